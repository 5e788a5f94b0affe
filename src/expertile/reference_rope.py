"""The obvious inverse rotation and quantisation of DeepSeek-V4's attention output, in float64.

What kernels.inv_rope_quant is judged by, so it shares no code with it. In a file of its own because nothing of it
belongs to a Mixture-of-Experts layer.
"""

from __future__ import annotations

import torch

F64 = torch.float64
HEAD_DIM, ROPE_DIM, BLOCK = 512, 64, 128
FP8_MAX, FLOOR = 448.0, 1e-10


def inverse_rope(o, positions, cos_sin):
    """o with the last 64 values of each head, taken as 32 complex numbers, turned by minus the angle of its position.

    Shapes    o [T, heads, 512] | positions [T] | cos_sin [max_pos, 64], cos(32) || sin(32) -> float64 [T, heads, 512]
    """
    still, turned = o.to(F64).split((HEAD_DIM - ROPE_DIM, ROPE_DIM), -1)
    cos, sin = cos_sin.to(F64)[positions.long()].unsqueeze(1).chunk(2, -1)
    back = torch.view_as_complex(turned.unflatten(-1, (-1, 2)).contiguous()) * torch.complex(cos, -sin)
    return torch.cat([still, torch.view_as_real(back).flatten(-2)], -1)


def power_of_two_scales(x):
    """2^ceil(log2(max(absmax, 1e-10) / 448)) of each 128 values: float64 [..., W] -> [..., W / 128]."""
    peaks = x.unflatten(-1, (-1, BLOCK)).abs().amax(-1).clamp(min=FLOOR) / FP8_MAX
    mantissa, exponent = torch.frexp(peaks)  # peaks = mantissa * 2^exponent, mantissa in [0.5, 1)
    return torch.ldexp(torch.ones_like(peaks), exponent - (mantissa == 0.5).to(exponent.dtype))


def fused_inv_rope_fp8_quant(o, positions, cos_sin, groups: int):
    """(q, scales) before they are rounded and laid out: q * scale is o rotated back, |q| <= 448.

    Shapes    -> q [T, groups, D], scales [T, groups, D / 128], both float64, D = heads / groups * 512
    """
    x = inverse_rope(o, positions, cos_sin).reshape(o.shape[0], groups, -1)
    scales = power_of_two_scales(x)
    return x / scales.repeat_interleave(BLOCK, -1), scales
