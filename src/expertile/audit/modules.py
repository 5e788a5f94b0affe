"""Parsed files, and what the names in them mean across files."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Generic, TypeVar

from .kernels import Kernel
from .launches import Launcher
from .sources import Parsed

Named = TypeVar("Named", Kernel, Launcher)


@dataclass
class Module:
    """A parsed file.

    kernels   defined in it; launchers too
    calls     x[...] of what may be launches, x[...](...)
    hands_on  a launcher may be called in it
    imports   local name -> (module it was imported from, name there); modules: local name -> module
    """

    source: Parsed
    kernels: list[Kernel]
    launchers: list[Launcher]
    calls: list[ast.Subscript]
    imports: dict[str, tuple[str, str]] = field(default_factory=dict)
    modules: dict[str, str] = field(default_factory=dict)
    hands_on: bool = False


class Known(Generic[Named]):
    """Which kernel, or launcher, a name in a module means: its own, an imported one, or the only one of that name."""

    def __init__(self, modules: list[Module], own: Callable[[Module], list[Named]]):
        self.own: Callable[[Module], list[Named]] = own
        self.by_name: dict[str, list[Named]] = {}
        for module in modules:
            for each in own(module):
                self.by_name.setdefault(each.name, []).append(each)

    def find(self, name: str, module: Module, line: int = 0) -> Named | None:
        first, _, last = name.rpartition(".")
        own = [each for each in self.own(module) if each.name == last]
        if own and not first:  # of several, the last one defined above the launch
            above = [each for each in own if each.line < line]
            return (above or own)[-1]
        origin, original = module.imports.get(last, ("", last)) if not first else (self._origin(first, module), last)
        named = self.by_name.get(original, [])
        if first and first.split(".")[0] in ("self", "cls"):
            return named[0] if len(named) == 1 else None
        fitting = [each for each in named if _is_module(each.path, origin)] if origin else []
        if len(fitting) == 1:
            return fitting[0]
        imported = bool(first) or last in module.imports
        return named[0] if imported and len(named) == 1 else None

    def _origin(self, first: str, module: Module) -> str:
        """The dotted module that `first` means: `import a.b as first`, `from a import first`."""
        if first in module.modules:
            return module.modules[first]
        if first in module.imports:
            package, name = module.imports[first]
            return f"{package}.{name}".strip(".")
        return first


def _is_module(path: str, dotted_name: str) -> bool:
    """Whether the file is that module: its path ends in a/b/c.py or a/b/c/__init__.py."""
    parts = [part for part in dotted_name.split(".") if part]
    file = PurePosixPath(path)
    own = [*file.parts[:-1], *([] if file.stem == "__init__" else [file.stem])]
    return bool(parts) and own[-len(parts) :] == parts
