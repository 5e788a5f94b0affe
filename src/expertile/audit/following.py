"""A launcher's body, followed once for each call that gives it a kernel: one level, and no further."""

from __future__ import annotations

import ast
from dataclasses import replace

from .flow import Flow
from .launches import Handed, Launch, Passed
from .syntax import show
from .values import UNKNOWN


def followed(handed: Handed) -> list[Launch]:
    """The launches that the call makes. What is passed on as it came keeps its place at the call; what the launcher
    makes itself stands at the whole call.
    """
    inside = _Inside(handed)
    inside.function(handed.launcher.node)
    return [replace(each, node=handed.node, through=handed.launcher) for each in inside.launches]


class _Inside(Flow):
    def __init__(self, handed: Handed):
        super().__init__(lambda name: False, lambda name: None, {})
        self.given = handed
        node = handed.launcher.node
        self.changed = {each.id for each in ast.walk(node) if isinstance(each, ast.Name) and _is_stored(each)}

    def block(self, statements: list[ast.stmt]) -> bool:
        if statements is self.given.launcher.node.body:  # the parameters have what their names say: now what they get
            self.values |= {k: each.value for k, each in self.given.named.items() if each.value != UNKNOWN}
            self.aliases = dict(self.given.kernels)
        return super().block(statements)

    def _passed(self, node: ast.expr) -> Passed:
        value, as_given = self.value(node), self.given.named.get(self._name(node))
        return as_given or Passed(value, self.given.node, show(node))

    def _rest(self, node: ast.expr) -> tuple[tuple[Passed, ...], bool]:
        rest = self.given.launcher.node.args.vararg
        if rest is not None and self._name(node) == rest.arg:
            return self.given.rest, self.given.hidden
        return super()._rest(node)

    def _options(self, node: ast.expr) -> tuple[dict[str, Passed], bool]:
        options = self.given.launcher.node.args.kwarg
        if options is not None and self._name(node) == options.arg:
            return self.given.options, self.given.hidden
        return super()._options(node)

    def _name(self, node: ast.expr) -> str:
        """Of a name that is never assigned to: it has what the call gave. "" of anything else."""
        return node.id if isinstance(node, ast.Name) and node.id not in self.changed else ""


def _is_stored(name: ast.Name) -> bool:
    return not isinstance(name.ctx, ast.Load)
