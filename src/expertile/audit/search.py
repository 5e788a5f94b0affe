"""The audit itself: files to kernels and launches, launches to findings, comments to suppressions."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from .expressions import Expressions
from .flow import Flow, Launch
from .kernels import Kernel, jit_names, kernels_in
from .report import Finding, Report, Severity
from .rules import findings_of
from .sources import Parsed, Source, parse, python_files, read
from .values import Value

_DEEP = "nested too deeply to follow"


@dataclass
class Module:
    """A parsed file.

    kernels   defined in it
    calls     lines of what may be launches, x[...](...)
    imports   local name -> (module it was imported from, name there); modules: local name -> module
    """

    source: Parsed
    kernels: list[Kernel]
    calls: list[int]
    imports: dict[str, tuple[str, str]] = field(default_factory=dict)
    modules: dict[str, str] = field(default_factory=dict)


def audit(paths: Iterable[str | Path]) -> Report:
    """What of the sources under the paths makes Triton compile again as sizes vary. Runs and imports none of them.

    Raises    ExpertileError for a path that is not there; files that cannot be read or parsed are findings
    """
    sources = [read(path) for path in python_files([Path(each) for each in paths])]
    findings = [_unreadable(source.path, source.trouble) for source in sources if source.trouble]
    modules: list[Module] = []

    def add(chosen: list[Source]) -> None:
        for source in chosen:
            try:
                parsed = parse(source)
                if isinstance(parsed, str):
                    findings.append(_unreadable(source.path, parsed))
                else:
                    modules.append(_module(parsed))
            except RecursionError:
                findings.append(_unreadable(source.path, _DEEP))

    add([source for source in sources if source.may_define])
    kernels = {kernel.name.encode() for module in modules for kernel in module.kernels}
    add([source for source in sources if not source.may_define and source.may_launch(kernels)])
    known, launches = _Known(modules), 0
    for module in modules:
        findings += _unexplained(module.source)
        try:
            made = _launches(module, known)
        except RecursionError:
            findings.append(_unreadable(module.source.path, _DEEP))
            continue
        launches += len(made)
        findings += _findings(module, made, known)
    found = sorted(_suppressed(findings, {m.source.path: m.source.comments for m in modules}), key=_place)
    return Report(len(sources), sum(len(module.kernels) for module in modules), launches, tuple(found))


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
            calls.append(node.lineno)
        elif isinstance(node, ast.ImportFrom):
            froms.append(node)
        elif isinstance(node, ast.Import):
            imports += node.names
    kernels = kernels_in(functions, source.tree, source.path, jit_names(froms))
    named = {alias.asname or alias.name: (node.module or "", alias.name) for node in froms for alias in node.names}
    return Module(source, kernels, calls, named, {alias.asname or alias.name: alias.name for alias in imports})


class _Known:
    """Which kernel a name in a module means: its own, an imported one, or the only one of that name."""

    def __init__(self, modules: list[Module]):
        self.by_name: dict[str, list[Kernel]] = {}
        for module in modules:
            for kernel in module.kernels:
                self.by_name.setdefault(kernel.name, []).append(kernel)

    def find(self, name: str, module: Module, line: int = 0) -> Kernel | None:
        first, _, last = name.rpartition(".")
        own = [kernel for kernel in module.kernels if kernel.name == last]
        if own and not first:  # of several, the last one defined above the launch
            above = [kernel for kernel in own if kernel.line < line]
            return (above or own)[-1]
        origin, original = module.imports.get(last, ("", last)) if not first else (self._origin(first, module), last)
        named = self.by_name.get(original, [])
        if first and first.split(".")[0] in ("self", "cls"):
            return named[0] if len(named) == 1 else None
        fitting = [kernel for kernel in named if _is_module(kernel.path, origin)] if origin else []
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


def _launches(module: Module, known: _Known) -> list[Launch]:
    """Of all functions and of the module's own statements."""
    if not module.calls:
        return []

    def is_kernel(name: str) -> bool:
        return known.find(name, module) is not None

    kernel_lines = {kernel.line for kernel in module.kernels}
    constants = _constants(module.source.tree)
    top = Flow(is_kernel, constants)
    top.block(module.source.tree.body)
    found, waiting = list(top.launches), [(top, *nested) for nested in top.nested]
    while waiting:
        outer, node, values = waiting.pop()
        if node.lineno in kernel_lines or not any(node.lineno <= line <= node.end_lineno for line in module.calls):
            continue
        flow = Flow(is_kernel, {**constants, **values}, outer)
        flow.function(node)
        found += flow.launches
        waiting += [(flow, *nested) for nested in flow.nested]
    return found


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


def _findings(module: Module, launches: list[Launch], known: _Known) -> list[Finding]:
    found = []
    for launch in launches:
        for name in launch.kernels:
            kernel = known.find(name, module, launch.node.lineno)
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
