"""Measures tiles and writes the winners as the policy's table: `expertile tune`.

For every number of tokens a handful of plans that could win is measured, checked first as every benchmark is,
interleaved in one process, on uniform routing; the fastest right one becomes an entry. The plan that the policy would
choose without a table is always among them, so an entry is never slower than none.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import astuple, replace
from pathlib import Path

from .bench.experts import run as run_experts
from .bench.ours import Expertile
from .bench.runner import Request, Setting, State
from .errors import ExpertileError, ShapeError, UnsupportedProblem
from .hardware import Hardware
from .plans import Backend, GemmConfig, Plan, Stream
from .policy.rules import stream_reasons, tile_reasons
from .policy.tiles import SPECIALIZED, STREAM_ROWS, choose_tiles, fused_quant, stream_tiles
from .problem import Problem, Quant, named_problem

STREAM_MOST = 64  # routed rows beyond which streaming is not even tried
MARGIN = 0.01  # a challenger must be this much faster than the plan without a table


class Fixed(Expertile):
    """`expertile.moe` under given plans, one a number of tokens."""

    def __init__(self, hardware: Hardware, variant: str, plans: dict[int, Plan]):
        super().__init__(hardware, variant)
        self.plans = plans

    def plan(self, inputs, tokens: int) -> Plan:
        problem = inputs.weights[0].problem(tokens, inputs.problem.top_k)
        return replace(self.plans[tokens], problem=problem)


def candidates(problem: Problem, hardware: Hardware) -> list[Plan]:
    """Plans worth measuring, the policy's choice without a table first."""
    base = Plan(problem, hardware.name, Backend.TRITON, pdl=True, sms=hardware.sms)
    found = []
    if problem.rows <= STREAM_MOST and not stream_reasons(problem):
        up, down = stream_tiles(problem)
        for warps in (8, 4):
            found.append(replace(base, gemm1=replace(up, warps=warps), gemm2=down, stream=Stream.BOTH))
        static = problem.static_scale
        for gemm1, _ in _pairs(problem):
            if gemm1.block_m == 16 and not tile_reasons(gemm1, problem, hardware):
                found.append(replace(base, gemm1=gemm1, gemm2=down, stream=Stream.DOWN, fuse_quant=static))
    pairs = [choose_tiles(problem, hardware), *_pairs(problem)]
    grouped = [
        replace(base, gemm1=gemm1, gemm2=gemm2, fuse_quant=fused_quant(problem, gemm1))
        for gemm1, gemm2 in pairs
        if not (tile_reasons(gemm1, problem, hardware) or tile_reasons(gemm2, problem, hardware))
    ]
    first = found if problem.rows <= STREAM_ROWS else grouped
    return list(dict.fromkeys([*first, *found, *grouped]))


def _pairs(problem: Problem) -> Iterator[tuple[GemmConfig, GemmConfig]]:
    k = 64 if problem.quant is Quant.NONE else 128
    rows, block = problem.rows_per_expert, problem.quant is Quant.FP8_BLOCK

    def swap(block_m, block_n, warps, stages, block_k=k):
        return GemmConfig(block_m, block_n, block_k, warps, stages, True, 1, not problem.activation.interleaved)

    def plain(block_m, block_n, warps, stages, group):
        return GemmConfig(block_m, block_n, k, warps, stages, False, group)

    for block_m in (16, 32, 64):
        if not block_m / 16 <= max(rows, 1) <= block_m * 1.25:
            continue
        yield (swap(block_m, 128, 4, 4),) * 2
        yield (swap(block_m, 128, 8, 4),) * 2
        if block_m == 16:
            yield (replace(swap(block_m, 128, 8, 4), tma=False),) * 2
        yield swap(block_m, 256, 8, 3), swap(block_m, 128, 4, 4)
        if not block:
            yield (swap(block_m, 128, 4, 3, 2 * k),) * 2
    if rows >= 16:
        yield (plain(64, 128, 4, 4, 8),) * 2
        yield (plain(64, 256, 8, 3, 8),) * 2
        for group in (8, 16):
            yield (replace(SPECIALIZED[k], group_m=group),) * 2


def tune(
    name: str, quant: str, tokens: tuple[int, ...], setting: Setting, *, replays: int = 11,
    report: Callable[[dict], None] = lambda entry: None,
) -> list[dict]:  # fmt: skip
    """Table entries for one problem and quant, one a number of tokens; `report` is told each as it is found."""
    if not setting.hardware.is_hopper:
        raise UnsupportedProblem(f"tiles are measured on a Hopper GPU; this machine is {setting.hardware.name}")
    if min(tokens, default=0) < 1:
        raise ShapeError(f"tokens={tokens}: give numbers of at least 1")
    found = []
    problem = named_problem(name, max(tokens), quant, static_scale=quant == "fp8_tensor")
    for few in _groups(tokens):
        plans = {count: candidates(problem.with_tokens(count), setting.hardware) for count in few}
        most = max(map(len, plans.values()))
        impls = [
            Fixed(setting.hardware, str(i), {count: plans[count][min(i, len(plans[count]) - 1)] for count in few})
            for i in range(most)
        ]
        request = Request("experts", (name,), (quant,), few, replays=replays)
        times: dict[int, dict[int, float]] = {count: {} for count in few}
        for outcome in run_experts(request, impls, setting):
            if outcome.state is State.MEASURED:
                index = int(outcome.impl.partition(":")[2])
                if index < len(plans[outcome.tokens]):
                    times[outcome.tokens][index] = outcome.row["time_us"]
        for count in few:
            if entry := _winner(plans[count], times[count]):
                found.append(entry)
                report(entry)
    return found


def _groups(tokens: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Tokens in groups with about as many candidates."""
    split = [[t for t in tokens if t < 64], [t for t in tokens if 64 <= t < 1024], [t for t in tokens if t >= 1024]]
    return [tuple(group) for group in split if group]


def _winner(plans: list[Plan], times: dict[int, float]) -> dict | None:
    if not times:
        return None
    best = min(times, key=times.get)
    if 0 in times and times[0] <= times[best] * (1 + MARGIN):
        best = 0
    plan, p = plans[best], plans[best].problem
    return dict(
        hidden=p.hidden, inter=p.inter, experts=p.experts, top_k=p.top_k, label=p.label, gated=p.activation.gated,
        tokens=p.tokens, gemm1=list(astuple(plan.gemm1)), gemm2=list(astuple(plan.gemm2)), stream=plan.stream.value,
        fuse_quant=plan.fuse_quant, time_us=round(times[best], 2),
    )  # fmt: skip


def write(path: Path, entries: list[dict], measured_with: dict) -> None:
    """Adds entries to a table; one for the same problem and tokens replaces the old."""
    names = ("hidden", "inter", "experts", "top_k", "label", "gated", "tokens")
    old = json.loads(path.read_text())["entries"] if path.is_file() else []
    merged = {tuple(entry[name] for name in names): entry for entry in [*old, *entries]}
    if not merged:
        raise ExpertileError(f"nothing was measured: {path} is left as it is")
    lines = ",\n    ".join(json.dumps(merged[key]) for key in sorted(merged))
    head = json.dumps(measured_with)
    path.write_text(f'{{\n  "measured_with": {head},\n  "entries": [\n    {lines}\n  ]\n}}\n')
