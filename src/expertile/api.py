"""The handful of calls that users and plugins make: prepare, moe, route, plan, explain."""

from __future__ import annotations

import os
from functools import lru_cache

import torch
from torch import Tensor

from . import backward, policy
from .arguments import (
    backend_named,
    check_device_runs,
    check_hardware,
    check_input,
    check_logits,
    check_options,
    check_out,
    check_plan,
    check_routing,
)
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
from .weights import Weights


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
    Compiled  under torch.compile one opaque operator (plan, workspace and hardware are then its own affair)
    Gradient  there is none: where one would be needed, forward runs and backward raises UnsupportedProblem
    """
    check_options(scaling_factor, weight_on_input, workspace, hardware)
    total = check_input(x, weights, ids, probs, logits, router, top_k, bias, expert_map)
    if out is not None:
        check_out(out, x)
    backend = backend_named(backend)
    if logits is not None:
        ids, probs = route(logits, router, top_k, bias=bias)
    check_routing(ids, probs, x)
    if torch.compiler.is_compiling():
        if plan is not None or workspace is not None or hardware is not None:
            raise ShapeError("plan, workspace and hardware are chosen inside the compiled operator: leave them out")
        y = _through_operator(x, weights, ids, probs, expert_map, weight_on_input, scaling_factor, backend)
        return y if out is None else out.copy_(y)
    if torch.is_grad_enabled() and backward.wanted(x, probs, *weights.tensors):
        with torch.no_grad():
            y = moe(
                x, weights, ids, probs, expert_map=expert_map, weight_on_input=weight_on_input,
                scaling_factor=scaling_factor, out=out, backend=backend, plan=plan, workspace=workspace,
                hardware=hardware,
            )  # fmt: skip
        return backward.refused(y, x, probs, *weights.tensors)
    ids, probs = ids.contiguous(), probs.contiguous()
    if expert_map is not None:
        expert_map = expert_map.contiguous()  # a column of a table of all ranks' maps is not
    problem = weights.problem(x.shape[0], ids.shape[1], total_experts=total, weight_on_input=weight_on_input)
    if plan is None:
        plan = decide(problem, hardware or detect(x.device), backend, settings())
    else:
        check_plan(plan, problem, x, backend, hardware)
    check_device_runs(plan, x, hardware)
    if not plan.backend.captures and x.is_cuda and torch.cuda.is_current_stream_capturing():
        raise UnsupportedProblem(f"backend={plan.backend.value} reads counts on the host: not under CUDA-graph capture")
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if workspace is None and plan.backend is Backend.TRITON:
        workspace = Workspace.for_plan(plan, x.device, calls=_calls())
    return run(
        plan, x, weights, ids, probs, out, expert_map=expert_map, scaling_factor=scaling_factor, workspace=workspace
    )


def route(logits, router, top_k: int, *, bias=None):
    """(ids, probs) of the top_k experts of each token, by the router's rules.

    Shapes    logits [T, E] | bias [E] -> ids [T, top_k] int32, probs [T, top_k] fp32
    Needs     what Router.check says; on a GPU one Triton kernel, elsewhere torch
    Gradient  there is none, as for `moe`
    """
    router = named_router(router)
    check_logits(logits, bias)
    router.check(logits.shape[1], top_k)
    if torch.compiler.is_compiling():
        r = router
        return _route_operator(
            logits, bias, top_k, r.score.value, r.softmax_after, r.renormalize, r.groups, r.top_groups,
            r.group_score.value, r.scaling_factor, r.epsilon,
        )  # fmt: skip
    ids, probs = _route(logits, router, top_k, bias)
    return ids, backward.refused(probs, logits, bias) if backward.wanted(logits, bias) else probs


def plan(problem: Problem, hardware: Hardware | str | None = None, backend: str | None = None) -> Plan:
    """How `moe` would compute this problem on this device (default: the one at hand)."""
    if not isinstance(problem, Problem):
        raise ShapeError(f"problem is a {type(problem).__name__}: give an expertile.Problem")
    if isinstance(hardware, str):
        hardware = policy.device(hardware)
    check_hardware(hardware)
    return decide(problem, hardware or detect(), backend_named(backend), settings())


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


backward.refuse(_operator)
backward.refuse(_route_operator)


def _through_operator(x, weights, ids, probs, expert_map, weight_on_input, scaling_factor, backend):
    w, name = weights, None if backend is None else backend.value
    return _operator(
        x, ids, probs, w.w13, w.w2, w.w13_scale, w.w2_scale, w.w13_bias, w.w2_bias, w.x_scale, w.h_scale, expert_map,
        w.layout, weight_on_input, float(scaling_factor), name,
    )  # fmt: skip


__all__ = ["explain", "moe", "plan", "prepare", "route"]
