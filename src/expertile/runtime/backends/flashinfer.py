"""FlashInfer's CUTLASS fused experts, tuned by its own tuner; x is quantised by vLLM's kernel, as FlashInfer has none.

Its weights lie otherwise than a checkpoint's: a copy is made when they are loaded.
"""

from __future__ import annotations

import torch

from ...plans import Backend
from ...problem import Problem, Quant
from ...weights import Weights
from . import Experts, module
from .vllm import ensure_session

ACTIVATIONS = {"silu": "Swiglu", "relu2": "Relu2"}  # names of ActivationType


def load(backend: Backend, weights: Weights, problem: Problem) -> Experts:
    """Each number of tokens is tuned on its first call outside CUDA-graph capture."""
    ensure_session()
    autotune = module("flashinfer.autotuner").autotune
    experts = cutlass_experts(weights)
    tuned: set[int] = set()

    def run(x, ids, probs):
        if x.shape[0] not in tuned and not torch.cuda.is_current_stream_capturing():
            tuned.add(x.shape[0])
            with autotune(True):
                experts(x, ids, probs)
        return experts(x, ids, probs)

    return run


def cutlass_experts(weights: Weights) -> Experts:
    fused_moe = module("flashinfer.fused_moe").cutlass_fused_moe
    kinds = module("flashinfer.fused_moe.core").ActivationType
    quantize = module("vllm._custom_ops").scaled_fp8_quant
    activation = getattr(kinds, ACTIVATIONS[weights.activation.name])
    w13, w2 = up_first(weights)
    scales, a1 = [], None
    if weights.quant is Quant.FP8_TENSOR:
        a1, a2 = weights.x_scale.reshape(()), weights.h_scale.reshape(())
        scales = [weights.w13_scale * a1, 1 / a2, weights.w2_scale * a2, a1]

    def run(x, ids, probs):
        q = x if a1 is None else quantize(x, a1)[0]
        out = torch.empty_like(x)
        fused_moe(q, ids, probs, w13, w2, x.dtype, scales, output=out, activation_type=activation)
        return out

    return run


def up_first(weights: Weights) -> tuple[torch.Tensor, torch.Tensor]:
    """(w13, w2) as the kernels want them: up rows before gate rows, I padded with zeros (to what vLLM pads it to)."""
    gated, inter = weights.activation.gated, weights.inter
    padding = -inter % (16 if gated else 128)
    # fp8 tensors can be neither flipped nor padded: their bytes can
    w13 = weights.w13.view(torch.uint8).unflatten(1, (-1, inter)).flip(1)
    w13 = torch.nn.functional.pad(w13, (0, 0, 0, padding)).flatten(1, 2).view(weights.w13.dtype)
    w2 = torch.nn.functional.pad(weights.w2.view(torch.uint8), (0, padding * weights.w2.element_size()))
    return w13, w2.view(weights.w2.dtype)
