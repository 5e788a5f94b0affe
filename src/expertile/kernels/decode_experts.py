"""Both products of a layer for a few tokens in one launch that never stops reading weights: `decode_experts`.

    h[e, t] = activation(x[t] @ w13[e].T + b13[e])          y[t * top_k + j] = h[e, t] @ w2[e].T + b2[e], e = ids[t, j]

Up to 64 tokens a layer is weights read from memory, so the pauses decide: between launches, while h is quantised, at
the end of GEMM1. Here persistent blocks (Gluon, one an SM) take items, block_n weight rows of one expert, from
one list: all of GEMM1, then all of GEMM2. Weights run through one ring of shared buffers across the items and across
the two products; while GEMM2's first items wait for their h, their weights are on the way already.

Operands are swapped: weight rows fill WGMMA's 64-row side, all tokens of the step sit on its narrow side (8 to 64),
whether they chose the expert or not. So an expert has one tile whatever the routing is, x needs no gathering (one TMA
box), and no rows are sorted: h is [experts, tokens], and GEMM2 writes y at the slots whose id is the expert.

`begin` goes before it: it quantises x, lists the experts that are hit and zeroes the counters. GEMM2 of an expert waits
until that expert's h is counted complete; an item is only dealt to a running block and GEMM1 is dealt first, so nothing
hangs on how many blocks run at once. The order of sums is fixed: the result does not depend on timing.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..errors import ShapeError
from ..plans import RING_STAGES, RING_WARPS, GemmConfig
from ..problem import BLOCK, Activation, Quant
from .decode_roles import load_rows, load_weights, multiply
from .tiles import (
    TYPES,
    Specialization,
    aligned_rows,
    gdc_launch_dependents,
    gdc_wait,
    launch,
    launch_options,
    local_experts,
    quantize_rows,
    scale_mode,
)

REGISTERS = 168  # a thread, before the roles trade theirs: 12 warps have 65536 between them
MAX_TOP_K = 16


@dataclass(frozen=True)
class Layer:
    """What decode_experts computes, besides its tiles."""

    hidden: int
    inter: int
    experts: int
    top_k: int
    dtype: str
    activation: Activation
    quant: Quant = Quant.NONE
    static_scale: bool = False
    split_scale: bool = False
    bias: bool = False

    @property
    def mode(self) -> str:
        """How rows of x and h become e4m3: tiles.scale_mode, or "" where they stay as they are."""
        return "" if self.quant is Quant.NONE else scale_mode(self.quant, self.static_scale)

    def constants(self, config: GemmConfig, pdl: bool) -> dict:
        """The constexpr arguments of decode_experts' kernel."""
        act = self.activation
        return dict(
            HIDDEN=self.hidden,
            INTER=self.inter,
            TOP_K=self.top_k,
            EXPERTS=self.experts,
            BINS=max(32, triton.next_power_of_2(self.experts)),
            GATE=act.gate.value,
            GATED=act.gated,
            ALPHA=act.alpha,
            BETA=act.beta,
            LIMIT=act.limit,
            QUANT=self.quant.value,
            STATIC_SCALE=self.static_scale,
            SPLIT_SCALE=self.split_scale,
            OUT_QUANT=self.mode,
            BLOCK_M=config.block_m,
            BLOCK_K=config.block_k,
            ROWS=config.block_n // 2,
            STAGES=config.stages,
            MULTIPLY_REGISTERS=232,  # of the second warpgroup; the first has what is left
            LOAD_REGISTERS=40 if self.experts <= 256 else 64,  # the list of experts is held in them
            PDL=pdl,
        )

    def check(self, config: GemmConfig, tokens: int) -> None:
        """Raises ShapeError for what the kernel cannot do."""
        item = 2 if self.quant is Quant.NONE else 1
        if config.block_k * item != 128 or config.block_n not in (128, 256) or config.block_m not in (8, 16, 32, 64):
            raise ShapeError(
                f"{config.block_m}x{config.block_n}x{config.block_k}: the tile is 8 to 64 x 128 or 256 x 128 bytes"
            )
        if self.quant is Quant.FP8_BLOCK and config.block_m > 32:
            raise ShapeError(
                f"block_m={config.block_m}: with fp8_block's scales the sums of 64 tokens exceed the registers"
            )
        if config.stages < RING_STAGES:
            raise ShapeError(f"stages={config.stages}: with fewer than {RING_STAGES} the roles of a block hang")
        if config.warps != RING_WARPS:
            raise ShapeError(f"warps={config.warps}: a block's roles have {RING_WARPS}")
        if tokens > config.block_m:
            raise ShapeError(f"T={tokens} tokens do not fit a tile of {config.block_m}")
        if self.hidden * item % 16 or self.inter * item % 16:
            raise ShapeError(f"rows of hidden={self.hidden} and inter={self.inter} must be multiples of 16 bytes")
        if self.top_k > MAX_TOP_K:
            raise ShapeError(f"top_k={self.top_k}: the choices of a token are held in registers, {MAX_TOP_K} at most")
        if self.activation.gated and self.activation.interleaved:
            raise ShapeError("gate and up rows alternate: a box holds neighbours")
        if self.quant is Quant.FP8_BLOCK and config.block_n != 2 * BLOCK:
            raise ShapeError(
                f"block_n={config.block_n}: fp8_block quantises h in blocks of {BLOCK} columns, it needs 256"
            )
        if self.quant is Quant.FP8_BLOCK and self.activation.gated and self.inter % BLOCK and not self.split_scale:
            raise ShapeError(f"inter={self.inter} puts gate and up rows in one scale block of {BLOCK}")


@triton.jit(do_not_specialize=["tokens", "slots", "total"])
def _begin_kernel(
    ids_ptr,  # [T, TOP_K]
    map_ptr,  # [total]
    x_ptr,  # [T, WIDTH]
    q_ptr,  # [T, WIDTH] e4m3
    scale_ptr,  # [1], [T] or [T, WIDTH / 128]
    hit_ptr,  # [1 + EXPERTS]
    counters_ptr,  # [1 + EXPERTS]
    stride_xm,
    tokens,
    slots,
    total,
    EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    SLOTS: tl.constexpr,
    WIDTH: tl.constexpr,
    MODE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    pid = tl.program_id(0)
    if pid == 0:
        bins = tl.arange(0, BINS)
        tl.store(counters_ptr + bins, tl.zeros((BINS,), tl.int32), mask=bins <= EXPERTS)
        expert = local_experts(ids_ptr, map_ptr, tl.arange(0, SLOTS), slots, total, EXPERTS)
        hit = ((tl.histogram(expert, BINS) > 0) & (bins < EXPERTS)).to(tl.int32)
        tl.store(hit_ptr + tl.cumsum(hit, 0), bins, mask=hit > 0)
        tl.store(hit_ptr, tl.sum(hit, 0))
    elif q_ptr is not None:
        row = (pid - 1).to(tl.int64) + tl.arange(0, 1)
        quantize_rows(x_ptr, q_ptr, scale_ptr, row, row < tokens, stride_xm, WIDTH, MODE, 1, BLOCK)


@gluon.jit(do_not_specialize=["tokens", "total"])
def _decode_experts_kernel(
    x_desc,  # [T, H], box [BLOCK_M, BLOCK_K]
    w13_desc,  # [E * rows, H], box [ROWS, BLOCK_K]
    w2_desc,  # [E * H, I], box [ROWS, BLOCK_K]
    h_desc,  # [E * BLOCK_M, I], box [BLOCK_M, BLOCK_K]
    h_ptr,  # [E * BLOCK_M, I]
    h_q_ptr,  # the same in e4m3
    y_ptr,  # [T * TOP_K, H]
    ids_ptr,  # [T, TOP_K]
    map_ptr,  # [total]
    hit_ptr,  # [1 + E]: how many experts are hit, then which
    counters_ptr,  # [1 + E], zero: items that were taken; for each expert, parts of h that are done
    x_scale_ptr,
    h_scale_ptr,
    w13_scale_ptr,
    w2_scale_ptr,
    b13_ptr,
    b2_ptr,
    tokens,
    total,
    HIDDEN: gl.constexpr,
    INTER: gl.constexpr,
    TOP_K: gl.constexpr,
    EXPERTS: gl.constexpr,
    BINS: gl.constexpr,
    GATE: gl.constexpr,
    GATED: gl.constexpr,
    ALPHA: gl.constexpr,
    BETA: gl.constexpr,
    LIMIT: gl.constexpr,
    QUANT: gl.constexpr,
    STATIC_SCALE: gl.constexpr,
    SPLIT_SCALE: gl.constexpr,
    OUT_QUANT: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_K: gl.constexpr,
    ROWS: gl.constexpr,
    STAGES: gl.constexpr,
    MULTIPLY_REGISTERS: gl.constexpr,
    LOAD_REGISTERS: gl.constexpr,
    PDL: gl.constexpr,
):
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    item = w13_desc.dtype
    HALVES: gl.constexpr = 2 if GATED else 1
    BLOCKS1: gl.constexpr = (INTER + (3 - HALVES) * ROWS - 1) // ((3 - HALVES) * ROWS)
    BLOCKS2: gl.constexpr = (HIDDEN + 2 * ROWS - 1) // (2 * ROWS)
    COMPLETE: gl.constexpr = BLOCKS1 + 1 if OUT_QUANT == "row" else BLOCKS1
    W_BYTES: gl.constexpr = 2 * ROWS * BLOCK_K * item.primitive_bitwidth // 8
    A_BYTES: gl.constexpr = BLOCK_M * BLOCK_K * item.primitive_bitwidth // 8
    w_bufs = gl.allocate_shared_memory(item, [2 * STAGES, ROWS, BLOCK_K], w13_desc.layout)
    a_bufs = gl.allocate_shared_memory(item, [STAGES, BLOCK_M, BLOCK_K], x_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(ready.index(s), count=2)
        mbarrier.init(empty.index(s), count=1)
    items = gl.allocate_shared_memory(gl.int32, [4, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    told = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    heard = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    for n in gl.static_range(4):
        mbarrier.init(told.index(n), count=1)
        mbarrier.init(heard.index(n), count=3)
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for n in gl.static_range(2):
        mbarrier.init(turns.index(n), count=1)
    gl.warp_specialize([
        (multiply, (
            0, h_ptr, h_q_ptr, y_ptr, ids_ptr, map_ptr, counters_ptr + 1, x_scale_ptr, h_scale_ptr,
            w13_scale_ptr, w2_scale_ptr, b13_ptr, b2_ptr, tokens, total, w_bufs, a_bufs, ready, empty, items, told,
            heard, turns, HIDDEN, INTER, TOP_K, EXPERTS, GATE, GATED, ALPHA, BETA, LIMIT, QUANT, STATIC_SCALE,
            SPLIT_SCALE, BLOCK_M, BLOCK_K, ROWS, STAGES, BLOCKS1, OUT_QUANT,
        )),
        (multiply, (
            1, h_ptr, h_q_ptr, y_ptr, ids_ptr, map_ptr, counters_ptr + 1, x_scale_ptr, h_scale_ptr,
            w13_scale_ptr, w2_scale_ptr, b13_ptr, b2_ptr, tokens, total, w_bufs, a_bufs, ready, empty, items, told,
            heard, turns, HIDDEN, INTER, TOP_K, EXPERTS, GATE, GATED, ALPHA, BETA, LIMIT, QUANT, STATIC_SCALE,
            SPLIT_SCALE, BLOCK_M, BLOCK_K, ROWS, STAGES, BLOCKS1, OUT_QUANT,
        )),
        (load_weights, (
            w13_desc, w2_desc, hit_ptr, counters_ptr, w_bufs, ready, empty, items, told, heard, HIDDEN, INTER,
            HALVES, EXPERTS, BINS, ROWS, BLOCK_K, W_BYTES, STAGES, BLOCKS1, BLOCKS2,
        )),
        (load_rows, (
            x_desc, h_desc, counters_ptr + 1, a_bufs, ready, empty, items, told, heard, HIDDEN, INTER, BLOCK_M,
            BLOCK_K, A_BYTES, STAGES, COMPLETE,
        )),
    ], [4, 1, 1], [MULTIPLY_REGISTERS, LOAD_REGISTERS, LOAD_REGISTERS])  # fmt: skip


def begin(ids, x, x_q, x_scale, hit, counters, layer: Layer, *, expert_map=None, pdl=False, launch=launch):
    """hit = how many experts are hit, then which, ascending; counters = 0; x_q = x in e4m3 where weights are.

    Shapes    ids [T, top_k] contiguous | x [T, H] -> x_q [T, H], x_scale as tiles.quantize_rows has it, hit, counters
              [1 + E]
    """
    tokens, quantized = x.shape[0], layer.mode != ""
    total = layer.experts if expert_map is None else expert_map.numel()
    launch(
        _begin_kernel, (1 + tokens * quantized,),
        ids, expert_map, x, x_q if quantized else None, x_scale if quantized else None, hit, counters, x.stride(0),
        tokens, ids.numel(), total, **_begin_constants(layer, ids.numel(), pdl), **launch_options(pdl, num_warps=4),
    )  # fmt: skip


def decode_experts(
    x, w13, w2, h, h_q, y, ids, hit, counters, config: GemmConfig, layer: Layer, *, sms: int, expert_map=None,
    pdl=False, launch=launch, **tensors,
):  # fmt: skip
    """y[t * top_k + j] = activation(x[t] @ w13[e].T + b13[e]) @ w2[e].T + b2[e], e = ids[t, j], for every valid slot.

    Shapes    x [T, H] | w13 [E, N, H], w2 [E, H, I] contiguous | ids [T, top_k] contiguous -> h, h_q
              [E * block_m, I] scratch, y [T * top_k, H]
    Dtypes    bf16, fp16, or e4m3 with scales (layer.quant); fp32 accumulation, one rounding at each store
    Tensors   x_scale, h_scale, w13_scale, w2_scale, b13, b2 as the layer needs them; a dynamic h_scale is scratch
    Needs     what `begin` writes: hit and counters, which are used up; T <= block_m; what Layer.check says
    Raises    ShapeError when Needs does not hold
    """
    layer.check(config, x.shape[0])
    x = aligned_rows(x)
    total = layer.experts if expert_map is None else expert_map.numel()
    box, rows = [config.block_n // 2, config.block_k], [config.block_m, config.block_k]
    names = ("x_scale", "h_scale", "w13_scale", "w2_scale", "b13", "b2")
    launch(
        _decode_experts_kernel, (sms,),
        _view(x, rows), _view(w13.view(-1, layer.hidden), box), _view(w2.view(-1, layer.inter), box),
        _view(h if layer.mode == "" else h_q, rows), h, h_q, y, ids, expert_map, hit, counters,
        *(tensors.get(name) for name in names), x.shape[0], total, **layer.constants(config, pdl),
        **_options(pdl),
    )  # fmt: skip
    return y


def _swizzled(box: list[int], item_bytes: int):
    return gl.NVMMASharedLayout(128, 8 * item_bytes, len(box))


def _view(x, box: list[int]) -> TensorDescriptor:
    return TensorDescriptor(x, list(x.shape), [x.stride(0), 1], box, _swizzled(box, x.element_size()))


def _options(pdl: bool) -> dict:
    return launch_options(pdl, num_warps=4, maxnreg=REGISTERS)


def _begin_constants(layer: Layer, slots: int, pdl: bool) -> dict:
    return dict(
        EXPERTS=layer.experts,
        BINS=max(32, triton.next_power_of_2(layer.experts + 1)),
        SLOTS=max(16, triton.next_power_of_2(slots)),
        WIDTH=layer.hidden,
        MODE=layer.mode,
        BLOCK=max(128, triton.next_power_of_2(layer.hidden)),
        PDL=pdl,
    )


def signature(
    config: GemmConfig, layer: Layer, tokens: int, *, mapped=False, pdl=True
) -> tuple[Specialization, Specialization]:
    """What begin and decode_experts ask the compiler for."""
    return _begin_signature(layer, tokens, mapped, pdl), _decode_signature(config, layer, mapped, pdl)


def _begin_signature(layer: Layer, tokens: int, mapped: bool, pdl: bool) -> Specialization:
    constants = _begin_constants(layer, tokens * layer.top_k, pdl) | ({} if mapped else {"map_ptr": None})
    constants |= {} if layer.mode else {"q_ptr": None, "scale_ptr": None}
    types = dict.fromkeys(("ids_ptr", "map_ptr", "hit_ptr", "counters_ptr"), "*i32")
    types |= dict(x_ptr=f"*{TYPES[layer.dtype]}", q_ptr="*fp8e4nv", scale_ptr="*fp32")
    return _specialization(_begin_kernel, types, constants, launch_options(pdl, num_warps=4))


def _decode_signature(config: GemmConfig, layer: Layer, mapped: bool, pdl: bool) -> Specialization:
    dtype, mode = TYPES[layer.dtype], layer.mode
    item, item_bytes = (dtype, 2) if mode == "" else ("fp8e4nv", 1)
    absent = {"map_ptr": not mapped, "h_ptr": mode in ("static", "block"), "h_q_ptr": mode == ""}
    absent |= dict.fromkeys(("x_scale_ptr", "h_scale_ptr", "w13_scale_ptr", "w2_scale_ptr"), mode == "")
    absent |= dict.fromkeys(("b13_ptr", "b2_ptr"), not layer.bias)
    constants = layer.constants(config, pdl) | {name: None for name, missing in absent.items() if missing}

    def descriptor(rows):
        box = [rows, config.block_k]
        return f"tensordesc<{item}[{rows}, {config.block_k}],{_swizzled(box, item_bytes)!r}>"

    types = dict.fromkeys(("x_desc", "h_desc"), descriptor(config.block_m))
    types |= dict.fromkeys(("w13_desc", "w2_desc"), descriptor(config.block_n // 2))
    types |= dict.fromkeys(("h_ptr", "y_ptr", "b13_ptr", "b2_ptr"), f"*{dtype}") | {"h_q_ptr": "*fp8e4nv"}
    types |= dict.fromkeys(("ids_ptr", "map_ptr", "hit_ptr", "counters_ptr"), "*i32")
    types |= dict.fromkeys(("x_scale_ptr", "h_scale_ptr", "w13_scale_ptr", "w2_scale_ptr"), "*fp32")
    return _specialization(_decode_experts_kernel, types, constants, _options(pdl))


def _specialization(kernel, types: dict, constants: dict, options: dict) -> Specialization:
    kinds = {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}
    aligned = tuple(name for name, kind in kinds.items() if kind.startswith("*") or name.startswith("stride"))
    return Specialization(kernel, kinds, constants, aligned, options)
