"""The plans in use, layer group by layer group, with their reasons."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..api import plan as plan_for
from ..policy import explain
from ..problem import Problem
from ..runtime.device import detect
from .model import LanguageModel, weights_of


@dataclass(frozen=True)
class GroupPlan:
    """What a group of like layers does in a step of so many tokens; `reasons` is `expertile explain`'s text."""

    layers: str
    count: int
    problem: str
    tokens: int
    backend: str
    plan: str
    reasons: str


def plans_in_use(model: LanguageModel, token_counts: list[int]) -> list[GroupPlan]:
    """For each group of layers with one problem, the plan for each number of tokens."""
    groups: dict[tuple[str, Problem], int] = {}
    for name, module in model.experts():
        key = re.sub(r"\d+", "*", name), weights_of(model, module).problem(1, model.top_k)
        groups[key] = groups.get(key, 0) + 1
    hardware = detect(model.device)
    found = []
    for (layers, problem), count in groups.items():
        p = problem
        words = f"{p.label}, {p.experts} experts of {p.hidden}x{p.inter}, top {p.top_k}, {p.activation.name}"
        for tokens in token_counts:
            plan = plan_for(problem.with_tokens(tokens), hardware)
            found.append(GroupPlan(layers, count, words, tokens, plan.backend.value, plan.name, explain(plan)))
    return found
