"""Launches, and the functions that launch a kernel which they are given: `def launch(kernel, grid, *arguments)`."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass

from .values import Value


@dataclass(frozen=True)
class Passed:
    """One argument of a launch as it stands there."""

    value: Value
    node: ast.expr
    text: str = ""  # as it is written, where that is not the node: an entry of **options


@dataclass(frozen=True)
class Launcher:
    """A function that launches what is passed for one of its parameters; `launched` are those."""

    node: ast.FunctionDef
    path: str
    launched: frozenset[str]

    @property
    def name(self) -> str:
        return self.node.name

    @property
    def line(self) -> int:
        return self.node.lineno


@dataclass(frozen=True)
class Launch:
    """kernel[grid](...): positional arguments up to a star, keywords, and whether stars hide more of them.

    through  the launcher that makes it; then `node` is the call of that
    """

    node: ast.Call
    kernels: tuple[str, ...]
    positional: tuple[Passed, ...]
    keywords: dict[str, Passed]
    hidden: bool
    through: Launcher | None = None


@dataclass(frozen=True)
class Handed:
    """A call of a launcher: what its parameters get, what goes to its *rest and **options, and which kernels."""

    launcher: Launcher
    node: ast.Call
    named: dict[str, Passed]
    rest: tuple[Passed, ...]
    options: dict[str, Passed]
    hidden: bool
    kernels: dict[str, tuple[str, ...]]


def launchers_in(functions: Iterable[ast.FunctionDef], calls: list[ast.Subscript], path: str) -> list[Launcher]:
    """Those of the functions in which one of the calls, x[...](...), looks like a launch of a parameter."""
    found = []
    for node in functions:
        parameters = frozenset(arg.arg for arg in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs])
        inside = [call for call in calls if node.lineno <= call.lineno <= node.end_lineno]
        likely = [call.value for call in inside if looks_like_one(call, parameters)]
        if launched := {each.id for each in likely if isinstance(each, ast.Name)} & parameters:
            found.append(Launcher(node, path, frozenset(launched)))
    return found


def bound(launcher: Launcher, positional: tuple[Passed, ...], keywords: dict[str, Passed]) -> tuple[dict, tuple, dict]:
    """What the parameters, *rest and **options of the launcher get."""
    arguments = launcher.node.args
    places = [arg.arg for arg in [*arguments.posonlyargs, *arguments.args]]
    if places and places[0] in ("self", "cls"):
        del places[0]
    names = {*places, *(arg.arg for arg in arguments.kwonlyargs)}
    named = dict(zip(places, positional, strict=False)) | {k: v for k, v in keywords.items() if k in names}
    return named, positional[len(places) :], {k: v for k, v in keywords.items() if k not in names}


def looks_like_one(call: ast.Subscript, parameters: frozenset[str]) -> bool:
    """Whether x[...](...) is a launch by its looks, whatever x is: [grid], [lambda ...], or [(n,)] of a parameter.

    Foo[int, str](...) and handlers[name](...) are none.
    """
    grid, of = call.slice, call.value
    names = [getattr(each, "id", getattr(each, "attr", "")) for each in ast.walk(grid)]
    if isinstance(grid, ast.Lambda) or any("grid" in name.lower() for name in names):
        return True
    name = of.id if isinstance(of, ast.Name) else ""
    return name in parameters and (isinstance(grid, ast.Tuple) or ("kernel" in name and "kernels" not in name))
