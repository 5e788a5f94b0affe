"""The handful of calls that users and plugins make: prepare, moe, route, plan, explain."""

from __future__ import annotations

import os
from functools import lru_cache
from math import isfinite

import torch
from torch import Tensor

from . import policy
from .errors import ShapeError, UnsupportedProblem
from .hardware import Hardware
from .plans import Backend, Plan
from .policy import Settings, decide
from .policy.settings import from_environment
from .problem import Problem
from .problem import activation as named_activation
from .quantization import prepare_weights
from .router import Router
from .router import router as named_router
from .runtime.backends import installed
from .runtime.device import detect
from .runtime.execute import run
from .runtime.launches import Calls
from .runtime.torch_router import route_torch
from .runtime.workspace import Workspace
from .weights import DTYPES, Weights

ID_DTYPES = (torch.int32, torch.int64)


def prepare(
    w13, w2, *, quant=None, activation="silu", dtype=None, w13_scale=None, w2_scale=None, split_scale=None,
    w13_bias=None, w2_bias=None, x_scale=None, h_scale=None,
) -> Weights:  # fmt: skip
    """The experts' weights as `moe` wants them: checked, quantised if asked, otherwise the very tensors given.

    Shapes    w13 [E, 2I, H] (or [E, I, H] without a gate) | w2 [E, H, I] | biases [E, 2I], [E, H] | scales: see Weights
    Dtypes    w13 and w2 alike: bf16, fp16, fp32 (quantised when `quant` says so), or e4m3 with scales (taken as they
              are, but for their values: finite and not negative); biases bf16, fp16 or fp32
    quant     none, fp8_tensor, fp8_channel, fp8_block; None: none, or for e4m3 what the scales' shapes say
    activation  a key of problem.ACTIVATIONS or an Activation
    dtype     of x and y; default that of w13, bf16 when w13 is e4m3
    split_scale  fp8_block only: whether gate and up rows have scale blocks of their own; default what w13_scale's
              shape says, where quantised here: they have
    x_scale, h_scale  static activation scales (fp8_tensor): x is divided by x_scale, h by h_scale
    Raises    ShapeError naming the value that does not fit
    """
    return prepare_weights(
        w13, w2, quant=quant, activation=named_activation(activation), dtype=dtype, w13_scale=w13_scale,
        w2_scale=w2_scale, split_scale=split_scale, w13_bias=w13_bias, w2_bias=w2_bias, x_scale=x_scale,
        h_scale=h_scale,
    )  # fmt: skip


def moe(
    x, weights: Weights, ids=None, probs=None, *, logits=None, router=None, top_k=None, bias=None, expert_map=None,
    weight_on_input=False, scaling_factor=1.0, out=None, backend=None, plan: Plan | None = None,
    workspace: Workspace | None = None, hardware: Hardware | None = None,
):  # fmt: skip
    """out[t] = scaling_factor * sum over j of probs[t, j] * experts[ids[t, j]](x[t]).

    Shapes    x [T, H] | ids, probs [T, top_k], or logits [T, E] with router and top_k | expert_map [total] -> [T, H]
    Dtypes    x weights.dtype; ids int32 or int64; probs and logits floating; expert_map int32
    ids       those < 0, >= E, or that expert_map sends to -1 contribute nothing
    router    a key of router.ROUTERS or a Router; `bias` its fp32 correction bias [E]
    weight_on_input  x is scaled by its router weight before the experts instead of after (top_k 1)
    out       written and returned; must not share memory with x
    backend, plan    override the policy; `workspace` gives the scratch memory (else torch's allocator does)
    Raises    ShapeError, UnsupportedProblem, naming the value, before anything is launched
    Compiled  under torch.compile one opaque operator (plan, workspace and hardware are then its own affair). There is
              no gradient: where one would be needed, backward raises
    """
    if torch.compiler.is_compiling() or _wants_grad(x, weights, probs):
        return _through_operator(x, weights, ids, probs, logits, router, top_k, bias, expert_map, weight_on_input,
                                 scaling_factor, out, backend, (plan, workspace, hardware))  # fmt: skip
    if isinstance(scaling_factor, bool) or not isinstance(scaling_factor, (int, float)) or not isfinite(scaling_factor):
        raise ShapeError(f"scaling_factor={scaling_factor!r}: give a finite number")
    if (logits is None) == (ids is None):
        raise ShapeError("give either ids and probs, or logits with router and top_k")
    _check_x(x, weights)
    if logits is not None:
        _check_logits(logits, x, weights, expert_map)
        if probs is not None:
            raise ShapeError("probs go with ids; with logits the router computes them")
        ids, probs = route(logits, _given(router, "router"), _given(top_k, "top_k"), bias=bias)
    elif router is not None or bias is not None or top_k is not None:
        raise ShapeError("router, top_k and bias go with logits; with ids the routing is already done")
    ids, probs = _check_routing(ids, probs, x, expert_map)
    total = weights.experts if expert_map is None else expert_map.numel()
    if plan is None:
        problem = weights.problem(x.shape[0], ids.shape[1], total_experts=total, weight_on_input=weight_on_input)
        plan = decide(problem, hardware or detect(x.device), _backend(backend), settings())
    else:
        _check_plan(plan, weights, x, ids, total, weight_on_input, backend)
    if not plan.backend.captures and x.is_cuda and torch.cuda.is_current_stream_capturing():
        raise UnsupportedProblem(f"backend={plan.backend.value} reads counts on the host: not under CUDA-graph capture")
    out = _check_out(out, x)
    if workspace is None and plan.backend is Backend.TRITON:
        workspace = Workspace.for_plan(plan, x.device, calls=_calls())
    return run(
        plan, x, weights, ids, probs, out, expert_map=expert_map, scaling_factor=scaling_factor, workspace=workspace
    )


def route(logits, router, top_k: int, *, bias=None):
    """(ids, probs) of the top_k experts of each token, by the router's rules.

    Shapes    logits [T, E] | bias [E] -> ids [T, top_k] int32, probs [T, top_k] fp32
    Needs     what Router.check says; on a GPU one Triton kernel, elsewhere torch
    """
    router = named_router(router)
    if logits.ndim != 2 or not logits.is_floating_point():
        raise ShapeError(f"logits are {logits.dtype} {tuple(logits.shape)}: need a floating [T, E]")
    router.check(logits.shape[1], top_k)
    if bias is not None and (tuple(bias.shape) != (logits.shape[1],) or bias.dtype != torch.float32):
        raise ShapeError(
            f"bias is {bias.dtype} {tuple(bias.shape)}, needs float32 ({logits.shape[1]},): bf16 ties experts"
        )
    if torch.compiler.is_compiling():
        r = router
        return _route_operator(
            logits, bias, top_k, r.score.value, r.softmax_after, r.renormalize, r.groups, r.top_groups,
            r.group_score.value, r.scaling_factor, r.epsilon,
        )  # fmt: skip
    return _route(logits, router, top_k, bias)


def plan(problem: Problem, hardware: Hardware | str | None = None, backend: str | None = None) -> Plan:
    """How `moe` would compute this problem on this device (default: the one at hand)."""
    if isinstance(hardware, str):
        hardware = policy.device(hardware)
    return decide(problem, hardware or detect(), _backend(backend), settings())


@lru_cache(maxsize=1)
def settings() -> Settings:
    """What EXPERTILE_POLICY asks for in this process (docs/policy.md), read when it is first needed."""
    return from_environment(os.environ, installed())


@lru_cache(maxsize=1)
def _calls() -> Calls:
    """Launches of this process's calls that brought no workspace of their own."""
    return Calls()


def explain(what: Plan | Problem, hardware: Hardware | str | None = None) -> str:
    """A plan's reasons as text; a Problem is planned first."""
    return policy.explain(what if isinstance(what, Plan) else plan(what, hardware))


@torch.library.custom_op("expertile::moe", mutates_args=())
def _operator(
    x: Tensor, ids: Tensor, probs: Tensor, w13: Tensor, w2: Tensor, w13_scale: Tensor | None, w2_scale: Tensor | None,
    w13_bias: Tensor | None, w2_bias: Tensor | None, x_scale: Tensor | None, h_scale: Tensor | None,
    expert_map: Tensor | None, layout: str, weight_on_input: bool, scaling_factor: float, backend: str | None,
) -> Tensor:  # fmt: skip
    weights = Weights.from_layout(
        layout, w13=w13, w2=w2, w13_scale=w13_scale, w2_scale=w2_scale, w13_bias=w13_bias, w2_bias=w2_bias,
        x_scale=x_scale, h_scale=h_scale,
    )  # fmt: skip
    with torch.no_grad():
        return moe(
            x, weights, ids, probs, expert_map=expert_map, weight_on_input=weight_on_input,
            scaling_factor=scaling_factor, backend=backend,
        )  # fmt: skip


@_operator.register_fake
def _(x, *others):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _route(logits, router: Router, top_k: int, bias):
    if logits.is_cuda:
        from .kernels.router import router as route_kernel

        return route_kernel(logits, router, top_k, bias)
    return route_torch(logits, router, top_k, bias)


@torch.library.custom_op("expertile::route", mutates_args=())
def _route_operator(
    logits: Tensor, bias: Tensor | None, top_k: int, score: str, softmax_after: bool, renormalize: bool, groups: int,
    top_groups: int, group_score: str, scaling_factor: float, epsilon: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    router = Router(score, softmax_after, renormalize, groups, top_groups, group_score, scaling_factor, epsilon)
    return _route(logits, router, top_k, bias)


@_route_operator.register_fake
def _(logits, bias, top_k, *others):
    shape = (logits.shape[0], top_k)
    return logits.new_empty(shape, dtype=torch.int32), logits.new_empty(shape, dtype=torch.float32)


def _wants_grad(x, weights: Weights, probs) -> bool:
    if not torch.is_grad_enabled():
        return False
    return any(t is not None and t.requires_grad for t in (x, probs, weights.w13, weights.w2))


def _through_operator(
    x, weights, ids, probs, logits, router, top_k, bias, expert_map, weight_on_input, scaling_factor, out, backend, own
):
    """moe() as the operator expertile::moe, for torch.compile and for autograd, which is told that there is no
    gradient.
    """
    if any(value is not None for value in own):
        raise ShapeError("plan, workspace and hardware are chosen inside the compiled operator: leave them out")
    if logits is not None:
        ids, probs = route(logits, _given(router, "router"), _given(top_k, "top_k"), bias=bias)
    w = weights
    y = _operator(
        x, ids, probs, w.w13, w.w2, w.w13_scale, w.w2_scale, w.w13_bias, w.w2_bias, w.x_scale, w.h_scale, expert_map,
        w.layout, weight_on_input, float(scaling_factor), backend,
    )  # fmt: skip
    return y if out is None else out.copy_(y)


def _backend(name) -> Backend | None:
    try:
        return Backend(name) if name is not None else None
    except ValueError:
        raise ShapeError(f"backend={name!r} is not known: use one of {', '.join(b.value for b in Backend)}") from None


def _given(value, name):
    if value is None:
        raise ShapeError(f"logits need {name}=...")
    return value


def _check_x(x, weights: Weights):
    if x.ndim != 2 or x.shape[1] != weights.hidden:
        raise ShapeError(f"x is {tuple(x.shape)}, the weights need (T, {weights.hidden})")
    if x.dtype != DTYPES[weights.dtype]:
        raise ShapeError(f"x has dtype {x.dtype}, the weights were prepared for {DTYPES[weights.dtype]}")
    if x.device != weights.device:
        raise ShapeError(f"x is on {x.device}, the weights are on {weights.device}")
    if x.shape[0] and x.stride(1) != 1:
        raise ShapeError(f"x has strides {x.stride()}: its last dimension must be contiguous")


def _check_logits(logits, x, weights: Weights, expert_map):
    total = weights.experts if expert_map is None else expert_map.numel()
    if logits.ndim != 2 or tuple(logits.shape) != (x.shape[0], total):
        raise ShapeError(f"logits are {tuple(logits.shape)}, x and the experts need ({x.shape[0]}, {total})")
    if logits.device != x.device:
        raise ShapeError(f"logits are on {logits.device}, x is on {x.device}")


def _check_routing(ids, probs, x, expert_map):
    if probs is None:
        raise ShapeError("ids need probs, the router's weights")
    if ids.dtype not in ID_DTYPES:
        raise ShapeError(f"ids have dtype {ids.dtype}: use int32 or int64")
    if ids.ndim != 2 or ids.shape[0] != x.shape[0] or ids.shape[1] < 1:
        raise ShapeError(f"ids are {tuple(ids.shape)}, x has {x.shape[0]} tokens: ids must be (T, top_k)")
    if probs.shape != ids.shape or not probs.is_floating_point():
        raise ShapeError(f"probs are {probs.dtype} {tuple(probs.shape)}, ids are {tuple(ids.shape)}: one weight a slot")
    if expert_map is not None and (expert_map.ndim != 1 or expert_map.dtype != torch.int32):
        raise ShapeError(f"expert_map is {expert_map.dtype} {tuple(expert_map.shape)}, needs int32 (total_experts,)")
    for name, tensor in (("ids", ids), ("probs", probs), ("expert_map", expert_map)):
        if tensor is not None and tensor.device != x.device:
            raise ShapeError(f"{name} are on {tensor.device}, x is on {x.device}")
    return ids.contiguous(), probs.contiguous()


def _check_plan(plan: Plan, weights: Weights, x, ids, total: int, weight_on_input: bool, backend):
    if backend is not None and _backend(backend) is not plan.backend:
        raise ShapeError(f"backend={backend!r} contradicts the plan, which is for {plan.backend.value}")
    problem = weights.problem(x.shape[0], ids.shape[1], total_experts=total, weight_on_input=weight_on_input)
    if plan.problem != problem:
        raise ShapeError(f"the plan is for {plan.problem}, this call is {problem}")


def _check_out(out, x):
    if out is None:
        return torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.shape != x.shape or out.dtype != x.dtype or out.device != x.device:
        raise ShapeError(
            f"out is {out.dtype} {tuple(out.shape)} on {out.device}, needs {x.dtype} {tuple(x.shape)} on {x.device}"
        )
    if out.shape[0] and out.stride(1) != 1:
        raise ShapeError(f"out has strides {out.stride()}: its last dimension must be contiguous")
    if out.numel() and out.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() and _overlap(out, x):
        raise ShapeError("out shares memory with x, which the experts still read while out is written")
    return out


def _overlap(a, b) -> bool:
    def extent(t):
        first = t.data_ptr()
        return first, first + ((t.shape[0] - 1) * t.stride(0) + t.shape[1]) * t.element_size()

    (a0, a1), (b0, b1) = extent(a), extent(b)
    return a0 < b1 and b0 < a1


__all__ = ["explain", "moe", "plan", "prepare", "route"]
