"""What the warps of decode_experts do: load weights, load rows, multiply and finish an item.

    w_bufs, a_bufs   [STAGES, ...] shared: 2 * ROWS weight rows and BLOCK_M rows of x or h, 128 bytes of each
    ready, empty     a stage's mbarriers: both loads have landed; the products have read it
    items            [4] shared: the items that come next, one word each; told, heard are their mbarriers
    turns            [2]: the other multiplying warpgroup has read its last stage: a barrier tells two phases apart, not
                     three, so nobody may wait for a stage's next round before its last one was read

An item is one block of weight rows of one expert, in GEMM1 or GEMM2, packed as ((expert * 2 + gemm) << 12) + block.
Every role walks over the same items and counts stages with `it`: its phase of a barrier is (it // STAGES) & 1.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .decode_sums import (
    choices,
    fence_async_global,
    publish,
    quantize_h,
    scaled,
    slot_of,
    sum_blocks,
    sum_item,
    write_h,
    write_y,
)
from .gluon_versions import tma_load
from .tiles import gate_value, gated_value

AHEAD = gl.constexpr(4)  # items that the loading warps may be ahead


@gluon.jit
def _tell(items, told, heard, n, item, LAYOUT: gl.constexpr):
    mbarrier.wait(heard.index(n % AHEAD), ((n // AHEAD) & 1) ^ 1)
    items.index(n % AHEAD).store(gl.full([1], 0, gl.int32, layout=LAYOUT) + item)
    mbarrier.arrive(told.index(n % AHEAD), count=1)


@gluon.jit
def _hear(items, told, heard, n, WARPS: gl.constexpr):
    """The n-th item of this block, or -1 after the last."""
    mbarrier.wait(told.index(n % AHEAD), (n // AHEAD) & 1)
    item = gl.max(items.index(n % AHEAD).load(gl.BlockedLayout([1], [32], [WARPS], [0])), 0)
    mbarrier.arrive(heard.index(n % AHEAD), count=1)
    return item


@gluon.jit
def load_weights(
    w13_desc, w2_desc, hit_ptr, next_ptr, w_bufs, ready, empty, items, told, heard,
    HIDDEN: gl.constexpr, INTER: gl.constexpr, HALVES: gl.constexpr, EXPERTS: gl.constexpr, BINS: gl.constexpr,
    ROWS: gl.constexpr, BLOCK_K: gl.constexpr, W_BYTES: gl.constexpr, STAGES: gl.constexpr, BLOCKS1: gl.constexpr,
    BLOCKS2: gl.constexpr,
):  # fmt: skip
    """One TMA warp: takes the next item from the counter that all blocks share, tells the others, asks for its weights.

    No block waits for another one that might not be running: an item of GEMM2 is dealt after all of GEMM1.
    """
    WARP: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    ticket = gl.atomic_add(next_ptr, 1, sem="relaxed")
    hits = gl.load(hit_ptr)
    rank = gl.arange(0, BINS, layout=WARP)
    hit = gl.load(hit_ptr + 1 + rank, mask=rank < EXPERTS, other=0)
    first_of_gemm2 = hits * BLOCKS1
    total = first_of_gemm2 + hits * BLOCKS2
    it = 0
    n = 0
    while ticket < total:
        gemm = (ticket >= first_of_gemm2).to(gl.int32)
        place = ticket - first_of_gemm2 * gemm
        blocks = BLOCKS1 + (BLOCKS2 - BLOCKS1) * gemm
        block = place % blocks
        e = gl.sum(gl.where(rank == place // blocks, hit, 0), 0)
        ticket = gl.atomic_add(next_ptr, 1, sem="relaxed")
        _tell(items, told, heard, n, ((e * 2 + gemm) << 12) + block, WARP)
        n += 1
        if gemm == 0:
            row = e * (HALVES * INTER) + block * (ROWS * (3 - HALVES))
            it = _load_block(w13_desc, row, INTER if HALVES == 2 else ROWS, w_bufs, ready, empty, it, HIDDEN, BLOCK_K,
                             W_BYTES, STAGES)  # fmt: skip
        else:
            row = e * HIDDEN + block * (2 * ROWS)
            it = _load_block(w2_desc, row, ROWS, w_bufs, ready, empty, it, INTER, BLOCK_K, W_BYTES, STAGES)
    _tell(items, told, heard, n, -1, WARP)


@gluon.jit
def _load_block(w_desc, row, APART: gl.constexpr, w_bufs, ready, empty, it, K: gl.constexpr, BLOCK_K: gl.constexpr,
                W_BYTES: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    for k in range(0, K, BLOCK_K):
        s = it % STAGES
        mbarrier.wait(empty.index(s), ((it // STAGES) & 1) ^ 1)
        mbarrier.expect(ready.index(s), W_BYTES)
        tma_load(w_desc, [row, k], ready.index(s), w_bufs.index(2 * s))
        tma_load(w_desc, [row + APART, k], ready.index(s), w_bufs.index(2 * s + 1))
        it += 1
    return it


@gluon.jit
def load_rows(
    x_desc, h_desc, done_ptr, a_bufs, ready, empty, items, told, heard,
    HIDDEN: gl.constexpr, INTER: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_K: gl.constexpr, A_BYTES: gl.constexpr,
    STAGES: gl.constexpr, COMPLETE: gl.constexpr,
):  # fmt: skip
    """The other TMA warp: rows of x, the same for every expert; rows of an expert's h once it is complete."""
    it = 0
    n = 0
    item = _hear(items, told, heard, n, 1)
    while item >= 0:
        if ((item >> 12) & 1) == 0:
            it = _load_rows(x_desc, 0, a_bufs, ready, empty, it, HIDDEN, BLOCK_K, A_BYTES, STAGES)
        else:
            e = item >> 13
            _wait_for(done_ptr + e, COMPLETE)
            it = _load_rows(h_desc, e * BLOCK_M, a_bufs, ready, empty, it, INTER, BLOCK_K, A_BYTES, STAGES)
        n += 1
        item = _hear(items, told, heard, n, 1)


@gluon.jit
def _acquired(count_ptr):
    """The count, and with it what was written before it was counted."""
    where = count_ptr + gl.zeros([32], gl.int32, layout=gl.BlockedLayout([1], [32], [1], [0]))
    found = gl.inline_asm_elementwise(
        "ld.acquire.gpu.global.s32 $0, [$1];", "=r,l", [where], dtype=gl.int32, is_pure=False, pack=1
    )
    return gl.min(found, 0)


@gluon.jit
def _wait_for(count_ptr, wanted):
    """Until that much is counted; then TMA may read what was written before it was counted."""
    while _acquired(count_ptr) < wanted:
        pass
    fence_async_global(gl.BlockedLayout([1], [32], [1], [0]), 32)


@gluon.jit
def _load_rows(desc, row, a_bufs, ready, empty, it, K: gl.constexpr, BLOCK_K: gl.constexpr, A_BYTES: gl.constexpr,
               STAGES: gl.constexpr):  # fmt: skip
    for k in range(0, K, BLOCK_K):
        s = it % STAGES
        mbarrier.wait(empty.index(s), ((it // STAGES) & 1) ^ 1)
        mbarrier.expect(ready.index(s), A_BYTES)
        tma_load(desc, [row, k], ready.index(s), a_bufs.index(s))
        it += 1
    return it


@gluon.jit
def multiply(
    which: gl.constexpr, h_ptr, h_q_ptr, y_ptr, ids_ptr, map_ptr, done_ptr, x_scale_ptr, h_scale_ptr, w13_scale_ptr,
    w2_scale_ptr, b13_ptr, b2_ptr, tokens, total, w_bufs, a_bufs, ready, empty, items, told, heard, turns,
    HIDDEN: gl.constexpr, INTER: gl.constexpr, TOP_K: gl.constexpr, EXPERTS: gl.constexpr, GATE: gl.constexpr,
    GATED: gl.constexpr, ALPHA: gl.constexpr, BETA: gl.constexpr, LIMIT: gl.constexpr, QUANT: gl.constexpr,
    STATIC_SCALE: gl.constexpr, SPLIT_SCALE: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_K: gl.constexpr,
    ROWS: gl.constexpr, STAGES: gl.constexpr, BLOCKS1: gl.constexpr, OUT_QUANT: gl.constexpr,
):  # fmt: skip
    """A warpgroup that multiplies: an item from the ring to h or y. Two take turns: one stores while the other sums."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 256 // a_bufs.dtype.primitive_bitwidth])
    h_out = h_q_ptr if OUT_QUANT == "static" or OUT_QUANT == "block" else h_ptr
    chosen, twice = choices(ids_ptr, map_ptr, tokens, total, TOP_K, EXPERTS, BLOCK_M)
    it = 0
    n = 0
    item = _hear(items, told, heard, n, 4)
    while item >= 0:
        e = item >> 13
        block = item & 4095
        gemm = (item >> 12) & 1
        if n % 2 != which:
            it += (HIDDEN + BLOCK_K - 1) // BLOCK_K * (1 - gemm) + (INTER + BLOCK_K - 1) // BLOCK_K * gemm
        elif gemm == 0:
            _take_turn(turns, which, n)
            it = _up(
                e, block, it, turns, which, h_out, x_scale_ptr, h_scale_ptr, w13_scale_ptr, b13_ptr, tokens, w_bufs,
                a_bufs, ready, empty, HIDDEN, INTER, GATE, GATED, ALPHA, BETA, LIMIT, QUANT, STATIC_SCALE, SPLIT_SCALE,
                BLOCK_M, BLOCK_K, ROWS, STAGES, OUT_QUANT, MMA,
            )  # fmt: skip
            before = publish(done_ptr, e)
            if OUT_QUANT == "row":
                if before == BLOCKS1 - 1:
                    quantize_h(e, h_ptr, h_q_ptr, h_scale_ptr, INTER, BLOCK_M)
                    publish(done_ptr, e)
        else:
            _take_turn(turns, which, n)
            left, right, it = _down(
                e, block, it, turns, which, h_scale_ptr, w2_scale_ptr, b2_ptr, tokens, w_bufs, a_bufs, ready, empty,
                HIDDEN, INTER, QUANT, STATIC_SCALE, BLOCK_M, BLOCK_K, ROWS, STAGES, MMA,
            )  # fmt: skip
            slot = slot_of(chosen, e, TOP_K)
            row = block * (2 * ROWS)
            write_y(left, row, e, slot, twice, y_ptr, ids_ptr, map_ptr, tokens, total, HIDDEN, TOP_K, EXPERTS, ROWS,
                    BLOCK_M)  # fmt: skip
            write_y(right, row + ROWS, e, slot, twice, y_ptr, ids_ptr, map_ptr, tokens, total, HIDDEN, TOP_K, EXPERTS,
                    ROWS, BLOCK_M)  # fmt: skip
        n += 1
        item = _hear(items, told, heard, n, 4)


@gluon.jit
def _take_turn(turns, which: gl.constexpr, n):
    """Before item n is summed: the warpgroup that has item n - 1 has summed it."""
    mbarrier.wait(turns.index(which), ((n // 2) & 1) ^ (1 - which))


@gluon.jit
def _give_turn(turns, which: gl.constexpr):
    mbarrier.arrive(turns.index(1 - which), count=1)


@gluon.jit
def _up(
    e, block, it, turns, which: gl.constexpr, h_ptr, x_scale_ptr, h_scale_ptr, w_scale_ptr, bias_ptr, tokens, w_bufs,
    a_bufs, ready, empty,
    K: gl.constexpr, N: gl.constexpr, GATE: gl.constexpr, GATED: gl.constexpr, ALPHA: gl.constexpr,
    BETA: gl.constexpr, LIMIT: gl.constexpr, QUANT: gl.constexpr, STATIC_SCALE: gl.constexpr,
    SPLIT_SCALE: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_K: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr,
    OUT_QUANT: gl.constexpr, MMA: gl.constexpr,
):  # fmt: skip
    """One item of GEMM1: ROWS gate rows and their up rows, or 2 * ROWS rows of experts without a gate, to h."""
    W_ROWS: gl.constexpr = 2 * N if GATED else N
    t = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, MMA))
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, MMA))
    left_n = block * ROWS if GATED else block * (2 * ROWS)  # the first column of h of each half
    right_n = left_n if GATED else left_n + ROWS
    up = N if GATED else 0  # from a gate row to its up row
    if QUANT == "fp8_block":
        K_BLOCKS: gl.constexpr = (K + 127) // 128
        HALF: gl.constexpr = (N + 127) // 128
        ALL: gl.constexpr = 2 * HALF if SPLIT_SCALE and GATED else (W_ROWS + 127) // 128
        scales = w_scale_ptr + e * (ALL * K_BLOCKS)
        right_block = HALF + left_n // 128 if SPLIT_SCALE and GATED else (up + right_n) // 128
        left, right, it = sum_blocks(
            w_bufs, a_bufs, ready, empty, it, x_scale_ptr, t, t < tokens, scales + left_n // 128 * K_BLOCKS,
            scales + gl.minimum(right_block, ALL - 1) * K_BLOCKS, K, ROWS, BLOCK_M, STAGES, MMA,
        )  # fmt: skip
    else:
        left, right, it = sum_item(w_bufs, a_bufs, ready, empty, it, K, BLOCK_K, ROWS, BLOCK_M, STAGES, MMA)
    _give_turn(turns, which)
    left = scaled(left, 0, left_n + row, t < tokens, e, x_scale_ptr, t, w_scale_ptr, bias_ptr, N, W_ROWS, QUANT,
                  STATIC_SCALE)  # fmt: skip
    right = scaled(right, up, right_n + row, t < tokens, e, x_scale_ptr, t, w_scale_ptr, bias_ptr, N, W_ROWS, QUANT,
                   STATIC_SCALE)  # fmt: skip
    if GATED:
        left = gated_value(left, right, GATE, ALPHA, BETA, LIMIT)
    else:
        left = gate_value(left, GATE, ALPHA)
        right = gate_value(right, GATE, ALPHA)
        write_h(right, right_n, e, h_ptr, h_scale_ptr, N, OUT_QUANT, ROWS, BLOCK_M, MMA)
    write_h(left, left_n, e, h_ptr, h_scale_ptr, N, OUT_QUANT, ROWS, BLOCK_M, MMA)
    return it


@gluon.jit
def _down(
    e, block, it, turns, which: gl.constexpr, h_scale_ptr, w_scale_ptr, bias_ptr, tokens, w_bufs, a_bufs, ready, empty,
    N: gl.constexpr, K: gl.constexpr, QUANT: gl.constexpr, STATIC_SCALE: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_K: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr, MMA: gl.constexpr,
):  # fmt: skip
    """(left, right, it) of one item of GEMM2: 2 * ROWS columns of y."""
    t = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, MMA))
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, MMA))
    left_n = block * (2 * ROWS)
    right_n = left_n + ROWS
    h_row = e * BLOCK_M + t
    if QUANT == "fp8_block":
        K_BLOCKS: gl.constexpr = (K + 127) // 128
        N_BLOCKS: gl.constexpr = (N + 127) // 128
        scales = w_scale_ptr + e * (N_BLOCKS * K_BLOCKS)
        left, right, it = sum_blocks(
            w_bufs, a_bufs, ready, empty, it, h_scale_ptr, h_row, t < tokens, scales + left_n // 128 * K_BLOCKS,
            scales + gl.minimum(right_n // 128, N_BLOCKS - 1) * K_BLOCKS, K, ROWS, BLOCK_M, STAGES, MMA,
        )  # fmt: skip
    else:
        left, right, it = sum_item(w_bufs, a_bufs, ready, empty, it, K, BLOCK_K, ROWS, BLOCK_M, STAGES, MMA)
    _give_turn(turns, which)
    left = scaled(left, 0, left_n + row, t < tokens, e, h_scale_ptr, h_row, w_scale_ptr, bias_ptr, N, N, QUANT,
                  STATIC_SCALE)  # fmt: skip
    right = scaled(right, 0, right_n + row, t < tokens, e, h_scale_ptr, h_row, w_scale_ptr, bias_ptr, N, N, QUANT,
                   STATIC_SCALE)  # fmt: skip
    return left, right, it
