"""What a name is after an assignment: the value, and what the name itself says of it."""

from __future__ import annotations

import ast
from dataclasses import replace

from . import names
from .expressions import Expressions
from .syntax import dotted, is_size, show
from .tensors import dimension
from .values import BATCH_BITS, UNKNOWN, Value, count, feature


class Assignments(Expressions):
    """Expressions with targets: names, dotted names, and tuples of them."""

    def assign(self, target: ast.expr, value: Value, source: ast.expr | None, narrow: bool = False) -> None:
        """`narrow`: a size of ids or the like, whatever its name says it is no width of the model."""
        if isinstance(target, (ast.Tuple, ast.List)):
            self._unpack(target, value, source)
            return
        name = dotted(target)
        if not name:
            return
        if value.varies and names.is_fixed(name.split(".")[-1]) and is_size(source):
            value = UNKNOWN  # heads first, or features first
        if value.varies and names.is_requests(name):
            value = replace(value, bits=min(value.bits, BATCH_BITS))
        if _is_plain(value) and names.is_feature(name) and not narrow:
            value = feature()
        if source is not None:
            value = value.step(f"{name} = {show(source)}")
        if value == UNKNOWN:
            value = names.by_name(name.split(".")[-1], f"{name} = {show(source)}, by its name") if source else UNKNOWN
        self.values[name] = value

    def _unpack(self, target: ast.Tuple | ast.List, value: Value, source: ast.expr | None) -> None:
        items = value.items
        if items is not None and (
            len(items) != len(target.elts) or any(isinstance(e, ast.Starred) for e in target.elts)
        ):
            items = None
        for index, each in enumerate(target.elts):
            if isinstance(each, ast.Starred):
                self.assign(each.value, UNKNOWN, None)
                continue
            if items is not None:
                found = items[index]
            elif value.tensor is not None and is_size(source):
                found = dimension(value.tensor, index, len(target.elts))
            else:
                found = UNKNOWN
            name = dotted(each)
            if is_size(source):
                found = self._by_place(name, index, found, target, value.tensor is not None and value.tensor.activation)
            own = source.elts[index] if isinstance(source, ast.Tuple) and items is not None else None
            if source is not None and own is None:
                found = found.step(f"{ast.unparse(target)} = {show(source)}")
            self.assign(each, found, own, narrow=value.tensor is not None and value.tensor.narrow)

    def _by_place(self, name: str, index: int, found: Value, target, activation: bool) -> Value:
        """What the names on the left say of the sizes on the right, where nothing else is known of those."""
        packed = index == 0 and name in ("b", "B") and len(target.elts) > 2  # [1, T, heads, d], [heads, T, d]
        if names.is_fixed(name) or packed:
            return UNKNOWN if found.varies and not found.known else found
        if found.varies or found.known:
            return found
        if index == 0:
            return found
        if len(target.elts) > 2:
            middle = activation and index < len(target.elts) - 1
            follows = names.is_count(name) or (middle and name in names.MIDDLE)
        else:  # of [batch, tokens] the second is bounded, of [k, M] the second is a width
            after_count = isinstance(target.elts[0], ast.Name) and names.is_count(target.elts[0].id)
            follows = names.is_count(name) and name not in names.MIDDLE and not after_count
        return count(f"{name}, by its name and place") if follows else found

    def _of_NamedExpr(self, node: ast.NamedExpr) -> Value:
        value = self.value(node.value)
        self.assign(node.target, value, node.value)
        return value


def _is_plain(value: Value) -> bool:
    """A number that stays, of which no more is known."""
    return not (value.varies or value.known or value.tensor or value.items or value.entries or value.logical)
