"""What the audit says of its own blind spots: kernels without a launch, launches without a kernel, hidden arguments."""

from __future__ import annotations

from collections.abc import Iterator

from .kernels import Kernel
from .launches import Launch, looks_like_one
from .modules import Known, Module
from .report import Unfollowed
from .syntax import dotted


def unfollowed(made: list[tuple[Module, list[Launch]]], kernels: Known[Kernel]) -> Unfollowed:
    """Kernels that no launch is seen of and no other kernel calls; launches of kernels that are not known."""
    met = {(kernel.path, kernel.line) for module, launches in made for kernel in _met(module, launches, kernels)}
    left = [kernel for module, _ in made for kernel in module.kernels if (kernel.path, kernel.line) not in met]
    reached = {(each.through.path, each.through.line) for _, launches in made for each in launches if each.through}
    places = [place for module, launches in made for place in _unknown(module, launches, reached)]
    hidden = sum(each.hidden for _, launches in made for each in launches)
    return Unfollowed(tuple(sorted((k.path, k.line, k.name) for k in left)), tuple(sorted(places)), hidden)


def _met(module: Module, launches: list[Launch], kernels: Known[Kernel]) -> Iterator[Kernel]:
    """Launched here, passed to a launch as a function that the kernel calls, or used in another kernel."""
    names = [(name, launch.node.lineno) for launch in launches for name in launch.kernels]
    for launch in launches:
        passed = [*launch.positional, *launch.keywords.values()]
        names += [(dotted(each.node), launch.node.lineno) for each in passed]
    names += [(name, kernel.line) for kernel in module.kernels for name in kernel.uses if name != kernel.name]
    for name, line in names:
        if name and (found := kernels.find(name, module, line)):
            yield found


def _unknown(module: Module, launches: list[Launch], reached: set[tuple[str, int]]) -> Iterator[tuple[str, int]]:
    """Places that look like launches, of which the kernel is not known."""
    seen = {(each.node.lineno, each.node.col_offset) for each in launches if each.through is None}
    devices = [range(kernel.line, kernel.end_line + 1) for kernel in module.kernels]
    for call in module.calls:
        if (call.lineno, call.col_offset) in seen or any(call.lineno in lines for lines in devices):
            continue
        around = [each for each in module.launchers if each.line <= call.lineno <= each.node.end_lineno]
        parameters = frozenset(name for each in around for name in each.launched)
        followed = any((each.path, each.line) in reached for each in around) and dotted(call.value) in parameters
        if not followed and looks_like_one(call, parameters):
            yield module.source.path, call.lineno
