"""Plans of our own kernels that could win for a problem: what `expertile tune` measures and `bench policy` searches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..hardware import Hardware
from ..plans import RING_TOKENS, Backend, GemmConfig, Plan, Stream
from ..problem import Problem, Quant
from .histogram import UNIFORM, mean_rows
from .rules import stream_reasons, tile_reasons
from .tiles import SPECIALIZED, STREAM_ROWS, choose_tiles, fused_quant, more_stream_tiles, ring_tiles, stream_tiles

STREAM_MOST = 64  # routed rows beyond which streaming is not even tried


def candidates(problem: Problem, hardware: Hardware, routing: str = UNIFORM) -> list[Plan]:
    """Plans worth measuring, the policy's choice without a table first; all can run."""
    base = Plan(problem, hardware.name, Backend.TRITON, pdl=True, sms=hardware.sms, routing=routing)
    found = []
    if problem.rows <= STREAM_MOST and not stream_reasons(problem):
        for up, down in more_stream_tiles(problem):
            found.append(replace(base, gemm1=up, gemm2=down, stream=Stream.BOTH))
        _, down = stream_tiles(problem)
        static = problem.static_scale
        for gemm1, _ in _pairs(problem, problem.rows_per_expert):
            if gemm1.block_m == 16 and not tile_reasons(gemm1, problem, hardware):
                found.append(replace(base, gemm1=gemm1, gemm2=down, stream=Stream.DOWN, fuse_quant=static))
    if problem.tokens <= RING_TOKENS:
        tiles = ring_tiles(problem, hardware)
        found += [replace(base, gemm1=tile, gemm2=tile, stream=Stream.RING) for tile in tiles]
    means = dict.fromkeys((problem.rows_per_expert, mean_rows(problem, routing)))
    pairs = [choose_tiles(problem, hardware), *(pair for rows in means for pair in _pairs(problem, rows))]
    grouped = [
        replace(base, gemm1=gemm1, gemm2=gemm2, fuse_quant=fused_quant(problem, gemm1))
        for gemm1, gemm2 in pairs
        if not (tile_reasons(gemm1, problem, hardware) or tile_reasons(gemm2, problem, hardware))
    ]
    first = found if problem.rows <= STREAM_ROWS else grouped
    return list(dict.fromkeys([*first, *found, *grouped]))


def _pairs(problem: Problem, rows: float) -> Iterator[tuple[GemmConfig, GemmConfig]]:
    """Tiles for experts of about that many rows."""
    k, block = 64 if problem.quant is Quant.NONE else 128, problem.quant is Quant.FP8_BLOCK

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
