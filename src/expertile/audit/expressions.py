"""Values of expressions: numbers, sizes and strides of tensors, what torch and Triton's helpers make of them."""

from __future__ import annotations

import ast

from . import names
from .syntax import called, dotted, is_shape, show
from .tensors import SAME, dimension, guessed, like, method, of_shape, permuted
from .values import (
    UNKNOWN,
    Tensor,
    Value,
    add,
    bit_length,
    bucketed,
    compare,
    constant,
    count,
    floor_divide,
    join,
    largest,
    multiply,
    power,
    product,
    remainder,
    rounded,
    smallest,
)

_ALLOCATE = {"empty", "zeros", "ones", "full", "new_empty", "new_zeros", "new_ones", "new_full", "rand", "randn"}
_LIKE = {"empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like"}
_CEIL = {"cdiv", "ceil_div", "div_up", "ceildiv", "divup"}
_POWER = {"next_power_of_2", "next_power_of_two", "next_pow2", "ceil_pow2", "next_positive_power_of_2"}
_ROUND = {"round_up", "roundup", "align", "align_up", "pad_to", "ceil_to", "round_up_to", "_align", "ceil_align"}
_ROUND_SOMEHOW = ("align", "round_up", "roundup", "padded")


class Expressions:
    """
    values     what is known of names and of dotted names (self.x) at this point
    multiples  expressions of which an assertion says what they are a multiple of
    """

    def __init__(self, values: dict[str, Value]):
        self.values = dict(values)
        self.multiples: dict[str, int] = {}

    def launch(self, node: ast.Call) -> bool:
        """Whether the call launches a kernel; the flow notes it."""
        return False

    def value(self, node: ast.expr | None) -> Value:
        if node is None:
            return UNKNOWN
        method = getattr(self, f"_of_{type(node).__name__}", None)
        if method is not None:
            value = method(node)
            if self.multiples and isinstance(node, (ast.Call, ast.Subscript, ast.Attribute)):
                value = value.divisible_by(self.multiples.get(ast.unparse(node), 1))
            return value
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self.value(child)
        return UNKNOWN

    def _of_Constant(self, node: ast.Constant) -> Value:
        return constant(node.value)

    def _of_Lambda(self, node: ast.Lambda) -> Value:
        return UNKNOWN  # a grid: its arguments are not these

    def _of_Name(self, node: ast.Name) -> Value:
        return self.values[node.id] if node.id in self.values else names.by_name(node.id, f"{node.id}, by its name")

    def _of_Attribute(self, node: ast.Attribute) -> Value:
        base = self.value(node.value)
        if node.attr == "shape":
            return self._shape(node.value, base)
        if node.attr in ("T", "mT") and base.tensor is not None:
            return Value(tensor=permuted(show(node), base.tensor, "t", []))
        if node.attr == "data" and base.tensor is not None:
            return base
        name = dotted(node)
        if name in self.values:
            return self.values[name]
        return names.by_name(node.attr, f"{name or show(node)}, by its name")

    def _shape(self, node: ast.expr, base: Value) -> Value:
        tensor = base.tensor or guessed(node)
        return Value(tensor=tensor, items=tensor.shape)

    def _of_Subscript(self, node: ast.Subscript) -> Value:
        base, index = self.value(node.value), self.value(node.slice)
        if is_shape(node.value) and base.tensor is not None:
            if isinstance(index.constant, int):
                return dimension(base.tensor, index.constant).step(show(node))
            return UNKNOWN
        if (
            base.items is not None
            and isinstance(index.constant, int)
            and -len(base.items) <= index.constant < len(base.items)
        ):
            return base.items[index.constant]
        if base.entries is not None and isinstance(index.constant, str):
            return dict(base.entries).get(index.constant, UNKNOWN)
        if base.tensor is not None:
            return self._sliced(node, base.tensor)
        return UNKNOWN

    def _sliced(self, node: ast.Subscript, tensor: Tensor) -> Value:
        """x[:n] has n rows and the strides of x."""
        places = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        parts = [part for part in places if isinstance(part, ast.Slice) and part.step is None]
        if len(parts) < len(places):
            return Value(tensor=Tensor(show(node)))
        sizes = [self._slice_size(part, tensor, place) for place, part in enumerate(parts)]
        shape = (*sizes, *tensor.shape[len(sizes) :]) if tensor.shape and len(tensor.shape) >= len(sizes) else None
        activation = sizes[0].varies or (tensor.activation and parts[0].upper is None)
        return Value(tensor=Tensor(show(node), activation, tensor.narrow, shape, tensor.strides))

    def _slice_size(self, part: ast.Slice, tensor: Tensor, place: int) -> Value:
        upper = self.value(part.upper)
        if part.lower is None and part.upper is None:
            return dimension(tensor, place)
        return upper if part.lower is None else UNKNOWN

    def _of_Tuple(self, node: ast.Tuple | ast.List) -> Value:
        items = [self.value(each) for each in node.elts]
        return UNKNOWN if any(isinstance(each, ast.Starred) for each in node.elts) else Value(items=tuple(items))

    _of_List = _of_Tuple

    def _of_Dict(self, node: ast.Dict) -> Value:
        values = [self.value(each) for each in node.values]
        keys = [key.value for key in node.keys if isinstance(key, ast.Constant) and isinstance(key.value, str)]
        return Value(entries=tuple(zip(keys, values, strict=True))) if len(keys) == len(values) else UNKNOWN

    def _of_UnaryOp(self, node: ast.UnaryOp) -> Value:
        operand = self.value(node.operand)
        if isinstance(node.op, ast.Not):
            return compare(operand)
        if isinstance(node.op, ast.USub):
            if operand.known and isinstance(operand.constant, (int, float)):
                return constant(-operand.constant)
            return add(constant(0), operand, -1)
        return operand

    def _of_BinOp(self, node: ast.BinOp) -> Value:
        left, right = self.value(node.left), self.value(node.right)
        if left.tensor is not None or right.tensor is not None:
            return Value(tensor=Tensor(show(node)))
        match node.op:
            case ast.Mult():
                made = multiply(left, right)
            case ast.Add():
                made = add(left, right)
            case ast.Sub():
                made = self._floored(node, left) or add(left, right, -1)
            case ast.FloorDiv():
                made = floor_divide(left, right)
            case ast.Mod():
                made = remainder(left, right)
            case ast.LShift() if left.known and left.constant == 1 and not right.known:
                made = power(right)
            case ast.LShift() if right.known and isinstance(right.constant, int) and 0 <= right.constant < 32:
                made = multiply(left, constant(1 << right.constant))
            case _:
                return UNKNOWN
        return made

    def _floored(self, node: ast.BinOp, left: Value) -> Value | None:
        """n - n % by is a multiple of `by`."""
        match node.right:
            case ast.BinOp(left=same, op=ast.Mod(), right=by) if ast.unparse(same) == ast.unparse(node.left):
                return rounded(left, self.value(by)) if left.varies else None
        return None

    def _of_Compare(self, node: ast.Compare) -> Value:
        sides = [self.value(each) for each in (node.left, *node.comparators)]
        if any(isinstance(op, (ast.Is, ast.IsNot)) for op in node.ops):
            return Value(logical=True)
        return compare(*sides)

    def _of_BoolOp(self, node: ast.BoolOp) -> Value:
        sides = [self.value(each) for each in node.values]
        if all(side.logical for side in sides):
            return compare(*sides)
        made = sides[0]
        for side in sides[1:]:
            made = join(made, side)
        return made

    def _of_IfExp(self, node: ast.IfExp) -> Value:
        test = self.value(node.test)
        return join(self.value(node.body), self.value(node.orelse), test)

    def _of_Call(self, node: ast.Call) -> Value:
        if self.launch(node):
            return UNKNOWN
        if isinstance(node.func, ast.Attribute):
            base = self.value(node.func.value)
            if node.func.attr == "bit_length":
                return bit_length(base)
            if base.tensor is not None or node.func.attr in ("stride", "size", "numel", *SAME - {"type", "int", "to"}):
                tensor, given = base.tensor or guessed(node.func.value), [self.value(each) for each in node.args]
                made = method(node.func.attr, node, tensor, given, base.tensor is not None)
                if made is not None:
                    return made
        arguments = [self.value(each) for each in node.args if not isinstance(each, ast.Starred)]
        keywords = {each.arg: self.value(each.value) for each in node.keywords}
        if any(isinstance(each, ast.Starred) for each in node.args):
            return UNKNOWN
        return self._function(called(node), node, arguments, keywords)

    def _function(self, name: str, node: ast.Call, given: list[Value], keywords: dict) -> Value:
        """What a function that is not a tensor's method gives."""
        if name in _CEIL and len(given) == 2:
            return floor_divide(given[0], given[1])
        if name in _POWER and given:
            return bucketed(given[0])
        if name in _ROUND and len(given) == 2:
            return rounded(given[0], given[1])
        if name in ("min", "max") and len(given) > 1:
            return smallest(given) if name == "min" else largest(given)
        if name in ("int", "abs", "SymInt") and len(given) == 1:
            return given[0]
        if name == "bool" and len(given) == 1:
            return compare(given[0])
        if name == "len" and len(node.args) == 1:
            return self._length(node.args[0], given[0])
        if name == "prod" and given and given[0].items is not None:
            return product(list(given[0].items))
        if name == "prod" and len(given) == 1 and (rows := self._first_of(node.args[0])).varies:
            return multiply(rows, UNKNOWN).step(show(node))
        if name == "dict" and not given and None not in keywords:
            return Value(entries=tuple(keywords.items()))
        if name in _ALLOCATE:
            return self._allocated(name, node, given, keywords)
        if name in _LIKE and given and given[0].tensor is not None:
            return Value(tensor=like(given[0].tensor, show(node)))
        if any(part in name for part in _ROUND_SOMEHOW) and given and given[0].varies:
            return count(f"{show(node)}", given[0].bits).step(show(node))
        return UNKNOWN

    def _first_of(self, node: ast.expr) -> Value:
        """The first of the sizes x.shape[:-1]; UNKNOWN of all but such."""
        match node:
            case ast.Subscript(value=shape, slice=ast.Slice(lower=None, step=None)) if is_shape(shape):
                return dimension(tensor, 0) if (tensor := self.value(shape).tensor) is not None else UNKNOWN
        return UNKNOWN

    def _length(self, node: ast.expr, value: Value) -> Value:
        if value.items is not None:
            return constant(len(value.items))
        if value.tensor is not None and value.tensor.activation:
            return count(f"len({value.tensor.name})")
        return UNKNOWN

    def _allocated(self, name: str, node: ast.Call, given: list[Value], keywords: dict) -> Value:
        shape = keywords.get("size", given[0] if given else UNKNOWN)
        if shape.items is None and given and name not in ("full", "new_full") and not given[0].tensor:
            shape = Value(items=tuple(given))
        if shape.items is None:
            return Value(tensor=Tensor(show(node)))
        return Value(tensor=of_shape(show(node), shape.items))
