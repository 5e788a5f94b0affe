"""Problem + Hardware -> Plan, by table and by model, in the standard library alone.

What is measured comes first (table), then the model; our kernels before torch, which reads counts on the host; another
library's only where it was measured to be faster, never on an estimate. See docs/policy.md.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from ..errors import UnsupportedProblem
from ..hardware import DEVICES, Hardware
from ..plans import Backend, Candidate, Layout, Plan, Stream
from ..problem import BLOCK, Problem
from . import table
from .histogram import experts_hit
from .libraries import LIBRARIES, layout_bytes
from .model import floor_us, plan_us
from .rules import reasons, ring_reasons, stream_tile_reasons, tile_reasons
from .settings import DEFAULT, Settings, Told
from .tiles import STREAM_ROWS, choose_tiles, fused_quant, ring_by_rule, stream_reasons, stream_tiles
from .words import explain

__all__ = ["DEFAULT", "Settings", "decide", "device", "explain", "reasons", "ring_reasons", "tile_reasons", "unable"]

MARGIN = 0.02  # another library's kernels must have measured this much faster than ours: less may be noise


@lru_cache(maxsize=4096)
def decide(
    problem: Problem, hardware: Hardware, backend: Backend | None = None, settings: Settings = DEFAULT
) -> Plan:  # fmt: skip
    """The fastest plan that can run, by measured table, else by the model; torch only where the kernels cannot run, as
    it reads counts on the host. A pure function (but for the tables that it reads once), memoised.

    backend forces one, before what the settings say; if it cannot run the problem, UnsupportedProblem says why.
    REFERENCE is never chosen unasked, other libraries only where settings.others.
    """
    told = settings.about(problem)
    wanted = backend or (told.backend if told else None) or settings.backend
    looked_at, plans = [], {}
    for each in Backend:
        candidate, plan = _look(each, problem, hardware, settings, told)
        looked_at.append(candidate)
        if plan is not None:
            plans[each] = plan
    if wanted is not None and wanted in plans:
        best = replace(plans[wanted], source=f"forced; {plans[wanted].source}")
    elif wanted is None and (able := _unasked(plans, looked_at, settings)):
        best = min(able, key=_rank)
    else:
        raise UnsupportedProblem(_refusal(wanted, looked_at, hardware))
    return replace(best, candidates=tuple(looked_at))


def _look(
    backend: Backend, problem: Problem, hardware: Hardware, settings: Settings, told: Told | None
) -> tuple[Candidate, Plan | None]:
    """The backend's price and plan, or its reasons against."""
    layout = LIBRARIES[backend].layout if backend in LIBRARIES else Layout.CHECKPOINT
    why = reasons(backend, problem, hardware, settings.installed)
    if settings.layout not in (None, layout):
        why.append(
            f"the weights were laid out as {settings.layout.value} when they were loaded, it needs {layout.value}"
        )
    if why:
        return Candidate(backend, tuple(why)), None
    if backend in LIBRARIES:
        return _library(backend, problem, hardware, settings, layout)
    plan = _plan(backend, problem, hardware, settings, told)
    if why := unable(plan, hardware):
        return Candidate(backend, tuple(why)), None
    return Candidate(backend, (), plan.time_us, plan.source, scratch_bytes=plan.workspace_bytes), plan


def _unasked(plans: dict[Backend, Plan], looked_at: list[Candidate], settings: Settings) -> list[Plan]:
    """The plans that may be taken where nobody asked for one: ours, torch's, and what was measured to beat ours; where
    nothing else can run (weights that lie otherwise), what can."""
    able = [plans[each] for each in (Backend.TORCH, Backend.TRITON) if each in plans]
    if not settings.others:
        return able
    fit = [c for c in looked_at if c.backend in LIBRARIES and c.backend in plans and not _too_much(c, settings)]
    measured = [plans[c.backend] for c in fit if c.source.startswith("measured")]
    if ours := plans.get(Backend.TRITON):
        measured = [plan for plan in measured if plan.time_us < ours.time_us * (1 - MARGIN)]
    return [*able, *measured] or [plans[c.backend] for c in fit]


def _too_much(candidate: Candidate, settings: Settings) -> bool:
    """Whether its memory is more than there is: a copy of the weights, or scratch."""
    bounds = (candidate.layout_bytes, settings.spare_bytes), (candidate.scratch_bytes, settings.scratch_bytes)
    return any(most is not None and need > most for need, most in bounds)


def _rank(plan: Plan) -> tuple:
    """What can be captured in a CUDA graph comes before what cannot, then the faster."""
    return not plan.backend.captures, plan.time_us


def _refusal(wanted: Backend | None, looked_at: list[Candidate], hardware: Hardware) -> str:
    refused = [c for c in looked_at if c.reasons and wanted in (None, c.backend)]
    detail = "; ".join(f"{c.backend.value}: {', '.join(c.reasons)}" for c in refused)
    who = f"backend={wanted.value} cannot" if wanted else "no backend can"
    return f"{who} run this problem on {hardware.name}: {detail}"


def _library(
    backend: Backend, problem: Problem, hardware: Hardware, settings: Settings, layout: Layout
) -> tuple[Candidate, Plan]:
    """Another library's price: measured beside ours in the same cell, by the installed version; else the model's."""
    floor = floor_us(problem, hardware, settings.routing)
    plan = Plan(problem, hardware.name, backend, floor_us=floor, sms=hardware.sms, routing=settings.routing)
    package = LIBRARIES[backend].package
    version = dict(settings.installed)[package]
    time_us, source = plan_us(plan, hardware), "model; never chosen on an estimate"
    entry = table.nearest(problem, hardware.name, settings.routing, settings.tables)
    for other, ratio, measured in entry.others if entry and entry.exact else ():
        if other is backend and measured == version and entry.routing == settings.routing:
            time_us = ratio * _cell_us(problem, hardware, entry)
            source = f"measured; {package} {version}{_at(entry)}"
        elif other is backend:
            source += f"; {package} {measured} with {entry.routing} routing was measured, not {version}"
    need = layout_bytes(problem, layout) if settings.layout is None else 0
    load_us = 2e6 * need / hardware.hbm_bytes_per_s
    scratch = int(LIBRARIES[backend].scratch(problem))
    plan = replace(plan, time_us=time_us, source=source)
    return Candidate(backend, (), time_us, source, layout, need, load_us, scratch), plan


def _plan(
    backend: Backend, problem: Problem, hardware: Hardware, settings: Settings, told: Told | None
) -> Plan:  # fmt: skip
    """The plan of a backend that is ours."""
    routing = settings.routing
    floor = floor_us(problem, hardware, routing)
    plan = Plan(problem, hardware.name, backend, floor_us=floor, sms=hardware.sms, routing=routing)
    if backend is not Backend.TRITON:
        return replace(plan, time_us=plan_us(plan, hardware), source="model")
    if told is not None and (told.gemm1 or told.stream not in (None, Stream.NO)):
        return _as_told(plan, hardware, told)

    def with_tiles(entry: table.Entry) -> Plan:
        return replace(plan, gemm1=entry.gemm1, gemm2=entry.gemm2, stream=entry.stream)

    able = lambda entry: not unable(with_tiles(entry), hardware)
    entry = table.nearest(problem, hardware.name, routing, settings.tables, able)
    measured = entry if entry and able(entry) else None
    if not (measured and measured.exact) and (ruled := _by_rule(plan, hardware)):
        return _priced(ruled, hardware, None, ruled.source)
    if measured:
        plan = with_tiles(measured)
        fuse = (measured.fuse_quant or not measured.exact) and fused_quant(problem, measured.gemm1)
        source = f"tiles measured for {measured.source}"
    else:
        gemm1, gemm2 = choose_tiles(problem, hardware)
        plan, fuse = replace(plan, gemm1=gemm1, gemm2=gemm2), fused_quant(problem, gemm1)
        source = "tiles by rows an expert"
    plan = replace(plan, fuse_quant=fuse, pdl=True)
    return _priced(plan, hardware, measured, source)


def _by_rule(plan: Plan, hardware: Hardware) -> Plan | None:
    """What measured best for so few rows whatever the layer, where no table has it.

    Streaming wants hardly two rows at one expert: it reads an expert's weights for each.
    """
    p = plan.problem
    if 0 < p.rows <= STREAM_ROWS and experts_hit(p, plan.routing) >= 0.9 * p.local_rows and not stream_reasons(p):
        gemm1, gemm2 = stream_tiles(p)
        source = f"streamed, as at most {STREAM_ROWS} routed rows are"
        return replace(plan, gemm1=gemm1, gemm2=gemm2, stream=Stream.BOTH, pdl=True, source=source)
    if tile := ring_by_rule(p, hardware):
        source = "both products in one launch, as some tens of routed rows are"
        return replace(plan, gemm1=tile, gemm2=tile, stream=Stream.RING, pdl=True, source=source)
    return None


def _priced(plan: Plan, hardware: Hardware, entry: table.Entry | None, source: str) -> Plan:
    """With its time: measured in this cell or between two, else the model's, scaled to the entry of these sizes."""
    routing = plan.routing
    if entry and entry.routing != routing:
        source += f" with {entry.routing} routing"
    if entry and entry.ends and entry.routing == routing:
        time_us = _cell_us(plan.problem, hardware, entry)
        return replace(plan, time_us=time_us, source=f"measured; {source}{_between(entry)}")
    time_us = plan_us(plan, hardware)
    if entry and entry.exact:
        there = plan_us(replace(plan, problem=plan.problem.with_tokens(entry.tokens), routing=entry.routing), hardware)
        time_us *= entry.time_us / there
    return replace(plan, time_us=time_us, source=f"model; {source}")


def _cell_us(problem: Problem, hardware: Hardware, entry: table.Entry) -> float:
    """Time at the problem's tokens: the measured one, or between its neighbours as multiples of the floor, which knows
    how many experts are hit."""
    if len(entry.ends) == 1:
        return entry.ends[0][1]
    (low, _), (high, _) = entry.ends
    times = [us / floor_us(problem.with_tokens(tokens), hardware, entry.routing) for tokens, us in entry.ends]
    return floor_us(problem, hardware, entry.routing) * table.between(problem.tokens, low, high, *times)


def _between(entry: table.Entry) -> str:
    """What to say of a time that lies between two measured ones."""
    return f", time between T={entry.ends[0][0]} and T={entry.ends[1][0]}" if len(entry.ends) == 2 else ""


def _at(entry: table.Entry) -> str:
    return " at " + " and ".join(f"T={tokens}" for tokens, _ in entry.ends)


def _as_told(plan: Plan, hardware: Hardware, told: Told) -> Plan:
    """Our kernels' plan as the file of problems gives it; tile rules judge it as any other."""
    stream = told.stream or Stream.NO
    up, down = stream_tiles(plan.problem)
    gemm1 = told.gemm1 or (up if stream is Stream.BOTH else choose_tiles(plan.problem, hardware)[0])
    gemm2 = told.gemm2 or (down if stream in (Stream.DOWN, Stream.BOTH) else gemm1)
    able = {
        Stream.NO: fused_quant(plan.problem, gemm1),
        Stream.DOWN: plan.problem.static_scale,
        Stream.BOTH: False,
        Stream.RING: False,
    }[stream]
    fuse = able if told.fuse_quant is None else able and told.fuse_quant
    plan = replace(plan, gemm1=gemm1, gemm2=gemm2, stream=stream, fuse_quant=fuse, pdl=True)
    if why := unable(plan, hardware):
        raise UnsupportedProblem(
            f"the file of problems gives tiles that cannot run T={plan.problem.tokens}: {'; '.join(why)}"
        )
    return replace(plan, time_us=plan_us(plan, hardware), source="model; tiles as the file of problems says")


def unable(plan: Plan, hardware: Hardware) -> list[str]:
    """Why the plan's kernels cannot run with these tiles, TRITON only."""
    if plan.backend is not Backend.TRITON:
        return []
    if plan.gemm1 is None or plan.gemm2 is None:
        return [f"gemm1={plan.gemm1}, gemm2={plan.gemm2}: both products need a tile"]
    if plan.stream is Stream.RING:
        return ring_reasons(plan.gemm1, plan.problem, hardware)
    tiles = {Stream.BOTH: (), Stream.DOWN: (plan.gemm1,), Stream.NO: (plan.gemm1, plan.gemm2)}[plan.stream]
    found = [reason for tile in dict.fromkeys(tiles) for reason in tile_reasons(tile, plan.problem, hardware)]
    if plan.stream is Stream.NO:
        if plan.gemm1.block_m != plan.gemm2.block_m:
            found.append(f"block_m={plan.gemm1.block_m} and {plan.gemm2.block_m}: one list of row tiles serves both")
        if plan.fuse_quant and not fused_quant(plan.problem, plan.gemm1):
            found.append(
                f"fuse_quant: a scale of h in {plan.problem.label} spans tiles of GEMM1 "
                f"(block_n={plan.gemm1.block_n}); it needs static scales, or blocks of {BLOCK} columns within a tile"
            )
        return found
    streamed = (plan.gemm2,) if plan.stream is Stream.DOWN else (plan.gemm1, plan.gemm2)
    found += [reason for tile in dict.fromkeys(streamed) for reason in stream_tile_reasons(tile)]
    return found + stream_reasons(plan.problem)


def device(name: str) -> Hardware:
    """A known device by name, for plans made elsewhere than on it."""
    if name not in DEVICES:
        raise UnsupportedProblem(f"device={name!r} is not known: use one of {', '.join(DEVICES)}")
    return DEVICES[name]
