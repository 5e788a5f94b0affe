"""From router logits to top_k expert ids and weights, one kernel for every kind of router (see `router.Router`).

    ids = the top_k experts by score(logits) + bias, lowest id first among equals        probs = their scores, weighted

One warp has a few tokens with all their experts in registers, so every reduction stays within the warp. Experts are
taken in top_k rounds by int32 keys that sort as the fp32 numbers do: a key taken becomes the smallest int32, which no
number has, so ids are distinct whatever the logits are. The experts of a group lie together, padded to a power of two.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..errors import ShapeError
from ..router import Router
from .tiles import TYPES, Specialization, gdc_launch_dependents, gdc_wait, launch_options

LARGEST = tl.constexpr(3.4028234663852886e38)
TAKEN = tl.constexpr(-(2**31))  # less than the key of any number
PAIRS_PER_WARP = 256  # tokens times experts of one program


@triton.jit
def finite(x):
    """fp32 with +-inf as the largest number and NaN as the smallest."""
    return tl.minimum(tl.maximum(tl.where(x != x, -LARGEST, x), -LARGEST), LARGEST)


@triton.jit
def sort_key(x):
    """int32 that orders as x does; 0.0 and -0.0 have the same."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def softplus(x):
    """log(1 + exp(x)) with a relative error near 1e-7: log1p(e) = 2 atanh(z), z = e / (2 + e) <= 1/3, as a series."""
    e = tl.exp(-tl.abs(x))
    z = e / (2.0 + e)
    q = z * z
    series = 1.0 + q * (
        0.33333333 + q * (0.2 + q * (0.14285714 + q * (0.11111111 + q * (0.09090909 + q * 0.07692308))))
    )
    return tl.maximum(x, 0.0) + 2.0 * z * series


@triton.jit
def expert_score(logit, peak, total, SCORE: tl.constexpr):
    """score(logit); peak and total are softmax's, of the token."""
    if SCORE == "softmax":
        score = tl.exp(logit - peak) / total
    elif SCORE == "sigmoid":
        score = 1.0 / (1.0 + tl.exp(-logit))
    elif SCORE == "sqrt_softplus":
        score = tl.sqrt(softplus(logit))
    else:
        tl.static_assert(SCORE == "none", "unknown score")
        score = logit
    return score


@triton.jit
def take_best(key, column, BLOCK: tl.constexpr):
    """The column of the largest key of each row, the first among equals, and the keys without it."""
    best = tl.max(key, 1)
    found = tl.min(tl.where(key == best[:, None], column[None, :], BLOCK), 1)
    return found, tl.where(column[None, :] == found[:, None], TAKEN, key)


@triton.jit
def keep_best_groups(
    choice, key, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, GROUP_SCORE: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """The keys with those of all but the best TOP_GROUPS groups taken out; choice is -inf where there is no expert."""
    group = tl.arange(0, BLOCK_G)
    member = tl.arange(0, BLOCK_S)[None, None, :]
    choice = tl.reshape(choice, (BLOCK_T, BLOCK_G, BLOCK_S))
    best = tl.max(choice, 2)
    if GROUP_SCORE == "top2":
        first = tl.min(tl.where(choice == best[:, :, None], member, BLOCK_S), 2)
        best += tl.max(tl.where(member == first[:, :, None], float("-inf"), choice), 2)
    left = tl.where((group < GROUPS)[None, :], sort_key(finite(best)), TAKEN)
    for _ in tl.static_range(TOP_GROUPS):
        _, left = take_best(left, group, BLOCK_G)
    chosen = (left == TAKEN) & (group < GROUPS)[None, :]
    key = tl.where(chosen[:, :, None], tl.reshape(key, (BLOCK_T, BLOCK_G, BLOCK_S)), TAKEN)
    return tl.reshape(key, (BLOCK_T, BLOCK_G * BLOCK_S))


@triton.jit(do_not_specialize=["tokens"])
def _router_kernel(
    logits_ptr,  # [T, EXPERTS]
    bias_ptr,  # [EXPERTS], or None
    ids_ptr,  # [T, TOP_K]
    probs_ptr,  # [T, TOP_K]
    tokens,
    stride_lt,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    SCORE: tl.constexpr,
    SOFTMAX_AFTER: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    GROUP_SCORE: tl.constexpr,
    FACTOR: tl.constexpr,
    EPSILON: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    BLOCK_E: tl.constexpr = BLOCK_G * BLOCK_S
    SIZE: tl.constexpr = EXPERTS // GROUPS
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    column = tl.arange(0, BLOCK_E)
    expert = column if GROUPS == 1 else (column // BLOCK_S) * SIZE + column % BLOCK_S
    valid = (column % BLOCK_S < SIZE) & (column // BLOCK_S < GROUPS)
    row_ptr = logits_ptr + token * stride_lt
    if PDL:
        gdc_wait()
        gdc_launch_dependents()

    there = (token < tokens)[:, None] & valid[None, :]
    logit = finite(tl.load(row_ptr[:, None] + expert[None, :], mask=there, other=0.0).to(tl.float32))
    peak = tl.max(tl.where(valid[None, :], logit, -LARGEST), 1)[:, None]
    total = tl.sum(tl.where(valid[None, :], tl.exp(logit - peak), 0.0), 1)[:, None] if SCORE == "softmax" else peak
    choice = expert_score(logit, peak, total, SCORE)
    if bias_ptr is not None:
        choice = finite(choice + tl.load(bias_ptr + expert, mask=valid, other=0.0)[None, :])
    choice = tl.where(valid[None, :], choice, float("-inf"))
    key = tl.where(valid[None, :], sort_key(choice), TAKEN)
    if GROUPS > 1:
        key = keep_best_groups(choice, key, GROUPS, TOP_GROUPS, GROUP_SCORE, BLOCK_T, BLOCK_G, BLOCK_S)

    slot = tl.arange(0, BLOCK_K)[None, :]
    ids = tl.zeros((BLOCK_T, BLOCK_K), tl.int32)
    for j in tl.static_range(TOP_K):
        found, key = take_best(key, column, BLOCK_E)
        ids = tl.where(slot == j, found[:, None], ids)
    if GROUPS > 1:
        ids = (ids // BLOCK_S) * SIZE + ids % BLOCK_S

    there = (token < tokens)[:, None] & (slot < TOP_K)
    logit = finite(tl.load(row_ptr[:, None] + ids, mask=there, other=0.0).to(tl.float32))
    probs = expert_score(logit, peak, total, SCORE)
    if SOFTMAX_AFTER:
        probs = tl.where(slot < TOP_K, probs, -LARGEST)
        probs = tl.where(slot < TOP_K, tl.exp(probs - tl.max(probs, 1)[:, None]), 0.0)
        probs = probs / tl.sum(probs, 1)[:, None]
    if RENORMALIZE:
        sum_k = tl.sum(tl.where(slot < TOP_K, probs, 0.0), 1)[:, None] + EPSILON
        probs = probs / tl.where(sum_k == 0.0, 1.0, sum_k)
    place = token[:, None] * TOP_K + slot
    tl.store(ids_ptr + place, ids, mask=there)
    tl.store(probs_ptr + place, probs * FACTOR, mask=there)


def _constants(experts: int, router: Router, top_k: int, pdl: bool) -> dict:
    size = triton.next_power_of_2(experts // router.groups)
    groups = triton.next_power_of_2(router.groups)
    return dict(
        EXPERTS=experts, TOP_K=top_k, SCORE=router.score.value, SOFTMAX_AFTER=router.softmax_after,
        RENORMALIZE=router.renormalize, GROUPS=router.groups, TOP_GROUPS=router.top_groups,
        GROUP_SCORE=router.group_score.value, FACTOR=router.scaling_factor, EPSILON=router.epsilon,
        BLOCK_T=max(1, PAIRS_PER_WARP // (groups * size)), BLOCK_G=groups, BLOCK_S=size,
        BLOCK_K=triton.next_power_of_2(top_k), PDL=pdl,
    )  # fmt: skip


def _options(pdl: bool) -> dict:
    return launch_options(pdl, num_warps=1)


def router(logits, router: Router, top_k: int, bias=None, ids=None, probs=None, *, pdl=False):
    """ids = the top_k experts by score(logits) + bias; probs = their scores, weighted as `router` says.

    Shapes    logits [T, E], E contiguous | bias [E] -> ids, probs [T, top_k]
    Dtypes    logits bf16, fp16 or fp32; bias, probs fp32; ids int32; all arithmetic fp32
    Needs     T < 2^31; any E that fits one warp's registers (1024 do)
    Raises    ShapeError when the router cannot choose top_k of E, or a tensor does not fit
    """
    tokens, experts = logits.shape
    router.check(experts, top_k)
    if logits.stride(1) != 1:
        raise ShapeError(f"logits with strides {logits.stride()}: the experts of a token must be contiguous")
    if bias is not None and (bias.dtype != torch.float32 or bias.shape != (experts,) or not bias.is_contiguous()):
        raise ShapeError(
            f"the router's bias is {bias.dtype} {tuple(bias.shape)}, needs contiguous float32 ({experts},)"
        )
    ids = _output("ids", ids, logits, top_k, torch.int32)
    probs = _output("probs", probs, logits, top_k, torch.float32)
    if tokens:
        constants = _constants(experts, router, top_k, pdl)
        with torch.cuda.device_of(logits):  # kernels start on the current device
            _router_kernel[(-(-tokens // constants["BLOCK_T"]),)](
                logits, bias, ids, probs, tokens, logits.stride(0), **constants, **_options(pdl)
            )
    return ids, probs


def _output(name: str, out, logits, top_k: int, dtype):
    shape = (logits.shape[0], top_k)
    if out is None:
        return torch.empty(shape, dtype=dtype, device=logits.device)
    if out.shape != shape or out.dtype != dtype or not out.is_contiguous():
        raise ShapeError(f"{name} is {out.dtype} {tuple(out.shape)}, needs contiguous {dtype} {shape}")
    return out


def signature(experts: int, router: Router, top_k: int, dtype="fp32", bias=False, pdl=True) -> Specialization:
    """What router asks the compiler for; the stride is a multiple of 16 where E is."""
    constants = _constants(experts, router, top_k, pdl) | ({} if bias else {"bias_ptr": None})
    types = dict(logits_ptr=f"*{TYPES[dtype]}", bias_ptr="*fp32", ids_ptr="*i32", probs_ptr="*fp32")
    types.update(tokens="i32", stride_lt="i32")
    types = {name: kind for name, kind in types.items() if name not in constants} | dict.fromkeys(
        constants, "constexpr"
    )
    aligned = tuple(name for name, kind in types.items() if kind.startswith("*"))
    aligned += ("stride_lt",) if experts % 16 == 0 else ()
    return Specialization(_router_kernel, types, constants, aligned, _options(pdl))
