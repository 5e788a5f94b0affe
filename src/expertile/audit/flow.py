"""Follows values through a host function, statement by statement, up to the launches in it.

Branches are followed both ways and joined; a loop's body is read once. What is not understood is UNKNOWN, which never
makes a finding. Function bodies are not entered, but for those of launchers: an argument is judged by its name and
annotation.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import replace
from math import gcd

from . import names
from .assignments import Assignments
from .launches import Handed, Launch, Launcher, Passed, bound
from .parameters import parameter, tensor_like
from .syntax import dotted, show
from .values import UNKNOWN, Tensor, Value, constant, count, join


class Flow(Assignments):
    """One function, or a module's own statements.

    is_kernel   whether a dotted name means a kernel
    launcher    the launcher that a dotted name means
    values      of the names that it sees, where it is defined
    outer       what it is defined in, read to its end: other names for kernels come from there
    nested      functions defined in it, with the values that they see
    """

    def __init__(
        self, is_kernel: Callable[[str], bool], launcher: Callable[[str], Launcher | None], values: dict[str, Value],
        outer: Flow | None = None,
    ):  # fmt: skip
        super().__init__(values)
        self.is_kernel, self.launcher = is_kernel, launcher
        self.aliases: dict[str, tuple[str, ...]] = dict(outer.aliases) if outer else {}
        self.launchers: dict[str, Launcher] = dict(outer.launchers) if outer else {}
        self.launches: list[Launch] = []
        self.handed: list[Handed] = []
        self.nested: list[tuple[ast.FunctionDef, dict[str, Value]]] = []

    def function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        used_as_tensor = tensor_like(node)
        of_weights = names.is_of_weights(node.name)
        for arg in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]:
            value = parameter(arg, arg.arg in used_as_tensor)
            if of_weights and value.tensor is not None:
                value = replace(value, tensor=Tensor(arg.arg))
            self.values[arg.arg] = value
            self.aliases[arg.arg] = ()  # not the module's kernel of that name
            self.launchers.pop(arg.arg, None)
        for name, default in _defaults(node.args):
            if kernels := self._kernels(default):
                self.aliases[name] = kernels
            elif launcher := self.launcher(dotted(default)):
                self.launchers[name] = launcher
        self.block(node.body)

    def block(self, statements: list[ast.stmt]) -> bool:
        """False when control does not come out at the end."""
        through = True
        for each in statements:
            through = self.statement(each) and through  # what follows a return is read as well
        return through

    def statement(self, node: ast.stmt) -> bool:
        method = getattr(self, f"_on_{type(node).__name__}", None)
        if method is not None:
            return method(node) is not False
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self.value(child)
        return not isinstance(node, (ast.Return, ast.Raise, ast.Continue, ast.Break))

    def _on_FunctionDef(self, node) -> None:
        self.nested.append((node, dict(self.values)))

    _on_AsyncFunctionDef = _on_FunctionDef

    def _on_ClassDef(self, node) -> None:
        self.nested += [(each, dict(self.values)) for each in node.body if isinstance(each, ast.FunctionDef)]

    def _on_Assign(self, node: ast.Assign) -> None:
        self._remember_alias(node)
        value = self.value(node.value)
        for target in node.targets:
            self.assign(target, value, node.value)

    def _on_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.assign(node.target, self.value(node.value), node.value)

    def _on_AugAssign(self, node: ast.AugAssign) -> None:
        as_sum = ast.copy_location(ast.BinOp(left=_loaded(node.target), op=node.op, right=node.value), node)
        self.assign(node.target, self.value(ast.fix_missing_locations(as_sum)), as_sum)

    def _on_If(self, node: ast.If) -> bool:
        test = self.value(node.test)
        before, aliases = dict(self.values), dict(self.aliases)
        through = self.block(node.body)
        then, self.values = self.values, before
        otherwise = self.block(node.orelse)
        self.aliases = _both(aliases, self.aliases)
        if through and otherwise:
            self.values = self._joined(then, self.values, test)
        elif through:
            self.values = then
        return through or otherwise

    def _on_For(self, node: ast.For) -> None:
        self.value(node.iter)
        self.assign(node.target, self._counted(node.iter), None)
        self._loop(node)

    _on_AsyncFor = _on_For

    def _counted(self, node: ast.expr) -> Value:
        """What a loop over it gives: of a range whose ends vary a number that does."""
        if not (isinstance(node, ast.Call) and dotted(node.func) == "range" and node.args):
            return UNKNOWN
        given = [self.value(each) for each in node.args]
        start, stop = given[:2] if len(given) > 1 else (constant(0), given[0])
        varying = [end for end in (stop, start) if end.varies]
        if not varying:
            return UNKNOWN
        multiple = gcd(start.multiple, given[2].multiple) if len(given) > 2 else 1
        return replace(count("", stop.bits), multiple=multiple, because=varying[0].because).step(f"in {show(node)}")

    def _on_While(self, node: ast.While) -> None:
        self.value(node.test)
        self._loop(node)

    def _loop(self, node) -> None:
        before = dict(self.values)
        self.block(node.body)
        self.values = self._joined(before, self.values, None)
        self.block(node.orelse)

    def _on_With(self, node) -> bool:
        for item in node.items:
            self.value(item.context_expr)
        return self.block(node.body)

    _on_AsyncWith = _on_With

    def _on_Try(self, node) -> bool:
        through = self.block([*node.body, *node.orelse])
        for handler in node.handlers:
            through = self.block(handler.body) or through
        return self.block(node.finalbody) and through

    _on_TryStar = _on_Try

    def _on_Match(self, node) -> None:
        self.value(node.subject)
        before = dict(self.values)
        for case in node.cases:
            after, self.values = self.values, dict(before)
            self.block(case.body)
            self.values = self._joined(after, self.values, None)

    def _on_Assert(self, node: ast.Assert) -> None:
        """`assert M % 16 == 0` says what M is a multiple of."""
        self.value(node.test)
        tests = (
            node.test.values if isinstance(node.test, ast.BoolOp) and isinstance(node.test.op, ast.And) else [node.test]
        )
        for test in tests:
            match test:
                case ast.Compare(
                    left=ast.BinOp(left=left, op=ast.Mod(), right=by),
                    ops=[ast.Eq()],
                    comparators=[ast.Constant(value=0)],
                ):
                    self._divides(self.value(by), left, show(by))

    def _divides(self, factor: Value, node: ast.expr, name: str) -> None:
        """What is called an alignment, but not known, is taken for 16 at least."""
        by = factor.constant if factor.known and isinstance(factor.constant, int) else 16 if "align" in name else 0
        if by > 1 and isinstance(node, ast.Name):
            self.values[node.id] = self.value(node).divisible_by(by)
        elif by > 1:
            self.multiples[ast.unparse(node)] = by

    def launch(self, node: ast.Call) -> bool:
        """Notes kernel[grid](...) and launcher(kernel, ...); False when it is neither."""
        if isinstance(node.func, ast.Subscript):
            if not (kernels := self._kernels(node.func.value)):
                return False
            self.value(node.func.slice)
            self.launches.append(Launch(node, kernels, *self._arguments(node)))
            return True
        name = dotted(node.func) or (f"self.{node.func.attr}" if isinstance(node.func, ast.Attribute) else "")
        launcher = self.launchers.get(name) or self.launcher(name)
        given = [*node.args, *(keyword.value for keyword in node.keywords)]
        if launcher is None or not any(self._kernels(each) for each in given):
            return False
        positional, keywords, hidden = self._arguments(node)
        named, rest, options = bound(launcher, positional, keywords)
        launched = {name: self._kernels(named[name].node) for name in launcher.launched & named.keys()}
        self.handed.append(Handed(launcher, node, named, rest, options, hidden, launched))
        return True

    def _arguments(self, node: ast.Call) -> tuple[tuple[Passed, ...], dict[str, Passed], bool]:
        """Positional arguments up to a star, keywords, and whether stars hide more."""
        positional: list[Passed] = []
        keywords: dict[str, Passed] = {}
        hidden = False
        for argument in node.args:
            if isinstance(argument, ast.Starred):
                found, more = self._rest(argument.value)
            else:
                found, more = (self._passed(argument),), False
            if not hidden:  # behind a star the position is not known
                positional += found
            hidden = hidden or more
        for keyword in node.keywords:
            if keyword.arg:
                keywords[keyword.arg] = self._passed(keyword.value)
            else:
                entries, more = self._options(keyword.value)
                keywords |= entries
                hidden = hidden or more
        return tuple(positional), keywords, hidden

    def _passed(self, node: ast.expr) -> Passed:
        return Passed(self.value(node), node)

    def _rest(self, node: ast.expr) -> tuple[tuple[Passed, ...], bool]:
        """What *node passes, and whether more than that."""
        self.value(node)
        return (), True

    def _options(self, node: ast.expr) -> tuple[dict[str, Passed], bool]:
        """What **node passes, and whether more than that."""
        value, source = self.value(node), show(node)
        if value.entries is None:
            return {}, True
        return {name: Passed(entry, node, f"{source}[{name!r}]") for name, entry in value.entries}, False

    def _kernels(self, node: ast.expr) -> tuple[str, ...]:
        """The dotted names of the kernels that an expression may mean."""
        if isinstance(node, ast.IfExp):
            return (*self._kernels(node.body), *self._kernels(node.orelse))
        name = dotted(node)
        if name in self.aliases:
            return self.aliases[name]
        return (name,) if name and self.is_kernel(name) else ()

    def _remember_alias(self, node: ast.Assign) -> None:
        kernels = self._kernels(node.value)
        for target in node.targets:
            if isinstance(target, ast.Name):
                if kernels:
                    self.aliases[target.id] = kernels
                else:
                    self.aliases.pop(target.id, None)

    def _joined(self, one: dict[str, Value], other: dict[str, Value], decides: Value | None) -> dict[str, Value]:
        found = {}
        for name in one.keys() | other.keys():
            a, b = one.get(name), other.get(name)
            found[name] = join(a, b, decides) if a is not None and b is not None else a or b
        return found


def _defaults(arguments: ast.arguments) -> list[tuple[str, ast.expr]]:
    positional = [*arguments.posonlyargs, *arguments.args]
    pairs = list(zip(positional[len(positional) - len(arguments.defaults) :], arguments.defaults, strict=True))
    pairs += [(arg, value) for arg, value in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if value]
    return [(arg.arg, value) for arg, value in pairs]


def _both(one: dict, other: dict) -> dict:
    return {
        name: tuple(dict.fromkeys((*one.get(name, ()), *other.get(name, ())))) for name in one.keys() | other.keys()
    }


def _loaded(target: ast.expr) -> ast.expr:
    """The target of an assignment as an expression that reads it."""
    return ast.parse(ast.unparse(target), mode="eval").body
