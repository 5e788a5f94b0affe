"""From slots back to tokens.

out[t] = factor * sum over j of probs[t, j] * y[t * top_k + j]          in fp32, in the order of j, one rounding
"""

from __future__ import annotations

import triton
import triton.language as tl

from .tiles import TYPES, Specialization, gdc_launch_dependents, gdc_wait, launch, launch_options


@triton.jit(do_not_specialize=["total"])
def _combine_kernel(
    y_ptr,  # [T * TOP_K, HIDDEN]; slots that were skipped hold anything
    ids_ptr,  # [T, TOP_K]
    map_ptr,  # [total]
    probs_ptr,  # [T, TOP_K], or None: every weight is one
    out_ptr,  # [T, HIDDEN]
    total,
    stride_om,
    HIDDEN: tl.constexpr,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    FACTOR: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    # What the router wrote was there before the kernel that writes y began: only y is waited for.
    valids = ()
    weights = ()
    for j in tl.static_range(TOP_K):
        slot = token * TOP_K + j
        expert = tl.load(ids_ptr + slot)
        valid = (expert >= 0) & (expert < total)
        if map_ptr is not None:
            expert = tl.load(map_ptr + expert, mask=valid, other=-1)
            valid = (expert >= 0) & (expert < EXPERTS)
        valids = valids + (valid,)
        if probs_ptr is not None:
            weights = weights + (tl.load(probs_ptr + slot, mask=valid, other=0.0).to(tl.float32),)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    acc = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(TOP_K):
        slot = token * TOP_K + j
        y = tl.load(y_ptr + slot * HIDDEN + n, mask=(n < HIDDEN) & valids[j], other=0.0).to(tl.float32)
        if probs_ptr is not None:
            y *= weights[j]
        acc += y
    if FACTOR != 1.0:
        acc *= FACTOR
    tl.store(out_ptr + token * stride_om + n, acc.to(out_ptr.dtype.element_ty), mask=n < HIDDEN)


def _constants(hidden: int, experts: int, top_k: int, factor: float, tokens: int, pdl: bool) -> dict:
    """One program takes 512 columns of a token while there are few tokens, else up to 2048."""
    block = min(triton.next_power_of_2(hidden), 512 if tokens <= 64 else 2048)
    return dict(HIDDEN=hidden, EXPERTS=experts, TOP_K=top_k, FACTOR=factor, BLOCK=block, PDL=pdl)


def _options(block: int, pdl: bool) -> dict:
    return launch_options(pdl, num_warps=block // 512 * 2 or 1)


def combine(y, ids, probs, out, experts: int, *, expert_map=None, factor=1.0, pdl=False, launch=launch):
    """out[t] = factor * sum over j of probs[t, j] * y[t * top_k + j]; skipped slots count as zero.

    Shapes    y [T * top_k, H] | ids, probs [T, top_k] contiguous -> out [T, H], H contiguous
    Dtypes    y, out bf16, fp16 or fp32; ids int32 or int64; probs any floating dtype, or None for ones
    """
    tokens, hidden = out.shape
    constants = _constants(hidden, experts, ids.shape[1], factor, tokens, pdl)
    total = experts if expert_map is None else expert_map.numel()
    launch(
        _combine_kernel, (tokens, -(-hidden // constants["BLOCK"])),
        y, ids, expert_map, probs, out, total, out.stride(0), **constants,
        **_options(constants["BLOCK"], pdl),
    )  # fmt: skip
    return out


def signature(
    hidden: int, experts: int, top_k: int, tokens: int, dtype="bf16", mapped=False, pdl=True
) -> Specialization:
    """What combine asks the compiler for, with int32 ids and fp32 probs."""
    constants = _constants(hidden, experts, top_k, 1.0, tokens, pdl) | ({} if mapped else {"map_ptr": None})
    kind = f"*{TYPES[dtype]}"
    types = dict(
        y_ptr=kind, ids_ptr="*i32", map_ptr="*i32", probs_ptr="*fp32", out_ptr=kind, total="i32", stride_om="i32"
    )
    types = {name: k for name, k in types.items() if name not in constants} | dict.fromkeys(constants, "constexpr")
    aligned = tuple(name for name, k in types.items() if k.startswith("*")) + ("stride_om",)
    return Specialization(_combine_kernel, types, constants, aligned, _options(constants["BLOCK"], pdl))
