"""DeepSeek-V4's attention output on its way into the output projection: rotated back, then e4m3, group by group.

    even' = even * cos + odd * sin        odd' = odd * cos - even * sin        in the last 64 of a head's 512 values
    scale = 2^ceil(log2(max(absmax, 1e-10) / 448)) of each 128 values          q = round(o' / scale)

A program, four warps, takes four tokens of one head: what a row of scales is rounded up to, so the tokens that only
pad are in a tile of some token that exists, and there is one launch. A warp has a token, a lane 16 values of it: two
16-byte loads, one 16-byte store; the rotated part is spread over all lanes once more. The scale is made of the bits of
absmax, exactly.

The number of tokens is the only argument that varies, and it is not specialised; what follows from it is computed here.
Strides of o come in units of 16 bytes, so that the compiler knows the alignment without knowing the stride.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..errors import ShapeError, UnsupportedProblem
from .tiles import Specialization, gdc_launch_dependents, gdc_wait, launch_options

HEAD_DIM, ROPE_DIM, BLOCK = 512, 64, 128
TOKENS = 4  # of a tile, and what a row of scales is rounded up to (16 bytes)
WARPS = 4  # of a program: one takes a token
UNIT = 8  # values of o in 16 bytes
POSITION_DTYPES = {torch.int32: "i32", torch.int64: "i64"}


@triton.jit
def _power_of_two_scale(absmax):
    """The smallest power of two that is at least max(absmax, 1e-10) / 448. As 448 = 1.75 * 2^8, one is added to the
    exponent where the mantissa is above 1.75.
    """
    bits = tl.maximum(absmax, 1e-10).to(tl.int32, bitcast=True)
    return (((bits + 0x1FFFFF) & 0x7F800000) - (8 << 23)).to(tl.float32, bitcast=True)


@triton.jit
def _inverse(scale):
    """1 / scale of a power of two, exactly: its exponent mirrored."""
    return (0x7F000000 - scale.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)


@triton.jit
def to_fp8(value, scale):
    """tiles.to_fp8 for values that are within 448 of themselves: nothing is clamped, so NaN stays NaN."""
    return (value / scale).to(tl.float8e4nv)


@triton.jit(
    do_not_specialize=["stride_ot", "stride_oh", "tokens"],
    do_not_specialize_on_alignment=["positions_ptr"],
)
def _inv_rope_quant_kernel(
    o_ptr,  # [T, HEADS, 512]
    positions_ptr,  # [T]
    cos_sin_ptr,  # [max_pos, 64]
    q_ptr,  # [GROUPS, T, HEADS / GROUPS * 512]
    scale_ptr,  # [GROUPS, HEADS / GROUPS * 4, T rounded up to 4]
    stride_ot,  # both in units of UNIT values
    stride_oh,
    tokens,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    TOKENS: tl.constexpr,
    UNIT: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    GROUP_HEADS: tl.constexpr = HEADS // GROUPS
    head = tl.program_id(0) % HEADS
    t = tl.program_id(0) // HEADS * TOKENS + tl.arange(0, TOKENS)
    exists = t < tokens
    t = t.to(tl.int64)

    n = tl.arange(0, 512)
    turned = tl.arange(0, 64)
    pair = tl.arange(0, 32)
    keep = exists[:, None] & (n < 448)[None, :]
    o_row = o_ptr + (t * stride_ot + head.to(tl.int64) * stride_oh)[:, None] * UNIT
    x = tl.load(o_row + n[None, :], mask=keep, other=0.0)
    y = tl.load(o_row + 448 + turned[None, :], mask=exists[:, None], other=0.0)
    position = tl.load(positions_ptr + t, mask=exists, other=0).to(tl.int64)
    tl.debug_barrier()  # else ptxas puts the loads that wait for `position` ahead of those of x
    cos_row = cos_sin_ptr + position[:, None] * 64
    cos = tl.load(cos_row + pair[None, :], mask=exists[:, None], other=0.0)
    sin = tl.load(cos_row + 32 + pair[None, :], mask=exists[:, None], other=0.0)

    even, odd = tl.split(tl.reshape(y.to(tl.float32), (TOKENS, 32, 2)))
    y = tl.reshape(tl.join(even * cos + odd * sin, odd * cos - even * sin), (TOKENS, 64))
    x = tl.reshape(x.to(tl.float32), (TOKENS, 4, 128))
    last = (tl.arange(0, 4) == 3)[None, :]
    absmax = tl.max(tl.abs(x), 2)
    scale = _power_of_two_scale(tl.where(last, tl.maximum(absmax, tl.max(tl.abs(y), 1)[:, None]), absmax))
    q = tl.reshape(to_fp8(x * _inverse(scale)[:, :, None], 1.0), (TOKENS, 512))
    q_turned = to_fp8(y * _inverse(tl.max(tl.where(last, scale, 0.0), 1))[:, None], 1.0)

    q_row = (head // GROUP_HEADS).to(tl.int64) * tokens + t
    q_row = q_ptr + (q_row * (GROUP_HEADS * 512) + head % GROUP_HEADS * 512)[:, None]
    tl.store(q_row + n[None, :], q, mask=keep)
    tl.store(q_row + 448 + turned[None, :], q_turned, mask=exists[:, None])
    block = (head * 4 + tl.arange(0, 4)).to(tl.int64)
    tl.store(scale_ptr + block[None, :] * ((tokens + 3) // 4 * 4) + t[:, None], tl.where(exists[:, None], scale, 0.0))


def fused_inv_rope_fp8_quant(o, positions, cos_sin, groups: int, *, out=None, scales=None):
    """(q, scales): o with each head's last 64 values rotated back by its token's position, in e4m3 and blocks of 128.

    Shapes    o [T, heads, 512] | positions [T] | cos_sin [max_pos, 64], cos(32) || sin(32)
              -> q [T, groups, D], scales [T, groups, D / 128], D = heads / groups * 512
    Dtypes    o bf16; positions int32 or int64; cos_sin fp32; q e4m3; scales fp32, powers of two
    Memory    q lies group by group, [groups, T, D]; scales with the tokens of a block side by side, in rows of T
              rounded up to 4 whose padding is zero, [groups, D / 128, ceil(T / 4) * 4]. `out` and `scales` give that
              memory, contiguous and in those shapes; the result is a view of it
    Needs     a Hopper GPU; 16-byte aligned rows of o; 0 <= positions < max_pos, which only the device could check
    Compiles  once for heads, groups and the dtype of positions, whatever T
    Raises    ShapeError naming the value; UnsupportedProblem on another device
    """
    tokens, heads = _check(o, positions, cos_sin, groups)
    _check_device(o)
    width = heads // groups * HEAD_DIM
    padded = -(-tokens // TOKENS) * TOKENS
    out = _memory("out", out, (groups, tokens, width), torch.float8_e4m3fn, o.device)
    scales = _memory("scales", scales, (groups, width // BLOCK, padded), torch.float32, o.device)
    with torch.cuda.device_of(o):  # kernels start on the current device
        launch(o, positions, cos_sin, out, scales)
    return out.transpose(0, 1), scales[:, :, :tokens].permute(2, 0, 1)


def launch(
    o, positions, cos_sin, out, scales, kernel=_inv_rope_quant_kernel, unit=UNIT, tile=TOKENS, warps=WARPS
) -> None:
    """Of arguments that are known to fit. What has a default differs from it only where its worth is measured."""
    tokens, heads, _ = o.shape
    groups, _, padded = scales.shape
    if not tokens:
        return
    constants, options = _constants(heads, groups, o.is_cuda, unit, tile, warps)
    kernel[(padded // tile * heads,)](
        o, positions, cos_sin, out, scales, o.stride(0) // unit, o.stride(1) // unit, tokens, **constants, **options
    )


def _constants(heads: int, groups: int, pdl: bool, unit=UNIT, tile=TOKENS, warps=WARPS) -> tuple[dict, dict]:
    """The constexpr arguments of a launch, and its options."""
    constants = dict(HEADS=heads, GROUPS=groups, TOKENS=tile, UNIT=unit, PDL=pdl)
    return constants, launch_options(pdl, num_warps=warps)


def signature(
    heads: int, groups: int, positions="i64", pdl=True, unit=UNIT, tile=TOKENS, warps=WARPS
) -> Specialization:
    """What fused_inv_rope_fp8_quant asks the compiler for, with any number of tokens."""
    constants, options = _constants(heads, groups, pdl, unit, tile, warps)
    pointers = dict(o_ptr="*bf16", cos_sin_ptr="*fp32", q_ptr="*fp8e4nv", scale_ptr="*fp32")
    types = dict(pointers, positions_ptr=f"*{positions}", stride_ot="i32", stride_oh="i32", tokens="i32")
    types |= dict.fromkeys(constants, "constexpr")
    return Specialization(_inv_rope_quant_kernel, types, constants, tuple(pointers), options)


def _check(o, positions, cos_sin, groups: int) -> tuple[int, int]:
    """(tokens, heads); raises ShapeError for what does not fit."""
    if o.ndim != 3 or o.shape[2] != HEAD_DIM or o.shape[1] < 1 or o.dtype != torch.bfloat16:
        raise ShapeError(f"o is {o.dtype} {tuple(o.shape)}, needs bfloat16 (T, heads, {HEAD_DIM})")
    tokens, heads, _ = o.shape
    if isinstance(groups, bool) or not isinstance(groups, int) or groups < 1 or heads % groups:
        raise ShapeError(f"groups={groups!r}: needs a whole number that divides {heads} heads")
    apart = [stride for size, stride in zip(o.shape, o.stride(), strict=True) if size > 1]
    if tokens and (apart[-1] != 1 or any(stride % UNIT for stride in apart[:-1]) or o.data_ptr() % 16):
        raise ShapeError(
            f"o has strides {o.stride()} at address {o.data_ptr():#x}: needs 16-byte aligned rows with the last "
            "dimension contiguous; o.contiguous() has them"
        )
    if positions.shape != (tokens,) or positions.dtype not in POSITION_DTYPES or not positions.is_contiguous():
        raise ShapeError(
            f"positions are {positions.dtype} {tuple(positions.shape)} with strides {positions.stride()}, need int32 "
            f"or int64 ({tokens},), contiguous"
        )
    if cos_sin.ndim != 2 or cos_sin.shape[1] != ROPE_DIM or cos_sin.dtype != torch.float32:
        raise ShapeError(f"cos_sin is {cos_sin.dtype} {tuple(cos_sin.shape)}, needs float32 (max_pos, {ROPE_DIM})")
    if not cos_sin.is_contiguous() or cos_sin.data_ptr() % 16:
        raise ShapeError(f"cos_sin has strides {cos_sin.stride()}: needs contiguous rows, 16-byte aligned")
    for name, tensor in (("positions", positions), ("cos_sin", cos_sin)):
        if tensor.device != o.device:
            raise ShapeError(f"{name} are on {tensor.device}, o is on {o.device}")
    return tokens, heads


def _check_device(o) -> None:
    hopper = o.is_cuda and torch.cuda.get_device_capability(o.device) >= (9, 0)
    if not hopper and not triton.knobs.runtime.interpret:
        raise UnsupportedProblem(f"o is on {o.device}: needs a GPU of compute capability 9.0 or later")


def _memory(name: str, given, shape: tuple[int, ...], dtype, device):
    if given is None:
        return torch.empty(shape, dtype=dtype, device=device)
    if tuple(given.shape) != shape or given.dtype != dtype or given.device != device:
        raise ShapeError(
            f"{name} is {given.dtype} {tuple(given.shape)} on {given.device}, needs {dtype} {shape} on {device}"
        )
    if not given.is_contiguous() or given.data_ptr() % 16:
        raise ShapeError(f"{name} has strides {given.stride()}: needs contiguous memory, 16-byte aligned")
    return given


__all__ = ["fused_inv_rope_fp8_quant", "signature"]
