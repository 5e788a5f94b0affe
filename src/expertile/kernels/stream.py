"""The experts of a handful of tokens in two launches that do nothing but stream weights: `stream_up`, `stream_down`.

    h[s] = activation(x[s // top_k] @ w13[e(s)].T)
    out[t] = factor * sum over j of probs[t, j] * (h[s] @ w2[e(s)].T)

With T * top_k slots below a few dozen, experts hardly meet twice: a grouped product has nothing to group, and a layer
costs its weights' bytes plus its dependent launches. So a block of `stream_up` takes one slot and a few gate and up
rows, a block of `stream_down` one token and a few columns of all its experts, which sums the slots where they are (no
routing, no combine). Whole weight rows go from memory to registers in one burst; the products are fp32 FMAs, far below
their rate at this intensity. x and h are quantised as they are loaded. `stream_down` has its weights on the way before
it waits for h.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..plans import GemmConfig
from ..problem import Quant
from .tiles import (
    TYPES,
    Product,
    Specialization,
    gate_value,
    gated_value,
    gdc_launch_dependents,
    gdc_wait,
    launch,
    launch_options,
    local_experts,
    scale_block_row,
    scale_mode,
    tile_weight_rows,
    to_fp8,
)


@triton.jit
def _quantized(x, scale, MODE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """(x [ROWS, WIDTH] as the e4m3 values it is multiplied as, scales [ROWS] or, by block, [ROWS, groups])."""
    if MODE == "block":
        groups = tl.reshape(x, (ROWS, WIDTH // 128, 128))
        scale = tl.maximum(tl.max(tl.abs(groups), 2), 1e-10) / 448.0
        x = tl.reshape(to_fp8(groups, scale[:, :, None]).to(tl.float32), (ROWS, WIDTH))
    elif MODE == "row" or MODE == "static":
        x = to_fp8(x, scale[:, None]).to(tl.float32)
    return x, scale


@triton.jit
def _row_absmax(x_ptr, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """max(|x|) of one row of K values."""
    k = tl.arange(0, BLOCK_K)
    absmax = tl.zeros((BLOCK_K,), tl.float32)
    for k0 in tl.static_range(0, K, BLOCK_K):
        absmax = tl.maximum(absmax, tl.abs(tl.load(x_ptr + k0 + k, mask=k0 + k < K, other=0.0).to(tl.float32)))
    return tl.max(absmax, 0)


@triton.jit(do_not_specialize=["slots", "total"])
def _stream_up_kernel(
    x_ptr,  # [T, K]
    w_ptr,  # [E, N or 2N, K]
    h_ptr,  # [T * TOP_K, N]
    ids_ptr,  # [T, TOP_K]
    map_ptr,  # [total]
    x_scale_ptr,  # [1], given ahead
    w_scale_ptr,
    h_scale_ptr,  # [1], given ahead: h is written as e4m3
    bias_ptr,
    probs_ptr,  # [T, TOP_K] when the router's weight applies to the input
    stride_xm,
    stride_we,
    stride_wn,
    slots,
    total,
    N: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr,
    GATE: tl.constexpr,
    GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ALPHA: tl.constexpr,
    BETA: tl.constexpr,
    LIMIT: tl.constexpr,
    QUANT: tl.constexpr,
    SPLIT_SCALE: tl.constexpr,
    MODE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    Y_BLOCK: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    n_blocks: tl.constexpr = (N + Y_BLOCK - 1) // Y_BLOCK
    W_ROWS: tl.constexpr = 2 * N if GATED else N
    K_BLOCKS: tl.constexpr = (K + 127) // 128
    pid = tl.program_id(0)
    block = pid % n_blocks
    slot = pid // n_blocks
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    expert = local_experts(ids_ptr, map_ptr, slot, slots, total, EXPERTS)
    if expert == EXPERTS:
        return
    e = expert.to(tl.int64)
    row, up = tile_weight_rows(block, N, GATED, INTERLEAVED, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    w_tile = w_ptr + e * stride_we + row.to(tl.int64)[:, None] * stride_wn + k[None, :]
    ahead = tl.load(w_tile, mask=(k < K)[None, :], other=0.0)  # on its way while x is scaled
    x_row = x_ptr + (slot // TOP_K).to(tl.int64) * stride_xm
    x_scale = tl.full((1,), 1.0, tl.float32)
    if MODE == "static":
        x_scale = x_scale * tl.load(x_scale_ptr)
    elif MODE == "row":
        x_scale = x_scale * (tl.maximum(_row_absmax(x_row, K, BLOCK_K), 1e-10) / 448.0)

    acc = tl.zeros((BLOCK_N,), tl.float32)
    part = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for k0 in tl.static_range(0, K, BLOCK_K):
        inside, w = k0 + k < K, ahead
        x = tl.load(x_row + k0 + k, mask=inside, other=0.0).to(tl.float32)
        x, scale = _quantized(x[None, :], x_scale, MODE, 1, BLOCK_K)
        if QUANT == "fp8_block":
            group = k0 // 128 + tl.arange(0, BLOCK_K // 128)
            table = scale_block_row(e, row, up, N, GATED, SPLIT_SCALE, INTERLEAVED) * K_BLOCKS
            w_scale = tl.load(
                w_scale_ptr + table[:, None] + group[None, :], mask=(group < K_BLOCKS)[None, :], other=0.0
            )
            sums = tl.sum(tl.reshape(w.to(tl.float32) * x, (BLOCK_N, BLOCK_K // 128, 128)), 2)
            acc += tl.sum(sums * w_scale * scale, 1)
        else:
            part += w.to(tl.float32) * x
        if k0 + BLOCK_K < K:
            ahead = tl.load(w_tile + k0 + BLOCK_K, mask=(k0 + BLOCK_K + k < K)[None, :], other=0.0)
    if QUANT != "fp8_block":
        acc = tl.sum(part, 1)

    if QUANT == "fp8_tensor" or QUANT == "fp8_channel":
        acc = acc * tl.sum(x_scale, 0)
    if QUANT == "fp8_tensor":
        acc = acc * tl.load(w_scale_ptr + e)
    if QUANT == "fp8_channel":
        acc = acc * tl.load(w_scale_ptr + e * W_ROWS + row)
    if probs_ptr is not None:
        acc = acc * tl.load(probs_ptr + slot).to(tl.float32)
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + e * W_ROWS + row).to(tl.float32)
    if GATED:
        g, u = tl.split(tl.reshape(acc, (BLOCK_N // 16, 2, 8)).permute(0, 2, 1))
        h = tl.reshape(gated_value(g, u, GATE, ALPHA, BETA, LIMIT), (Y_BLOCK,))
    else:
        h = gate_value(acc, GATE, ALPHA)
    n = block * Y_BLOCK + tl.arange(0, Y_BLOCK)
    if h_scale_ptr is not None:
        h = to_fp8(h, tl.load(h_scale_ptr))
    tl.store(h_ptr + slot.to(tl.int64) * N + n, h.to(h_ptr.dtype.element_ty), mask=n < N)


@triton.jit(do_not_specialize=["slots", "total"])
def _stream_down_kernel(
    h_ptr,  # [T * TOP_K, K]
    w_ptr,  # [E, N, K]
    out_ptr,  # [T, N]
    ids_ptr,  # [T, TOP_K]
    map_ptr,  # [total]
    probs_ptr,  # [T, TOP_K], or None: every weight is one
    h_scale_ptr,  # [1], given ahead: h is e4m3 already
    w_scale_ptr,
    bias_ptr,
    stride_we,
    stride_wn,
    stride_om,
    slots,
    total,
    N: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    SLOTS: tl.constexpr,  # TOP_K rounded up to a power of two
    EXPERTS: tl.constexpr,
    FACTOR: tl.constexpr,
    QUANT: tl.constexpr,
    MODE: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_K: tl.constexpr,  # K rounded up to a power of two
    PDL: tl.constexpr,
):
    n_blocks: tl.constexpr = (N + COLUMNS - 1) // COLUMNS
    K_BLOCKS: tl.constexpr = (K + 127) // 128
    pid = tl.program_id(0)
    token = pid // n_blocks
    n = pid % n_blocks * COLUMNS + tl.arange(0, COLUMNS)
    n_in = tl.minimum(n, N - 1)
    j = tl.arange(0, SLOTS)
    k = tl.arange(0, BLOCK_K)
    # The ids were complete before stream_up began, and it released this launch only after that.
    slot = tl.where(j < TOP_K, token * TOP_K + j, slots)
    expert = local_experts(ids_ptr, map_ptr, slot, slots, total, EXPERTS)
    valid = expert < EXPERTS
    e = expert.to(tl.int64)
    w_tile = w_ptr + e[:, None, None] * stride_we + n_in.to(tl.int64)[None, :, None] * stride_wn + k[None, None, :]
    w = tl.load(w_tile, mask=valid[:, None, None] & (k < K)[None, None, :], other=0.0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    h_tile = h_ptr + slot.to(tl.int64)[:, None] * K + k[None, :]
    h = tl.load(h_tile, mask=valid[:, None] & (k < K)[None, :], other=0.0).to(tl.float32)
    h_scale = tl.full((SLOTS,), 1.0, tl.float32)
    if MODE == "ready":
        h_scale = h_scale * tl.load(h_scale_ptr)
    elif MODE == "row":
        h_scale = tl.maximum(tl.max(tl.abs(h), 1), 1e-10) / 448.0
    h, scale = _quantized(h, h_scale, MODE, SLOTS, BLOCK_K)
    if QUANT == "fp8_block":
        group = tl.arange(0, BLOCK_K // 128)
        table = (e[:, None] * ((N + 127) // 128) + n_in[None, :] // 128) * K_BLOCKS
        ok = valid[:, None, None] & (group < K_BLOCKS)[None, None, :]
        w_scale = tl.load(w_scale_ptr + table[:, :, None] + group[None, None, :], mask=ok, other=0.0)
        sums = tl.sum(tl.reshape(w.to(tl.float32) * h[:, None, :], (SLOTS, COLUMNS, BLOCK_K // 128, 128)), 3)
        y = tl.sum(sums * w_scale * scale[:, None, :], 2)
    else:
        y = tl.sum(w.to(tl.float32) * h[:, None, :], 2)
    if QUANT == "fp8_tensor":
        h_scale = h_scale * tl.load(w_scale_ptr + e, mask=valid, other=0.0)
    if QUANT == "fp8_tensor" or QUANT == "fp8_channel":
        y = y * h_scale[:, None]
    if QUANT == "fp8_channel":
        y = y * tl.load(w_scale_ptr + e[:, None] * N + n_in[None, :], mask=valid[:, None], other=0.0)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + e[:, None] * N + n_in[None, :], mask=valid[:, None], other=0.0).to(tl.float32)
    if probs_ptr is not None:
        y = y * tl.load(probs_ptr + slot, mask=valid, other=0.0).to(tl.float32)[:, None]
    out = tl.sum(tl.where(valid[:, None], y, 0.0), 0) * FACTOR
    tl.store(out_ptr + token.to(tl.int64) * stride_om + n, out.to(out_ptr.dtype.element_ty), mask=n < N)


def _mode(product: Product) -> str:
    """How x (or h) becomes e4m3 as it is loaded."""
    return "none" if product.quant is Quant.NONE else scale_mode(product.quant, product.static_scale)


def _up_constants(product: Product, config: GemmConfig, experts: int, pdl: bool) -> dict:
    act = product.activation
    return dict(
        N=product.n,
        K=product.k,
        TOP_K=product.top_k,
        EXPERTS=experts,
        GATE=act.gate.value,
        GATED=act.gated,
        INTERLEAVED=act.interleaved,
        ALPHA=act.alpha,
        BETA=act.beta,
        LIMIT=act.limit,
        QUANT=product.quant.value,
        SPLIT_SCALE=product.split_scale,
        MODE=_mode(product),
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        PDL=pdl,
    )


def _down_constants(product: Product, config: GemmConfig, experts: int, factor: float, pdl: bool) -> dict:
    return dict(
        N=product.n,
        K=product.k,
        TOP_K=product.top_k,
        SLOTS=triton.next_power_of_2(product.top_k),
        EXPERTS=experts,
        FACTOR=factor,
        QUANT=product.quant.value,
        MODE="ready" if product.static_scale else _mode(product),
        COLUMNS=config.block_n,
        BLOCK_K=max(128, triton.next_power_of_2(product.k)),
        PDL=pdl,
    )


def stream_up(
    x, w13, h, ids, config: GemmConfig, product: Product, *, expert_map=None, pdl=False, launch=launch, **tensors
):
    """h[s] = activation(x[s // top_k] @ w13[e(s)].T) for every valid slot s; the others are left as they are.

    Shapes    x [T, K] | w13 [E, N or 2N, K] | ids [T, top_k] contiguous -> h [T * top_k, N]; K contiguous
    Dtypes    x bf16 or fp16; h the same, or e4m3 with a static h_scale; fp32 products and sums
    Tensors   x_scale, h_scale [1] (static), w_scale, bias, probs (the router's weight on the input)
    Config    block_n weight rows of a block, a multiple of 16; block_k values of them at a time
    """
    experts = w13.shape[0]
    total = experts if expert_map is None else expert_map.numel()
    blocks = -(-product.n // product.y_block(config))
    launch(
        _stream_up_kernel, (ids.numel() * blocks,),
        x, w13, h, ids, expert_map, tensors.get("x_scale"), tensors.get("w_scale"), tensors.get("h_scale"),
        tensors.get("bias"), tensors.get("probs"), x.stride(0), w13.stride(0), w13.stride(1), ids.numel(), total,
        **_up_constants(product, config, experts, pdl), **launch_options(pdl, num_warps=config.warps),
    )  # fmt: skip
    return h


def stream_down(
    h, w2, out, ids, probs, config: GemmConfig, product: Product, *, expert_map=None, factor=1.0, pdl=False,
    launch=launch, **tensors,
):  # fmt: skip
    """out[t] = factor * sum over j of probs[t, j] * (h[t * top_k + j] @ w2[e].T + bias); skipped slots count as zero.

    Shapes    h [T * top_k, K] | w2 [E, N, K] | ids, probs [T, top_k] contiguous -> out [T, N]; K contiguous
    Tensors   h_scale [1] (static: h is e4m3), w_scale, bias
    Config    block_n columns of out a block; top_k * block_n rows of K values are held in registers
    """
    experts = w2.shape[0]
    total = experts if expert_map is None else expert_map.numel()
    launch(
        _stream_down_kernel, (out.shape[0] * -(-product.n // config.block_n),),
        h, w2, out, ids, expert_map, probs, tensors.get("h_scale"), tensors.get("w_scale"), tensors.get("bias"),
        w2.stride(0), w2.stride(1), out.stride(0), ids.numel(), total,
        **_down_constants(product, config, experts, factor, pdl), **launch_options(pdl, num_warps=config.warps),
    )  # fmt: skip
    return out


def signature_up(config: GemmConfig, product: Product, experts: int, *, mapped=False, pdl=True) -> Specialization:
    """What stream_up asks the compiler for, with int32 ids and fp32 probs."""
    absent = dict(
        map_ptr=not mapped,
        x_scale_ptr=not product.static_scale,
        h_scale_ptr=not product.static_scale,
        w_scale_ptr=product.quant is Quant.NONE,
        bias_ptr=not product.bias,
        probs_ptr=not product.weight_on_input,
    )
    return _specialization(
        _stream_up_kernel, _up_constants(product, config, experts, pdl), absent, product, config, pdl
    )


def signature_down(
    config: GemmConfig, product: Product, experts: int, *, weighted=True, mapped=False, factor=1.0, pdl=True
) -> Specialization:
    """What stream_down asks the compiler for, with int32 ids and fp32 probs (weighted: not on the input instead)."""
    absent = dict(
        map_ptr=not mapped,
        h_scale_ptr=not product.static_scale,
        w_scale_ptr=product.quant is Quant.NONE,
        bias_ptr=not product.bias,
        probs_ptr=not weighted,
    )
    constants = _down_constants(product, config, experts, factor, pdl)
    return _specialization(_stream_down_kernel, constants, absent, product, config, pdl)


def _specialization(kernel, constants, absent, product: Product, config: GemmConfig, pdl: bool) -> Specialization:
    dtype = TYPES[product.dtype]
    types = dict.fromkeys(("x_scale_ptr", "w_scale_ptr", "h_scale_ptr", "probs_ptr"), "*fp32")
    types |= dict.fromkeys(("x_ptr", "out_ptr", "bias_ptr"), f"*{dtype}") | dict.fromkeys(
        ("ids_ptr", "map_ptr"), "*i32"
    )
    types |= dict(
        w_ptr=f"*{dtype}" if product.quant is Quant.NONE else "*fp8e4nv",
        h_ptr="*fp8e4nv" if product.static_scale else f"*{dtype}",
    )
    constants = constants | {name: None for name, missing in absent.items() if missing}
    kinds = {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}
    aligned = tuple(name for name, kind in kinds.items() if kind.startswith("*") or name.startswith("stride"))
    return Specialization(kernel, kinds, constants, aligned, launch_options(pdl, num_warps=config.warps))
