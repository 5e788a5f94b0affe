"""OpenAI's triton_kernels as vLLM brings and calls them, on 16-bit weights: gpt-oss' activation is all they have."""

from __future__ import annotations

import torch

from ...plans import Backend
from ...problem import Problem
from ...weights import Weights
from . import Experts, module
from .vllm import LAYERS, ensure_session, moe_activation


def distinct(ids: torch.Tensor, probs: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids [T, k] and weights of the same sums with no expert twice in a row, for ids in [0, experts) and k <= experts.

    The library routes by one bit a token and expert, so that a second slot of an expert got no row of its own and the
    top-k sum read memory that nobody wrote. An expert's first slot takes the weights of all of its slots; each
    other one gets an expert that the row does not have, and weight 0.
    """
    same = ids[:, :, None] == ids[:, None, :]
    again = same.tril(-1).any(2)
    absent = torch.ones(ids.shape[0], experts, dtype=torch.bool, device=ids.device).scatter_(1, ids.long(), False)
    fill = torch.searchsorted(absent.cumsum(1), again.cumsum(1)).clamp_(max=experts - 1)  # the n-th that is absent
    merged = (same * probs[:, None, :]).sum(2)
    return torch.where(again, fill.to(ids.dtype), ids), merged.masked_fill(again, 0.0)


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
        routing, gather, scatter = calls.make_routing_data(*distinct(ids, probs, total), total)
        return calls.triton_kernel_fused_experts(
            torch.empty_like(x), x, w13, w2, routing, gather, scatter, ids.shape[1], activation=activation,
            quant_config=quant_config, swiglu_alpha=alpha, swiglu_limit=limit, global_num_experts=total,
        )  # fmt: skip

    return run
