"""Grouped product for thin tiles: swapped operands, weights by TMA.

    y[r] = epilogue(x[row(r)] @ w[e(r)].T)          acc = w @ x.T   [weight rows, BLOCK_M tokens]

What grouped_gemm does with config.swap, for the same operands and with the same rounding, with two differences that pay
while a layer is weight streaming: one thread asks for a whole tile of weights (cp.async takes an instruction for every
16 bytes, and the warps of a small block spend their time on those), and gate and up rows come as two tiles with an
accumulator each, so their product needs no permuted addresses.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from ..errors import ShapeError
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
    write_tile,
)


@triton.jit
def _load_rows(w_desc, expert, half, n0, k0, HALVES: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr):
    """ROWS weight rows from output column n0 of the gate (half 0) or up (1) projection, [ROWS, BLOCK_K]."""
    return tl.reshape(w_desc.load([expert * HALVES + half, n0, k0]), (ROWS, BLOCK_K))


@triton.jit
def _block_scale(
    w_scale_ptr, e, row, up, k0, N: tl.constexpr, K: tl.constexpr, GATED: tl.constexpr, SPLIT: tl.constexpr
):
    return tl.load(w_scale_ptr + scale_block_row(e, row, up, N, GATED, SPLIT) * ((K + 127) // 128) + k0 // 128)


@triton.jit
def _swapped_gemm_kernel(
    x_ptr,  # [X, K]
    w_desc,  # see _weight_view
    y_ptr,  # [R, N]
    gather_ptr,  # [R]
    tiles_ptr,  # [max_tiles, 4]
    x_scale_ptr,  # [1], [X] or [X, K / 128]
    w_scale_ptr,  # [E], [E, rows] or [E, rows / 128, K / 128]
    y_scale_ptr,  # [1] or [R, N / 128]
    bias_ptr,  # [E, N or 2N]
    probs_ptr,  # [R]
    stride_xm,
    N: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    GATHER: tl.constexpr,
    SCATTER: tl.constexpr,
    GATE: tl.constexpr,
    GATED: tl.constexpr,
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
    PDL: tl.constexpr,
):
    ROWS: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    W_ROWS: tl.constexpr = 2 * N if GATED else N
    HALVES: tl.constexpr = 2 if GATED else 1
    n_blocks: tl.constexpr = (N + ROWS - 1) // ROWS
    pid = tl.program_id(0)
    block = pid % n_blocks
    tile_ptr = tiles_ptr + pid // n_blocks * 4
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    expert = tl.load(tile_ptr)
    if expert < 0:
        return
    first = tl.load(tile_ptr + 1)
    end = tl.load(tile_ptr + 2)
    m = tl.minimum(first + tl.arange(0, BLOCK_M), end - 1)  # token rows do not mix: a repeated one is only wasted
    slot = tl.load(gather_ptr + m) if GATHER or SCATTER else m
    x_row = (slot // TOP_K if GATHER else m).to(tl.int64)
    e = expert.to(tl.int64)
    n = tl.minimum(block * ROWS + tl.arange(0, ROWS), N - 1)
    up_row = n + N

    k = tl.arange(0, BLOCK_K)
    x_tile = x_ptr + x_row[:, None] * stride_xm + k[None, :]
    acc = tl.zeros((ROWS, BLOCK_M), tl.float32)
    acc_up = tl.zeros((ROWS, BLOCK_M), tl.float32)
    for k0 in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        w = _load_rows(w_desc, expert, 0, block * ROWS, k0, HALVES, ROWS, BLOCK_K)
        if GATED:
            w_up = _load_rows(w_desc, expert, 1, block * ROWS, k0, HALVES, ROWS, BLOCK_K)
        if K % BLOCK_K == 0:
            x = tl.load(x_tile + k0)
        else:
            x = tl.load(x_tile + k0, mask=k[None, :] < K - k0, other=0.0)
        if QUANT == "fp8_block":
            xs = tl.load(x_scale_ptr + x_row * ((K + 127) // 128) + k0 // 128)[None, :]
            ws = _block_scale(w_scale_ptr, e, n, 0, k0, N, K, GATED, SPLIT_SCALE)
            acc += tl.dot(w, tl.trans(x)) * xs * ws[:, None]
            if GATED:
                ws = _block_scale(w_scale_ptr, e, up_row, 1, k0, N, K, GATED, SPLIT_SCALE)
                acc_up += tl.dot(w_up, tl.trans(x)) * xs * ws[:, None]
        else:
            acc = tl.dot(w, tl.trans(x), acc)
            if GATED:
                acc_up = tl.dot(w_up, tl.trans(x), acc_up)

    y = dequantized(
        tl.trans(acc), slot, x_row, e, n, x_scale_ptr, w_scale_ptr, bias_ptr, probs_ptr, W_ROWS, QUANT, STATIC_SCALE
    )
    if GATED:
        u = dequantized(
            tl.trans(acc_up), slot, x_row, e, up_row, x_scale_ptr, w_scale_ptr, bias_ptr, probs_ptr, W_ROWS, QUANT,
            STATIC_SCALE,
        )  # fmt: skip
        y = gated_value(y, u, GATE, ALPHA, BETA, LIMIT)
    elif GATE != "":
        y = gate_value(y, GATE, ALPHA)
    inside = first + tl.arange(0, BLOCK_M) < end
    write_tile(y, slot if SCATTER else m, inside, block, y_ptr, y_scale_ptr, N, OUT_QUANT, BLOCK_M, ROWS)


OPTIONAL = ("x_scale", "w_scale", "y_scale", "bias", "probs")


def _weight_view(w, product: Product, config: GemmConfig) -> TensorDescriptor:
    """w as a TMA view whose box is the gate, the up or the only rows of one tile; rows past N read as zeros."""
    if not w.is_contiguous():
        raise ShapeError(f"w {tuple(w.shape)} has strides {w.stride()}: its TMA view needs contiguous weights")
    halves = w.shape[0] * (2 if product.gated else 1)
    n, k = product.n, product.k
    return TensorDescriptor(w, [halves, n, k], [n * k, k, 1], [1, product.y_block(config), config.block_k])


def swapped_gemm(
    x, w, routing: Routing, config: GemmConfig, product: Product, y, *, pdl=False, launch=launch, **tensors
):  # fmt: skip
    """y[r] = epilogue(x[row(r)] @ w[e(r)].T) for every routed row r, weight rows on WGMMA's 64-row side.

    Shapes    x [X, K] | w [E, product.w_rows, K] contiguous -> y [R, product.n] contiguous
    Dtypes    bf16, fp16, or e4m3 with scales (product.quant); fp32 accumulation, one rounding at the store
    Tensors   x_scale, w_scale, y_scale, bias, probs as the product needs them
    Needs     rows of w a multiple of 16 bytes (TMA), gate rows before up rows, config.swap, tiles that product.check
    admits
    Raises    ShapeError when Needs does not hold
    """
    product.check(config, routing.block_m)
    blocks = -(-product.n // product.y_block(config))
    launch(
        _swapped_gemm_kernel, (routing.tiles.shape[0] * blocks,),
        x, _weight_view(w, product, config), y, routing.gather, routing.tiles,
        *(tensors.get(name) for name in OPTIONAL), x.stride(0), **_constants(product, config, pdl),
        **launch_options(pdl, num_warps=config.warps, num_stages=config.stages),
    )  # fmt: skip
    return y


def _constants(product: Product, config: GemmConfig, pdl: bool) -> dict:
    return {
        name: value for name, value in product.constants(config, pdl).items() if name in _swapped_gemm_kernel.arg_names
    }


def signature(config: GemmConfig, product: Product, pdl: bool = True) -> Specialization:
    """What swapped_gemm asks the compiler for with this tile and product."""
    found = gemm_specialization(_swapped_gemm_kernel, product, config, pdl)
    item = found.types["w_ptr"].removeprefix("*")
    types = {name: kind for name, kind in found.types.items() if name in _swapped_gemm_kernel.arg_names}
    types["w_desc"] = f"tensordesc<{item}[1, {product.y_block(config)}, {config.block_k}]>"
    constants = {name: value for name, value in found.constants.items() if name in types}
    aligned = tuple(name for name in found.divisible_by_16 if name in types)
    return Specialization(_swapped_gemm_kernel, types, constants, aligned, found.options)
