"""From expert ids to routed rows sorted by expert and the row tiles that cover them (see `routing.Routing`), and x to
e4m3.

A counting sort. A program takes ROUTE_BLOCK slots: a slot's row is its expert's offset, plus that expert's slots in
earlier programs, plus those before it in its own. Up to SCAN_ROWS slots every program counts all ids itself, and one
launch does it; beyond, a launch before it leaves the counts of each program. Stable, nothing padded, nothing to be
zeroed first, and the host knows no count. x does not depend on the ids, so the first launch quantises it as well, a
token a program.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..plans import ROUTE_BLOCK, SCAN_ROWS
from ..problem import Quant
from ..routing import Routing
from .tiles import (
    TYPES,
    Specialization,
    gdc_launch_dependents,
    gdc_wait,
    launch,
    launch_options,
    local_experts,
    quantize_rows,
    scale_mode,
)


@triton.jit
def _rank_in_block(expert, ids_ptr, map_ptr, start, slots, total, EXPERTS: tl.constexpr, BLOCK: tl.constexpr):
    """How many slots before each in its block have the same expert."""
    PART: tl.constexpr = 32
    place = tl.arange(0, BLOCK)
    rank = tl.zeros((BLOCK,), tl.int32)
    for c in tl.static_range(0, BLOCK, PART):
        other = c + tl.arange(0, PART)
        theirs = local_experts(ids_ptr, map_ptr, start + other, slots, total, EXPERTS)
        same = (expert[:, None] == theirs[None, :]) & (other[None, :] < place[:, None])
        rank += tl.sum(same.to(tl.int32), 1)
    return rank


@triton.jit
def _count_rows(
    ids_ptr, map_ptr, counts_ptr, pid, slots, total, EXPERTS: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr
):
    expert = local_experts(ids_ptr, map_ptr, pid * BLOCK + tl.arange(0, BLOCK), slots, total, EXPERTS)
    bins = tl.arange(0, BINS)
    tl.store(counts_ptr + pid.to(tl.int64) * EXPERTS + bins, tl.histogram(expert, BINS), mask=bins < EXPERTS)


@triton.jit
def _place_rows(
    ids_ptr, map_ptr, counts_ptr, gather_ptr, offsets_ptr, tiles_ptr, tile_count_ptr, next_tile_ptr, pid, slots,
    total, max_tiles, EXPERTS: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_M: tl.constexpr,
    SCAN: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    place = tl.arange(0, BLOCK)
    bins = tl.arange(0, BINS)
    count = tl.zeros((BINS,), tl.int32)
    before = tl.zeros((BINS,), tl.int32)
    programs = (slots + BLOCK - 1) // BLOCK
    if SCAN:
        for q in tl.range(0, programs):
            part = tl.histogram(local_experts(ids_ptr, map_ptr, q * BLOCK + place, slots, total, EXPERTS), BINS)
            count += part
            before += tl.where(q < pid, part, 0)
        count = tl.where(bins < EXPERTS, count, 0)
    else:
        for q0 in tl.range(0, programs, CHUNK):
            q = q0 + tl.arange(0, CHUNK)
            inside = (q < programs)[:, None] & (bins < EXPERTS)[None, :]
            part = tl.load(counts_ptr + q[:, None].to(tl.int64) * EXPERTS + bins[None, :], mask=inside, other=0)
            count += tl.sum(part, 0)
            before += tl.sum(tl.where((q < pid)[:, None], part, 0), 0)
    offset = tl.cumsum(count, 0) - count
    tile_count = (count + BLOCK_M - 1) // BLOCK_M
    tile_offset = tl.cumsum(tile_count, 0) - tile_count

    start = pid * BLOCK
    expert = local_experts(ids_ptr, map_ptr, start + place, slots, total, EXPERTS)
    valid = expert < EXPERTS
    row = tl.gather(offset + before, expert, 0)
    row += _rank_in_block(expert, ids_ptr, map_ptr, start, slots, total, EXPERTS, BLOCK)
    tl.store(gather_ptr + row, start + place, mask=valid)
    first = tl.gather(offset, expert, 0)
    starts = valid & ((row - first) % BLOCK_M == 0)
    tile_ptr = tiles_ptr + (tl.gather(tile_offset, expert, 0) + (row - first) // BLOCK_M) * 4
    tl.store(tile_ptr, expert, mask=starts)
    tl.store(tile_ptr + 1, row, mask=starts)
    tl.store(tile_ptr + 2, tl.minimum(row + BLOCK_M, first + tl.gather(count, expert, 0)), mask=starts)
    if pid == 0:
        tiles = tl.sum(tl.where(bins < EXPERTS, tile_count, 0))
        tl.store(offsets_ptr + bins, offset, mask=bins <= EXPERTS)
        tl.store(tile_count_ptr, tiles)
        tl.store(next_tile_ptr + tl.arange(0, 2), tl.zeros((2,), tl.int32))
        for t0 in tl.range(tiles, max_tiles, BLOCK):
            tl.store(tiles_ptr + (t0 + place) * 4, tl.full((BLOCK,), -1, tl.int32), mask=t0 + place < max_tiles)


@triton.jit(do_not_specialize=["slots", "total", "max_tiles", "programs"])
def _route_kernel(
    ids_ptr,  # [T * top_k]
    map_ptr,  # [total]
    counts_ptr,  # [programs, EXPERTS]
    gather_ptr,  # [T * top_k]
    offsets_ptr,  # [EXPERTS + 1]
    tiles_ptr,  # [max_tiles, 4]
    tile_count_ptr,  # [1]
    next_tile_ptr,  # [2]
    x_ptr,  # [T, WIDTH] to quantise, or None
    q_ptr,  # [T, WIDTH]
    scale_ptr,  # [1], [T] or [T, WIDTH / 128]
    stride_xm,
    slots,
    total,
    max_tiles,
    programs,
    STEP: tl.constexpr,  # count or place
    EXPERTS: tl.constexpr,
    BINS: tl.constexpr,  # power of two > EXPERTS; the last bins hold skipped slots
    BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SCAN: tl.constexpr,
    CHUNK: tl.constexpr,
    WIDTH: tl.constexpr,
    MODE: tl.constexpr,
    X_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    pid = tl.program_id(0)
    if pid < programs:
        if STEP == "count":
            _count_rows(ids_ptr, map_ptr, counts_ptr, pid, slots, total, EXPERTS, BINS, BLOCK)
        else:
            _place_rows(ids_ptr, map_ptr, counts_ptr, gather_ptr, offsets_ptr, tiles_ptr, tile_count_ptr, next_tile_ptr,
                        pid, slots, total, max_tiles, EXPERTS, BINS, BLOCK, BLOCK_M, SCAN, CHUNK)  # fmt: skip
    elif x_ptr is not None:
        row = (pid - programs).to(tl.int64) + tl.arange(0, 1)
        quantize_rows(x_ptr, q_ptr, scale_ptr, row, row >= 0, stride_xm, WIDTH, MODE, 1, X_BLOCK)


def _constants(experts: int, rows: int, block_m: int, pdl: bool) -> dict:
    """Constexprs that routing needs. BLOCK has two sizes only, so that few variants serve every row count."""
    bins = triton.next_power_of_2(experts + 1)
    return dict(EXPERTS=experts, BINS=bins, BLOCK=64 if rows <= 64 else ROUTE_BLOCK, BLOCK_M=block_m,
                SCAN=rows <= SCAN_ROWS, CHUNK=max(1, min(32, 8192 // bins)), PDL=pdl)  # fmt: skip


def _quantize_constants(width: int, quant: Quant, static: bool) -> dict:
    if quant is Quant.NONE:
        return dict(WIDTH=1, MODE="static", X_BLOCK=1)
    return dict(WIDTH=width, MODE=scale_mode(quant, static), X_BLOCK=max(128, triton.next_power_of_2(width)))


def _options(pdl: bool) -> dict:
    return launch_options(pdl, num_warps=4)


def route_rows(
    ids, experts: int, routing: Routing, counts, expert_map=None, *, x=None, x_q=None, x_scale=None, quant=Quant.NONE,
    static=False, pdl=False, launch=launch,
) -> Routing:  # fmt: skip
    """gather, offsets and tiles of `routing` from ids: a counting sort of the slots by expert. With x, also x_q.

    Shapes    ids [T, top_k] contiguous | expert_map [total] -> routing, counts [route_programs(R), experts] scratch
              x [T, H] -> x_q [T, H], x_scale as in kernels.quantize
    Dtypes    ids int32 or int64; expert_map int32
    Needs     routing.tiles.shape[0] at least plan.max_tiles
    """
    slots = ids.numel()
    total = experts if expert_map is None else expert_map.numel()
    constants = _constants(experts, slots, routing.block_m, pdl)
    programs = -(-slots // constants["BLOCK"])
    nothing = (None, None, None, 0, _quantize_constants(1, Quant.NONE, False))
    something = nothing if x is None else (x, x_q, x_scale, x.stride(0), _quantize_constants(x.shape[1], quant, static))
    for step in ("place",) if constants["SCAN"] else ("count", "place"):
        *tensors, stride, extra = something
        grid = programs + (0 if tensors[0] is None else x.shape[0])
        launch(
            _route_kernel, (grid,),
            ids, expert_map, counts, routing.gather, routing.offsets, routing.tiles, routing.tile_count,
            routing.next_tile, *tensors, stride, slots, total, routing.tiles.shape[0], programs, STEP=step, **constants,
            **extra, **_options(pdl),
        )  # fmt: skip
        something = nothing
    return routing


def signature(
    experts: int, rows: int, block_m: int, *, id_type="i32", mapped=False, width=1, quant=Quant.NONE, dtype="bf16",
    static=False, pdl=True,
) -> tuple[Specialization, ...]:  # fmt: skip
    """What route_rows asks the compiler for: one Specialization a launch."""
    counters = ("counts_ptr", "gather_ptr", "offsets_ptr", "tiles_ptr", "tile_count_ptr", "next_tile_ptr", "map_ptr")
    types = dict.fromkeys(counters, "*i32")
    types |= dict(ids_ptr=f"*{id_type}", x_ptr=f"*{TYPES[dtype]}", q_ptr="*fp8e4nv", scale_ptr="*fp32")
    types |= dict.fromkeys(("stride_xm", "slots", "total", "max_tiles", "programs"), "i32")
    constants = _constants(experts, rows, block_m, pdl)
    found, quantizing = [], quant is not Quant.NONE
    for step in ("place",) if constants["SCAN"] else ("count", "place"):
        own = constants | _quantize_constants(width, quant if quantizing else Quant.NONE, static) | {"STEP": step}
        own |= {} if mapped else {"map_ptr": None}
        own |= {} if quantizing else dict(x_ptr=None, q_ptr=None, scale_ptr=None)
        kinds = {name: "constexpr" if name in own else types[name] for name in _route_kernel.arg_names}
        aligned = tuple(name for name, kind in kinds.items() if kind.startswith("*")) + ("stride_xm",)
        found.append(Specialization(_route_kernel, kinds, own, aligned, _options(pdl)))
        quantizing = False
    return tuple(found)
