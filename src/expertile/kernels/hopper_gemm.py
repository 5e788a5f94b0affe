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
from ..problem import BLOCK, Quant
from ..routing import Routing
from .gluon_versions import cp_async, cp_async_commit, cp_async_wait, tma_load
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
    w_desc, a_desc, tiles_ptr, count_ptr, next_ptr, w_bufs, a_bufs, ready, empty, steps, told, heard,
    N: gl.constexpr, K: gl.constexpr, N_BLOCKS: gl.constexpr, HALVES: gl.constexpr, GATHER: gl.constexpr,
    BLOCK_K: gl.constexpr, W_BYTES: gl.constexpr, A_BYTES: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    """The TMA warp: takes the next tile from the counter that all blocks share and tells the other warps, then asks for its
    weights, and for rows of h where they need no gathering."""
    BOXES: gl.constexpr = w_desc.block_type.shape[0]
    ROWS: gl.constexpr = BOXES * w_desc.block_type.shape[1] * 8  # rows of w in one box
    UNIT: gl.constexpr = w_desc.block_type.shape[1] * 8
    LOADS: gl.constexpr = 256 // ROWS
    EXPERT_ROWS: gl.constexpr = N * HALVES
    tiles = gl.load(count_ptr)
    total = tiles * N_BLOCKS
    WARP: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    it = 0
    n = 0
    t = gl.program_id(0)
    while t < total:
        _tell(steps, told, heard, n, t, WARP)
        n += 1
        t_next = gl.num_programs(0) + gl.atomic_add(next_ptr, 1, sem="relaxed")
        tile, block = _tile_of(t, tiles, N_BLOCKS, GROUP_M)
        row = gl.load(tiles_ptr + tile * 4) * EXPERT_ROWS + block * ROWS
        first = gl.load(tiles_ptr + tile * 4 + 1)
        full = gl.load(tiles_ptr + tile * 4 + 2) - first > 64
        for k in range(0, K, BLOCK_K):
            s = it % STAGES
            mbarrier.wait(empty.index(s), ((it // STAGES) & 1) ^ 1)
            if GATHER:
                mbarrier.expect(ready.index(s), W_BYTES)
            elif full:
                mbarrier.expect(ready.index(s), W_BYTES + 2 * A_BYTES)
            else:
                mbarrier.expect(ready.index(s), W_BYTES + A_BYTES)
            for half in gl.static_range(LOADS):
                box = w_bufs.index(s).slice(half * BOXES, BOXES, dim=0)
                tma_load(w_desc, [(row + half * N) // UNIT, 0, 0, 0, k], ready.index(s), box)
            if not GATHER:
                tma_load(a_desc, [first, k], ready.index(s), a_bufs.index(s).slice(0, 64, dim=0))
                if full:
                    tma_load(a_desc, [first + 64, k], ready.index(s), a_bufs.index(s).slice(64, 64, dim=0))
            it += 1
        t = t_next
    _tell(steps, told, heard, n, total, WARP)


@gluon.jit
def _tell(steps, told, heard, n, t, LAYOUT: gl.constexpr):
    mbarrier.wait(heard.index(n % 2), ((n // 2) & 1) ^ 1)
    steps.index(n % 2).store(gl.full([1], 0, gl.int32, layout=LAYOUT) + t)
    mbarrier.arrive(told.index(n % 2), count=1)


@gluon.jit
def _hear(steps, told, heard, n, WARPS: gl.constexpr):
    """The n-th tile of this block."""
    mbarrier.wait(told.index(n % 2), (n // 2) & 1)
    t = gl.max(steps.index(n % 2).load(gl.BlockedLayout([1], [32], [WARPS], [0])), 0)
    mbarrier.arrive(heard.index(n % 2), count=1)
    return t


@gluon.jit
def _gather_rows(
    x_ptr, stride_xm, gather_ptr, tiles_ptr, count_ptr, a_bufs, ready, empty, steps, told, heard,
    K: gl.constexpr, N_BLOCKS: gl.constexpr, TOP_K: gl.constexpr, BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr, WARPS: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    """The cp.async warps: rows of x by token, 16 bytes a copy. Rows past the expert's end repeat its last.

    A stage is handed over LAG steps after its copies were issued, when they have landed: the fence that shows them to WGMMA
    is then paid here and not by the warps that multiply.
    """
    EACH: gl.constexpr = 128 // x_ptr.dtype.element_ty.primitive_bitwidth
    L: gl.constexpr = gl.BlockedLayout([1, EACH], [32 // (BLOCK_K // EACH), BLOCK_K // EACH], [WARPS, 1], [1, 0])
    LAG: gl.constexpr = STAGES // 2
    r = gl.arange(0, 64, layout=gl.SliceLayout(1, L))
    c = gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, L))
    tiles = gl.load(count_ptr)
    it = 0
    n = 0
    t = _hear(steps, told, heard, n, WARPS)
    while t < tiles * N_BLOCKS:
        tile, block = _tile_of(t, tiles, N_BLOCKS, GROUP_M)
        first = gl.load(tiles_ptr + tile * 4 + 1)
        end = gl.load(tiles_ptr + tile * 4 + 2)
        upper = gl.load(gather_ptr + gl.minimum(first + r, end - 1)) // TOP_K * (stride_xm // EACH)
        lower = gl.load(gather_ptr + gl.minimum(first + 64 + r, end - 1)) // TOP_K * (stride_xm // EACH)
        for k in range(0, K, BLOCK_K):
            s = it % STAGES
            mbarrier.wait(empty.index(s), ((it // STAGES) & 1) ^ 1)
            inside = (c < K - k)[None, :]
            rows = x_ptr + ((upper + k // EACH).to(gl.int64) * EACH)[:, None] + c[None, :]
            cp_async(a_bufs.index(s).slice(0, 64, dim=0), rows, mask=None if K % BLOCK_K == 0 else inside)
            if end - first > 64:
                rows = x_ptr + ((lower + k // EACH).to(gl.int64) * EACH)[:, None] + c[None, :]
                cp_async(a_bufs.index(s).slice(64, 64, dim=0), rows, mask=None if K % BLOCK_K == 0 else inside)
            cp_async_commit()
            if it >= LAG:
                _hand_over(ready, it - LAG, LAG, STAGES)
            it += 1
        n += 1
        t = _hear(steps, told, heard, n, WARPS)
    for late in gl.static_range(LAG):
        if it >= LAG - late:
            _hand_over(ready, it - LAG + late, LAG - 1 - late, STAGES)


@gluon.jit
def _hand_over(ready, step, PENDING: gl.constexpr, STAGES: gl.constexpr):
    cp_async_wait(PENDING)
    fence_async_shared()
    mbarrier.arrive(ready.index(step % STAGES), count=1)


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
    first = e * W_ROWS + row0
    if QUANT == "fp8_tensor":
        value *= gl.load(w_scale_ptr + e)
    if QUANT == "fp8_channel":
        value *= gl.load(w_scale_ptr + first + n * STEP, mask=n < N, other=0.0)[None, :]
    if STATIC_SCALE:
        value *= gl.load(x_scale_ptr)
    elif QUANT == "fp8_tensor" or QUANT == "fp8_channel":
        value *= gl.load(x_scale_ptr + x_row)[:, None]
    if probs_ptr is not None:
        value *= gl.load(probs_ptr + slot).to(gl.float32)[:, None]
    if bias_ptr is not None:
        value += gl.load(bias_ptr + first + n * STEP, mask=n < N, other=0.0).to(gl.float32)[None, :]
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
def _sum(half: gl.constexpr, w_bufs, a_bufs, ready, empty, it, K: gl.constexpr, INTERLEAVED: gl.constexpr,
         BLOCK_K: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """(left, right, it): 64 rows of x times the 256 weight rows of a tile, one product always in flight."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 256 // a_bufs.dtype.primitive_bitwidth])
    acc = warpgroup_mma_init(gl.zeros((64, 256), gl.float32, layout=MMA))
    for k in range(0, K, BLOCK_K):
        s = it % STAGES
        mbarrier.wait(ready.index(s), (it // STAGES) & 1)
        a = a_bufs.index(s).slice(half * 64, 64, dim=0)
        w = w_bufs.index(s).reshape((256, BLOCK_K))
        acc = warpgroup_mma(a, w.permute((1, 0)), acc, use_acc=k > 0, is_async=True)
        acc = warpgroup_mma_init(warpgroup_mma_wait(1, deps=(acc,)))
        mbarrier.arrive(empty.index((it + STAGES - 1) % STAGES), count=1, pred=k > 0)
        it += 1
    done = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(empty.index((it + STAGES - 1) % STAGES), count=1)
    left, right = _halves(done, INTERLEAVED)
    return left, right, it


@gluon.jit
def _sum_of_blocks(
    half: gl.constexpr, w_bufs, a_bufs, ready, empty, it, block, e, first, end, gather_ptr, x_scale_ptr, w_scale_ptr,
    N: gl.constexpr, K: gl.constexpr, TOP_K: gl.constexpr, GATHER: gl.constexpr, GATED: gl.constexpr,
    SPLIT_SCALE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The same with fp8_block's scales: each 128 values along K are promoted with theirs.

    Two halves of 128 weight rows, so that the sums and one product fit the registers; each half lies in one row of scale
    blocks, a scalar serves it. Meanwhile the other warpgroup multiplies.
    """
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    K_BLOCKS: gl.constexpr = (K + 127) // 128
    Y_BLOCKS: gl.constexpr = 1 if GATED else 2
    ROWS: gl.constexpr = 2 * N if GATED else N
    UP: gl.constexpr = (N + 127) // 128 if GATED else 1  # rows of scale blocks from the left half to the right
    IN_ALL: gl.constexpr = 2 * UP if SPLIT_SCALE else (ROWS + 127) // 128
    ws = w_scale_ptr + (e * IN_ALL + block * Y_BLOCKS) * K_BLOCKS
    row = gl.minimum(first + half * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, MMA)), end - 1)
    if GATHER:
        row = gl.load(gather_ptr + row) // TOP_K
    xs = x_scale_ptr + row.to(gl.int64) * K_BLOCKS
    zeros = gl.zeros((64, 128), gl.float32, layout=MMA)
    left = zeros
    right = zeros
    for kb in range(0, K_BLOCKS):
        s = it % STAGES
        x_now = gl.load(xs + kb)  # on their way while the first product runs
        left_now = gl.load(ws + kb)
        right_now = gl.load(ws + UP * K_BLOCKS + kb)
        mbarrier.wait(ready.index(s), (it // STAGES) & 1)
        a = a_bufs.index(s).slice(half * 64, 64, dim=0)
        w = w_bufs.index(s).reshape((256, 128))
        part = warpgroup_mma(a, w.slice(0, 128, dim=0).permute((1, 0)), zeros, use_acc=False, is_async=True)
        part = warpgroup_mma_wait(0, deps=(part,))
        left += part * (x_now * left_now)[:, None]
        part = warpgroup_mma(a, w.slice(128, 128, dim=0).permute((1, 0)), zeros, use_acc=False, is_async=True)
        part = warpgroup_mma_wait(0, deps=(part,))
        mbarrier.arrive(empty.index(s), count=1)
        right += part * (x_now * right_now)[:, None]
        it += 1
    return left, right, it


@gluon.jit
def _finish(
    left, right, half: gl.constexpr, tile, block, e, first, end, tiles_ptr, y_ptr, gather_ptr, x_scale_ptr, w_scale_ptr, y_scale_ptr,
    bias_ptr, probs_ptr,
    N: gl.constexpr, TOP_K: gl.constexpr, GATHER: gl.constexpr, SCATTER: gl.constexpr, GATE: gl.constexpr,
    GATED: gl.constexpr, INTERLEAVED: gl.constexpr, ALPHA: gl.constexpr, BETA: gl.constexpr, LIMIT: gl.constexpr,
    QUANT: gl.constexpr, STATIC_SCALE: gl.constexpr, OUT_QUANT: gl.constexpr,
):  # fmt: skip
    """Scales, bias, activation and store of 64 rows; no shared memory, no other warpgroup waited for."""
    STORE: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [8, 0], [0, 32], [0, 64]], [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]],
        [], [64, 128],
    )  # fmt: skip
    Y_BLOCK: gl.constexpr = 128 if GATED else 256
    W_ROWS: gl.constexpr = 2 * N if GATED else N
    STEP: gl.constexpr = 2 if INTERLEAVED else 1
    if GATHER:  # read again: registers are scarce while the sums run
        e = gl.load(tiles_ptr + tile * 4)
        first = gl.load(tiles_ptr + tile * 4 + 1)
        end = gl.load(tiles_ptr + tile * 4 + 2)
    e = e.to(gl.int64)
    row = first + half * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, STORE))
    keep = row < end
    m = gl.minimum(row, end - 1)
    slot = m
    if GATHER or SCATTER or (probs_ptr is not None):
        slot = gl.load(gather_ptr + m)
    x_row = slot // TOP_K if GATHER else m
    y_row = slot if SCATTER else m
    left = _in_order(left, INTERLEAVED, STORE)
    right = _in_order(right, INTERLEAVED, STORE)
    n = block * Y_BLOCK + gl.arange(0, 128, layout=gl.SliceLayout(0, STORE))
    left = _scaled(left, n, 0, e, x_row, slot, x_scale_ptr, w_scale_ptr, bias_ptr, probs_ptr, N, W_ROWS, STEP, QUANT,
                   STATIC_SCALE)  # fmt: skip
    if GATED:
        UP_ROW: gl.constexpr = 1 if INTERLEAVED else N
        right = _scaled(right, n, UP_ROW, e, x_row, slot, x_scale_ptr, w_scale_ptr, bias_ptr, probs_ptr, N, W_ROWS, STEP,
                        QUANT, STATIC_SCALE)  # fmt: skip
        y = gated_value(left, right, GATE, ALPHA, BETA, LIMIT)
        _write(y, n, y_row, keep, block, y_ptr, y_scale_ptr, N, OUT_QUANT)
    else:
        if GATE != "":
            left = gate_value(left, GATE, ALPHA)
        _write(left, n, y_row, keep, block * 2, y_ptr, y_scale_ptr, N, OUT_QUANT)
        n += 128
        right = _scaled(right, n, 0, e, x_row, slot, x_scale_ptr, w_scale_ptr, bias_ptr, probs_ptr, N, W_ROWS, STEP, QUANT,
                        STATIC_SCALE)  # fmt: skip
        if GATE != "":
            right = gate_value(right, GATE, ALPHA)
        _write(right, n, y_row, keep, block * 2 + 1, y_ptr, y_scale_ptr, N, OUT_QUANT)


@gluon.jit
def _multiply(
    half: gl.constexpr, y_ptr, gather_ptr, tiles_ptr, count_ptr, x_scale_ptr, w_scale_ptr, y_scale_ptr, bias_ptr, probs_ptr,
    w_bufs, a_bufs, ready, empty, steps, told, heard,
    N: gl.constexpr, K: gl.constexpr, TOP_K: gl.constexpr, GATHER: gl.constexpr, SCATTER: gl.constexpr, GATE: gl.constexpr,
    GATED: gl.constexpr, INTERLEAVED: gl.constexpr, ALPHA: gl.constexpr, BETA: gl.constexpr, LIMIT: gl.constexpr,
    QUANT: gl.constexpr, STATIC_SCALE: gl.constexpr, SPLIT_SCALE: gl.constexpr, OUT_QUANT: gl.constexpr,
    N_BLOCKS: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    """A warpgroup: rows 64 * half ... of every tile, from the ring to y."""
    tiles = gl.load(count_ptr)
    it = 0
    n = 0
    t = _hear(steps, told, heard, n, 4)
    while t < tiles * N_BLOCKS:
        tile, block = _tile_of(t, tiles, N_BLOCKS, GROUP_M)
        e = gl.load(tiles_ptr + tile * 4)
        first = gl.load(tiles_ptr + tile * 4 + 1)
        end = gl.load(tiles_ptr + tile * 4 + 2)
        if first + half * 64 < end:
            if QUANT == "fp8_block":
                left, right, it = _sum_of_blocks(half, w_bufs, a_bufs, ready, empty, it, block, e, first, end, gather_ptr,
                                                 x_scale_ptr, w_scale_ptr, N, K, TOP_K, GATHER, GATED, SPLIT_SCALE, STAGES)
            else:
                left, right, it = _sum(half, w_bufs, a_bufs, ready, empty, it, K, INTERLEAVED, BLOCK_K, STAGES)
            _finish(left, right, half, tile, block, e, first, end, tiles_ptr, y_ptr, gather_ptr, x_scale_ptr, w_scale_ptr, y_scale_ptr,
                    bias_ptr, probs_ptr, N, TOP_K, GATHER, SCATTER, GATE, GATED, INTERLEAVED, ALPHA, BETA, LIMIT, QUANT,
                    STATIC_SCALE, OUT_QUANT)  # fmt: skip
        else:
            for _ in range(0, K, BLOCK_K):  # a short tile has nothing for the second half but stages to pass on
                mbarrier.wait(ready.index(it % STAGES), (it // STAGES) & 1)
                mbarrier.arrive(empty.index(it % STAGES), count=1)
                it += 1
        n += 1
        t = _hear(steps, told, heard, n, 4)


@gluon.jit(do_not_specialize_on_alignment=["next_ptr"])
def _hopper_gemm_kernel(
    x_ptr,  # [X, K]
    a_desc,  # x by TMA where rows need no gathering, else None
    w_desc,  # see _weight_view
    y_ptr,  # [R, N]
    gather_ptr,  # [R]
    tiles_ptr,  # [max_tiles, 4]
    count_ptr,  # [1], row tiles
    next_ptr,  # [1], zero: tiles that were taken beyond the first of each block
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
    MULTIPLY_REGISTERS: gl.constexpr,
    LOAD_REGISTERS: gl.constexpr,
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
        mbarrier.init(ready.index(s), count=2 if GATHER else 1)
        mbarrier.init(empty.index(s), count=2)
    steps = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    told = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    heard = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for n in gl.static_range(2):
        mbarrier.init(told.index(n), count=1)
        mbarrier.init(heard.index(n), count=3 if GATHER else 2)
    W_BYTES: gl.constexpr = BLOCK_N * BLOCK_K * item.primitive_bitwidth // 8
    A_BYTES: gl.constexpr = 64 * BLOCK_K * item.primitive_bitwidth // 8
    HALVES: gl.constexpr = 2 if GATED else 1
    if GATHER:
        gl.warp_specialize([
            (_multiply, (
                0, y_ptr, gather_ptr, tiles_ptr, count_ptr, x_scale_ptr, w_scale_ptr, y_scale_ptr, bias_ptr, probs_ptr, w_bufs,
                a_bufs, ready, empty, steps, told, heard, N, K, TOP_K, GATHER, SCATTER, GATE, GATED, INTERLEAVED, ALPHA, BETA, LIMIT, QUANT,
                STATIC_SCALE, SPLIT_SCALE, OUT_QUANT, N_BLOCKS, BLOCK_K, STAGES, GROUP_M,
            )),
            (_multiply, (
                1, y_ptr, gather_ptr, tiles_ptr, count_ptr, x_scale_ptr, w_scale_ptr, y_scale_ptr, bias_ptr, probs_ptr, w_bufs,
                a_bufs, ready, empty, steps, told, heard, N, K, TOP_K, GATHER, SCATTER, GATE, GATED, INTERLEAVED, ALPHA, BETA, LIMIT, QUANT,
                STATIC_SCALE, SPLIT_SCALE, OUT_QUANT, N_BLOCKS, BLOCK_K, STAGES, GROUP_M,
            )),
            (_gather_rows, (
                x_ptr, stride_xm, gather_ptr, tiles_ptr, count_ptr, a_bufs, ready, empty, steps, told, heard, K, N_BLOCKS, TOP_K,
                BLOCK_K, STAGES, GATHER_WARPS, GROUP_M,
            )),
            (_load_weights, (
                w_desc, a_desc, tiles_ptr, count_ptr, next_ptr, w_bufs, a_bufs, ready, empty, steps, told, heard, N, K,
                N_BLOCKS, HALVES, GATHER, BLOCK_K, W_BYTES, A_BYTES, STAGES, GROUP_M,
            )),
        ], [4, GATHER_WARPS, 1], [MULTIPLY_REGISTERS, LOAD_REGISTERS, LOAD_REGISTERS])  # fmt: skip
    else:
        gl.warp_specialize([
            (_multiply, (
                0, y_ptr, gather_ptr, tiles_ptr, count_ptr, x_scale_ptr, w_scale_ptr, y_scale_ptr, bias_ptr, probs_ptr, w_bufs,
                a_bufs, ready, empty, steps, told, heard, N, K, TOP_K, GATHER, SCATTER, GATE, GATED, INTERLEAVED, ALPHA, BETA, LIMIT, QUANT,
                STATIC_SCALE, SPLIT_SCALE, OUT_QUANT, N_BLOCKS, BLOCK_K, STAGES, GROUP_M,
            )),
            (_multiply, (
                1, y_ptr, gather_ptr, tiles_ptr, count_ptr, x_scale_ptr, w_scale_ptr, y_scale_ptr, bias_ptr, probs_ptr, w_bufs,
                a_bufs, ready, empty, steps, told, heard, N, K, TOP_K, GATHER, SCATTER, GATE, GATED, INTERLEAVED, ALPHA, BETA, LIMIT, QUANT,
                STATIC_SCALE, SPLIT_SCALE, OUT_QUANT, N_BLOCKS, BLOCK_K, STAGES, GROUP_M,
            )),
            (_load_weights, (
                w_desc, a_desc, tiles_ptr, count_ptr, next_ptr, w_bufs, a_bufs, ready, empty, steps, told, heard, N, K,
                N_BLOCKS, HALVES, GATHER, BLOCK_K, W_BYTES, A_BYTES, STAGES, GROUP_M,
            )),
        ], [4, 1], [MULTIPLY_REGISTERS, LOAD_REGISTERS])  # fmt: skip


OPTIONAL = ("x_scale", "w_scale", "y_scale", "bias", "probs")
REGISTERS = 168  # a thread, before the roles trade theirs: 12 warps have 65536 between them

#: (gathering, fp8_block) -> registers of the second multiplying warpgroup, and of the loading warps; the first multiplying
#: one has what is left of three times 168. ptxas spills at other splits: tests/compile asks it.
ROLE_REGISTERS = {(True, False): (232, 40), (True, True): (216, 72), (False, False): (232, 40), (False, True): (224, 64)}


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
    box = [64, config.block_k]
    return TensorDescriptor(x, list(x.shape), [x.stride(0), 1], box, _swizzled(box, x.element_size()))


def hopper_gemm(
    x, w, routing: Routing, config: GemmConfig, product: Product, y, *, programs: int, pdl=False, **tensors
):
    """y[r] = epilogue(x[row(r)] @ w[e(r)].T) for every routed row r, by `programs` persistent blocks, one an SM.

    Shapes    x [X, K] | w [E, product.w_rows, K] contiguous -> y [R, product.n] contiguous
    Dtypes    bf16, fp16, or e4m3 with scales (product.quant); fp32 accumulation, one rounding at the store
    Tensors   x_scale, w_scale, y_scale, bias, probs as the product needs them
    Needs     routing.next_tile zero, as route_rows leaves it (it is used up); a tile of 128 x 256 x 128 bytes; rows of w a multiple of 16 bytes; product.n a multiple of 32; with
              fp8_block, gate and up rows in scale blocks of their own
    Raises    ShapeError when Needs does not hold
    """
    product.check(config, routing.block_m)
    _check(x, w, product, config)
    blocks = -(-product.n // product.y_block(config))
    next_tile = routing.next_tile[0 if product.gather else 1 :]
    rows = (x, None) if product.gather else (None, _row_view(x, config))
    _hopper_gemm_kernel[(min(programs, routing.tiles.shape[0] * blocks),)](
        *rows, _weight_view(w, product, config), y, routing.gather, routing.tiles, routing.tile_count, next_tile,
        *(tensors.get(name) for name in OPTIONAL), x.stride(0), **_constants(product, config, pdl), **_options(pdl),
    )  # fmt: skip
    return y


def _check(x, w, product: Product, config: GemmConfig) -> None:
    item = w.element_size()
    if (config.block_m, config.block_n, config.block_k * item) != (128, 256, 128):
        raise ShapeError(f"{config.name}: the tile is 128 rows by 256 rows of w by 128 bytes")
    if product.n % 32 or product.k * item % 16:
        raise ShapeError(f"n={product.n} must be a multiple of 32, rows of k={product.k} of 16 bytes")
    if x.shape[0] * x.stride(0) * item >= 2**35:
        raise ShapeError(f"x {tuple(x.shape)} spans {x.shape[0] * x.stride(0) * item} bytes, less than 2^35 can be gathered")
    apart = product.split_scale or not product.gated or product.n % BLOCK == 0
    if product.quant is Quant.FP8_BLOCK and (not apart or (product.gated and product.activation.interleaved)):
        raise ShapeError(f"n={product.n}: gate and up rows lie in one scale block of {BLOCK}")


def _constants(product: Product, config: GemmConfig, pdl: bool) -> dict:
    multiply, load = ROLE_REGISTERS[product.gather, product.quant is Quant.FP8_BLOCK]
    roles = dict(GATHER_WARPS=GATHER_WARPS, MULTIPLY_REGISTERS=multiply, LOAD_REGISTERS=load)
    found = product.constants(config, pdl) | roles
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

    types = found.types | dict(count_ptr="*i32", next_ptr="*i32", w_desc=descriptor(_weight_box(product, config)))
    types["a_desc"] = descriptor([64, config.block_k])
    types |= dict.fromkeys(constants, "constexpr")
    types = {name: types[name] for name in _hopper_gemm_kernel.arg_names}
    constants = {name: value for name, value in constants.items() if name in types}
    aligned = tuple(
        name for name, kind in types.items() if name != "next_ptr" and (kind.startswith("*") or name == "stride_xm")
    )
    return Specialization(_hopper_gemm_kernel, types, constants, aligned, _options(pdl))
