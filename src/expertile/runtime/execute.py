"""run(plan, ...): one entry a backend. Inputs have been checked; nothing here decides anything."""

from __future__ import annotations

import torch

from ..plans import Backend, Plan
from ..reference import moe as reference_moe
from ..weights import Weights
from .torch_experts import torch_experts


def run(plan: Plan, x, weights: Weights, ids, probs, out, *, expert_map=None, scaling_factor=1.0, workspace=None):
    """out [T, H] of one MoE layer by the plan's backend."""
    if plan.problem.tokens == 0:
        return out
    if x.is_cuda and x.get_device() != torch.cuda.current_device():
        with torch.cuda.device(x.device):  # kernels start on the current device, and records are kept by it
            return run(plan, x, weights, ids, probs, out, expert_map=expert_map, scaling_factor=scaling_factor,
                       workspace=workspace)  # fmt: skip
    return RUNNERS[plan.backend](plan, x, weights, ids, probs, out, expert_map, scaling_factor, workspace)


def _reference(plan, x, weights, ids, probs, out, expert_map, scaling_factor, workspace):
    on_input = plan.problem.weight_on_input
    y = reference_moe(
        x, weights, ids, probs, expert_map=expert_map, weight_on_input=on_input, scaling_factor=scaling_factor
    )
    return out.copy_(y)


def _torch(plan, x, weights, ids, probs, out, expert_map, scaling_factor, workspace):
    on_input = plan.problem.weight_on_input
    return torch_experts(
        x, weights, ids, probs, expert_map=expert_map, weight_on_input=on_input, scaling_factor=scaling_factor, out=out
    )


def _triton(plan, x, weights, ids, probs, out, expert_map, scaling_factor, workspace):
    from .triton_experts import triton_experts  # where torch comes without Triton the other backends still run

    return triton_experts(
        plan, x, weights, ids, probs, out, expert_map=expert_map, scaling_factor=scaling_factor, workspace=workspace
    )


def _library(*call):
    from .backends import run as run_library  # imports a library when one is called

    return run_library(*call)


RUNNERS = {
    Backend.REFERENCE: _reference,
    Backend.TORCH: _torch,
    Backend.TRITON: _triton,
    Backend.VLLM_TRITON: _library,
    Backend.VLLM_CUTLASS: _library,
    Backend.VLLM_DEEPGEMM: _library,
    Backend.FLASHINFER_CUTLASS: _library,
    Backend.TRITON_KERNELS: _library,
}
