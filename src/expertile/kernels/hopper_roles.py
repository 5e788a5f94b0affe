"""What the warps of hopper_gemm do: load weights, gather rows, multiply and finish a tile.

    w_bufs, a_bufs   [STAGES, ...] shared: 256 rows of w and 128 rows of x, 128 bytes of each
    ready, empty     a stage's mbarriers: all its bytes have landed; both warpgroups have read it
    steps            [SLOTS * 4] shared: of this tile and of those to come (block of weight rows or -1 for the end,
                     expert, first row, end of the expert's rows); told, heard are their mbarriers

Every role walks over the same tiles in the same order and counts stages with `it`: its phase of a barrier is
(it // STAGES) & 1.
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

from .gluon_versions import cp_async, cp_async_commit, cp_async_wait, tma_load
from .tiles import clamped, gate_value, gated_value

SLOTS = gl.constexpr(4)  # tiles told ahead: with a short K several fit the ring


@gluon.jit
def _tile_of(t, tiles, N_BLOCKS: gl.constexpr, GROUP_M: gl.constexpr):
    """(row tile, block of weight rows) of step t: GROUP_M row tiles share one sweep over the weights."""
    group = t // (GROUP_M * N_BLOCKS)
    height = gl.minimum(tiles - group * GROUP_M, GROUP_M)
    rest = t % (GROUP_M * N_BLOCKS)
    return group * GROUP_M + rest % height, rest // height


@gluon.jit
def load_weights(
    w_desc, a_desc, tiles_ptr, count_ptr, next_ptr, w_bufs, a_bufs, ready, empty, steps, told, heard,
    N: gl.constexpr, K: gl.constexpr, N_BLOCKS: gl.constexpr, HALVES: gl.constexpr, GATHER: gl.constexpr,
    BLOCK_K: gl.constexpr, W_BYTES: gl.constexpr, A_BYTES: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    """The TMA warp: takes the next tile from the counter that all blocks share and tells the other warps, then asks for
    its weights, and for rows of h where they need no gathering.
    """
    BOXES: gl.constexpr = w_desc.block_type.shape[0]
    ROWS: gl.constexpr = BOXES * w_desc.block_type.shape[1] * 8  # rows of w in one box
    UNIT: gl.constexpr = w_desc.block_type.shape[1] * 8
    LOADS: gl.constexpr = 256 // ROWS
    EXPERT_ROWS: gl.constexpr = N * HALVES
    tiles = gl.load(count_ptr)
    total = tiles * N_BLOCKS
    it = 0
    n = 0
    t = gl.program_id(0)
    while t < total:
        t_next = gl.num_programs(0) + gl.atomic_add(next_ptr, 1, sem="relaxed")
        tile, block = _tile_of(t, tiles, N_BLOCKS, GROUP_M)
        e = gl.load(tiles_ptr + tile * 4)
        first = gl.load(tiles_ptr + tile * 4 + 1)
        last = gl.load(tiles_ptr + tile * 4 + 2)
        _tell(steps, told, heard, n, block, e, first, last)
        n += 1
        row = e * EXPERT_ROWS + block * ROWS
        full = last - first > 64
        end = K
        if (
            not GATHER
        ):  # LLVM must not know it: it would unroll a short loop, and then needs more registers than there are
            end = gl.minimum(t + K, K)
        for k in range(0, end, BLOCK_K):
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
    _tell(steps, told, heard, n, -1, 0, 0, 0)


@gluon.jit
def _tell(steps, told, heard, n, block, e, first, end):
    """Puts the n-th tile of this block where the other warps find it, as soon as a slot is free."""
    slot = n % SLOTS
    mbarrier.wait(heard.index(slot), ((n // SLOTS) & 1) ^ 1)
    zero = gl.full([1], 0, gl.int32, layout=gl.BlockedLayout([1], [32], [1], [0]))
    steps.index(slot * 4).store(zero + block)
    steps.index(slot * 4 + 1).store(zero + e)
    steps.index(slot * 4 + 2).store(zero + first)
    steps.index(slot * 4 + 3).store(zero + end)
    mbarrier.arrive(told.index(slot), count=1)


@gluon.jit
def _hear(steps, told, n, WARPS: gl.constexpr):
    """The n-th tile's block of weight rows, -1 when there is none."""
    mbarrier.wait(told.index(n % SLOTS), (n // SLOTS) & 1)
    return _told(steps, n, 0, WARPS)


@gluon.jit
def _told(steps, n, field: gl.constexpr, WARPS: gl.constexpr):
    """Expert (1), first row (2), end of the rows (3) of the n-th tile: until this role arrives at `heard`."""
    return gl.max(steps.index(n % SLOTS * 4 + field).load(gl.BlockedLayout([1], [32], [WARPS], [0])), 0)


@gluon.jit
def gather_rows(
    x_ptr, stride_xm, gather_ptr, a_bufs, ready, empty, steps, told, heard,
    K: gl.constexpr, TOP_K: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """The cp.async warps: rows of x by token, 16 bytes a copy. Rows past the expert's end repeat its last.

    A stage is handed over LAG steps after its copies were issued, when they have landed: the fence that shows them to
    WGMMA is then paid here and not by the warps that multiply.
    """
    EACH: gl.constexpr = 128 // x_ptr.dtype.element_ty.primitive_bitwidth
    L: gl.constexpr = gl.BlockedLayout([1, EACH], [32 // (BLOCK_K // EACH), BLOCK_K // EACH], [WARPS, 1], [1, 0])
    LAG: gl.constexpr = STAGES // 2
    r = gl.arange(0, 64, layout=gl.SliceLayout(1, L))
    c = gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, L))
    it = 0
    n = 0
    block = _hear(steps, told, n, WARPS)
    while block >= 0:
        first = _told(steps, n, 2, WARPS)
        end = _told(steps, n, 3, WARPS)
        mbarrier.arrive(heard.index(n % SLOTS), count=1)
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
        block = _hear(steps, told, n, WARPS)
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
def _rows_of(
    half: gl.constexpr, e, first, end, gather_ptr, x_scale_ptr, w_scale_ptr, probs_ptr,
    TOP_K: gl.constexpr, GATHER: gl.constexpr, SCATTER: gl.constexpr, QUANT: gl.constexpr, STATIC_SCALE: gl.constexpr,
    STORE: gl.constexpr,
):  # fmt: skip
    """(rows of y, factors) of 64 rows: scales that do not vary along K or the columns, and the router's weight on the
    input."""
    row = gl.minimum(first + half * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, STORE)), end - 1)
    slot = row
    if GATHER or SCATTER or (probs_ptr is not None):
        slot = gl.load(gather_ptr + row)
    factor = gl.full([64], 1.0, gl.float32, layout=gl.SliceLayout(1, STORE))
    if STATIC_SCALE:
        factor *= gl.load(x_scale_ptr)
    elif QUANT == "fp8_tensor" or QUANT == "fp8_channel":
        factor *= gl.load(x_scale_ptr + (slot // TOP_K if GATHER else row))
    if QUANT == "fp8_tensor":
        factor *= gl.load(w_scale_ptr + e)
    if probs_ptr is not None:
        factor *= gl.load(probs_ptr + slot).to(gl.float32)
    return slot if SCATTER else row, factor


@gluon.jit
def _scaled(
    value, factor, n, first, w_scale_ptr, bias_ptr, N: gl.constexpr, STEP: gl.constexpr, QUANT: gl.constexpr
):  # fmt: skip
    """value [64, 128] times the factors of its rows and the scales of its weight rows, plus the bias."""
    if QUANT == "fp8_channel":
        value *= gl.load(w_scale_ptr + first + n * STEP, mask=n < N, other=0.0)[None, :]
    value *= factor[:, None]
    if bias_ptr is not None:
        value += gl.load(bias_ptr + first + n * STEP, mask=n < N, other=0.0).to(gl.float32)[None, :]
    return value


@gluon.jit
def _write(y, n, y_row, keep, group, y_ptr, y_scale_ptr, N: gl.constexpr, OUT_QUANT: gl.constexpr):
    """Stores y [64, 128], quantised if OUT_QUANT says so."""
    where = y_ptr + y_row.to(gl.int64)[:, None] * N + n[None, :]
    mask = keep[:, None] & (n < N)[None, :]
    if OUT_QUANT == "static":
        y = y / gl.load(y_scale_ptr)
    elif OUT_QUANT == "block":
        scale = gl.maximum(gl.max(gl.abs(gl.where((n < N)[None, :], y, 0.0)), 1), 1e-10) / 448.0
        there = keep & (group * 128 < N)  # a tile may reach past the last group
        gl.store(y_scale_ptr + y_row.to(gl.int64) * ((N + 127) // 128) + group, scale, mask=there)
        y = y / scale[:, None]
    if OUT_QUANT != "":
        y = clamped(y, 448.0)
    gl.store(where, y.to(y_ptr.dtype.element_ty), mask=mask)


@gluon.jit
def _sum(
    half: gl.constexpr, w_bufs, a_bufs, ready, empty, it, K: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr
):  # fmt: skip
    """(sum [64, 256], it): 64 rows of x times the 256 weight rows of a tile; the last product is still in flight."""
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
    return acc, it


@gluon.jit
def _sum_of_blocks(
    half: gl.constexpr, w_bufs, a_bufs, ready, empty, it, block, e, first, end, gather_ptr, x_scale_ptr, w_scale_ptr,
    N: gl.constexpr, K: gl.constexpr, TOP_K: gl.constexpr, GATHER: gl.constexpr, GATED: gl.constexpr,
    SPLIT_SCALE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The same with fp8_block's scales: each 128 values along K are promoted with theirs.

    Two halves of 128 weight rows, so that the sums and one product fit the registers; each half lies in one row of
    scale blocks, a scalar serves it. Meanwhile the other warpgroup multiplies.
    """
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    K_BLOCKS: gl.constexpr = (K + 127) // 128
    Y_BLOCKS: gl.constexpr = 1 if GATED else 2
    ROWS: gl.constexpr = 2 * N if GATED else N
    UP: gl.constexpr = (N + 127) // 128 if GATED else 1  # rows of scale blocks from the left half to the right
    IN_ALL: gl.constexpr = 2 * UP if SPLIT_SCALE else (ROWS + 127) // 128
    ws = w_scale_ptr + (e * IN_ALL + block * Y_BLOCKS) * K_BLOCKS
    ws_right = ws + UP * K_BLOCKS
    if not GATED and IN_ALL % 2:  # the right half of the last tile lies past the table: its columns are not stored
        ws_right = w_scale_ptr + (e * IN_ALL + gl.minimum(block * Y_BLOCKS + 1, IN_ALL - 1)) * K_BLOCKS
    row = gl.minimum(first + half * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, MMA)), end - 1)
    if GATHER:
        row = gl.load(gather_ptr + row) // TOP_K
    xs = x_scale_ptr + row.to(gl.int64) * K_BLOCKS
    zeros = gl.zeros((64, 128), gl.float32, layout=MMA)
    left = zeros
    right = zeros
    for kb in range(K_BLOCKS):
        s = it % STAGES
        x_now = gl.load(xs + kb)  # on their way while the first product runs
        left_now = gl.load(ws + kb)
        right_now = gl.load(ws_right + kb)
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
    left, right, factor, y_row, keep, block, e, y_ptr, w_scale_ptr, y_scale_ptr, bias_ptr,
    N: gl.constexpr, GATE: gl.constexpr, GATED: gl.constexpr, INTERLEAVED: gl.constexpr, ALPHA: gl.constexpr,
    BETA: gl.constexpr, LIMIT: gl.constexpr, QUANT: gl.constexpr, OUT_QUANT: gl.constexpr, STORE: gl.constexpr,
):  # fmt: skip
    """Scales, bias, activation and store of 64 rows; no shared memory, no other warpgroup waited for."""
    Y_BLOCK: gl.constexpr = 128 if GATED else 256
    W_ROWS: gl.constexpr = 2 * N if GATED else N
    STEP: gl.constexpr = 2 if INTERLEAVED else 1
    w_row = e.to(gl.int64) * W_ROWS
    left = _in_order(left, INTERLEAVED, STORE)
    right = _in_order(right, INTERLEAVED, STORE)
    n = block * Y_BLOCK + gl.arange(0, 128, layout=gl.SliceLayout(0, STORE))
    left = _scaled(left, factor, n, w_row, w_scale_ptr, bias_ptr, N, STEP, QUANT)
    if GATED:
        UP_ROW: gl.constexpr = 1 if INTERLEAVED else N
        right = _scaled(right, factor, n, w_row + UP_ROW, w_scale_ptr, bias_ptr, N, STEP, QUANT)
        y = gated_value(left, right, GATE, ALPHA, BETA, LIMIT)
        _write(y, n, y_row, keep, block, y_ptr, y_scale_ptr, N, OUT_QUANT)
    else:
        if GATE != "":
            left = gate_value(left, GATE, ALPHA)
        _write(left, n, y_row, keep, block * 2, y_ptr, y_scale_ptr, N, OUT_QUANT)
        n += 128
        right = _scaled(right, factor, n, w_row, w_scale_ptr, bias_ptr, N, STEP, QUANT)
        if GATE != "":
            right = gate_value(right, GATE, ALPHA)
        _write(right, n, y_row, keep, block * 2 + 1, y_ptr, y_scale_ptr, N, OUT_QUANT)


@gluon.jit
def multiply(
    half: gl.constexpr, y_ptr, gather_ptr, x_scale_ptr, w_scale_ptr, y_scale_ptr, bias_ptr, probs_ptr, w_bufs, a_bufs,
    ready, empty, steps, told, heard,
    N: gl.constexpr, K: gl.constexpr, TOP_K: gl.constexpr, GATHER: gl.constexpr, SCATTER: gl.constexpr,
    GATE: gl.constexpr, GATED: gl.constexpr, INTERLEAVED: gl.constexpr, ALPHA: gl.constexpr, BETA: gl.constexpr,
    LIMIT: gl.constexpr, QUANT: gl.constexpr, STATIC_SCALE: gl.constexpr, SPLIT_SCALE: gl.constexpr,
    OUT_QUANT: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """A warpgroup: rows 64 * half ... of every tile, from the ring to y.

    What the epilogue reads from memory is asked for while the last product runs.
    """
    STORE: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [8, 0], [0, 32], [0, 64]], [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]], [], [64, 128],
    )  # fmt: skip
    it = 0
    n = 0
    block = _hear(steps, told, n, 4)
    while block >= 0:
        first = _told(steps, n, 2, 4)
        end = _told(steps, n, 3, 4)
        if first + half * 64 < end:
            if QUANT == "fp8_block":
                e = _told(steps, n, 1, 4)
                left, right, it = _sum_of_blocks(
                    half, w_bufs, a_bufs, ready, empty, it, block, e, first, end, gather_ptr, x_scale_ptr, w_scale_ptr,
                    N, K, TOP_K, GATHER, GATED, SPLIT_SCALE, STAGES,
                )  # fmt: skip
                y_row, factor = _rows_of(
                    half, e, first, end, gather_ptr, x_scale_ptr, w_scale_ptr, probs_ptr, TOP_K, GATHER, SCATTER,
                    QUANT, STATIC_SCALE, STORE,
                )  # fmt: skip
            else:
                acc, it = _sum(half, w_bufs, a_bufs, ready, empty, it, K, BLOCK_K, STAGES)
                e = _told(steps, n, 1, 4)
                first = _told(steps, n, 2, 4)  # read again: registers are scarce while the sums run
                end = _told(steps, n, 3, 4)
                y_row, factor = _rows_of(
                    half, e, first, end, gather_ptr, x_scale_ptr, w_scale_ptr, probs_ptr, TOP_K, GATHER, SCATTER,
                    QUANT, STATIC_SCALE, STORE,
                )  # fmt: skip
                done = warpgroup_mma_wait(0, deps=(acc,))
                mbarrier.arrive(empty.index((it + STAGES - 1) % STAGES), count=1)
                left, right = _halves(done, INTERLEAVED)
            keep = first + half * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, STORE)) < end
            _finish(
                left, right, factor, y_row, keep, block, e, y_ptr, w_scale_ptr, y_scale_ptr, bias_ptr, N, GATE, GATED,
                INTERLEAVED, ALPHA, BETA, LIMIT, QUANT, OUT_QUANT, STORE,
            )  # fmt: skip
        else:
            for _ in range((K + BLOCK_K - 1) // BLOCK_K):  # a short tile: the second half only passes stages on
                mbarrier.wait(ready.index(it % STAGES), (it // STAGES) & 1)
                mbarrier.arrive(empty.index(it % STAGES), count=1)
                it += 1
        mbarrier.arrive(heard.index(n % SLOTS), count=1)
        n += 1
        block = _hear(steps, told, n, 4)
