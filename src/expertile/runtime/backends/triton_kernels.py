"""OpenAI's triton_kernels as vLLM brings and calls them, on 16-bit weights: gpt-oss' activation is all they have."""

from __future__ import annotations

import torch

from ...plans import Backend
from ...problem import Problem
from ...weights import Weights
from . import Experts, module
from .vllm import LAYERS, ensure_session, moe_activation


def load(backend: Backend, weights: Weights, problem: Problem) -> Experts:
    """Transposed views of the weights, biases in fp32. The router's weights are rounded to bf16 by vLLM's wrapper."""
    ensure_session()
    calls, config = module(f"{LAYERS}.experts.gpt_oss_triton_kernels_moe"), module(f"{LAYERS}.config")
    w13, w2, total = weights.w13.transpose(1, 2), weights.w2.transpose(1, 2), weights.experts
    biases = {
        name: None if bias is None else bias.float()
        for name, bias in (("w1_bias", weights.w13_bias), ("w2_bias", weights.w2_bias))
    }
    quant_config, activation = config.biased_moe_quant_config(**biases), moe_activation(weights.activation)
    alpha, limit = weights.activation.alpha, weights.activation.limit

    def run(x, ids, probs):
        skipped = (ids < 0) | (ids >= total)  # their rows would be summed unwritten: they get an expert, and weight 0
        ids, probs = ids.masked_fill(skipped, 0), probs.masked_fill(skipped, 0.0)
        routing, gather, scatter = calls.make_routing_data(ids, probs, total)
        return calls.triton_kernel_fused_experts(
            torch.empty_like(x), x, w13, w2, routing, gather, scatter, ids.shape[1], activation=activation,
            quant_config=quant_config, swiglu_alpha=alpha, swiglu_limit=limit, global_num_experts=total,
        )  # fmt: skip

    return run
