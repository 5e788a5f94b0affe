"""Tiles for a problem that no table covers: by the rows an expert can expect, since that is what fills a tile."""

from __future__ import annotations

from dataclasses import replace

from ..hardware import Hardware
from ..plans import GemmConfig
from ..problem import BLOCK, Problem, Quant
from .rules import tile_reasons


def fused_quant(problem: Problem, gemm1: GemmConfig) -> bool:
    """Whether GEMM1's epilogue sees all values behind one scale of h: given ahead, or a block within the tile."""
    if problem.quant is Quant.FP8_TENSOR:
        return problem.static_scale
    columns = gemm1.block_n // (2 if problem.activation.gated else 1)
    return problem.quant is Quant.FP8_BLOCK and columns % BLOCK == 0


def choose_tiles(problem: Problem, hardware: Hardware) -> tuple[GemmConfig, GemmConfig]:
    """(gemm1, gemm2). The smallest token tile that holds an expert's rows; thick experts get the widest tile that fits."""
    wide = 64 if problem.quant is Quant.NONE else 128  # block_k: 128 bytes
    rows = problem.rows_per_expert
    if rows <= 12:
        ladder = [(GemmConfig(16, 64, wide * 2, 4, 4, True), GemmConfig(16, 64, wide * 2, 4, 3, True))]
    elif rows <= 24:
        ladder = [(GemmConfig(32, 128, wide, 4, 4, True),) * 2]
    elif rows <= 96:
        ladder = [(GemmConfig(64, 128, wide, 4, 4, True),) * 2]
    else:
        ladder = [(GemmConfig(128, 128, wide, 8, 4, False, 8),) * 2]
    ladder.append((GemmConfig(16, 64, wide, 4, 3, True),) * 2)
    if problem.quant is Quant.FP8_BLOCK:
        ladder = [tuple(_within_block(config) for config in pair) for pair in ladder]
    for gemm1, gemm2 in ladder:
        if not (tile_reasons(gemm1, problem, hardware) or tile_reasons(gemm2, problem, hardware)):
            return gemm1, gemm2
    return ladder[-1]


def _within_block(config: GemmConfig) -> GemmConfig:
    """The same tile with block_k inside one scale block."""
    return replace(config, block_k=min(config.block_k, BLOCK))
