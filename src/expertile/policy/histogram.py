"""How tokens spread over the experts, as far as it can be known ahead: what a plan assumes, and its expectations.

uniform   every expert alike
zipf<a>   an expert's weight falls as 1 / rank^a (zipf1.2); tokens draw their experts without replacement
hot       one expert has half of all slots, or one slot of every token where ids must be distinct (top_k > 2)
trace:F   as in a recorded file (expertile.tune.trace): priced as uniform here, looked up in the table by its name
"""

from __future__ import annotations

import math
import re
from functools import lru_cache

from ..errors import ShapeError
from ..problem import Problem

UNIFORM = "uniform"
ZIPF = re.compile(r"zipf([0-9](?:\.[0-9]{1,6})?)")  # from 10 on the last experts' weights would be 0
MOST_GROUPS = 24  # experts of nearly the same share are taken together

Groups = tuple[tuple[float, float], ...]


def check_name(routing: str) -> str:
    """The name, if it is one; ShapeError else."""
    traced = routing.startswith("trace:") and routing != "trace:"
    if routing not in (UNIFORM, "hot") and not ZIPF.fullmatch(routing) and not traced:
        raise ShapeError(
            f"routing={routing!r} is not known: use uniform, hot, zipf1.2 (or another exponent below 10), trace:FILE"
        )
    return routing


def shares(problem: Problem, routing: str = UNIFORM) -> Groups:
    """(experts on this rank, share) of groups of experts; the share is the chance that a token visits one of them.

    Shares of all experts add up to top_k. Which experts are here is not known: each group is here in part.

    >>> from expertile.problem import Problem
    >>> shares(Problem(tokens=4, hidden=64, inter=64, experts=8, top_k=2), "hot")
    ((1.0, 1.0), (7.0, 0.14285714285714285))
    """
    local = problem.experts / problem.total_experts
    return tuple((count * local, share) for count, share in _of_all(problem.total_experts, problem.top_k, routing))


@lru_cache(maxsize=256)
def _of_all(experts: int, top_k: int, routing: str) -> Groups:
    check_name(routing)
    if routing == "hot" and experts > 1:
        hot = min(1.0, top_k / 2)
        return ((1.0, hot), (experts - 1.0, (top_k - hot) / (experts - 1)))
    found = ZIPF.fullmatch(routing)
    if not found or top_k == experts:
        return ((float(experts), top_k / experts),)
    weights = [rank ** -float(found[1]) for rank in range(1, experts + 1)]
    level = _level(weights, top_k)
    return _grouped([1 - math.exp(-level * weight) for weight in weights])


def _level(weights: list[float], top_k: int) -> float:
    """The time by which, of experts that turn up at these rates, top_k have: drawing without replacement is that."""
    low, high = 0.0, 1.0
    while sum(1 - math.exp(-high * weight) for weight in weights) < top_k:
        high *= 2
    for _ in range(50):
        middle = (low + high) / 2
        if sum(1 - math.exp(-middle * weight) for weight in weights) < top_k:
            low = middle
        else:
            high = middle
    return high


def _grouped(falling: list[float]) -> Groups:
    """The most visited experts alone, the others in runs that double."""
    found: list[tuple[float, float]] = []
    first = 0
    while first < len(falling):
        size = 1 if first < MOST_GROUPS // 2 else max(1, first // 4)
        run = falling[first : first + size]
        found.append((float(len(run)), sum(run) / len(run)))
        first += size
    return tuple(found)


def experts_hit(problem: Problem, routing: str = UNIFORM) -> float:
    """Experts on this rank that get at least one token."""
    if routing == UNIFORM:
        return problem.experts_hit
    return sum(count * (1 - (1 - share) ** problem.tokens) for count, share in shares(problem, routing))


def mean_rows(problem: Problem, routing: str = UNIFORM) -> float:
    """Rows of the expert that a routed row can expect to be at: under skewed routing more than rows_per_expert."""
    if routing == UNIFORM:
        return problem.rows_per_expert
    groups = shares(problem, routing)
    return problem.tokens * sum(n * share**2 for n, share in groups) / sum(n * share for n, share in groups)
