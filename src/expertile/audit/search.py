"""The audit itself: files to kernels and launches, launches to findings, comments to suppressions."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from pathlib import Path

from ..errors import ExpertileError
from .expressions import Expressions
from .flow import Flow
from .following import followed
from .kernels import Kernel, jit_names, kernels_in
from .launches import Launch, Launcher, launchers_in
from .modules import Known, Module
from .report import Finding, Report, Severity
from .rules import findings_of
from .sources import Parsed, Source, parse, python_files, read
from .unfollowed import unfollowed
from .values import Value

_DEEP = "nested too deeply to follow"


def audit(paths: Iterable[str | Path]) -> Report:
    """What of the sources under the paths makes Triton compile again as sizes vary. Runs and imports none of them.

    Raises    ExpertileError for a path that is not there; files that cannot be read or parsed are findings
    """
    if isinstance(paths, (str, Path)):
        raise ExpertileError(f"paths={str(paths)!r}: give a list of paths")
    if "" in (paths := list(paths)):
        raise ExpertileError("path '' is empty: give files and folders, '.' for the current one")
    sources = [read(path) for path in python_files([Path(each) for each in paths])]
    findings = [_unreadable(source.path, source.trouble) for source in sources if source.trouble]
    modules = _modules(sources, findings)
    kernels = Known(modules, lambda module: module.kernels)
    launchers = Known(modules, lambda module: module.launchers)
    made: list[tuple[Module, list[Launch]]] = []
    for module in modules:
        findings += _unexplained(module.source)
        try:
            launches = _launches(module, kernels, launchers)
        except RecursionError:
            findings.append(_unreadable(module.source.path, _DEEP))
            continue
        made.append((module, launches))
        findings += _findings(module, launches, kernels)
    found = sorted(_suppressed(findings, {m.source.path: m.source.comments for m in modules}), key=_place)
    counts = len(sources), sum(len(module.kernels) for module in modules), sum(len(each) for _, each in made)
    return Report(*counts, tuple(found), unfollowed(made, kernels))


def _modules(sources: list[Source], findings: list[Finding]) -> list[Module]:
    """Those parsed that may hold kernels, launches or launchers; what cannot be is added to the findings."""
    modules: dict[str, Module] = {}

    def add(chosen: Iterable[Source]) -> None:
        for source in chosen:
            try:
                parsed = parse(source)
                if isinstance(parsed, str):
                    findings.append(_unreadable(source.path, parsed))
                else:
                    modules[source.path] = _module(parsed)
            except RecursionError:
                findings.append(_unreadable(source.path, _DEEP))

    add(source for source in sources if source.may_define)
    kernels = {kernel.name.encode() for module in modules.values() for kernel in module.kernels}
    others = [source for source in sources if kernels and not source.may_define]
    add(source for source in others if source.may_launch(kernels) or source.may_hand_on)
    launchers = {launcher.name.encode() for module in modules.values() for launcher in module.launchers}
    waiting = [source for source in others if source.path not in modules and source.mentions(launchers)]
    add(source for source in waiting if source.mentions(kernels))
    for source in sources:
        if source.path in modules:
            modules[source.path].hands_on = source.mentions(launchers)
    return list(modules.values())


def _unreadable(path: str, trouble: str) -> Finding:
    return Finding("unreadable", Severity.NOTE, path, 1, 1, 1, trouble)


def _place(finding: Finding) -> tuple:
    return finding.path, finding.line, finding.column, finding.kernel, finding.argument, finding.rule


def _module(source: Parsed) -> Module:
    functions, calls, froms, imports = [], [], [], []
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef):
            functions.append(node)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
            calls.append(node.func)
        elif isinstance(node, ast.ImportFrom):
            froms.append(node)
        elif isinstance(node, ast.Import):
            imports += node.names
    kernels = kernels_in(functions, source.tree, source.path, jit_names(imports, froms, source.tree))
    lines = {kernel.line for kernel in kernels}
    launchers = launchers_in([each for each in functions if each.lineno not in lines], calls, source.path)
    named = {alias.asname or alias.name: (node.module or "", alias.name) for node in froms for alias in node.names}
    found = {alias.asname or alias.name: alias.name for alias in imports}
    return Module(source, kernels, launchers, calls, named, found)


def _launches(module: Module, kernels: Known[Kernel], launchers: Known[Launcher]) -> list[Launch]:
    """Of all functions and of the module's own statements."""
    if not (module.calls or module.hands_on):
        return []

    def is_kernel(name: str) -> bool:
        return kernels.find(name, module) is not None

    def launcher(name: str) -> Launcher | None:
        return launchers.find(name, module) if name else None

    def may_launch(node: ast.FunctionDef) -> bool:
        inside = any(node.lineno <= call.lineno <= node.end_lineno for call in module.calls)
        return node.lineno not in kernel_lines and (module.hands_on or inside)

    kernel_lines = {kernel.line for kernel in module.kernels}
    constants = _constants(module.source.tree)
    top = Flow(is_kernel, launcher, constants)
    top.block(module.source.tree.body)
    flows, waiting = [top], [(top, *nested) for nested in top.nested]
    while waiting:
        outer, node, values = waiting.pop()
        if may_launch(node):
            flow = Flow(is_kernel, launcher, {**constants, **values}, outer)
            flow.function(node)
            flows.append(flow)
            waiting += [(flow, *nested) for nested in flow.nested]
    through = [launch for flow in flows for handed in flow.handed for launch in followed(handed)]
    return [launch for flow in flows for launch in flow.launches] + through


def _constants(tree: ast.Module) -> dict[str, Value]:
    """Numbers that the module names: only those, and only where they are assigned once."""
    reader = Expressions({})
    found: dict[str, Value] = {}
    often: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            often |= {name} & found.keys()
            found[name] = reader.value(node.value)
    return {name: value for name, value in found.items() if value.known and name not in often}


def _findings(module: Module, launches: list[Launch], kernels: Known[Kernel]) -> list[Finding]:
    found = []
    for launch in launches:
        for name in launch.kernels:
            kernel = kernels.find(name, module, launch.node.lineno)
            if kernel is not None:
                found += [(launch, finding) for finding in findings_of(launch, kernel, module.source.path)]
    return [_with_launch_comment(finding, launch, module.source) for launch, finding in found]


def _with_launch_comment(finding: Finding, launch: Launch, source: Parsed) -> Finding:
    """A comment on the line where the launch begins speaks for all its arguments."""
    reason = source.comments.get(launch.node.lineno)
    return finding.with_reason(reason) if reason else finding


def _suppressed(findings: list[Finding], comments: dict[str, dict[int, str]]) -> Iterable[Finding]:
    """A comment at the argument, or at the parameter or the `def` of its kernel, gives a finding its reason."""
    for finding in findings:
        here, there = comments.get(finding.path, {}), comments.get(finding.kernel_path, {})
        lines = range(finding.line, finding.end_line + 1) if finding.kernel else ()
        reasons = [here.get(line) for line in lines]
        reasons += [there.get(finding.parameter_line), there.get(finding.kernel_line)]
        reason = finding.suppressed or next((each for each in reasons if each), "")
        yield finding.with_reason(reason) if reason else finding


def _unexplained(source: Parsed) -> list[Finding]:
    message, advice = (
        "`# expertile: ok` without a reason suppresses nothing",
        "say why it is all right, on the same line",
    )
    empty = [line for line, reason in source.comments.items() if not reason]
    return [
        Finding("unexplained-suppression", Severity.WARNING, source.path, line, line, 1, message, advice)
        for line in empty
    ]
