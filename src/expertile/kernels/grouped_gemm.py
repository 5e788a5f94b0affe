"""Grouped product of routed rows with their experts' weights, operands as they are or swapped.

    y[r] = epilogue(x[row(r)] @ w[e(r)].T)

plain    acc = x @ w.T   [BLOCK_M tokens, BLOCK_N weight rows]   for experts with many rows
swapped  acc = w @ x.T   [BLOCK_N weight rows, BLOCK_M tokens]   for thin tiles: weight rows fill WGMMA's 64-row side

A decode tile has 16 or 32 tokens. With tokens on the M side Triton falls back to mma.sync (and, for e4m3, to fp16
arithmetic); with weight rows there it issues wgmma m64n16k32. Rows are read where they lie: x through `gather`, w by
permuted addresses (tiles.py). Accumulation is fp32; for fp8_block each 128 values are promoted with their scales.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..plans import GemmConfig
from ..routing import Routing
from .tiles import (
    Product,
    Specialization,
    dequantized,
    gate_value,
    gated_value,
    gdc_launch_dependents,
    gdc_wait,
    gemm_specialization,
    launch,
    launch_options,
    scale_block_row,
    tile_weight_rows,
    write_tile,
)


@triton.jit
def _grouped_gemm_kernel(
    x_ptr,  # [X, K]
    w_ptr,  # [E, N or 2N, K]
    y_ptr,  # [R, N]
    gather_ptr,  # [R]
    tiles_ptr,  # [max_tiles, 4]
    x_scale_ptr,  # [1], [X] or [X, K / 128]
    w_scale_ptr,  # [E], [E, rows] or [E, rows / 128, K / 128]
    y_scale_ptr,  # [1] or [R, N / 128]
    bias_ptr,  # [E, N or 2N]
    probs_ptr,  # [R]
    stride_xm,
    stride_we,
    stride_wn,
    N: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    GATHER: tl.constexpr,
    SCATTER: tl.constexpr,
    GATE: tl.constexpr,
    GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ALPHA: tl.constexpr,
    BETA: tl.constexpr,
    LIMIT: tl.constexpr,
    QUANT: tl.constexpr,
    STATIC_SCALE: tl.constexpr,
    SPLIT_SCALE: tl.constexpr,
    OUT_QUANT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    SWAP: tl.constexpr,
    GROUP_M: tl.constexpr,
    PDL: tl.constexpr,
):
    Y_BLOCK: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    n_blocks: tl.constexpr = (N + Y_BLOCK - 1) // Y_BLOCK
    pid = tl.program_id(0)
    tiles = tl.num_programs(0) // n_blocks
    group = pid // (GROUP_M * n_blocks)
    height = tl.minimum(tiles - group * GROUP_M, GROUP_M)
    tile = group * GROUP_M + (pid % (GROUP_M * n_blocks)) % height
    block = (pid % (GROUP_M * n_blocks)) // height
    if PDL:
        gdc_wait()
        gdc_launch_dependents()

    expert = tl.load(tiles_ptr + tile * 4)
    if expert < 0:
        return
    first = tl.load(tiles_ptr + tile * 4 + 1)
    end = tl.load(tiles_ptr + tile * 4 + 2)
    m = tl.minimum(first + tl.arange(0, BLOCK_M), end - 1)  # token rows do not mix: a repeated one is only wasted
    slot = tl.load(gather_ptr + m) if GATHER or SCATTER else m
    x_row = (slot // TOP_K if GATHER else m).to(tl.int64)
    e = expert.to(tl.int64)
    row, up = tile_weight_rows(block, N, GATED, INTERLEAVED, BLOCK_N)

    k = tl.arange(0, BLOCK_K)
    x_tile = x_ptr + x_row[:, None] * stride_xm + k[None, :]
    w_tile = w_ptr + e * stride_we + row.to(tl.int64)[:, None] * stride_wn + k[None, :]
    if QUANT == "fp8_block":
        K_BLOCKS: tl.constexpr = (K + 127) // 128
        x_scale = x_scale_ptr + x_row * K_BLOCKS
        w_scale = w_scale_ptr + scale_block_row(e, row, up, N, GATED, SPLIT_SCALE, INTERLEAVED) * K_BLOCKS
        # All gate rows of the tile, and all its up rows, lie in one scale block: two scalars serve the tile.
        ONE_BLOCK: tl.constexpr = (
            (128 % Y_BLOCK == 0) and not INTERLEAVED and (SPLIT_SCALE or not GATED or N % 128 == 0)
        )
        n0 = block * Y_BLOCK
        gate_scale = w_scale_ptr + scale_block_row(e, n0, 0, N, GATED, SPLIT_SCALE) * K_BLOCKS
        up_scale = w_scale_ptr + scale_block_row(e, n0 + N, 1, N, GATED, SPLIT_SCALE) * K_BLOCKS
    acc = tl.zeros((BLOCK_N, BLOCK_M) if SWAP else (BLOCK_M, BLOCK_N), tl.float32)
    for k0 in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        if K % BLOCK_K == 0:
            x = tl.load(x_tile + k0)
            w = tl.load(w_tile + k0)
        else:
            x = tl.load(x_tile + k0, mask=k[None, :] < K - k0, other=0.0)
            w = tl.load(w_tile + k0, mask=k[None, :] < K - k0, other=0.0)
        if QUANT == "fp8_block":
            xs = tl.load(x_scale + k0 // 128)
            if not ONE_BLOCK:
                ws = tl.load(w_scale + k0 // 128)
            elif GATED:
                ws = tl.where(up == 1, tl.load(up_scale + k0 // 128), tl.load(gate_scale + k0 // 128))
            else:
                ws = tl.full((BLOCK_N,), 1.0, tl.float32) * tl.load(gate_scale + k0 // 128)
            if SWAP:
                acc += tl.dot(w, tl.trans(x)) * ws[:, None] * xs[None, :]
            else:
                acc += tl.dot(x, tl.trans(w)) * xs[:, None] * ws[None, :]
        elif SWAP:
            acc = tl.dot(w, tl.trans(x), acc)
        else:
            acc = tl.dot(x, tl.trans(w), acc)
    if SWAP:
        acc = tl.trans(acc)
    W_ROWS: tl.constexpr = 2 * N if GATED else N
    acc = dequantized(
        acc, slot, x_row, e, row, x_scale_ptr, w_scale_ptr, bias_ptr, probs_ptr, W_ROWS, QUANT, STATIC_SCALE
    )
    if GATED:
        g, u = tl.split(tl.reshape(acc, (BLOCK_M, BLOCK_N // 16, 2, 8)).permute(0, 1, 3, 2))
        y = tl.reshape(gated_value(g, u, GATE, ALPHA, BETA, LIMIT), (BLOCK_M, Y_BLOCK))
    elif GATE != "":
        y = gate_value(acc, GATE, ALPHA)
    else:
        y = acc
    inside = first + tl.arange(0, BLOCK_M) < end
    write_tile(y, slot if SCATTER else m, inside, block, y_ptr, y_scale_ptr, N, OUT_QUANT, BLOCK_M, Y_BLOCK)


OPTIONAL = ("x_scale", "w_scale", "y_scale", "bias", "probs")


def grouped_gemm(
    x, w, routing: Routing, config: GemmConfig, product: Product, y, *, pdl=False, launch=launch, **tensors
):  # fmt: skip
    """y[r] = epilogue(x[row(r)] @ w[e(r)].T) for every routed row r.

    Shapes    x [X, K] | w [E, product.w_rows, K] -> y [R, product.n]; K contiguous in x and w, y contiguous
    Dtypes    bf16, fp16, or e4m3 with scales (product.quant); fp32 accumulation, one rounding at the store
    Tensors   x_scale, w_scale, y_scale, bias, probs as the product needs them
    Needs     tiles that product.check admits; routing.block_m == config.block_m
    Raises    ShapeError when Needs does not hold
    """
    product.check(config, routing.block_m)
    blocks = -(-product.n // product.y_block(config))
    launch(
        _grouped_gemm_kernel, (routing.tiles.shape[0] * blocks,),
        x, w, y, routing.gather, routing.tiles, *(tensors.get(name) for name in OPTIONAL),
        x.stride(0), w.stride(0), w.stride(1), **product.constants(config, pdl),
        **launch_options(pdl, num_warps=config.warps, num_stages=config.stages),
    )  # fmt: skip
    return y


def signature(config: GemmConfig, product: Product, pdl: bool = True) -> Specialization:
    """What grouped_gemm asks the compiler for with this tile and product."""
    return gemm_specialization(_grouped_gemm_kernel, product, config, pdl)
