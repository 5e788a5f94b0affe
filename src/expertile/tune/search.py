"""Measures cells: for one layer, number of tokens and routing all plans that could win, checked first, in turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

from ..bench.experts import run as run_experts
from ..bench.fixed import Fixed, endangers, session_of
from ..bench.runner import Request, Setting, State
from ..errors import ExpertileError, ShapeError, UnsupportedProblem
from ..plans import Plan
from ..policy import decide, unable
from ..policy.candidates import candidates
from ..policy.histogram import check_name
from ..policy.libraries import LIBRARIES
from ..policy.settings import Settings
from ..problem import Problem, named_problem
from . import tables
from .journal import CRASHED, DONE, MEASURED, RAN, TRYING, Journal

Report = Callable[[dict], None]
Measure = Callable[..., Iterator]


class GpuLost(ExpertileError):
    """A plan left the GPU unusable for this process. It is in the journal: another process goes on without it."""


@dataclass(frozen=True)
class Task:
    """What a tuning run is asked for.

    problem   a known layer, or what named_problem takes
    others    other libraries that are installed are measured beside our plans
    budget_s  no cell is begun after that many seconds
    """

    problem: str
    quant: str
    tokens: tuple[int, ...]
    routings: tuple[str, ...] = ("uniform",)
    others: bool = False
    replays: int = 11
    budget_s: float | None = None
    flashinfer_module: Path | None = None

    def __post_init__(self):
        if min(self.tokens, default=0) < 1:
            raise ShapeError(f"tokens={self.tokens}: give numbers of at least 1")
        for routing in self.routings:
            check_name(routing)
        self.problem_at(1)

    def problem_at(self, tokens: int) -> Problem:
        """As the benchmarks measure it: fp8_tensor with static activation scales."""
        return named_problem(self.problem, tokens, self.quant, static_scale=self.quant == "fp8_tensor")

    def cells(self) -> list[tuple[int, str]]:
        return [(tokens, routing) for routing in self.routings for tokens in sorted(self.tokens)]


@dataclass(frozen=True)
class Machine:
    """What times hang on beside the layer: in every cell of the journal, and in the table's head.

    device     name, sms, memory_gib
    versions   of torch, triton and the libraries that are measured
    """

    device: dict
    versions: dict[str, str]

    @property
    def installed(self) -> tuple[tuple[str, str], ...]:
        return tuple(self.versions.items())


def tune(
    task: Task, setting: Setting, machine: Machine, out: Path, *, report: Report = lambda event: None,
    measure: Measure = run_experts,
) -> list[dict]:  # fmt: skip
    """Measures what the journal beside `out` does not have yet and writes the winners to `out`, cell by cell.

    report is told {"total": cells}, then {"cell", "plan", "state"} for each outcome and {"done": cells so far}.
    Returns the entries. A plan that crashes or is wrong is a line of the journal and is left out; one that leaves the
    GPU unusable raises GpuLost after it was written down.
    """
    if not setting.hardware.is_hopper:
        raise UnsupportedProblem(f"tiles are measured on a Hopper GPU; this machine is {setting.hardware.name}")
    tables.check_device(out, tables.read(out), machine.device)  # before hours of measuring, not after
    journal, started, found = Journal.open(journal_path(out)), monotonic(), []
    cells = task.cells()
    report({"total": len(cells)})
    for number, (tokens, routing) in enumerate(cells, 1):
        cell = key(task, machine, tokens, routing)
        if not journal.is_done(cell):
            if task.budget_s is not None and monotonic() - started > task.budget_s:
                break
            _measure(task, setting, machine, out, journal, cell, report, measure)
            journal.write(cell, DONE)
        if entry := entry_of(task, setting, machine, out, journal, tokens, routing):
            found.append(entry)
            tables.write(out, [entry], _run(setting, machine), machine.device)
        report({"done": number})
    return found


def journal_path(out: Path) -> Path:
    return out.with_name(out.name + ".journal")


def key(task: Task, machine: Machine, tokens: int, routing: str) -> dict:
    """The cell's name in the journal: all of device, versions, layer, tokens and routing."""
    p = task.problem_at(tokens)
    layer = dict(
        hidden=p.hidden, inter=p.inter, experts=p.experts, top_k=p.top_k, quant=p.label, activation=p.activation.name,
        static_scale=p.static_scale, bias=p.bias,
    )  # fmt: skip
    return {**machine.device, **machine.versions, **layer, "tokens": tokens, "routing": routing}


def plans_of(task: Task, setting: Setting, machine: Machine, out: Path, tokens: int, routing: str) -> list[Plan]:
    """What is measured in a cell: our candidates, the incumbent of the table among them, and other libraries."""
    problem, hardware = task.problem_at(tokens), setting.hardware
    found = candidates(problem, hardware, routing)
    if (old := _incumbent(problem, setting, out, routing)) and old.name not in {plan.name for plan in found}:
        found.append(old)
    if task.others:
        settings = Settings(installed=machine.installed, routing=routing)
        for backend in LIBRARIES:
            if endangers(backend, problem, task.flashinfer_module):
                continue
            try:
                found.append(decide(problem, hardware, backend, settings))
            except UnsupportedProblem:
                continue
    return found


def _incumbent(problem: Problem, setting: Setting, out: Path, routing: str) -> Plan | None:
    """The plan that the table at `out` has for the very cell, where it can run."""
    if not out.is_file():
        return None
    base = candidates(problem, setting.hardware, routing)[0]
    entry = tables.find(tables.read(out), base)
    if entry is None:
        return None
    found = tables.plan(entry, base)
    return None if unable(found, setting.hardware) else found


def _measure(task, setting, machine, out, journal: Journal, cell: dict, report: Report, measure: Measure) -> None:
    tokens, routing = cell["tokens"], cell["routing"]
    skipped = journal.skipped(cell)
    plans = [plan for plan in plans_of(task, setting, machine, out, tokens, routing) if plan.name not in skipped]
    names = {f"{Fixed.key}:{number}": plan.name for number, plan in enumerate(plans)}
    implementations = [
        Fixed(
            setting.hardware, str(number), {tokens: plan}, session_of(plan.backend, task.flashinfer_module),
            began=lambda _, name=plan.name: journal.write(cell, TRYING, name),
            ran=lambda _, name=plan.name: journal.write(cell, RAN, name),
        )
        for number, plan in enumerate(plans)
    ]  # fmt: skip
    request = Request("experts", (task.problem,), (task.quant,), (tokens,), (routing,), replays=task.replays)
    try:
        for outcome in measure(request, implementations, setting):
            fields = _times(outcome.row) if outcome.state is State.MEASURED else {"message": outcome.message}
            journal.write(cell, outcome.state.value, names[outcome.impl], **fields)
            report({"cell": cell, "plan": names[outcome.impl], "state": outcome.state.value})
    except ExpertileError as error:
        name = names.get(str(error).split(" ", 1)[0]) or journal.unfinished(cell)  # the runner names whom it blames
        if name is None:
            raise
        journal.write(cell, CRASHED, name, message=str(error))
        raise GpuLost(f"{name}: {error}") from error


def _times(row: dict) -> dict:
    return {name: row[name] for name in ("time_us", "p10_us", "p90_us", "err") if name in row}


def entry_of(
    task: Task, setting: Setting, machine: Machine, out: Path, journal: Journal, tokens: int, routing: str
) -> dict | None:  # fmt: skip
    """The table's entry for a measured cell; None where nothing of ours was measured."""
    measured = journal.measured(key(task, machine, tokens, routing))
    plans = plans_of(task, setting, machine, out, tokens, routing)
    old = _incumbent(task.problem_at(tokens), setting, out, routing)
    best = tables.winner(plans, measured, old.name if old else None)
    if best is None:
        return None
    versions = {b.value: machine.versions.get(library.package, "") for b, library in LIBRARIES.items()}
    return tables.entry(best, measured, versions)


def _run(setting: Setting, machine: Machine) -> dict:
    return {**{name: setting.shared[name] for name in ("date", "gpu", "driver")}, **machine.versions}


def slower(journal: Journal, cell: dict) -> Sequence[tuple[str, float]]:
    """(plan, time over the fastest) of what was measured in a cell, fastest first."""
    measured = journal.measured(cell)
    best = min((line["time_us"] for line in measured.values()), default=None)
    return sorted(((name, line["time_us"] / best) for name, line in measured.items()), key=lambda pair: pair[1])


__all__ = ["MEASURED", "GpuLost", "Machine", "Task", "journal_path", "key", "plans_of", "slower", "tune"]
