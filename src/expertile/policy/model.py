"""Bytes, operations, tiles and shared memory of a plan in closed form."""

from __future__ import annotations

import math

from ..hardware import Hardware
from ..plans import SCAN_ROWS, Backend, GemmConfig, Plan, Stream
from ..problem import BLOCK, Problem, Quant
from .histogram import UNIFORM, experts_hit, shares

SPECIALIZED_BYTES = 512  # at most: barriers of the stages, and what the roles are told at the start
HOST_US = 5.0  # one operation of torch, launched from Python


def weight_bytes(problem: Problem) -> float:
    """Bytes of one expert's weights and scales."""
    values = problem.w13_rows * problem.hidden + problem.hidden * problem.inter
    if problem.quant is Quant.NONE:
        return values * problem.dtype.bytes
    scales = {
        Quant.FP8_TENSOR: 2,
        Quant.FP8_CHANNEL: problem.w13_rows + problem.hidden,
        Quant.FP8_BLOCK: values / BLOCK**2,
    }[problem.quant]
    return values + 4 * scales


def flops(problem: Problem, rows: float | None = None) -> float:
    rows = problem.rows if rows is None else rows
    return 2.0 * rows * (problem.w13_rows * problem.hidden + problem.hidden * problem.inter)


def peak(problem: Problem, hardware: Hardware) -> float:
    return hardware.flops_per_s_16 if problem.quant is Quant.NONE else hardware.flops_per_s_8


def floor_us(problem: Problem, hardware: Hardware, routing: str = UNIFORM) -> float:
    """No kernel is faster: weights of the experts hit, input and output once, or the operations."""
    moved = (
        experts_hit(problem, routing) * weight_bytes(problem)
        + 2 * problem.tokens * problem.hidden * problem.dtype.bytes
    )
    return 1e6 * max(moved / hardware.hbm_bytes_per_s, flops(problem) / peak(problem, hardware))


def smem_bytes(config: GemmConfig, problem: Problem) -> int:
    """Shared memory of one block of the grouped product: operand tiles of every stage.

    WGMMA reads its operands from shared memory while the next are on their way, so Triton keeps `stages` buffers, and
    of block scales one less. tests/compile asks the compiler.
    """
    item = problem.dtype.bytes if problem.quant is Quant.NONE else 1
    tiles = config.stages * (config.block_m + config.block_n) * config.block_k * item
    if config.specialized:
        return tiles + SPECIALIZED_BYTES
    scales = _scale_bytes(config, problem) if problem.quant is Quant.FP8_BLOCK else 0
    return tiles + scales + (8 * config.stages if config.tma else 0)  # TMA: one mbarrier a stage


def _scale_bytes(config: GemmConfig, problem: Problem) -> int:
    """Block scales on their way: one a row of x and of w, but one for all gate, one for all up rows of w where they are
    in the same block in both products. Exact but for the second product, which has no up rows."""
    act, buffers = problem.activation, config.stages - 1
    halves_apart = not act.gated or (problem.inter % BLOCK == 0 and not act.interleaved)
    if config.tma or config.block_n > BLOCK or not halves_apart:
        return 4 * buffers * (config.block_m + config.block_n)
    gate = -(-4 * buffers // 16) * 16 if act.gated else 0  # the next buffers start on 16 bytes
    return 4 * buffers * config.block_m + gate + 4 * buffers


def expected_tiles(problem: Problem, block_m: int, routing: str = UNIFORM) -> float:
    """Row tiles: an expert's rows are binomial, and its last tile is partly empty.

    Sum over experts of E[ceil(X / block_m)], X ~ Binomial(tokens, chance that a token visits the expert): exact while
    the mean is at most 30, beyond by the normal distribution.
    """
    return sum(count * _tiles(problem.tokens, share, block_m) for count, share in shares(problem, routing))


def _tiles(tokens: int, share: float, block_m: int) -> float:
    mean = tokens * share
    deviation = math.sqrt(mean * (1 - share))
    if deviation == 0:
        return float(-(-round(mean) // block_m))
    if mean > 30:
        last = int((mean + 6 * deviation) / block_m)
        starts = ((tile * block_m + 0.5 - mean) / deviation for tile in range(last + 1))  # a tile exists if X is beyond
        return sum(0.5 * math.erfc(start / math.sqrt(2)) for start in starts)
    chance, total = (1 - share) ** tokens, 0.0
    for count in range(min(tokens, int(mean + 10 * deviation) + 10) + 1):
        total += chance * -(-count // block_m)
        chance *= (tokens - count) / (count + 1) * share / (1 - share)
    return total


def plan_us(plan: Plan, hardware: Hardware) -> float:
    """Estimate for a plan: launches, then per product the slower of reading the weights and multiplying padded tiles.

    The efficiencies are fitted to H200 rows of benchmarks/results (2026-12-02): they rank plans, they do not promise.
    """
    problem = plan.problem
    hit = experts_hit(problem, plan.routing)
    moved = hit * weight_bytes(problem)
    if plan.backend in (Backend.TORCH, Backend.REFERENCE):
        return _torch_us(problem, hardware, moved, hit) * (1.0 if plan.backend is Backend.TORCH else 60.0)
    if plan.backend is not Backend.TRITON:
        return _library_us(problem, hardware, moved, plan.routing)
    total = launches(plan) * hardware.launch_us
    if plan.stream is Stream.BOTH:
        again = problem.rows / max(hit, 1)  # an expert of several slots is read by each, from L2
        return total + 1e6 * moved * max(1.0, 0.75 * again) / (0.78 * hardware.hbm_bytes_per_s)
    shares = (problem.w13_rows, plan.gemm1), (problem.inter, plan.gemm2)
    whole = problem.w13_rows + problem.inter
    activations = problem.rows * (problem.inter * 2 + problem.hidden) * problem.dtype.bytes
    for rows, config in shares:
        part = rows / whole
        padded = expected_tiles(problem, config.block_m, plan.routing) * config.block_m
        rate = peak(problem, hardware) * _efficiency(config)
        total += 1e6 * max(moved * part / (0.9 * hardware.hbm_bytes_per_s), flops(problem, padded) * part / rate)
    return total + 1e6 * activations / hardware.hbm_bytes_per_s


def _efficiency(config: GemmConfig) -> float:
    if config.specialized:
        return 0.7
    return 0.55 if config.block_m >= 64 and not config.swap else 0.35


def _library_us(problem: Problem, hardware: Hardware, moved: float, routing: str) -> float:
    """Another library's grouped products: eight launches, a usual tile. A rough guess, which nothing is chosen by."""
    block_m = 64 if problem.rows_per_expert > 32 else 16
    padded = expected_tiles(problem, block_m, routing) * block_m
    busy = max(moved / (0.85 * hardware.hbm_bytes_per_s), flops(problem, padded) / (0.45 * peak(problem, hardware)))
    activations = 2 * problem.rows * (problem.w13_rows + problem.inter + problem.hidden) * problem.dtype.bytes
    return 8 * hardware.launch_us + 1e6 * (busy + activations / hardware.hbm_bytes_per_s)


def _torch_us(problem: Problem, hardware: Hardware, moved: float, hit: float) -> float:
    """The torch backend: fp8 weights become fp32 (read, written, read again) and are multiplied as such. On a GPU it
    asks for the counts and launches from the host, which no graph hides: some thirty operations, and four an expert."""
    rate = 0.5 * hardware.flops_per_s_16
    if problem.quant is not Quant.NONE:
        moved, rate = 9 * moved, rate / (6 if hardware.is_gpu else 1)
    busy = 1e6 * max(moved / hardware.hbm_bytes_per_s, flops(problem) / rate)
    host = HOST_US * (30 + 4 * hit) if hardware.is_gpu else 25.0 * hit
    return busy + host


def launches(plan: Plan) -> int:
    """Kernels of one call of the TRITON backend."""
    problem = plan.problem
    if plan.stream is Stream.BOTH:
        return 2
    if plan.stream in (Stream.DOWN, Stream.RING):
        return 3
    counted_apart = problem.rows > SCAN_ROWS
    return 4 + counted_apart + (problem.quant is not Quant.NONE and not plan.fuse_quant)
