"""Problem + Hardware -> Plan, by table and by model, in the standard library alone."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from ..errors import UnsupportedProblem
from ..hardware import DEVICES, Hardware
from ..plans import Backend, Candidate, Plan, Stream
from ..problem import Problem, Quant
from . import table
from .model import floor_us, plan_us
from .rules import reasons, tile_reasons
from .tiles import STREAM_ROWS, choose_tiles, fused_quant, stream_reasons, stream_tiles

__all__ = ["decide", "explain", "reasons", "tile_reasons"]


@lru_cache(maxsize=4096)
def decide(problem: Problem, hardware: Hardware, backend: Backend | None = None) -> Plan:
    """The fastest plan that can run, by measured table, else by the model; torch only where the kernels cannot run, as
    it reads counts on the host. A pure function, memoised.

    backend forces one; if it cannot run the problem, UnsupportedProblem says why. REFERENCE is never chosen unasked.
    """
    looked_at, best = [], None
    for candidate in Backend:
        why = reasons(candidate, problem, hardware)
        if why:
            looked_at.append(Candidate(candidate, tuple(why)))
            continue
        plan = _plan(candidate, problem, hardware)
        why = _refused(plan, hardware)
        if why:
            looked_at.append(Candidate(candidate, tuple(why)))
            continue
        looked_at.append(Candidate(candidate, (), plan.time_us, plan.source))
        if candidate is backend:
            best = replace(plan, source=f"forced; {plan.source}")
        elif backend is None and candidate is not Backend.REFERENCE:
            best = plan if best is None else min(best, plan, key=_rank)
    if best is None:
        refused = [c for c in looked_at if c.reasons and backend in (None, c.backend)]
        detail = "; ".join(f"{c.backend.value}: {', '.join(c.reasons)}" for c in refused)
        wanted = f"backend={backend.value} cannot" if backend else "no backend can"
        raise UnsupportedProblem(f"{wanted} run this problem on {hardware.name}: {detail}")
    return replace(best, candidates=tuple(looked_at))


def _rank(plan: Plan) -> tuple:
    """What can be captured in a CUDA graph comes before what cannot, then the faster."""
    return plan.backend is Backend.TORCH, plan.time_us


def _plan(backend: Backend, problem: Problem, hardware: Hardware) -> Plan:
    plan = Plan(problem, hardware.name, backend, floor_us=floor_us(problem, hardware), sms=hardware.sms)
    if backend is not Backend.TRITON:
        return replace(plan, time_us=plan_us(plan, hardware), source="model")
    entry = table.nearest(problem, hardware.name)
    measured = entry and replace(plan, gemm1=entry.gemm1, gemm2=entry.gemm2, stream=entry.stream)
    few = 0 < problem.rows <= STREAM_ROWS and not stream_reasons(problem)
    if measured and ((not entry.exact and (few or entry.stream is not Stream.NO)) or _refused(measured, hardware)):
        measured = None  # whether to stream hangs on the very sizes: another problem's entry is no guide
    if measured:
        plan = measured
        fuse = entry.fuse_quant and fused_quant(problem, entry.gemm1)
        source = f"tiles measured for {entry.source}"
    elif few:
        gemm1, gemm2 = stream_tiles(problem)
        plan, fuse = replace(plan, gemm1=gemm1, gemm2=gemm2, stream=Stream.BOTH), False
        source = f"streamed, as at most {STREAM_ROWS} routed rows are"
    else:
        gemm1, gemm2 = choose_tiles(problem, hardware)
        plan, fuse = replace(plan, gemm1=gemm1, gemm2=gemm2), fused_quant(problem, gemm1)
        source = "tiles by rows an expert"
    plan = replace(plan, fuse_quant=fuse, pdl=True)
    if measured and entry.exact and entry.tokens == problem.tokens:
        return replace(plan, time_us=entry.time_us, source=f"measured; {source}")
    return replace(plan, time_us=plan_us(plan, hardware), source=f"model; {source}")


def _refused(plan: Plan, hardware: Hardware) -> list[str]:
    """Why the plan's kernels cannot run with these tiles, TRITON only."""
    if plan.backend is not Backend.TRITON:
        return []
    tiles = {Stream.BOTH: (), Stream.DOWN: (plan.gemm1,), Stream.NO: (plan.gemm1, plan.gemm2)}[plan.stream]
    found = [reason for tile in dict.fromkeys(tiles) for reason in tile_reasons(tile, plan.problem, hardware)]
    return found + (stream_reasons(plan.problem) if plan.stream is not Stream.NO else [])


def explain(plan: Plan) -> str:
    """The decision in words: the problem, what was chosen and from what, every other backend with price or reasons."""
    p = plan.problem
    activation = p.activation.name
    sizes = f"T={p.tokens} H={p.hidden} I={p.inter} E={p.experts} top-k={p.top_k} {p.label} {activation}"
    lines = [
        f"{sizes} on {plan.device}",
        f"  {p.rows} routed rows, {p.rows_per_expert:.2f} an expert, {p.experts_hit:.1f} experts hit (uniform routing)",
        f"  -> {plan.backend.value}: {_us(plan.time_us)} ({plan.source}), floor {_us(plan.floor_us)}",
    ]
    if plan.backend is Backend.TRITON:
        lines += [f"     {line}" for line in _tiles_in_words(plan)]
        if p.quant is not Quant.NONE and plan.stream is Stream.NO:
            where = "in GEMM1's epilogue" if plan.fuse_quant else "by a kernel of its own (its scale spans GEMM1 tiles)"
            lines += [f"     h is quantised {where}"]
        lines += [f"     workspace {plan.workspace_bytes / 2**20:.1f} MiB"]
    for other in plan.candidates:
        if other.backend is plan.backend:
            continue
        note = "; ".join(other.reasons) if other.reasons else f"{_us(other.time_us)} ({other.source})"
        unasked = " (only when asked for)" if other.backend is Backend.REFERENCE else ""
        lines.append(f"  {'no' if other.reasons else '  '} {other.backend.value}: {note}{unasked}")
    return "\n".join(lines)


def _tiles_in_words(plan: Plan) -> list[str]:
    if plan.stream is Stream.BOTH:
        up, down = plan.gemm1, plan.gemm2
        return [
            f"streamed in two launches: {up.block_n} rows of w13 a block, {down.block_n} columns of a token's experts",
            "no routing and no combine: hardly two slots share an expert, there is nothing to group",
        ]
    if plan.stream is Stream.DOWN:
        return [
            f"gemm1 {plan.gemm1.name}, then {plan.gemm2.block_n} columns of all a token's experts a block are streamed",
            "no combine: a block has all slots of its token",
        ]
    if plan.gemm1.specialized:
        return [
            f"gemm1 and gemm2 {plan.gemm1.name}: a block on every SM takes tile after tile",
            "three of its warps load, two warpgroups multiply 64 rows each",
        ]
    side = "sit on WGMMA's narrow side, weight rows fill its 64 rows" if plan.gemm1.swap else "fill WGMMA's 64-row side"
    return [f"gemm1 {plan.gemm1.name}, gemm2 {plan.gemm2.name}: {plan.gemm1.block_m} tokens a tile {side}"]


def _us(value: float | None) -> str:
    if value is None:
        return "unknown"
    return f"{value:.1f} us" if value < 1000 else f"{value / 1000:.2f} ms"


def device(name: str) -> Hardware:
    """A known device by name, for plans made elsewhere than on it."""
    if name not in DEVICES:
        raise UnsupportedProblem(f"device={name!r} is not known: use one of {', '.join(DEVICES)}")
    return DEVICES[name]
