"""vLLM's experts, called as its layers call them: the Triton kernels, CUTLASS fp8, and DeepGEMM fp8 in blocks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache

import torch

from ...plans import Backend
from ...problem import BLOCK, Activation, DType, Problem, Quant
from ...weights import Weights
from . import Experts, module

#: Our activations -> MoEActivation's values.
ACTIVATIONS = {
    "silu": "silu",
    "gelu_erf": "gelu",
    "gelu_tanh": "gelu_tanh",
    "relu2": "relu2_no_mul",
    "swiglu_oai/interleaved": "swigluoai",
}
MOST_TOKENS = 8192  # what the modular kernels make room for, at least
LAYERS = "vllm.model_executor.layers.fused_moe"


@contextmanager
def session() -> Iterator[None]:
    """vLLM's operations look up a current config, and its modular kernels a workspace."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    config = module("vllm.config")
    with config.set_current_vllm_config(config.VllmConfig()):
        module("vllm.v1.worker.workspace").init_workspace_manager(torch.device("cuda"))
        yield


def ensure_session() -> None:
    """Enters a session for the rest of the process, where no engine and no benchmark has entered one."""
    if module("vllm.config").get_current_vllm_config_or_none() is None:
        _lasting()


@lru_cache(maxsize=1)
def _lasting() -> AbstractContextManager[None]:
    """An entered session, kept: a generator that nobody holds is closed, and its context with it."""
    entered = session()
    entered.__enter__()
    return entered


def load(backend: Backend, weights: Weights, problem: Problem) -> Experts:
    """The weights are taken as they lie."""
    ensure_session()
    if backend is Backend.VLLM_TRITON:
        return triton_experts(weights)
    return modular_experts(weights, problem, *MODULAR[backend]())


def triton_experts(weights: Weights) -> Experts:
    """`fused_experts`: vLLM's default for bf16 and for fp8 in blocks on Hopper."""
    fused_experts = module(f"{LAYERS}.fused_moe").fused_experts
    config, activation, total = quant_config(weights), moe_activation(weights.activation), weights.experts
    w13, w2 = weights.w13, weights.w2

    def run(x, ids, probs):
        return fused_experts(
            x, w13, w2, probs, ids, activation=activation, quant_config=config, global_num_experts=total
        )

    return run


def modular_experts(weights: Weights, problem: Problem, experts_class, backend) -> Experts:
    """Experts behind vLLM's modular kernel."""
    config = module(f"{LAYERS}.config")
    activation, total = moe_activation(weights.activation), weights.experts
    layer = config.FusedMoEConfig(
        num_experts=total,
        experts_per_token=problem.top_k,
        hidden_dim=weights.hidden,
        intermediate_size=weights.inter,
        num_local_experts=total,
        num_logical_experts=total,
        activation=activation,
        device=str(weights.device),
        routing_method=config.RoutingMethodType.Renormalize,
        moe_parallel_config=config.FusedMoEParallelConfig.make_no_parallel(),
        in_dtype=torch.float16 if weights.dtype is DType.FP16 else torch.bfloat16,
        max_num_tokens=max(MOST_TOKENS, problem.tokens),
    )
    make = module(f"{LAYERS}.oracle.fp8").make_fp8_moe_kernel
    kernel = make(quant_config(weights), layer, experts_class, backend)
    w13, w2 = weights.w13, weights.w2

    def run(x, ids, probs):
        return kernel.apply(x, w13, w2, probs, ids, activation, total, None, False)

    return run


def cutlass_classes():
    """(experts class, backend) of vLLM."""
    backend = module(f"{LAYERS}.oracle.fp8").Fp8MoeBackend.VLLM_CUTLASS
    return module(f"{LAYERS}.experts.cutlass_moe").CutlassExpertsFp8, backend


def deepgemm_classes():
    """(experts class, backend) of vLLM."""
    backend = module(f"{LAYERS}.oracle.fp8").Fp8MoeBackend.DEEPGEMM
    return module(f"{LAYERS}.experts.deep_gemm_moe").DeepGemmExperts, backend


MODULAR = {Backend.VLLM_CUTLASS: cutlass_classes, Backend.VLLM_DEEPGEMM: deepgemm_classes}


def moe_activation(activation: Activation):
    return module(f"{LAYERS}.activation").MoEActivation.from_str(ACTIVATIONS[activation.name])


def quant_config(weights: Weights):
    """vLLM's record of the scales and biases."""
    config = module(f"{LAYERS}.config")
    biases = dict(w1_bias=weights.w13_bias, w2_bias=weights.w2_bias)
    if weights.quant is Quant.NONE:
        return (
            config.biased_moe_quant_config(**biases)
            if weights.w13_bias is not None
            else config.FUSED_MOE_UNQUANTIZED_CONFIG
        )
    w1, w2 = weights.w13_scale, weights.w2_scale
    if weights.quant is Quant.FP8_BLOCK:
        return config.fp8_w8a8_moe_quant_config(w1, w2, block_shape=[BLOCK, BLOCK], **biases)
    if weights.quant is Quant.FP8_CHANNEL:
        return config.fp8_w8a8_moe_quant_config(
            w1.unsqueeze(-1), w2.unsqueeze(-1), per_act_token_quant=True, per_out_ch_quant=True, **biases
        )
    a1, a2 = weights.x_scale.reshape(()), weights.h_scale.reshape(())
    return config.fp8_w8a8_moe_quant_config(
        w1,
        w2,
        a1_scale=a1,
        a2_scale=a2,
        a1_gscale=1 / a1,
        a2_gscale=1 / a2,
        g1_alphas=w1 * a1,
        g2_alphas=w2 * a2,
        **biases,
    )
