"""A decision in words."""

from __future__ import annotations

from ..plans import Backend, Candidate, Layout, Plan, Stream
from ..problem import Problem, Quant
from .histogram import UNIFORM, experts_hit
from .libraries import LIBRARIES


def explain(plan: Plan, full: bool = False) -> str:
    """The problem, what was chosen and from what, every other backend with its price or the reasons against it.

    full   other libraries that cannot run as well, and what each takes of memory
    """
    p = plan.problem
    sizes = f"T={p.tokens} H={p.hidden} I={p.inter} E={p.experts} top-k={p.top_k} {_format(p)}"
    traced = plan.routing.startswith("trace:")
    spread = f"{plan.routing}, priced as {UNIFORM}" if traced else f"{plan.routing} routing"
    hit = experts_hit(p, plan.routing)
    lines = [
        f"{sizes} on {plan.device}",
        f"  {p.rows} routed rows, {p.rows_per_expert:.2f} an expert, {hit:.1f} experts hit ({spread})",
        f"  -> {plan.backend.value}: {us(plan.time_us)} ({plan.source}), floor {us(plan.floor_us)}",
    ]
    if plan.backend is Backend.TRITON:
        lines += [f"     {line}" for line in _tiles(plan)]
        if p.quant is not Quant.NONE and plan.stream is Stream.NO:
            where = "in GEMM1's epilogue" if plan.fuse_quant else "by a kernel of its own (its scale spans GEMM1 tiles)"
            lines += [f"     h is quantised {where}"]
        lines += [f"     workspace {mib(plan.workspace_bytes)}"]
    for other in plan.candidates:
        if other.backend is plan.backend:
            lines += [f"     {memory(other)}"] if other.backend in LIBRARIES else []
        elif full or not (other.reasons and other.backend in LIBRARIES):
            lines.append(_other(other, full))
    return "\n".join(lines)


def _format(p: Problem) -> str:
    """Format and activation, with what of them the sizes do not tell."""
    scales = (" static scales" if p.static_scale else " dynamic scales") if p.quant is Quant.FP8_TENSOR else ""
    return f"{p.label}{scales} {p.activation.name}{' bias' if p.bias else ''}"


def _other(other: Candidate, full: bool) -> str:
    note = "; ".join(other.reasons) if other.reasons else f"{us(other.time_us)} ({other.source})"
    if other.backend is Backend.REFERENCE:
        note += " (only when asked for)"
    elif other.backend in LIBRARIES and full and not other.reasons:
        note += f"; {memory(other)}"
    return f"  {'no' if other.reasons else '  '} {other.backend.value}: {note}"


def memory(candidate: Candidate) -> str:
    """What a backend takes: a copy of the weights where it wants them otherwise, and the scratch of a call."""
    scratch = f"scratch {mib(candidate.scratch_bytes)}"
    if candidate.layout is Layout.CHECKPOINT:
        return scratch
    if not candidate.layout_bytes:
        return f"weights lie as it wants them ({candidate.layout.value}), {scratch}"
    once = f"{mib(candidate.layout_bytes)} and {us(candidate.load_us)} once"
    return f"a copy of the weights ({candidate.layout.value}): {once}, {scratch}"


def _tiles(plan: Plan) -> list[str]:
    if plan.stream is Stream.BOTH:
        up, down = plan.gemm1, plan.gemm2
        return [
            f"streamed in two launches: {up.block_n} rows of w13 a block, {down.block_n} columns of a token's experts",
            "no routing and no combine: hardly two slots share an expert, there is nothing to group",
        ]
    if plan.stream is Stream.RING:
        return [
            f"both products in one launch, {plan.gemm1.block_n} weight rows an item, {plan.gemm1.stages} stages",
            "no routing: every token meets every expert that is hit, which costs nothing while memory is the limit",
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


def us(value: float | None) -> str:
    if value is None:
        return "unknown"
    return f"{value:.1f} us" if value < 1000 else f"{value / 1000:.2f} ms"


def mib(value: float) -> str:
    return f"{value / 2**20:.1f} MiB"
