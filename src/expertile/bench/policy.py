"""Benchmark `policy`: what the policy's choice loses against the fastest of all candidates, all of them measured.

A cell is one problem, quant, number of tokens and routing. Its candidates are all plans of ours that could win, other
libraries' that are installed, and the policy's choice; checked first, then timed in turn. One row says what was chosen
and what was best; another, with impl `default-list`, what a fixed list of priorities would have taken of the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from time import monotonic

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ..errors import ExpertileError, UnsupportedProblem
from ..plans import Backend, Plan
from ..policy import decide, reasons
from ..policy.candidates import candidates
from ..policy.left_out import judged
from ..policy.libraries import LIBRARIES
from ..policy.settings import DEFAULT, Settings
from ..problem import Problem, named_problem
from . import rows
from .experts import run as run_experts
from .fixed import Fixed, endangers, session_of
from .runner import Outcome, Request, Setting, State

BENCH = "policy"
#: Layers that no shipped table has (their sizes are those of known models, cut as engines cut them), and token counts
#: between and beyond those that tables have.
PROBLEMS = (
    ("3072,384,256,8", "fp8_block"),  # MiniMax-M2, four ways
    ("4096,704,128,8", "bf16"),  # GLM-4.5-Air, two ways
    ("4096,384,128,8", "fp8_block"),  # Qwen3-235B-A22B, four ways
    ("2048,1024,64,8", "fp8_tensor"),  # OLMoE
    ("5120,1024,128,1", "fp8_tensor"),  # Llama 4 Maverick, eight ways
    ("4096,3200,16,2", "bf16"),  # Phi-3.5-MoE, two ways
)
TOKENS = (1, 3, 6, 12, 24, 48, 96, 192, 384, 768, 1536, 3072, 6144)
ROUTINGS = ("uniform", "zipf1.2", "hot")
#: An engine's order, as vLLM 0.26 has it on Hopper without expert parallelism: the first that can run is taken.
DEFAULT_LIST = {
    "fp8_tensor": (Backend.FLASHINFER_CUTLASS, Backend.VLLM_CUTLASS, Backend.VLLM_TRITON),
    "fp8_channel": (Backend.VLLM_CUTLASS, Backend.VLLM_TRITON),
    "fp8_block": (Backend.VLLM_TRITON, Backend.VLLM_DEEPGEMM),
    "bf16": (Backend.VLLM_TRITON,),
    "fp16": (Backend.VLLM_TRITON,),
}
#: Steps of each size in a mix that mostly decodes: out of a hundred.
DECODE_MIX = {1: 10, 8: 20, 32: 30, 64: 20, 128: 12, 512: 5, 2048: 2, 4096: 1}


@dataclass(frozen=True)
class Cell:
    problem: str
    quant: str
    tokens: int
    routing: str

    def problem_at(self) -> Problem:
        return named_problem(self.problem, self.tokens, self.quant, static_scale=self.quant == "fp8_tensor")


def cells(
    problems: Iterable[tuple[str, str]], tokens: Sequence[int], routings: Sequence[str], seed: int = 0
) -> list[Cell]:  # fmt: skip
    """All cells of (problem, quant), in an order that leaves a fair sample wherever time runs out."""
    found = [Cell(p, q, t, r) for p, q in problems for t in tokens for r in routings]
    Random(seed).shuffle(found)
    return found


def plans_of(
    cell: Cell, setting: Setting, settings: Settings, flashinfer_module: Path | None = None
) -> tuple[Plan, list[Plan]]:  # fmt: skip
    """(the policy's choice, everything that is measured: the choice is among it)."""
    problem, hardware = cell.problem_at(), setting.hardware
    chosen = decide(problem, hardware, None, settings)
    ours = [] if reasons(Backend.TRITON, problem, hardware) else candidates(problem, hardware, settings.routing)
    found = {plan.name: plan for plan in (chosen, *ours)}
    for backend in LIBRARIES:
        if endangers(backend, problem, flashinfer_module):
            continue
        try:
            plan = decide(problem, hardware, backend, settings)
        except UnsupportedProblem:
            continue
        found.setdefault(plan.name, plan)
    return chosen, list(found.values())


def default_of(quant: str, plans: Iterable[Plan]) -> Plan | None:
    """What a fixed list takes of the candidates that were measured; None where none of the list was."""
    by_backend = {plan.backend: plan for plan in plans}
    return next((by_backend[each] for each in DEFAULT_LIST.get(quant, ()) if each in by_backend), None)


def run(
    todo: Sequence[Cell], setting: Setting, settings: Settings, *, replays: int = 15, sets: int = 8, seed: int = 0,
    budget_s: float | None = None, flashinfer_module: Path | None = None, measure: Callable = run_experts,
) -> Iterator[Outcome]:  # fmt: skip
    """Outcomes of the cells, rows among them; no cell is begun that would likely end after budget_s seconds.

    Candidates that crash or are wrong are outcomes too, and are no candidates; the choice being one is an outcome in
    that state without a row.
    """
    started = monotonic()
    for done, cell in enumerate(todo):
        spent = monotonic() - started
        if budget_s is not None and done and spent + spent / done > budget_s:
            break
        yield from _cell(cell, setting, settings, replays, sets, seed, flashinfer_module, measure)


def _cell(cell: Cell, setting, settings, replays, sets, seed, module, measure) -> Iterator[Outcome]:
    routed = replace(settings, routing=cell.routing)
    chosen, plans = plans_of(cell, setting, routed, module)
    names = {f"{Fixed.key}:{number}": plan for number, plan in enumerate(plans)}
    implementations = [
        Fixed(setting.hardware, str(number), {cell.tokens: plan}, session_of(plan.backend, module))
        for number, plan in enumerate(plans)
    ]
    request = Request("experts", (cell.problem,), (cell.quant,), (cell.tokens,), (cell.routing,), sets, replays, seed)
    times: dict[str, float] = {}
    for outcome in measure(request, implementations, setting):
        plan = names[outcome.impl]
        if outcome.state is State.MEASURED:
            times[plan.name] = outcome.row["time_us"]
        else:
            where = replace(outcome, problem=cell.problem, quant=cell.quant, routing=cell.routing, tokens=cell.tokens)
            ours = plan.name == chosen.name
            yield replace(where, impl="expertile" if ours else plan.name)
    if chosen.name in times:
        yield _outcome(cell, setting, "expertile", chosen.name, times)
        default = default_of(cell.quant, [plan for plan in plans if plan.name in times])
        if default is not None:
            yield _outcome(cell, setting, "default-list", default.name, times)


def _outcome(cell: Cell, setting: Setting, impl: str, chosen: str, times: Mapping[str, float]) -> Outcome:
    best = min(times, key=times.get)
    row = rows.make(
        BENCH, setting.shared, impl=impl, problem=cell.problem, quant=cell.quant, tokens=cell.tokens,
        routing=cell.routing, chosen=chosen, chosen_us=round(times[chosen], 3), best=best,
        best_us=round(times[best], 3), regret=round(times[chosen] / times[best] - 1, 5),
        times_us={name: round(us, 3) for name, us in sorted(times.items(), key=lambda each: each[1])},
    )  # fmt: skip
    return Outcome(impl, State.MEASURED, cell.problem, cell.quant, cell.routing, cell.tokens, row=row)


def regrets(found: Iterable[Mapping]) -> dict[str, dict[str, float]]:
    """impl -> {"cells", "mean", "worst"} over policy rows."""
    by_impl: dict[str, list[float]] = {}
    for row in found:
        if row["bench"] == BENCH:
            by_impl.setdefault(row["impl"], []).append(row["regret"])
    return {
        impl: {"cells": len(values), "mean": sum(values) / len(values), "worst": max(values)}
        for impl, values in by_impl.items()
    }


def judgement(found: Iterable[Mapping], settings: Settings = DEFAULT) -> list[str]:
    """In words: what today's choice by these settings loses where every candidate's time is known, worst cell first."""
    made = sorted(judged(found, settings), key=lambda each: -(each[2] or 0.0))
    known = [(row, chosen, regret) for row, chosen, regret in made if regret is not None]
    if not known:
        raise ExpertileError("no row has the times of all candidates: give a file that `bench policy` wrote")
    lines = [
        f"{100 * regret:.1f} % {row['problem']} {row['quant']} {row['routing']} T={row['tokens']}: {chosen}"
        for row, chosen, regret in known
        if regret > 0.02
    ]
    mean = sum(regret for *_, regret in known) / len(known)
    return [
        *lines,
        f"regret {100 * mean:.2f} % in the mean, {100 * known[0][2]:.2f} % at worst, {len(known)} cells; "
        f"in {len(made) - len(known)} the choice was not measured",
    ]


def against_default(found: Iterable[Mapping], mix: Mapping[int, int] = DECODE_MIX) -> dict[tuple[str, str], dict]:
    """(problem, routing) -> {tokens: default's time over the policy's, "mix": the same over that many steps of each}.

    "mix" is left out where a size of the mix was not measured.
    """
    times: dict[tuple[str, str], dict[int, dict[str, float]]] = {}
    for row in found:
        if row["bench"] == BENCH:
            cell = times.setdefault((row["problem"], row["routing"]), {}).setdefault(row["tokens"], {})
            cell[row["impl"]] = row["chosen_us"]
    made: dict[tuple[str, str], dict] = {}
    for where, by_tokens in times.items():
        both = {tokens: cell for tokens, cell in sorted(by_tokens.items()) if len(cell) == 2}
        made[where] = {tokens: cell["default-list"] / cell["expertile"] for tokens, cell in both.items()}
        if both.keys() >= mix.keys():
            default, policy = (sum(n * both[t][impl] for t, n in mix.items()) for impl in ("default-list", "expertile"))
            made[where]["mix"] = default / policy
    return {where: ratios for where, ratios in made.items() if ratios}


def follow(outcomes: Iterable[Outcome], total: int, path: Path) -> bool:
    """Writes rows as they come, shows progress and, last, what they say; False when a choice of the policy failed."""
    console, written, good = Console(), [], True
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        shown = progress.add_task(BENCH, total=total)
        for outcome in outcomes:
            where = f"{outcome.problem} {outcome.quant} {outcome.routing} T={outcome.tokens}"
            if outcome.state is State.MEASURED:
                rows.write(path, [outcome.row])
                written.append(outcome.row)
                progress.update(shown, description=where, advance=outcome.impl == "expertile")
                continue
            good = good and outcome.impl != "expertile"
            text = f"{outcome.impl} ({where}) {outcome.state.value}: {outcome.message}"
            console.print(text, markup=False, highlight=False)
    for line in in_words(written):
        console.print(line, markup=False, highlight=False)
    console.print(f"{len(written)} rows in {path}" if written else "no rows", markup=False, highlight=False)
    return good


def in_words(written: Sequence[Mapping]) -> list[str]:
    """Regret of each chooser, and what the policy gains on the fixed list, by tokens and over the mix."""
    lines = [
        f"{impl}: regret {100 * each['mean']:.2f} % in the mean, {100 * each['worst']:.2f} % at worst, "
        f"{each['cells']:.0f} cells"
        for impl, each in regrets(written).items()
    ]
    for (problem, routing), ratios in against_default(written).items():
        text = ", ".join(f"{'T=' if at != 'mix' else ''}{at}: {ratio:.3f}" for at, ratio in ratios.items())
        lines.append(f"{problem} {routing}, the list's time over the policy's: {text}")
    return lines
