"""From expert ids to routed rows sorted by expert, and the row tiles that cover them (see `routing.Routing`).

Two launches: `_count_kernel` histograms ROUTE_BLOCK slots a program; `_place_kernel` sorts the same slots by expert in
registers and knows every row's place from the counts. Up to ROUTE_BLOCK slots one program of the second does it all.
The order is stable (by slot within an expert), nothing is padded, nothing needs to be zeroed, the host knows no count.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..plans import ROUTE_BLOCK, route_programs
from ..routing import Routing
from .tiles import Specialization, gdc_launch_dependents, gdc_wait


@triton.jit
def local_experts(ids_ptr, map_ptr, slot, slots, total, EXPERTS: tl.constexpr):
    """The expert on this rank of each slot; EXPERTS where the slot is skipped."""
    expert = tl.load(ids_ptr + slot, mask=slot < slots, other=-1)
    valid = (expert >= 0) & (expert < total)
    if map_ptr is not None:
        expert = tl.load(map_ptr + expert, mask=valid, other=-1)
        valid = (expert >= 0) & (expert < EXPERTS)
    return tl.where(valid, expert, EXPERTS).to(tl.int32)


@triton.jit(do_not_specialize=["slots"])
def _count_kernel(
    ids_ptr,  # [T * top_k]
    map_ptr,  # [total]
    counts_ptr,  # [programs, EXPERTS]
    slots,
    total,
    EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    pid = tl.program_id(0)
    expert = local_experts(ids_ptr, map_ptr, pid * BLOCK + tl.arange(0, BLOCK), slots, total, EXPERTS)
    bins = tl.arange(0, BINS)
    tl.store(counts_ptr + pid * EXPERTS + bins, tl.histogram(expert, BINS), mask=bins < EXPERTS)


@triton.jit(do_not_specialize=["slots", "max_tiles", "programs"])
def _place_kernel(
    ids_ptr,  # [T * top_k]
    map_ptr,  # [total]
    counts_ptr,  # [programs, EXPERTS], only read when there is more than one program
    gather_ptr,  # [T * top_k]
    offsets_ptr,  # [EXPERTS + 1]
    tiles_ptr,  # [max_tiles, 4]
    slots,
    total,
    max_tiles,
    programs,
    EXPERTS: tl.constexpr,
    BINS: tl.constexpr,  # power of two > EXPERTS; the last bins hold skipped slots
    BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SINGLE: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    pid = tl.program_id(0)
    place = tl.arange(0, BLOCK)
    bins = tl.arange(0, BINS)
    expert = local_experts(ids_ptr, map_ptr, pid * BLOCK + place, slots, total, EXPERTS)
    key = tl.sort(expert * BLOCK + place)
    expert = key // BLOCK
    own = tl.where(bins < EXPERTS, tl.histogram(expert, BINS), 0)
    if SINGLE:
        count = own
        before = tl.zeros_like(own)
    else:
        count = tl.zeros_like(own)
        before = tl.zeros_like(own)
        for q0 in tl.range(0, programs, CHUNK):
            q = q0 + tl.arange(0, CHUNK)
            inside = (q < programs)[:, None] & (bins < EXPERTS)[None, :]
            part = tl.load(counts_ptr + q[:, None] * EXPERTS + bins[None, :], mask=inside, other=0)
            count += tl.sum(part, 0)
            before += tl.sum(tl.where((q < pid)[:, None], part, 0), 0)
    offset = tl.cumsum(count, 0) - count
    tile_count = (count + BLOCK_M - 1) // BLOCK_M
    tile_offset = tl.cumsum(tile_count, 0) - tile_count

    valid = expert < EXPERTS
    first = tl.gather(offset, expert, 0)
    row = tl.gather(offset + before - (tl.cumsum(own, 0) - own), expert, 0) + place
    tl.store(gather_ptr + row, pid * BLOCK + key % BLOCK, mask=valid)
    starts = valid & ((row - first) % BLOCK_M == 0)
    tile_ptr = tiles_ptr + (tl.gather(tile_offset, expert, 0) + (row - first) // BLOCK_M) * 4
    tl.store(tile_ptr, expert, mask=starts)
    tl.store(tile_ptr + 1, row, mask=starts)
    tl.store(tile_ptr + 2, tl.minimum(row + BLOCK_M, first + tl.gather(count, expert, 0)), mask=starts)

    if pid == 0:
        tl.store(offsets_ptr + bins, offset, mask=bins <= EXPERTS)
        for t0 in tl.range(tl.sum(tile_count), max_tiles, BLOCK):
            tl.store(tiles_ptr + (t0 + place) * 4, tl.full((BLOCK,), -1, tl.int32), mask=t0 + place < max_tiles)


def _constants(experts: int, rows: int, block_m: int, pdl: bool) -> dict:
    """Constexprs of both kernels. BLOCK has three sizes only, so that few variants serve every row count."""
    block = next(size for size in (64, 256, ROUTE_BLOCK) if rows <= size or size == ROUTE_BLOCK)
    bins = triton.next_power_of_2(experts + 1)
    return dict(EXPERTS=experts, BINS=bins, BLOCK=block, BLOCK_M=block_m, SINGLE=rows <= ROUTE_BLOCK,
                CHUNK=max(1, min(32, 8192 // bins)), PDL=pdl)  # fmt: skip


def route_rows(ids, experts: int, routing: Routing, counts, expert_map=None, *, pdl=False) -> Routing:
    """gather, offsets and tiles of `routing` from ids: a counting sort of the slots by expert.

    Shapes    ids [T, top_k] contiguous | expert_map [total] -> routing, counts [route_programs(R), experts] scratch
    Dtypes    ids int32 or int64; expert_map int32
    Needs     routing.tiles.shape[0] at least plan.max_tiles
    """
    slots = ids.numel()
    total = experts if expert_map is None else expert_map.numel()
    constants = _constants(experts, slots, routing.block_m, pdl)
    programs = route_programs(slots)
    options = {"num_warps": 4, **({"launch_pdl": True} if pdl else {})}
    if programs > 1:
        count_names = ("EXPERTS", "BINS", "BLOCK", "PDL")
        _count_kernel[(programs,)](ids, expert_map, counts, slots, total,
                                   **{name: constants[name] for name in count_names}, **options)  # fmt: skip
    _place_kernel[(programs,)](
        ids, expert_map, counts, routing.gather, routing.offsets, routing.tiles, slots, total,
        routing.tiles.shape[0], programs, **constants, **options,
    )  # fmt: skip
    return routing


def signature(experts: int, rows: int, block_m: int, id_type="i32", mapped=False, pdl=True) -> tuple[Specialization, ...]:
    """What route_rows asks the compiler for."""
    constants = _constants(experts, rows, block_m, pdl)
    types = dict(ids_ptr=f"*{id_type}", map_ptr="*i32", counts_ptr="*i32", gather_ptr="*i32", offsets_ptr="*i32",
                 tiles_ptr="*i32", slots="i32", total="i32", max_tiles="i32", programs="i32")  # fmt: skip
    found = []
    for kernel in (_count_kernel, _place_kernel) if not constants["SINGLE"] else (_place_kernel,):
        own = {name: value for name, value in constants.items() if name in kernel.arg_names}
        own.update({} if mapped else {"map_ptr": None})
        kinds = {name: "constexpr" if name in own else types[name] for name in kernel.arg_names}
        aligned = tuple(name for name, kind in kinds.items() if kind.startswith("*"))
        found.append(Specialization(kernel, kinds, own, aligned, {"num_warps": 4, **({"launch_pdl": True} if pdl else {})}))
    return tuple(found)
