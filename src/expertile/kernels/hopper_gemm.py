"""Grouped product for thick tiles: persistent and warp-specialised (Gluon), 128 rows by 256 weight rows.

    y[r] = epilogue(x[row(r)] @ w[e(r)].T)

What grouped_gemm computes, for experts with many rows. A block stays on its SM and walks over tiles. Its warps have roles:
one asks for weights by TMA, two gather rows of x by cp.async (in GEMM2 h is in routed order and comes by TMA as well), and
two warpgroups multiply 64 rows each, so that one's epilogue hides under the other's products. A ring of shared buffers with
an mbarrier pair a stage is all that they share.

Weights land in shared memory in another row order than they have: of every 32 rows, row 8l + 2g + c is put at 8g + 2l + c (a
rank-5 TMA view, no rewrite). WGMMA's accumulator then gives a thread eight neighbouring columns of y, which it stores as one
piece: the epilogue needs no shared memory.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..errors import ShapeError
from ..plans import GemmConfig
from ..routing import Routing
from .gluon_versions import cp_async, cp_async_arrive, tma_load
from .tiles import (
    Product,
    Specialization,
    gate_value,
    gated_value,
    gdc_launch_dependents,
    gdc_wait,
    gemm_specialization,
)

GATHER_WARPS = 2


@gluon.jit
def _tile_of(t, tiles, N_BLOCKS: gl.constexpr, GROUP_M: gl.constexpr):
    """(row tile, block of weight rows) of step t: GROUP_M row tiles share one sweep over the weights."""
    group = t // (GROUP_M * N_BLOCKS)
    height = gl.minimum(tiles - group * GROUP_M, GROUP_M)
    rest = t % (GROUP_M * N_BLOCKS)
    return group * GROUP_M + rest % height, rest // height


@gluon.jit
def _load_weights(
    w_desc, a_desc, tiles_ptr, count_ptr, w_bufs, a_bufs, ready, empty,
    N: gl.constexpr, K: gl.constexpr, N_BLOCKS: gl.constexpr, HALVES: gl.constexpr, GATHER: gl.constexpr,
    BLOCK_K: gl.constexpr, BYTES: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    """The TMA warp: every weight tile, and rows of h where they need no gathering."""
    BOXES: gl.constexpr = w_desc.block_type.shape[0]
    ROWS: gl.constexpr = BOXES * w_desc.block_type.shape[1] * 8  # rows of w in one box
    UNIT: gl.constexpr = w_desc.block_type.shape[1] * 8
    LOADS: gl.constexpr = 256 // ROWS
    EXPERT_ROWS: gl.constexpr = N * HALVES
    tiles = gl.load(count_ptr)
    it = 0
    for t in range(gl.program_id(0), tiles * N_BLOCKS, gl.num_programs(0)):
        tile, block = _tile_of(t, tiles, N_BLOCKS, GROUP_M)
        row = gl.load(tiles_ptr + tile * 4) * EXPERT_ROWS + block * ROWS
        first = gl.load(tiles_ptr + tile * 4 + 1)
        for k in range(0, K, BLOCK_K):
            s = it % STAGES
            mbarrier.wait(empty.index(s), ((it // STAGES) & 1) ^ 1)
            mbarrier.expect(ready.index(s), BYTES)
            for half in gl.static_range(LOADS):
                box = w_bufs.index(s).slice(half * BOXES, BOXES, dim=0)
                tma_load(w_desc, [(row + half * N) // UNIT, 0, 0, 0, k], ready.index(s), box)
            if not GATHER:
                tma_load(a_desc, [first, k], ready.index(s), a_bufs.index(s))
            it += 1


@gluon.jit
def _gather_rows(
    x_ptr, stride_xm, gather_ptr, tiles_ptr, count_ptr, a_bufs, ready, empty,
    K: gl.constexpr, N_BLOCKS: gl.constexpr, TOP_K: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr, WARPS: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    """The cp.async warps: rows of x by token, 16 bytes a copy. Rows past the expert's end repeat its last."""
    EACH: gl.constexpr = 128 // x_ptr.dtype.element_ty.primitive_bitwidth
    L: gl.constexpr = gl.BlockedLayout([1, EACH], [32 // (BLOCK_K // EACH), BLOCK_K // EACH], [WARPS, 1], [1, 0])
    r = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, L))
    c = gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, L))
    tiles = gl.load(count_ptr)
    it = 0
    for t in range(gl.program_id(0), tiles * N_BLOCKS, gl.num_programs(0)):
        tile, block = _tile_of(t, tiles, N_BLOCKS, GROUP_M)
        first = gl.load(tiles_ptr + tile * 4 + 1)
        end = gl.load(tiles_ptr + tile * 4 + 2)
        token = gl.load(gather_ptr + gl.minimum(first + r, end - 1)) // TOP_K
        rows = x_ptr + token.to(gl.int64)[:, None] * stride_xm + c[None, :]
        for k in range(0, K, BLOCK_K):
            s = it % STAGES
            mbarrier.wait(empty.index(s), ((it // STAGES) & 1) ^ 1)
            if K % BLOCK_K == 0:
                cp_async(a_bufs.index(s), rows + k)
            else:
                cp_async(a_bufs.index(s), rows + k, mask=(c < K - k)[None, :])
            cp_async_arrive(ready.index(s), increment_count=False)
            it += 1


@gluon.jit
def _halves(acc, INTERLEAVED: gl.constexpr):
    """acc [64, 256] as two [64, 128]: gate and up, or the left and the right columns; in registers."""
    if INTERLEAVED:
        left, right = acc.reshape((64, 128, 2)).split()
    else:
        left, right = acc.reshape((64, 2, 128)).permute((0, 2, 1)).split()
    return left, right


@gluon.jit
def _in_order(value, INTERLEAVED: gl.constexpr, STORE: gl.constexpr):
    """value [64, 128] with its columns back in the order of w's rows, eight neighbours a thread; in registers."""
    if INTERLEAVED:
        value = value.reshape((64, 4, 8, 4)).permute((0, 1, 3, 2))
    else:
        value = value.reshape((64, 4, 4, 4, 2)).permute((0, 1, 3, 2, 4))
    return gl.convert_layout(value.reshape((64, 128)), STORE)


@gluon.jit
def _scaled(
    value, n, row0, e, x_row, slot, x_scale_ptr, w_scale_ptr, bias_ptr, probs_ptr,
    N: gl.constexpr, W_ROWS: gl.constexpr, STEP: gl.constexpr, QUANT: gl.constexpr, STATIC_SCALE: gl.constexpr,
):  # fmt: skip
    """value [64, 128] times the scales that do not vary along K and the router's weight on the input, plus the bias."""
    row = e * W_ROWS + row0 + gl.minimum(n, N - 1) * STEP
    if QUANT == "fp8_tensor":
        value *= gl.load(w_scale_ptr + e)
    if QUANT == "fp8_channel":
        value *= gl.load(w_scale_ptr + row)[None, :]
    if STATIC_SCALE:
        value *= gl.load(x_scale_ptr)
    elif QUANT == "fp8_tensor" or QUANT == "fp8_channel":
        value *= gl.load(x_scale_ptr + x_row)[:, None]
    if probs_ptr is not None:
        value *= gl.load(probs_ptr + slot).to(gl.float32)[:, None]
    if bias_ptr is not None:
        value += gl.load(bias_ptr + row).to(gl.float32)[None, :]
    return value


@gluon.jit
def _write(
    y, n, y_row, keep, group, y_ptr, y_scale_ptr, N: gl.constexpr, OUT_QUANT: gl.constexpr
):
    """Stores y [64, 128], quantised if OUT_QUANT says so."""
    where = y_ptr + y_row.to(gl.int64)[:, None] * N + n[None, :]
    mask = keep[:, None] & (n < N)[None, :]
    if OUT_QUANT == "static":
        y = y / gl.load(y_scale_ptr)
    elif OUT_QUANT == "block":
        scale = gl.maximum(gl.max(gl.abs(gl.where((n < N)[None, :], y, 0.0)), 1), 1e-10) / 448.0
        gl.store(y_scale_ptr + y_row.to(gl.int64) * ((N + 127) // 128) + group, scale, mask=keep)
        y = y / scale[:, None]
    if OUT_QUANT != "":
        y = gl.minimum(gl.maximum(y, -448.0), 448.0)
    gl.store(where, y.to(y_ptr.dtype.element_ty), mask=mask)


@gluon.jit
def _multiply(
    half: gl.constexpr, y_ptr, gather_ptr, tiles_ptr, count_ptr, x_scale_ptr, w_scale_ptr, y_scale_ptr, bias_ptr, probs_ptr,
    w_bufs, a_bufs, ready, empty,
    N: gl.constexpr, K: gl.constexpr, TOP_K: gl.constexpr, GATHER: gl.constexpr, SCATTER: gl.constexpr, GATE: gl.constexpr,
    GATED: gl.constexpr, INTERLEAVED: gl.constexpr, ALPHA: gl.constexpr, BETA: gl.constexpr, LIMIT: gl.constexpr,
    QUANT: gl.constexpr, STATIC_SCALE: gl.constexpr, SPLIT_SCALE: gl.constexpr, OUT_QUANT: gl.constexpr,
    N_BLOCKS: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    """A warpgroup that multiplies rows 64 * half ... of every tile and writes them."""
    STORE: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [8, 0], [0, 32], [0, 64]], [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]],
        [], [64, 128],
    )  # fmt: skip
    WIDTH: gl.constexpr = 128 if QUANT == "fp8_block" else 256
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 256 // a_bufs.dtype.primitive_bitwidth])
    Y_BLOCK: gl.constexpr = 128 if GATED else 256
    W_ROWS: gl.constexpr = 2 * N if GATED else N
    K_BLOCKS: gl.constexpr = (K + 127) // 128
    tiles = gl.load(count_ptr)
    it = 0
    for t in range(gl.program_id(0), tiles * N_BLOCKS, gl.num_programs(0)):
        tile, block = _tile_of(t, tiles, N_BLOCKS, GROUP_M)
        e = gl.load(tiles_ptr + tile * 4)
        first = gl.load(tiles_ptr + tile * 4 + 1)
        end = gl.load(tiles_ptr + tile * 4 + 2)
        if QUANT == "fp8_block":
            # Each half of the weight rows lies in one row of scale blocks: a scalar serves it.
            if SPLIT_SCALE:
                BLOCKS: gl.constexpr = 2 * ((N + 127) // 128)
                UP: gl.constexpr = (N + 127) // 128
            else:
                BLOCKS: gl.constexpr = (W_ROWS + 127) // 128
                UP: gl.constexpr = N // 128 if GATED else 1
            ws = w_scale_ptr + (e * BLOCKS + block * (Y_BLOCK // 128)) * K_BLOCKS
            m = gl.minimum(first + half * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, MMA)), end - 1)
            if GATHER:
                m = gl.load(gather_ptr + m) // TOP_K
            xs = x_scale_ptr + m.to(gl.int64) * K_BLOCKS
            zeros = gl.zeros((64, 128), gl.float32, layout=MMA)
            left = zeros
            right = zeros
            x_next = gl.load(xs)
            left_next = gl.load(ws)
            right_next = gl.load(ws + UP * K_BLOCKS)
            for kb in range(0, K_BLOCKS):
                s = it % STAGES
                x_now = x_next
                left_now = left_next
                right_now = right_next
                ahead = gl.minimum(kb + 1, K_BLOCKS - 1)
                x_next = gl.load(xs + ahead)
                left_next = gl.load(ws + ahead)
                right_next = gl.load(ws + UP * K_BLOCKS + ahead)
                mbarrier.wait(ready.index(s), (it // STAGES) & 1)
                if GATHER:
                    fence_async_shared()
                a = a_bufs.index(s).slice(half * 64, 64, dim=0)
                w = w_bufs.index(s).reshape((256, BLOCK_K))
                part = warpgroup_mma(a, w.slice(0, 128, dim=0).permute((1, 0)), zeros, use_acc=False, is_async=True)
                part = warpgroup_mma_wait(0, deps=(part,))
                left += part * (x_now * left_now)[:, None]
                part = warpgroup_mma(a, w.slice(128, 128, dim=0).permute((1, 0)), zeros, use_acc=False, is_async=True)
                part = warpgroup_mma_wait(0, deps=(part,))
                mbarrier.arrive(empty.index(s), count=1)
                right += part * (x_now * right_now)[:, None]
                it += 1
        else:
            acc = warpgroup_mma_init(gl.zeros((64, 256), gl.float32, layout=MMA))
            for k in range(0, K, BLOCK_K):
                s = it % STAGES
                mbarrier.wait(ready.index(s), (it // STAGES) & 1)
                if GATHER:
                    fence_async_shared()
                a = a_bufs.index(s).slice(half * 64, 64, dim=0)
                w = w_bufs.index(s).reshape((256, BLOCK_K))
                acc = warpgroup_mma(a, w.permute((1, 0)), acc, use_acc=k > 0, is_async=True)
                acc = warpgroup_mma_init(warpgroup_mma_wait(1, deps=(acc,)))
                mbarrier.arrive(empty.index((it + STAGES - 1) % STAGES), count=1, pred=k > 0)
                it += 1
            done = warpgroup_mma_wait(0, deps=(acc,))
            mbarrier.arrive(empty.index((it + STAGES - 1) % STAGES), count=1)
            left, right = _halves(done, INTERLEAVED)

        r = first + half * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, STORE))
        keep = r < end
        m = gl.minimum(r, end - 1)
        slot = m
        if GATHER or SCATTER or (probs_ptr is not None):
            slot = gl.load(gather_ptr + m)
        x_row = slot // TOP_K if GATHER else m
        y_row = slot if SCATTER else m
        e = e.to(gl.int64)
        left = _in_order(left, INTERLEAVED, STORE)
        right = _in_order(right, INTERLEAVED, STORE)
        n = block * Y_BLOCK + gl.arange(0, 128, layout=gl.SliceLayout(0, STORE))
        STEP: gl.constexpr = 2 if INTERLEAVED else 1
        left = _scaled(left, n, 0, e, x_row, slot, x_scale_ptr, w_scale_ptr, bias_ptr, probs_ptr, N, W_ROWS, STEP, QUANT,
                       STATIC_SCALE)  # fmt: skip
        if GATED:
            UP_ROW: gl.constexpr = 1 if INTERLEAVED else N
            right = _scaled(right, n, UP_ROW, e, x_row, slot, x_scale_ptr, w_scale_ptr, bias_ptr, probs_ptr, N, W_ROWS,
                            STEP, QUANT, STATIC_SCALE)  # fmt: skip
            y = gated_value(left, right, GATE, ALPHA, BETA, LIMIT)
            _write(y, n, y_row, keep, block, y_ptr, y_scale_ptr, N, OUT_QUANT)
        else:
            if GATE != "":
                left = gate_value(left, GATE, ALPHA)
            _write(left, n, y_row, keep, block * 2, y_ptr, y_scale_ptr, N, OUT_QUANT)
            n += 128
            right = _scaled(right, n, 0, e, x_row, slot, x_scale_ptr, w_scale_ptr, bias_ptr, probs_ptr, N, W_ROWS, STEP,
                            QUANT, STATIC_SCALE)  # fmt: skip
            if GATE != "":
                right = gate_value(right, GATE, ALPHA)
            _write(right, n, y_row, keep, block * 2 + 1, y_ptr, y_scale_ptr, N, OUT_QUANT)


@gluon.jit
def _hopper_gemm_kernel(
    x_ptr,  # [X, K]
    a_desc,  # x by TMA where rows need no gathering, else None
    w_desc,  # see _weight_view
    y_ptr,  # [R, N]
    gather_ptr,  # [R]
    tiles_ptr,  # [max_tiles, 4]
    count_ptr,  # [1], row tiles
    x_scale_ptr,  # [1], [X] or [X, K / 128]
    w_scale_ptr,  # [E], [E, rows] or [E, rows / 128, K / 128]
    y_scale_ptr,  # [1] or [R, N / 128]
    bias_ptr,  # [E, N or 2N]
    probs_ptr,  # [R]
    stride_xm,
    N: gl.constexpr,
    K: gl.constexpr,
    TOP_K: gl.constexpr,
    GATHER: gl.constexpr,
    SCATTER: gl.constexpr,
    GATE: gl.constexpr,
    GATED: gl.constexpr,
    INTERLEAVED: gl.constexpr,
    ALPHA: gl.constexpr,
    BETA: gl.constexpr,
    LIMIT: gl.constexpr,
    QUANT: gl.constexpr,
    STATIC_SCALE: gl.constexpr,
    SPLIT_SCALE: gl.constexpr,
    OUT_QUANT: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP_M: gl.constexpr,
    GATHER_WARPS: gl.constexpr,
    PDL: gl.constexpr,
):
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    gl.static_assert(BLOCK_M == 128)
    gl.static_assert(BLOCK_N == 256)
    N_BLOCKS: gl.constexpr = (N + (127 if GATED else 255)) // (128 if GATED else 256)
    item = w_desc.dtype
    w_box: gl.constexpr = w_desc.block_type.shape
    BOXES: gl.constexpr = 256 // (w_box[1] * 8)
    A_LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, item.primitive_bitwidth, 2)
    a_bufs = gl.allocate_shared_memory(item, [STAGES, BLOCK_M, BLOCK_K], A_LAYOUT)
    w_bufs = gl.allocate_shared_memory(item, [STAGES, BOXES, w_box[1], w_box[2], w_box[3], BLOCK_K], w_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(ready.index(s), count=1 + (GATHER_WARPS * 32 if GATHER else 0))
        mbarrier.init(empty.index(s), count=2)
    BYTES: gl.constexpr = (BLOCK_N + (0 if GATHER else BLOCK_M)) * BLOCK_K * item.primitive_bitwidth // 8
    HALVES: gl.constexpr = 2 if GATED else 1
    if GATHER:
        gl.warp_specialize([
            (_multiply, (
                0, y_ptr, gather_ptr, tiles_ptr, count_ptr, x_scale_ptr, w_scale_ptr, y_scale_ptr, bias_ptr, probs_ptr, w_bufs,
                a_bufs, ready, empty, N, K, TOP_K, GATHER, SCATTER, GATE, GATED, INTERLEAVED, ALPHA, BETA, LIMIT, QUANT,
                STATIC_SCALE, SPLIT_SCALE, OUT_QUANT, N_BLOCKS, BLOCK_K, STAGES, GROUP_M,
            )),
            (_multiply, (
                1, y_ptr, gather_ptr, tiles_ptr, count_ptr, x_scale_ptr, w_scale_ptr, y_scale_ptr, bias_ptr, probs_ptr, w_bufs,
                a_bufs, ready, empty, N, K, TOP_K, GATHER, SCATTER, GATE, GATED, INTERLEAVED, ALPHA, BETA, LIMIT, QUANT,
                STATIC_SCALE, SPLIT_SCALE, OUT_QUANT, N_BLOCKS, BLOCK_K, STAGES, GROUP_M,
            )),
            (_gather_rows, (
                x_ptr, stride_xm, gather_ptr, tiles_ptr, count_ptr, a_bufs, ready, empty, K, N_BLOCKS, TOP_K, BLOCK_M, BLOCK_K,
                STAGES, GATHER_WARPS, GROUP_M,
            )),
            (_load_weights, (
                w_desc, a_desc, tiles_ptr, count_ptr, w_bufs, a_bufs, ready, empty, N, K, N_BLOCKS, HALVES, GATHER, BLOCK_K, BYTES,
                STAGES, GROUP_M,
            )),
        ], [4, GATHER_WARPS, 1], [216, 72, 72])  # fmt: skip
    else:
        gl.warp_specialize([
            (_multiply, (
                0, y_ptr, gather_ptr, tiles_ptr, count_ptr, x_scale_ptr, w_scale_ptr, y_scale_ptr, bias_ptr, probs_ptr, w_bufs,
                a_bufs, ready, empty, N, K, TOP_K, GATHER, SCATTER, GATE, GATED, INTERLEAVED, ALPHA, BETA, LIMIT, QUANT,
                STATIC_SCALE, SPLIT_SCALE, OUT_QUANT, N_BLOCKS, BLOCK_K, STAGES, GROUP_M,
            )),
            (_multiply, (
                1, y_ptr, gather_ptr, tiles_ptr, count_ptr, x_scale_ptr, w_scale_ptr, y_scale_ptr, bias_ptr, probs_ptr, w_bufs,
                a_bufs, ready, empty, N, K, TOP_K, GATHER, SCATTER, GATE, GATED, INTERLEAVED, ALPHA, BETA, LIMIT, QUANT,
                STATIC_SCALE, SPLIT_SCALE, OUT_QUANT, N_BLOCKS, BLOCK_K, STAGES, GROUP_M,
            )),
            (_load_weights, (
                w_desc, a_desc, tiles_ptr, count_ptr, w_bufs, a_bufs, ready, empty, N, K, N_BLOCKS, HALVES, GATHER, BLOCK_K, BYTES,
                STAGES, GROUP_M,
            )),
        ], [4, 1], [216, 72])  # fmt: skip


OPTIONAL = ("x_scale", "w_scale", "y_scale", "bias", "probs")
REGISTERS = 168  # a thread, before the roles trade theirs: 12 warps have 65536 between them


def _swizzled(block: list[int], item_bytes: int):
    return gl.NVMMASharedLayout(128, 8 * item_bytes, len(block))


def _weight_box(product: Product, config: GemmConfig) -> list[int]:
    """Rows of one TMA load as [boxes, 2g, 8l, c] of w's row order (see above), by block_k."""
    interleaved = product.gated and product.activation.interleaved
    return [4 if product.gated else 8, 8 if interleaved else 4, 4, 2, config.block_k]


def _weight_view(w, product: Product, config: GemmConfig) -> TensorDescriptor:
    """w [E, rows, K] as a rank-5 TMA view whose box lands in the order that WGMMA's accumulator wants."""
    if not w.is_contiguous():
        raise ShapeError(f"w {tuple(w.shape)} has strides {w.stride()}: its TMA view needs contiguous weights")
    k = w.shape[2]
    box = _weight_box(product, config)
    unit = box[1] * 8  # rows that are reordered among themselves
    shape = [w.shape[0] * w.shape[1] // unit, box[1], 4, 2, k]
    strides = [unit * k, 2 * k, 2 * box[1] * k, k, 1]
    return TensorDescriptor(w, shape, strides, box, _swizzled(box, w.element_size()))


def _row_view(x, config: GemmConfig) -> TensorDescriptor:
    box = [config.block_m, config.block_k]
    return TensorDescriptor(x, list(x.shape), [x.stride(0), 1], box, _swizzled(box, x.element_size()))


def hopper_gemm(x, w, routing: Routing, config: GemmConfig, product: Product, y, *, pdl=False, **tensors):
    """y[r] = epilogue(x[row(r)] @ w[e(r)].T) for every routed row r, by a persistent block on every SM.

    Shapes    x [X, K] | w [E, product.w_rows, K] contiguous -> y [R, product.n] contiguous
    Dtypes    bf16, fp16, or e4m3 with scales (product.quant); fp32 accumulation, one rounding at the store
    Tensors   x_scale, w_scale, y_scale, bias, probs as the product needs them
    Needs     a tile of 128 x 256 x 128 bytes; rows of w a multiple of 16 bytes; product.n a multiple of 32; with
              fp8_block, gate and up rows in scale blocks of their own
    Raises    ShapeError when Needs does not hold
    """
    product.check(config, routing.block_m)
    blocks = -(-product.n // product.y_block(config))
    programs = torch.cuda.get_device_properties(x.device).multi_processor_count
    rows = (x, None) if product.gather else (None, _row_view(x, config))
    _hopper_gemm_kernel[(min(programs, routing.tiles.shape[0] * blocks),)](
        *rows, _weight_view(w, product, config), y, routing.gather, routing.tiles, routing.tile_count,
        *(tensors.get(name) for name in OPTIONAL), x.stride(0), **_constants(product, config, pdl), **_options(pdl),
    )  # fmt: skip
    return y


def _constants(product: Product, config: GemmConfig, pdl: bool) -> dict:
    found = product.constants(config, pdl) | {"GATHER_WARPS": GATHER_WARPS}
    return {name: value for name, value in found.items() if name in _hopper_gemm_kernel.arg_names}


def _options(pdl: bool) -> dict:
    return dict(num_warps=4, maxnreg=REGISTERS, **({"launch_pdl": True} if pdl else {}))


def signature(config: GemmConfig, product: Product, pdl: bool = True) -> Specialization:
    """What hopper_gemm asks the compiler for with this tile and product."""
    found = gemm_specialization(_hopper_gemm_kernel, product, config, pdl)
    item = found.types["w_ptr"].removeprefix("*")
    item_bytes = 1 if item == "fp8e4nv" else 2
    constants = _constants(product, config, pdl) | {k: None for k, v in found.constants.items() if v is None}
    constants |= {"a_desc": None} if product.gather else {"x_ptr": None}

    def descriptor(box):
        return f"tensordesc<{item}[{', '.join(map(str, box))}],{_swizzled(box, item_bytes)!r}>"

    types = found.types | dict(count_ptr="*i32", w_desc=descriptor(_weight_box(product, config)))
    types["a_desc"] = descriptor([config.block_m, config.block_k])
    types |= dict.fromkeys(constants, "constexpr")
    types = {name: types[name] for name in _hopper_gemm_kernel.arg_names}
    constants = {name: value for name, value in constants.items() if name in types}
    aligned = tuple(name for name, kind in types.items() if kind.startswith("*") or name == "stride_xm")
    return Specialization(_hopper_gemm_kernel, types, constants, aligned, _options(pdl))
