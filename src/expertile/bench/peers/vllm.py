"""vLLM's experts, called as its layers call them: the Triton kernels, CUTLASS fp8, and DeepGEMM fp8 in blocks."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import torch

from ...problem import BLOCK, DType, Problem, Quant
from ...router import GroupScore, Router, Score
from ...runtime.backends import vllm as adapter
from ...runtime.backends.vllm import ACTIVATIONS
from ...runtime.backends.vllm import session as vllm_session
from ...weights import Weights
from ..implementation import Implementation, Run
from ..inputs import Call, Inputs
from ..rows import version


class VLLM(Implementation):
    """What the three have in common."""

    session = staticmethod(vllm_session)
    flavour = ""
    quants: tuple[Quant, ...] = ()
    activations: tuple[str, ...] = tuple(ACTIVATIONS.values())
    takes_bias = False

    @property
    def name(self) -> str:
        installed = version("vllm")
        return f"vllm-{installed}-{self.flavour}" if installed else self.key

    def available(self, device: torch.device) -> list[str]:
        return missing(device)

    def fits(self, problem: Problem, router: Router | None) -> list[str]:
        reasons = [] if router is None else router_reasons(router)
        if problem.quant not in self.quants:
            reasons.append(f"does not take {problem.label}")
        if problem.dtype is DType.FP32:
            reasons.append("does not take fp32")
        if ACTIVATIONS.get(problem.activation.name) not in self.activations:
            reasons.append(f"has no activation {problem.activation.name}")
        if problem.bias and not self.takes_bias:
            reasons.append("adds no bias")
        if problem.quant is Quant.FP8_BLOCK and (problem.hidden % BLOCK or problem.inter % BLOCK):
            reasons.append(f"needs whole blocks of {BLOCK}: H={problem.hidden}, I={problem.inter}")
        return reasons

    def prepare(self, inputs: Inputs) -> Run:
        experts = [self.experts(weights, inputs.problem) for weights in inputs.weights]
        route = router_call(inputs) if inputs.router is not None else None

        def run(call: Call) -> torch.Tensor:
            ids, probs = (call.ids, call.probs) if route is None else route(call)
            return experts[call.copy](call.x, ids, probs)

        return run

    def experts(self, weights: Weights, problem: Problem) -> Callable[..., torch.Tensor]:
        """(x, ids, probs) -> y"""
        raise NotImplementedError


class VLLMTriton(VLLM):
    """`fused_experts`: vLLM's default for bf16 and for fp8 in blocks on Hopper."""

    key, flavour = "vllm-triton", "triton"
    quants = tuple(Quant)
    takes_bias = True

    def experts(self, weights: Weights, problem: Problem) -> Callable[..., torch.Tensor]:
        return adapter.triton_experts(weights)


class _Modular(VLLM):
    """Experts behind vLLM's modular kernel."""

    def classes(self):
        """(experts class, backend) of vLLM."""
        raise NotImplementedError

    def experts(self, weights: Weights, problem: Problem) -> Callable[..., torch.Tensor]:
        return adapter.modular_experts(weights, problem, *self.classes())


class VLLMCutlass(_Modular):
    key, flavour = "vllm-cutlass", "cutlass"
    quants = (Quant.FP8_TENSOR, Quant.FP8_CHANNEL)
    activations = ("silu", "gelu", "gelu_tanh", "swigluoai")

    def classes(self):
        return adapter.cutlass_classes()


class VLLMDeepGEMM(_Modular):
    key, flavour = "vllm-deepgemm", "deepgemm"
    quants = (Quant.FP8_BLOCK,)
    activations = ("silu",)

    def classes(self):
        return adapter.deepgemm_classes()


def missing(device: torch.device) -> list[str]:
    """Why vLLM cannot run here."""
    reasons = [] if find_spec("vllm") else ["vllm is not installed"]
    return reasons + ([] if device.type == "cuda" else ["needs a GPU"])


def router_reasons(router: Router) -> list[str]:
    """Why none of vLLM's routers that are called here computes this one."""
    if router.score is Score.SQRT_SOFTPLUS:
        return ["its sqrt-softplus router is not called by this benchmark"]
    if router.score is Score.NONE and not router.softmax_after:
        return ["has no router that takes the logits themselves as weights"]
    if router.groups > 1:
        needs = GroupScore.TOP2 if router.score is Score.SIGMOID else GroupScore.MAX
        if router.group_score is not needs:
            return [f"its {router.score.value} router scores groups by {needs.value}"]
    return []


def router_call(inputs: Inputs) -> Callable[[Call], tuple[torch.Tensor, torch.Tensor]]:
    """call -> (ids, probs) by the router that vLLM would take for this model."""
    from vllm.model_executor.layers.fused_moe.router import fused_topk_router, grouped_topk_router

    router, top_k = inputs.router, inputs.problem.top_k
    shared = dict(
        topk=top_k,
        renormalize=router.renormalize,
        num_expert_group=router.groups,
        topk_group=router.top_groups,
        scoring_func=router.score.value,
        routed_scaling_factor=router.scaling_factor,
    )
    if router.score is Score.SIGMOID:
        bias = inputs.router_bias
        if bias is None:
            bias = torch.zeros(inputs.problem.experts, device=inputs.device)

        def route(call: Call):
            probs, ids = grouped_topk_router.fused_grouped_topk(
                call.x, call.logits, e_score_correction_bias=bias, **shared
            )
            return ids, probs

    elif router.groups > 1 or router.scaling_factor != 1.0:

        def route(call: Call):
            probs, ids = grouped_topk_router.grouped_topk(call.x, call.logits, **shared)
            return ids, probs

    else:
        # softmax over the chosen logits is the softmax over all, renormalised
        renormalize = router.renormalize or router.softmax_after

        def route(call: Call):
            probs, ids, _ = fused_topk_router.fused_topk(call.x, call.logits, top_k, renormalize)
            return ids, probs

    return route
