"""Compiles ahead: after `warm` no number of tokens up to its limit compiles anything."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from .api import moe, settings
from .errors import check_count
from .hardware import Hardware
from .plans import Backend
from .policy import Settings, decide
from .problem import Problem
from .runtime.device import detect
from .runtime.workspace import Workspace
from .weights import DTYPES, Weights, check_tensor

if TYPE_CHECKING:
    from .kernels.tiles import Specialization


def turning_points(
    problem: Problem, hardware: Hardware, max_tokens: int, split_scale: bool = False, mapped: bool = False
) -> list[int]:
    """The smallest numbers of tokens in 1 ... max_tokens whose calls together ask for every variant of every kernel."""
    return [tokens for tokens, _ in _new_variants(problem, hardware, max_tokens, split_scale, mapped, settings())]


def variants(
    problem: Problem, hardware: Hardware, max_tokens: int, split_scale: bool = False, mapped: bool = False
) -> list[Specialization]:
    """Every variant of every kernel that calls of 1 ... max_tokens tokens ask for, for `guard.warm`."""
    found = _new_variants(problem, hardware, max_tokens, split_scale, mapped, settings())
    return [spec for _, new in found for spec in new]


@lru_cache(maxsize=16)
def _new_variants(
    problem: Problem, hardware: Hardware, max_tokens: int, split_scale: bool, mapped: bool, settings: Settings
) -> tuple[tuple[int, tuple[Specialization, ...]], ...]:
    """(tokens, what a call with so many asks for and none with fewer does), where there is any; under these settings.

    Every number of tokens is planned: some seconds for thousands of them, so layers of one shape share the answer.
    """
    from .runtime.triton_experts import specializations

    seen: set = set()
    found = []
    for tokens in range(1, max_tokens + 1):
        plan = decide(problem.with_tokens(tokens), hardware, None, settings)
        if plan.backend is Backend.TRITON:
            asked = {_variant(spec): spec for spec in specializations(plan, split_scale, mapped)}
            new = tuple(spec for key, spec in asked.items() if key not in seen)
            if new:
                seen |= set(asked)
                found.append((tokens, new))
    return tuple(found)


def _variant(spec) -> tuple:
    constants = tuple(sorted((name, repr(value)) for name, value in spec.constants.items()))
    types, options = tuple(sorted(spec.types.items())), tuple(sorted(spec.options.items()))
    return spec.kernel.__name__, types, constants, spec.divisible_by_16, options


def warm(
    weights: Weights, top_k: int, max_tokens: int, *, expert_map=None, weight_on_input: bool = False,
    scaling_factor: float = 1.0, hardware: Hardware | None = None, workspace: Workspace | None = None,
    report: Callable[[int, int], None] = lambda done, of: None,
) -> list[int]:  # fmt: skip
    """Runs `moe` once for each turning point, so that no call with up to max_tokens tokens compiles later.

    Give expert_map, weight_on_input and scaling_factor as the calls will. ids are taken as int32 and probs as fp32, x
    and out as contiguous: others are other variants. workspace lends its memory, else torch's allocator does. `report`
    is told how many of how many are done. Returns the token counts that ran; none where the policy chooses a backend
    that compiles nothing.
    """
    check_count(max_tokens, "max_tokens")
    if expert_map is not None:
        check_tensor("expert_map", expert_map)
    total = weights.experts if expert_map is None else expert_map.numel()
    problem = weights.problem(1, top_k, total_experts=total, weight_on_input=weight_on_input)
    hardware = hardware or detect(weights.device)
    points = turning_points(problem, hardware, max_tokens, weights.split_scale, expert_map is not None)
    for done, tokens in enumerate(points, 1):
        x = torch.zeros(tokens, weights.hidden, dtype=DTYPES[weights.dtype], device=weights.device)
        ids = torch.arange(tokens * top_k, dtype=torch.int32, device=weights.device).view(tokens, top_k) % total
        moe(
            x, weights, ids, torch.ones(ids.shape, dtype=torch.float32, device=ids.device), expert_map=expert_map,
            hardware=hardware, weight_on_input=weight_on_input, scaling_factor=scaling_factor, workspace=workspace,
        )  # fmt: skip
        report(done, len(points))
    return points


__all__ = ["turning_points", "variants", "warm"]
