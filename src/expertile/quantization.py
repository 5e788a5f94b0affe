"""Weights on load: scales normalised to the shapes of `Weights`, 16-bit weights quantised to e4m3 where asked.

scale = max(absmax, 1e-10) / 448 over a tensor, a row or a 128x128 block          q = round(w / scale), to nearest even
"""

from __future__ import annotations

import torch

from .errors import ShapeError, check_flag, check_number, member
from .problem import BLOCK, Activation, DType, Quant
from .weights import DTYPES, FP8, FP8_MAX, NAMES, Weights, check_sizes, check_tensor, check_weights, is_askew


def prepare_weights(
    w13, w2, *, quant, activation, dtype, w13_scale, w2_scale, split_scale, w13_bias, w2_bias, x_scale, h_scale
):
    """See api.prepare."""
    tensors = dict(
        w13=w13, w2=w2, w13_scale=w13_scale, w2_scale=w2_scale, w13_bias=w13_bias, w2_bias=w2_bias
    )  # fmt: skip
    for name, value in tensors.items():
        if value is not None or name in ("w13", "w2"):
            check_tensor(name, value)
    check_sizes(w13, w2, activation)
    _check_dtypes(w13, w2)
    stored = w13.dtype == FP8
    quant = _quant(quant, stored, w13_scale, w13)
    _check_split(split_scale, quant, activation, stored)
    dtype = _dtype(dtype, w13, stored)
    if stored:
        w13_scale, w2_scale = _scale(w13_scale, quant, "w13_scale"), _scale(w2_scale, quant, "w2_scale")
        _check_halves(w13_scale, quant, w13)
        if split_scale is None:
            split_scale = _infer_split(w13_scale, quant, activation, w2.shape[-1])
    elif w13_scale is not None or w2_scale is not None:
        raise ShapeError(f"scales were given for weights in {w13.dtype}: they go with float8_e4m3fn weights")
    elif quant is not Quant.NONE:
        if split_scale is None:
            split_scale = quant is Quant.FP8_BLOCK and activation.gated and not activation.interleaved
        w13, w13_scale = quantize_weight(w13, quant, halves=2 if split_scale else 1)
        w2, w2_scale = quantize_weight(w2, quant)
    weights = Weights(
        w13=_laid_out(w13),
        w2=_laid_out(w2),
        dtype=dtype,
        quant=quant,
        activation=activation,
        w13_scale=w13_scale,
        w2_scale=w2_scale,
        split_scale=bool(split_scale),
        w13_bias=w13_bias if w13_bias is None else w13_bias.contiguous(),
        w2_bias=w2_bias if w2_bias is None else w2_bias.contiguous(),
        x_scale=_static("x_scale", x_scale, w13.device),
        h_scale=_static("h_scale", h_scale, w13.device),
    )
    check_weights(weights)
    for name in ("w13", "w2"):
        _check_values(name, getattr(weights, f"{name}_scale"), stored)
    return weights


def _check_dtypes(w13, w2) -> None:
    if w13.dtype not in NAMES and w13.dtype != FP8:
        raise ShapeError(
            f"w13 has dtype {w13.dtype}: use bf16, fp16, fp32, or float8_e4m3fn with scales; packed weights of other "
            f"formats are to be unpacked first"
        )
    if w2.dtype != w13.dtype:
        raise ShapeError(f"w2 has dtype {w2.dtype}, w13 has {w13.dtype}: both must have the same")


def _check_split(split_scale, quant: Quant, activation: Activation, stored: bool) -> None:
    """split_scale is about fp8_block scales of a w13 with gate rows and up rows; elsewhere it would be ignored."""
    if split_scale is None:
        return
    check_flag(split_scale, "split_scale")
    if quant is not Quant.FP8_BLOCK:
        raise ShapeError(f"split_scale={split_scale} goes with quant=fp8_block, not {quant.value}: leave it out")
    if split_scale and not activation.gated:
        raise ShapeError(f"split_scale=True, but activation {activation.name} has no gate rows to split off: leave it")
    if split_scale and not stored and activation.interleaved:
        raise ShapeError("split_scale=True, but gate and up rows alternate: they are quantised in common blocks")


def _check_halves(w13_scale, quant: Quant, w13) -> None:
    """[E, 2] is what checkpoints with a scale each for gate and up have: neither fp8_tensor nor fp8_channel."""
    experts, rows, hidden = w13.shape
    if quant is not Quant.FP8_BLOCK and tuple(w13_scale.shape) == (experts, 2) and rows != 2:
        raise ShapeError(
            f"w13_scale is {tuple(w13_scale.shape)}: a scale each for gate and up rows, which quant={quant.value} does "
            f"not have. Where both are equal give w13_scale[:, 0] with quant='fp8_tensor'; else quant='fp8_channel' "
            f"with one a row: w13_scale.repeat_interleave({rows // 2}, 1) (gate rows first), and of w2's scales [E] "
            f"w2_scale[:, None].expand(-1, {hidden})"
        )


def _check_values(name: str, scale, stored: bool) -> None:
    """Waits for the GPU: weights are prepared once, when they are loaded."""
    if scale is None or scale.is_meta:
        return
    good = (scale >= 0) & (scale < torch.inf)  # NaN is neither
    if bool(good.all()):
        return
    place = (~good).nonzero()[0].tolist()
    if not stored:
        raise ShapeError(f"{name}[{place[0]}] holds values that are not finite: it cannot be quantised")
    raise ShapeError(f"{name}_scale{place} is {scale[tuple(place)].item()}: a scale is finite and not negative")


@torch.no_grad()
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


def _quant(quant, stored: bool, w13_scale, w13) -> Quant:
    """The quant that was asked for, or what the shape of the scales says."""
    if quant is not None:
        quant = member(Quant, quant, "quant")
        if stored and quant is Quant.NONE:
            raise ShapeError("quant='none', but w13 is float8_e4m3fn: give the quant its scales belong to")
        return quant
    if not stored:
        return Quant.NONE
    if w13_scale is None:
        raise ShapeError("w13 is float8_e4m3fn: give w13_scale and w2_scale")
    experts, rows, _ = w13.shape
    if w13_scale.numel() in (1, experts):
        return Quant.FP8_TENSOR
    if w13_scale.ndim == 3 and tuple(w13_scale.shape[1:]) != (rows, 1):
        return Quant.FP8_BLOCK
    return Quant.FP8_CHANNEL


def _dtype(dtype, w13, stored: bool) -> DType:
    if dtype is None:
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


def _laid_out(w):
    """On a GPU a view is laid out anew (a transposed checkpoint, [E, H, 2I], or one that begins amid other memory): TMA
    reads whole rows, from multiples of 16 bytes on. Elsewhere it will do.
    """
    if is_askew(w):
        return w.clone(memory_format=torch.contiguous_format)
    return w.contiguous() if w.is_cuda else w


def _static(name: str, scale, device):
    if scale is None:
        return None
    if not isinstance(scale, torch.Tensor):
        check_number(scale, name)
    found = torch.as_tensor(scale, dtype=torch.float32, device=device)
    if found.numel() != 1 or not (found.isfinite().all() and (found > 0).all()):
        raise ShapeError(
            f"{name} is {found.flatten()[:4].tolist()}: a static activation scale is one finite number above zero"
        )
    return found.reshape(1)


__all__ = ["prepare_weights", "quantize_weight"]
