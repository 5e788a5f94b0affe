"""vLLM's parameters of a layer, as it leaves them for its Triton backend, as Weights: views, nothing copied or changed.

w13 [E, 2I or I, H], w2 [E, H, I]   as the checkpoint has them
scales fp32                         [E] | [E, N, 1], [E, H, 1] | [E, blocks, ceil(H / 128)], [E, ceil(H / 128), ...]
static activation scales            one value, the largest of the experts'
"""

from __future__ import annotations

import torch

from ...errors import ShapeError
from ...problem import BLOCK, Activation, Quant
from ...weights import NAMES, Weights, check_weights


def weights_of(w13, w2, config, activation: Activation, dtype: torch.dtype) -> Weights:
    """The Weights of one layer.

    config    vLLM's FusedMoEQuantConfig: scales, biases and how x and h are quantised
    dtype     of x
    Raises    ShapeError naming what is not as vLLM's Triton backend has it. Nothing here waits for the GPU
    """
    quant = quant_of(config)
    weights = Weights(
        w13=w13,
        w2=w2,
        dtype=NAMES[dtype],
        quant=quant,
        activation=activation,
        w13_scale=_scale(config.w1_scale, quant),
        w2_scale=_scale(config.w2_scale, quant),
        split_scale=quant is Quant.FP8_BLOCK and activation.gated and w2.shape[-1] % BLOCK != 0,
        w13_bias=config.w1_bias,
        w2_bias=config.w2_bias,
        x_scale=_one(config.a1_scale),
        h_scale=_one(config.a2_scale),
    )
    check_weights(weights)
    for name in ("w13", "w2", "w13_scale", "w2_scale", "w13_bias", "w2_bias"):
        tensor = getattr(weights, name)
        if tensor is not None and not tensor.is_contiguous():
            raise ShapeError(f"{name} {tuple(tensor.shape)} has strides {tensor.stride()}: it must be contiguous")
    return weights


def quant_of(config) -> Quant:
    """How the weights that this FusedMoEQuantConfig describes are stored."""
    if config.w1_scale is None:
        return Quant.NONE
    if config.block_shape is not None:
        if list(config.block_shape) != [BLOCK, BLOCK]:
            raise ShapeError(f"block_shape={config.block_shape}: only {BLOCK}x{BLOCK} is supported")
        return Quant.FP8_BLOCK
    return Quant.FP8_CHANNEL if config.per_out_ch_quant else Quant.FP8_TENSOR


def _scale(scale, quant: Quant):
    """In the shape of Weights: [E, N, 1] is [E, N], [E, 1] is [E]."""
    if scale is None or quant is Quant.FP8_BLOCK:
        return scale
    return scale.view(scale.shape[0], -1) if quant is Quant.FP8_CHANNEL else scale.view(-1)


def _one(scale):
    return None if scale is None else scale.view(1) if scale.numel() == 1 else scale  # check_weights refuses several
