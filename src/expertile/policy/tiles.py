"""Tiles for a problem that no table covers: by the rows an expert can expect, since that is what fills a tile."""

from __future__ import annotations

from dataclasses import replace

from ..hardware import Hardware
from ..plans import RING_WARPS, GemmConfig
from ..problem import BLOCK, Problem, Quant
from .rules import ring_reasons, stream_reasons, tile_reasons

RING_ROWS, RING_RULE_TOKENS = 20, 24
SHORT_PIECES_BYTES = 8192  # of a row of w13 that was measured in short pieces
STREAM_ROWS = 10  # routed rows up to which streaming beats grouping on an H200 (docs/measured.md)

#: block_k -> the tile of 128 x 256 x 128 bytes whose blocks stay on their SM
SPECIALIZED = {k: GemmConfig(128, 256, k, 12, 4, False, 8, specialized=True) for k in (64, 128)}


def fused_quant(problem: Problem, gemm1: GemmConfig) -> bool:
    """Whether GEMM1's epilogue sees all values behind one scale of h: given ahead, or a block within the tile."""
    if problem.quant is Quant.FP8_TENSOR:
        return problem.static_scale
    columns = gemm1.block_n // (2 if problem.activation.gated else 1)
    return problem.quant is Quant.FP8_BLOCK and columns % BLOCK == 0


def stream_tiles(problem: Problem) -> tuple[GemmConfig, GemmConfig]:
    """(up, down): pieces of 16 weight rows by 512 values a block; of w2 as many columns as a block's registers hold.

    Short pieces by few warps measured best wherever both were tried on layers without a table; long rows of w13 keep
    long pieces: their registers would spill (7168 values of bf16). From 8-bit w2 registers hold 64 KiB, from 16-bit w2
    32: there more columns were slower (all on an H200, 2026-12-03 and 04).
    """
    item = _item(problem)
    row = max(128, _power_of_two(problem.inter)) * item * _power_of_two(problem.top_k)
    columns = max(1, min(16, 65536 // item // row))
    up = _up(512, 4) if problem.hidden * item <= SHORT_PIECES_BYTES else _up(_longest(problem), 8)
    return up, GemmConfig(16, columns, BLOCK, 8 if item == 1 else 4, 1, True)


def more_stream_tiles(problem: Problem) -> list[tuple[GemmConfig, GemmConfig]]:
    """stream_tiles and what else won somewhere: longer pieces of a row, twice the rows, half the columns."""
    up, down = stream_tiles(problem)
    long = _longest(problem)
    ups = dict.fromkeys((up, _up(long, 8), _up(long, 4), _up(512, 4), replace(_up(512, 8), block_n=32)))
    downs = (down, replace(down, block_n=max(1, down.block_n // 2), warps=4))
    return [(up, down) for down in downs for up in ups]


def _up(block_k: int, warps: int) -> GemmConfig:
    return GemmConfig(16, 16, block_k, warps, 1, True)


def _item(problem: Problem) -> int:
    """Bytes of one weight."""
    return problem.dtype.bytes if problem.quant is Quant.NONE else 1


def _longest(problem: Problem) -> int:
    """Values of a weight row that a block reads at a time: up to 2 KiB, few of them masked."""
    pieces = (size // _item(problem) for size in (2048, 1024, 512))
    return min(pieces, key=lambda size: -(-problem.hidden // size) * (size + 64))


def ring_tiles(problem: Problem, hardware: Hardware) -> list[GemmConfig]:
    """Tiles for both products in one launch: short and long items, each with as many stages as an SM's memory holds."""
    wide = 64 if problem.quant is Quant.NONE else 128  # block_k: 128 bytes
    block_m = max(8, _power_of_two(problem.tokens))
    found = []
    for block_n in (128, 256):
        tiles = [GemmConfig(block_m, block_n, wide, RING_WARPS, stages, True, 1, True) for stages in range(12, 2, -1)]
        found += [tile for tile in tiles if not ring_reasons(tile, problem, hardware)][:1]
    return found


def ring_by_rule(problem: Problem, hardware: Hardware) -> GemmConfig | None:
    """The tile with which both products go in one launch where no table has the layer, None where they should not.

    Measured on twelve layers (2026-12-02): from some 20 routed rows, while all tokens of the step, which every expert
    that is hit is given, still are few. With one scale an expert or a row it was up to 9 % faster in most cells (2.6 %
    slower in one), in 16 bit and with block scales only where rows of w13 are long: else up to 46 % slower.
    """
    if not hardware.is_hopper or problem.local_rows < RING_ROWS or problem.tokens > RING_RULE_TOKENS:
        return None
    block = problem.quant is Quant.FP8_BLOCK
    if (block or problem.quant is Quant.NONE) and problem.hidden < 4096:
        return None
    if block and not 8 <= problem.tokens <= 16:
        return None
    return next(iter(ring_tiles(problem, hardware)), None)


def _power_of_two(value: int) -> int:
    return 1 << (value - 1).bit_length()


def choose_tiles(problem: Problem, hardware: Hardware) -> tuple[GemmConfig, GemmConfig]:
    """(gemm1, gemm2). The smallest token tile that holds an expert's rows; thick experts get the widest tile that fits.

    The ladder is what measured best on an H200 for qwen3-30b-a3b (2026-12-02); tables/ holds what was measured
    elsewhere.
    """
    wide = 64 if problem.quant is Quant.NONE else 128  # block_k: 128 bytes
    rows, block = problem.rows_per_expert, problem.quant is Quant.FP8_BLOCK
    if rows <= 6:
        ladder = [(GemmConfig(16, 128, wide, 4, 4, True, 1, True),) * 2]
    elif rows <= 24:
        ladder = [(GemmConfig(32, 128, wide, 4, 4, True, 1, True),) * 2]
    elif rows <= 48:
        ladder = [(GemmConfig(64, 128, wide, 4, 4, False, 8),) * 2]
    else:
        plain = GemmConfig(64, 128, wide, 4, 4, False, 8) if block else GemmConfig(128, 128, wide, 8, 3, False, 16)
        ladder = [(SPECIALIZED[wide],) * 2, (plain,) * 2]
    ladder += [(GemmConfig(pair[0].block_m, 128, wide, 4, 4, True),) * 2 for pair in ladder if pair[0].tma]
    ladder.append((GemmConfig(16, 64, wide, 4, 3, True),) * 2)
    for gemm1, gemm2 in ladder:
        if not (tile_reasons(gemm1, problem, hardware) or tile_reasons(gemm2, problem, hardware)):
            return gemm1, gemm2
    return ladder[-1]


__all__ = [
    "SPECIALIZED", "STREAM_ROWS", "choose_tiles", "fused_quant", "more_stream_tiles", "ring_tiles", "stream_reasons",
    "stream_tiles",
]  # fmt: skip
