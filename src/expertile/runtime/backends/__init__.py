"""Other libraries' experts behind one call. A library is imported when its backend is first used, never before.

An adapter is a module here with `load(backend, weights, problem) -> (x, ids, probs) -> y`: it takes the weights in
once, in the layout that its library wants (plans.Layout), and must not keep the Weights record itself, only tensors:
what was loaded is freed with the record. Which problems an adapter may get is data (policy/libraries.py).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from importlib import import_module, metadata
from weakref import WeakKeyDictionary

import torch

from ...errors import UnsupportedProblem
from ...plans import Backend, Plan
from ...problem import Problem
from ...weights import Weights

Experts = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

PACKAGES = ("torch", "triton", "vllm", "flashinfer-python")
ADAPTERS = {
    Backend.VLLM_TRITON: "vllm",
    Backend.VLLM_CUTLASS: "vllm",
    Backend.VLLM_DEEPGEMM: "vllm",
    Backend.FLASHINFER_CUTLASS: "flashinfer",
    Backend.TRITON_KERNELS: "triton_kernels",
}

#: What was loaded, by the weights it came from. Module state, as calls of `moe` share nothing else.
_loaded: WeakKeyDictionary[Weights, dict[Backend, Experts]] = WeakKeyDictionary()


@lru_cache(maxsize=1)
def installed() -> tuple[tuple[str, str], ...]:
    """(package, version) of those PACKAGES that are here. Nothing is imported."""
    found = []
    for package in PACKAGES:
        try:
            found.append((package, metadata.version(package).split("+")[0]))
        except metadata.PackageNotFoundError:
            continue
    return tuple(found)


def module(name: str):
    """A library's module; UnsupportedProblem where this version of it has none of that name."""
    try:
        return import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        have = dict(installed()).get(package) or dict(installed()).get(f"{package}-python") or "not installed"
        raise UnsupportedProblem(f"{name} cannot be imported ({package} {have}): {error}") from None


def load(backend: Backend, weights: Weights, problem: Problem) -> Experts:
    """The library's experts with these weights in its layout, made once as long as the weights live.

    Takes memory and time where the layout is another (Candidate.layout_bytes, load_us). UnsupportedProblem under
    CUDA-graph capture: load, or call once, before.
    """
    ready = _loaded.setdefault(weights, {})
    if backend not in ready:
        if weights.w13.is_cuda and torch.cuda.is_current_stream_capturing():
            raise UnsupportedProblem(
                f"backend={backend.value} has not loaded these weights: call it once before capture"
            )
        ready[backend] = module(f"{__name__}.{ADAPTERS[backend]}").load(backend, weights, problem)
    return ready[backend]


def run(plan: Plan, x, weights: Weights, ids, probs, out, expert_map, scaling_factor, workspace):
    """One call, as RUNNERS have it. `workspace` is not used: these libraries take their memory from torch.

    Ids outside [0, experts) contribute nothing: such a slot gets another expert of its token and the weight 0, so that
    no weights are read that the token does not use.
    """
    if expert_map is not None:
        raise UnsupportedProblem(f"backend={plan.backend.value} is not given an expert map")
    experts = load(plan.backend, weights, plan.problem)
    valid = (ids >= 0) & (ids < weights.experts)
    spare = ids.masked_fill(~valid, 0).amax(1, keepdim=True)
    probs = probs.float().masked_fill(~valid, 0.0)
    if scaling_factor != 1.0:
        probs = probs * scaling_factor
    out.copy_(experts(x.contiguous(), torch.where(valid, ids, spare).to(torch.int32), probs))
    return out.masked_fill_(~valid.any(1, keepdim=True), 0.0)
