"""Whether the arguments of a call fit each other: the same checks however `moe` and `route` are entered.

They run on every call, eagerly and while torch.compile traces, and look at shapes, dtypes, devices and strides: nothing
here waits for a GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import policy
from .errors import ShapeError, UnsupportedProblem, check_flag, check_number, member
from .hardware import DEVICES, H200, Hardware
from .plans import Backend, Plan
from .runtime.device import detect, interpreted
from .runtime.workspace import Workspace
from .weights import DTYPES, Weights, check_tensor

OPTIONAL = ("ids", "probs", "logits", "bias", "expert_map")
ID_DTYPES = (torch.int32, torch.int64)


def check_input(x, weights, ids, probs, logits, router, top_k, bias, expert_map) -> int:
    """All that `moe` is given but options and out. Returns how many experts ids are drawn from."""
    if not isinstance(weights, Weights):
        raise ShapeError(f"weights is {_kind(weights)}: give what expertile.prepare returned")
    check_tensor("x", x)
    for name, value in zip(OPTIONAL, (ids, probs, logits, bias, expert_map)):  # noqa: B905  strict costs time
        if value is not None and not isinstance(value, Tensor):
            check_tensor(name, value)
    if (logits is None) == (ids is None):
        raise ShapeError("give either ids and probs, or logits with router and top_k")
    _check_x(x, weights)
    total = weights.experts
    if expert_map is not None:
        if expert_map.ndim != 1 or expert_map.dtype != torch.int32:
            raise ShapeError(
                f"expert_map is {expert_map.dtype} {tuple(expert_map.shape)}, needs int32 (total_experts,)"
            )
        check_device("expert_map", expert_map, x)
        total = expert_map.numel()
    if logits is not None:
        if logits.ndim != 2 or logits.shape[0] != x.shape[0] or logits.shape[1] != total:
            raise ShapeError(f"logits are {tuple(logits.shape)}, x and the experts need ({x.shape[0]}, {total})")
        check_device("logits", logits, x)
        if probs is not None:
            raise ShapeError("probs go with ids; with logits the router computes them")
        for name, value in (("router", router), ("top_k", top_k)):
            if value is None:
                raise ShapeError(f"logits need {name}=...")
    elif router is not None or bias is not None or top_k is not None:
        raise ShapeError("router, top_k and bias go with logits; with ids the routing is already done")
    return total


def check_device(name: str, tensor, x) -> None:
    if tensor.device != x.device:
        raise ShapeError(f"{name} is on {tensor.device}, x is on {x.device}: move it there")


def check_options(scaling_factor, weight_on_input, workspace, hardware) -> None:
    check_number(scaling_factor, "scaling_factor")
    check_flag(weight_on_input, "weight_on_input")
    if workspace is not None and not isinstance(workspace, Workspace):
        raise ShapeError(f"workspace is {_kind(workspace)}: give an expertile.Workspace")
    check_hardware(hardware)


def check_hardware(hardware) -> None:
    if hardware is not None and not isinstance(hardware, Hardware):
        raise ShapeError(f"hardware={hardware!r}: give a Hardware such as expertile.H200, or leave it out")


def check_logits(logits, bias) -> None:
    """What `route` is given."""
    check_tensor("logits", logits)
    if bias is not None:
        check_tensor("bias", bias)
    if logits.ndim != 2 or not logits.is_floating_point():
        raise ShapeError(f"logits are {logits.dtype} {tuple(logits.shape)}: need a floating [T, E]")
    if bias is not None and (tuple(bias.shape) != (logits.shape[1],) or bias.dtype != torch.float32):
        raise ShapeError(
            f"bias is {bias.dtype} {tuple(bias.shape)}, needs float32 ({logits.shape[1]},): bf16 ties experts"
        )
    if bias is not None and bias.device != logits.device:
        raise ShapeError(f"bias is on {bias.device}, logits are on {logits.device}: move it there")


def check_routing(ids, probs, x) -> None:
    if probs is None:
        raise ShapeError("ids need probs, the router's weights")
    if ids.dtype not in ID_DTYPES:
        raise ShapeError(f"ids have dtype {ids.dtype}: use int32 or int64")
    shape = ids.shape
    if len(shape) != 2 or shape[0] != x.shape[0] or shape[1] < 1:
        raise ShapeError(f"ids are {tuple(shape)}, x has {x.shape[0]} tokens: ids must be (T, top_k)")
    if probs.shape != shape or not probs.is_floating_point():
        raise ShapeError(f"probs are {probs.dtype} {tuple(probs.shape)}, ids are {tuple(ids.shape)}: one weight a slot")
    device = x.device
    if ids.device != device or probs.device != device:
        check_device("ids", ids, x)
        check_device("probs", probs, x)


def _check_x(x, weights: Weights) -> None:
    shape = x.shape
    if len(shape) != 2 or shape[1] != weights.hidden:
        raise ShapeError(f"x is {tuple(shape)}, the weights need (T, {weights.hidden})")
    if x.dtype != DTYPES[weights.dtype]:
        raise ShapeError(f"x has dtype {x.dtype}, the weights were prepared for {DTYPES[weights.dtype]}")
    if x.device != weights.device:
        raise ShapeError(f"x is on {x.device}, the weights are on {weights.device}")
    if shape[0] and x.stride(1) != 1:
        raise ShapeError(f"x has strides {x.stride()}: its last dimension must be contiguous")


def check_out(out, x) -> None:
    """Memory that x and out share is only seen where they have addresses; compiled calls write out after they are
    done with x.
    """
    check_tensor("out", out)
    shape = out.shape
    if shape != x.shape or out.dtype != x.dtype or out.device != x.device:
        raise ShapeError(
            f"out is {out.dtype} {tuple(shape)} on {out.device}, needs {x.dtype} {tuple(x.shape)} on {x.device}"
        )
    if shape[0] and (out.stride(1) != 1 or (shape[0] > 1 and out.stride(0) < shape[1])):
        raise ShapeError(f"out has strides {out.stride()}: rows must be contiguous, each with memory of its own")
    if out is x or (shape[0] and not torch.compiler.is_compiling() and _overlap(out, x)):
        raise ShapeError("out shares memory with x, which the experts still read while out is written")
    if out.requires_grad and out.is_leaf and torch.is_grad_enabled():
        raise ShapeError("out requires a gradient, but it is overwritten: give one that does not, or use no_grad()")


def _overlap(a, b) -> bool:
    def extent(t):
        first = t.data_ptr()
        return first, first + ((t.shape[0] - 1) * t.stride(0) + t.shape[1]) * t.element_size()

    if a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr():
        return False
    (a0, a1), (b0, b1) = extent(a), extent(b)
    return a0 < b1 and b0 < a1


def backend_named(name) -> Backend | None:
    return None if name is None else member(Backend, name, "backend")


def check_plan(plan: Plan, problem, x, backend, hardware: Hardware | None) -> None:
    """A plan that the caller brought: for this problem, and one that the device's kernels can run."""
    if not isinstance(plan, Plan):
        raise ShapeError(f"plan is {_kind(plan)}: give what expertile.plan returned")
    if backend is not None and backend_named(backend) is not plan.backend:
        raise ShapeError(f"backend={backend!r} contradicts the plan, which is for {plan.backend.value}")
    if plan.problem != problem:
        raise ShapeError(f"the plan is for {plan.problem}, this call is {problem}")
    if plan.backend is not Backend.TRITON or (hardware or x.device) in plan.able_on:
        return
    here = hardware or (detect(x.device) if x.is_cuda else DEVICES.get(plan.device, H200))
    why = policy.reasons(plan.backend, problem, here) + policy.unable(plan, here)
    if why:
        raise UnsupportedProblem(f"the plan's kernels cannot run on {here.name}: {'; '.join(why)}")
    plan.able_on.add(hardware or x.device)


def check_device_runs(plan: Plan, x, hardware: Hardware | None) -> None:
    """Our kernels need a GPU, or Triton's interpreter."""
    if plan.backend is Backend.TRITON and not x.is_cuda and not interpreted():
        told = f"hardware={hardware.name}" if hardware else f"a plan for {plan.device}"
        raise UnsupportedProblem(
            f"backend=triton runs on a GPU, x is on {x.device}: move x and the weights there, or call without {told}"
        )


def _kind(value) -> str:
    return f"a {type(value).__name__}"
