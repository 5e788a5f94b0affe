"""Weights on load: scales normalised to the shapes of `Weights`, 16-bit weights quantised to e4m3 where asked.

scale = max(absmax, 1e-10) / 448 over a tensor, a row or a 128x128 block          q = round(w / scale), to nearest even
"""

from __future__ import annotations

import torch

from .errors import ShapeError
from .problem import BLOCK, Activation, DType, Quant
from .weights import DTYPES, FP8, FP8_MAX, NAMES, Weights, check_weights


def prepare_weights(
    w13, w2, *, quant, activation, dtype, w13_scale, w2_scale, split_scale, w13_bias, w2_bias, x_scale, h_scale
):
    """See api.prepare."""
    stored = w13.dtype == FP8
    quant = _quant(quant, stored, w13_scale, w2.shape[0] if w2.ndim == 3 else 0)
    dtype = _dtype(dtype, w13, stored)
    if stored:
        w13_scale, w2_scale = _scale(w13_scale, quant, "w13_scale"), _scale(w2_scale, quant, "w2_scale")
        if split_scale is None:
            split_scale = _infer_split(w13_scale, quant, activation, w2.shape[-1])
    elif w13_scale is not None or w2_scale is not None:
        raise ShapeError(f"scales were given for weights in {w13.dtype}: they go with float8_e4m3fn weights")
    elif quant is not Quant.NONE:
        split_scale = quant is Quant.FP8_BLOCK and activation.gated and not activation.interleaved
        w13, w13_scale = quantize_weight(w13, quant, halves=2 if split_scale else 1)
        w2, w2_scale = quantize_weight(w2, quant)
    weights = Weights(
        w13=_rows_contiguous(w13),
        w2=_rows_contiguous(w2),
        dtype=dtype,
        quant=quant,
        activation=activation,
        w13_scale=w13_scale,
        w2_scale=w2_scale,
        split_scale=bool(split_scale),
        w13_bias=w13_bias if w13_bias is None else w13_bias.contiguous(),
        w2_bias=w2_bias if w2_bias is None else w2_bias.contiguous(),
        x_scale=_static(x_scale, w13.device),
        h_scale=_static(h_scale, w13.device),
    )
    check_weights(weights)
    return weights


def quantize_weight(w: torch.Tensor, quant: Quant, halves: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """(q, scale) of w [E, N, K], one expert at a time; halves=2: blocks start anew at row N / 2 (the up rows)."""
    q = torch.empty(w.shape, dtype=FP8, device=w.device)
    scales = []
    for expert in range(w.shape[0]):
        value = w[expert].float()
        if quant is Quant.FP8_BLOCK:
            parts = [_block_scales(part) for part in value.chunk(halves)]
            scale = torch.cat([scale for scale, _ in parts])
            full = torch.cat([full for _, full in parts])
        else:
            absmax = value.abs().amax(dim=1) if quant is Quant.FP8_CHANNEL else value.abs().amax()
            scale = absmax.clamp(min=1e-10) / FP8_MAX
            full = scale[:, None] if quant is Quant.FP8_CHANNEL else scale
        q[expert] = (value / full).clamp(-FP8_MAX, FP8_MAX).to(FP8)
        scales.append(scale)
    return q, torch.stack(scales)


def _block_scales(value):
    """([ceil(N / 128), ceil(K / 128)] scales, the same spread over [N, K])."""
    rows, columns = value.shape
    padded = torch.nn.functional.pad(value.abs(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    absmax = padded.view(padded.shape[0] // BLOCK, BLOCK, padded.shape[1] // BLOCK, BLOCK).amax(dim=(1, 3))
    scale = absmax.clamp(min=1e-10) / FP8_MAX
    full = scale.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
    return scale, full


def _quant(quant, stored: bool, w13_scale, experts: int) -> Quant:
    if quant is not None:
        try:
            quant = Quant(quant)
        except ValueError:
            known = ", ".join(q.value for q in Quant)
            raise ShapeError(f"quant={quant!r} is not known: use one of {known}") from None
        if stored and quant is Quant.NONE:
            raise ShapeError("quant='none', but w13 is float8_e4m3fn: give the quant its scales belong to")
        return quant
    if not stored:
        return Quant.NONE
    if w13_scale is None:
        raise ShapeError("w13 is float8_e4m3fn: give w13_scale and w2_scale")
    if w13_scale.numel() in (1, experts):
        return Quant.FP8_TENSOR
    return Quant.FP8_CHANNEL if w13_scale.ndim == 2 or w13_scale.shape[-1] == 1 else Quant.FP8_BLOCK


def _dtype(dtype, w13, stored: bool) -> DType:
    if dtype is None:
        if not stored and w13.dtype not in NAMES:
            raise ShapeError(f"w13 has dtype {w13.dtype}: use bf16, fp16, fp32 or float8_e4m3fn with scales")
        return DType.BF16 if stored else NAMES[w13.dtype]
    found = NAMES.get(dtype) if isinstance(dtype, torch.dtype) else next((d for d in DType if d.value == dtype), None)
    if found is None:
        raise ShapeError(f"dtype={dtype!r} is not known: use one of {', '.join(str(t) for t in DTYPES.values())}")
    return found


def _scale(scale, quant: Quant, name: str):
    """fp32, in the shape of Weights: trailing ones of per-tensor and per-channel scales dropped, E8M0 converted."""
    if scale is None:
        raise ShapeError(f"quant={quant.value} needs {name}")
    if not scale.dtype.is_floating_point:
        raise ShapeError(f"{name} has dtype {scale.dtype}: a scale is a float (E8M0 bytes: view as float8_e8m0fnu)")
    scale = scale.to(torch.float32)
    keep = {Quant.FP8_TENSOR: 1, Quant.FP8_CHANNEL: 2}.get(quant, 3)
    while scale.ndim > keep and scale.shape[-1] == 1:
        scale = scale[..., 0]
    return scale.contiguous()


def _infer_split(w13_scale, quant: Quant, activation: Activation, inter: int) -> bool:
    """Whether gate and up rows have scale blocks of their own, from the number of scale rows."""
    if quant is not Quant.FP8_BLOCK or not activation.gated or inter % BLOCK == 0:
        return False
    split, merged = 2 * -(-inter // BLOCK), -(-2 * inter // BLOCK)
    if split == merged:
        raise ShapeError(
            f"w13_scale has {w13_scale.shape[1]} block rows for I={inter}, which fits both ways of laying them: say "
            f"split_scale=True (gate and up have blocks of their own) or False (blocks run over all 2I rows)"
        )
    return w13_scale.shape[1] == split


def _rows_contiguous(w):
    """On a GPU a view is laid out anew (a transposed checkpoint, [E, H, 2I]): TMA reads whole rows. Elsewhere it will
    do.
    """
    return w.contiguous() if w.is_cuda else w


def _static(scale, device):
    if scale is None:
        return None
    found = torch.as_tensor(scale, dtype=torch.float32, device=device)
    if found.numel() != 1 or not (found.isfinite().all() and (found > 0).all()):
        raise ShapeError(
            f"a static activation scale is one finite number above zero, got {found.flatten()[:4].tolist()}"
        )
    return found.reshape(1)


__all__ = ["prepare_weights", "quantize_weight"]
