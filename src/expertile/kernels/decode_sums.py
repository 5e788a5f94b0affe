"""Parts of what decode_experts' multiplying warpgroup does with an item: sums from the ring, scales, stores.

MMA is the layout of the sums [ROWS, BLOCK_M]: weight rows by tokens.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from .gluon_versions import thread_barrier
from .tiles import clamped, local_experts


@gluon.jit
def choices(ids_ptr, map_ptr, tokens, total, TOP_K: gl.constexpr, EXPERTS: gl.constexpr, BLOCK_M: gl.constexpr):
    """(expert, twice): of every token and choice, [BLOCK_M, TOP_K or more]; whether a token chose an expert twice."""
    WIDTH: gl.constexpr = 1 if TOP_K == 1 else 2 if TOP_K == 2 else 4 if TOP_K <= 4 else 8 if TOP_K <= 8 else 16
    gl.static_assert(TOP_K <= WIDTH)
    L: gl.constexpr = gl.BlockedLayout([1, WIDTH], [32, 1], [4, 1], [1, 0])
    t = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, L))
    j = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, L))
    inside = (t < tokens)[:, None] & (j < TOP_K)[None, :]
    slot = gl.where(inside, t[:, None] * TOP_K + j[None, :], tokens * TOP_K)
    expert = local_experts(ids_ptr, map_ptr, slot, tokens * TOP_K, total, EXPERTS)
    most = 0
    for each in range(TOP_K):
        one = local_experts(ids_ptr, map_ptr, t * TOP_K + each, tokens * TOP_K, total, EXPERTS)
        same = (expert == one[:, None]) & (expert < EXPERTS)
        most = gl.maximum(most, gl.max(gl.sum(same.to(gl.int32), 1), 0))
    return expert, most > 1


@gluon.jit
def slot_of(chosen, e, TOP_K: gl.constexpr):
    """The slot by which each token chose expert e, [BLOCK_M]; -1 where it did not."""
    L: gl.constexpr = chosen.type.layout
    t = gl.arange(0, chosen.shape[0], layout=gl.SliceLayout(1, L))
    j = gl.arange(0, chosen.shape[1], layout=gl.SliceLayout(0, L))
    choice = gl.max(gl.where(chosen == e, j[None, :], -1), 1)
    return gl.where(choice >= 0, t * TOP_K + choice, -1)


@gluon.jit
def sum_item(w_bufs, a_bufs, ready, empty, it, K: gl.constexpr, BLOCK_K: gl.constexpr, ROWS: gl.constexpr,
         BLOCK_M: gl.constexpr, STAGES: gl.constexpr, MMA: gl.constexpr):  # fmt: skip
    """(left, right, it): both halves of a block of weight rows times the rows, one step always in flight."""
    left = warpgroup_mma_init(gl.zeros((ROWS, BLOCK_M), gl.float32, layout=MMA))
    right = warpgroup_mma_init(gl.zeros((ROWS, BLOCK_M), gl.float32, layout=MMA))
    for k in range(0, K, BLOCK_K):
        s = it % STAGES
        mbarrier.wait(ready.index(s), (it // STAGES) & 1)
        a = a_bufs.index(s).permute((1, 0))
        left = warpgroup_mma(w_bufs.index(2 * s), a, left, use_acc=k > 0, is_async=True)
        right = warpgroup_mma(w_bufs.index(2 * s + 1), a, right, use_acc=k > 0, is_async=True)
        left, right = warpgroup_mma_wait(2, deps=(left, right))
        left = warpgroup_mma_init(left)
        right = warpgroup_mma_init(right)
        mbarrier.arrive(empty.index((it + STAGES - 1) % STAGES), count=1, pred=k > 0)
        it += 1
    left, right = warpgroup_mma_wait(0, deps=(left, right))
    mbarrier.arrive(empty.index((it + STAGES - 1) % STAGES), count=1)
    return left, right, it


@gluon.jit
def sum_blocks(
    w_bufs, a_bufs, ready, empty, it, a_scale_ptr, a_row, keep, left_ptr, right_ptr,
    K: gl.constexpr, ROWS: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr, MMA: gl.constexpr,
):  # fmt: skip
    """The same with fp8_block's scales: each 128 values along K are promoted with theirs; a half has one row of them.

    h's scales are written while this kernel runs: they may be read once its first rows are there.
    """
    K_BLOCKS: gl.constexpr = (K + 127) // 128
    TOGETHER: gl.constexpr = ROWS * BLOCK_M <= 2048  # else the registers hold the sums and one half's product
    zeros = gl.zeros((ROWS, BLOCK_M), gl.float32, layout=MMA)
    left = zeros
    right = zeros
    scales = a_scale_ptr + a_row * K_BLOCKS
    left_next = gl.load(left_ptr)
    right_next = gl.load(right_ptr)
    mbarrier.wait(ready.index(it % STAGES), (it // STAGES) & 1)
    a_next = gl.load(scales, mask=keep, other=0.0, cache_modifier=".cg")
    for kb in range(K_BLOCKS):
        s = it % STAGES
        left_scale = a_next * left_next
        right_scale = a_next * right_next
        mbarrier.wait(ready.index(s), (it // STAGES) & 1)
        a = a_bufs.index(s).permute((1, 0))
        one = warpgroup_mma(w_bufs.index(2 * s), a, zeros, use_acc=False, is_async=True)
        if TOGETHER:
            other = warpgroup_mma(w_bufs.index(2 * s + 1), a, zeros, use_acc=False, is_async=True)
        after = gl.minimum(kb + 1, K_BLOCKS - 1)  # one step ahead of the products
        a_next = gl.load(scales + after, mask=keep, other=0.0, cache_modifier=".cg")
        left_next = gl.load(left_ptr + after)
        right_next = gl.load(right_ptr + after)
        if TOGETHER:
            one, other = warpgroup_mma_wait(0, deps=(one, other))
            mbarrier.arrive(empty.index(s), count=1)
            left += one * left_scale[None, :]
            right += other * right_scale[None, :]
        else:
            one = warpgroup_mma_wait(0, deps=(one,))
            left += one * left_scale[None, :]
            other = warpgroup_mma(w_bufs.index(2 * s + 1), a, zeros, use_acc=False, is_async=True)
            other = warpgroup_mma_wait(0, deps=(other,))
            mbarrier.arrive(empty.index(s), count=1)
            right += other * right_scale[None, :]
        it += 1
    return left, right, it


@gluon.jit
def scaled(
    value, row0, n, keep, e, a_scale_ptr, a_row, w_scale_ptr, bias_ptr,
    N: gl.constexpr, W_ROWS: gl.constexpr, QUANT: gl.constexpr, STATIC_SCALE: gl.constexpr,
):  # fmt: skip
    """value [ROWS, BLOCK_M] times the scales that do not vary along K, plus the bias."""
    rows = e * W_ROWS + row0 + n
    if QUANT == "fp8_tensor":
        value *= gl.load(w_scale_ptr + e)
    if QUANT == "fp8_channel":
        value *= gl.load(w_scale_ptr + rows, mask=n < N, other=0.0)[:, None]
    if STATIC_SCALE:
        value *= gl.load(a_scale_ptr)
    elif QUANT == "fp8_tensor" or QUANT == "fp8_channel":
        value *= gl.load(a_scale_ptr + a_row, mask=keep, other=0.0, cache_modifier=".cg")[None, :]
    if bias_ptr is not None:
        value += gl.load(bias_ptr + rows, mask=n < N, other=0.0).to(gl.float32)[:, None]
    return value


@gluon.jit
def _turned(value, ROWS: gl.constexpr, BLOCK_M: gl.constexpr):
    """value [ROWS, BLOCK_M] as [BLOCK_M, ROWS], neighbours along ROWS in one thread."""
    ITEM: gl.constexpr = value.dtype.primitive_bitwidth // 8
    MOST: gl.constexpr = 16 // ITEM
    SHARE: gl.constexpr = ROWS * BLOCK_M // 128
    EACH: gl.constexpr = MOST if MOST < SHARE else SHARE
    STORE: gl.constexpr = gl.BlockedLayout([1, EACH], [32 * EACH // ROWS, ROWS // EACH], [4, 1], [1, 0])
    return gl.convert_layout(value.permute((1, 0)), STORE)


@gluon.jit
def _write(value, row0, first, ptr, N: gl.constexpr, ROWS: gl.constexpr, BLOCK_M: gl.constexpr):
    turned = _turned(value, ROWS, BLOCK_M)
    LAYOUT: gl.constexpr = turned.type.layout
    n = row0 + gl.arange(0, ROWS, layout=gl.SliceLayout(0, LAYOUT))
    t = first + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, LAYOUT))
    gl.store(ptr + t.to(gl.int64)[:, None] * N + n[None, :], turned, mask=(n < N)[None, :])


@gluon.jit
def write_h(h, row0, e, h_ptr, h_scale_ptr, N: gl.constexpr, OUT_QUANT: gl.constexpr, ROWS: gl.constexpr,
             BLOCK_M: gl.constexpr, MMA: gl.constexpr):  # fmt: skip
    """Stores h [ROWS, BLOCK_M], quantised if OUT_QUANT says so, at rows e * BLOCK_M ..., columns row0 ... of h."""
    n = row0 + gl.arange(0, ROWS, layout=gl.SliceLayout(1, MMA))
    if OUT_QUANT == "static":
        h = h / gl.load(h_scale_ptr)
    elif OUT_QUANT == "block":
        h = gl.where((n < N)[:, None], h, 0.0)
        scale = gl.maximum(gl.max(gl.abs(h), 0), 1e-10) / 448.0
        t = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, MMA))
        gl.store(h_scale_ptr + (e * BLOCK_M + t).to(gl.int64) * ((N + 127) // 128) + row0 // 128, scale,
                 mask=(t < BLOCK_M) & (row0 < N))  # fmt: skip
        h = h / scale[None, :]
    if OUT_QUANT == "static" or OUT_QUANT == "block":
        h = clamped(h, 448.0)
    _write(h.to(h_ptr.dtype.element_ty), row0, e * BLOCK_M, h_ptr, N, ROWS, BLOCK_M)


@gluon.jit
def quantize_h(e, h_ptr, q_ptr, h_scale_ptr, INTER: gl.constexpr, BLOCK_M: gl.constexpr):
    """h of expert e, complete, to e4m3 with one scale a row."""
    WIDTH: gl.constexpr = 512 if BLOCK_M <= 16 else 8192 // BLOCK_M
    ACROSS: gl.constexpr = 32 if WIDTH >= 256 else WIDTH // 8
    L: gl.constexpr = gl.BlockedLayout([1, 8], [32 // ACROSS, ACROSS], [4, 1], [1, 0])
    t = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, L))
    c = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, L))
    row = (e * BLOCK_M + t).to(gl.int64)
    at = row[:, None] * INTER + c[None, :]
    most = gl.full([BLOCK_M], 1e-10, gl.float32, layout=gl.SliceLayout(1, L))
    for n in range(0, INTER, WIDTH):
        h = gl.load(h_ptr + at + n, mask=(c < INTER - n)[None, :], other=0.0, cache_modifier=".cg").to(gl.float32)
        most = gl.maximum(most, gl.max(gl.abs(h), 1))
    scale = most / 448.0
    gl.store(h_scale_ptr + row, scale)
    for n in range(0, INTER, WIDTH):
        h = gl.load(h_ptr + at + n, mask=(c < INTER - n)[None, :], other=0.0, cache_modifier=".cg").to(gl.float32)
        h = clamped(h / scale[:, None], 448.0)
        gl.store(q_ptr + at + n, h.to(q_ptr.dtype.element_ty), mask=(c < INTER - n)[None, :])


@gluon.jit
def write_y(y, row0, e, slot, twice, y_ptr, ids_ptr, map_ptr, tokens, total, N: gl.constexpr, TOP_K: gl.constexpr,
             EXPERTS: gl.constexpr, ROWS: gl.constexpr, BLOCK_M: gl.constexpr):  # fmt: skip
    """Stores y [ROWS, BLOCK_M] at the slot [BLOCK_M] by which a token chose expert e, -1 if it did not."""
    turned = _turned(y.to(y_ptr.dtype.element_ty), ROWS, BLOCK_M)
    LAYOUT: gl.constexpr = turned.type.layout
    n = row0 + gl.arange(0, ROWS, layout=gl.SliceLayout(0, LAYOUT))
    slot = gl.convert_layout(slot, gl.SliceLayout(1, LAYOUT))
    there = (slot >= 0)[:, None] & (n < N)[None, :]
    gl.store(y_ptr + slot.to(gl.int64)[:, None] * N + n[None, :], turned, mask=there)
    if twice:
        t = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, LAYOUT))
        for j in range(TOP_K):
            other = t * TOP_K + j
            mine = local_experts(ids_ptr, map_ptr, other, tokens * TOP_K, total, EXPERTS) == e
            there = mine[:, None] & (n < N)[None, :]
            gl.store(y_ptr + other.to(gl.int64)[:, None] * N + n[None, :], turned, mask=there)


@gluon.jit
def publish(done_ptr, e):
    """Counts one more finished item of expert e; what the warpgroup wrote is visible to whoever sees the count."""
    fence_async_global(gl.BlockedLayout([1], [32], [4], [0]), 128)
    thread_barrier()
    return gl.atomic_add(done_ptr + e, 1, sem="acq_rel")


@gluon.jit
def fence_async_global(LAYOUT: gl.constexpr, THREADS: gl.constexpr):
    """Orders what this thread wrote or has seen written in global memory before TMA loads that follow."""
    lane = gl.arange(0, THREADS, layout=LAYOUT)
    gl.inline_asm_elementwise(
        "fence.proxy.async.global; mov.u32 $0, $1;", "=r,r", [lane], dtype=gl.int32, is_pure=False, pack=1
    )
