"""What would change a decision: other token counts, other routing, faster rivals, what is not there or not measured."""

from __future__ import annotations

import json
from dataclasses import replace

from ..errors import UnsupportedProblem
from ..hardware import Hardware
from ..plans import Backend, Plan
from ..problem import BOUNDS
from . import MARGIN, decide, table
from .histogram import UNIFORM
from .libraries import LIBRARIES
from .settings import DEFAULT, Settings
from .words import explain

FURTHEST = 64  # times fewer or more tokens that are looked at


def in_full(plan: Plan, hardware: Hardware, settings: Settings = DEFAULT) -> str:
    """explain(plan, full=True), the row of the table, and what would change the choice."""
    lines = [explain(plan, full=True), f"  table: {row(plan, hardware, settings)}", "  what would change it:"]
    return "\n".join([*lines, *(f"    {change}" for change in changes(plan, hardware, settings))])


def as_data(plan: Plan, hardware: Hardware, settings: Settings = DEFAULT) -> dict:
    """The plan's JSON with two fields more: "table_row" and "would_change"."""
    found = json.loads(plan.to_json())
    return {
        **found,
        "table_row": row(plan, hardware, settings),
        "would_change": changes(plan, hardware, settings),
    }


def row(plan: Plan, hardware: Hardware, settings: Settings = DEFAULT) -> str:
    """The measured entry that was looked at, or that there is none."""
    p = plan.problem
    entry = table.nearest(p, hardware.name, settings.routing, settings.tables)
    if entry is None:
        gate = "with" if p.activation.gated else "without"
        return f"nothing measured on {hardware.name} for {p.label} {gate} a gate"
    hidden, inter, experts, top_k = entry.sizes
    rows = entry.tokens * top_k / experts
    where = f"T={entry.tokens} H={hidden} I={inter} E={experts} top-k={top_k} {p.label}, {entry.routing} routing"
    why = "these sizes, nearest in log T" if entry.exact else "nearest in rows an expert, hidden and inter together"
    return f"{where}: {entry.time_us:.1f} us, {rows:.2f} rows an expert ({why})"


def changes(plan: Plan, hardware: Hardware, settings: Settings = DEFAULT) -> list[str]:
    """One sentence each; nothing is measured here."""
    if plan.source.startswith("forced"):
        free = decide(plan.problem, hardware, None, replace(settings, backend=None, told=()))
        return [f"not forcing it: {free.name}, {free.time_us:.1f} us"]
    found = _tokens(plan, hardware, settings) + _routings(plan, hardware, settings)
    for other in plan.candidates:
        if other.backend is plan.backend or other.backend is Backend.REFERENCE:
            continue
        name = other.backend.value
        if other.reasons:
            found.append(f"{name}: if not for: {'; '.join(other.reasons)}")
        elif other.backend is Backend.TORCH:
            found.append(f"{name} is taken only where the kernels cannot run")
        elif other.backend in LIBRARIES and not other.source.startswith("measured"):
            found.append(f"{name}: measuring it here (expertile tune --others): an estimate is never chosen")
        elif other.backend in LIBRARIES and not settings.others:
            found.append(f"{name}: allowing other libraries (others) lets it be chosen where it is faster")
        elif other.time_us is not None and plan.time_us:
            least = plan.time_us * (1 - MARGIN if other.backend in LIBRARIES else 1)
            if other.time_us < least:
                found.append(f"{name}: it is faster, but its memory is more than the settings allow")
            else:
                found.append(f"{name}: being {100 * (1 - least / other.time_us):.0f} % faster than it is")
    return found


def _tokens(plan: Plan, hardware: Hardware, settings: Settings) -> list[str]:
    """The nearest token counts on both sides that get another plan."""
    at, found = plan.problem.tokens, []
    for word, step in (("fewer", -1), ("more", 1)):
        if other := _first_other(plan, hardware, settings, step):
            found.append(f"{word} tokens: from T={other[0]} on {other[1]}")
        elif at:
            found.append(f"no {word} tokens, as far as a factor of {FURTHEST}")
    return found


def _first_other(plan: Plan, hardware: Hardware, settings: Settings, step: int) -> tuple[int, str] | None:
    """The nearest token count below (-1) or above (1) with another plan, found by halving, and that plan's name."""
    at = plan.problem.tokens
    last, far = at, at

    def planned(tokens: int) -> str:
        try:
            return decide(plan.problem.with_tokens(tokens), hardware, None, settings).name
        except UnsupportedProblem:
            return "nothing: what the settings force cannot run there"

    while far == last or planned(far) == plan.name:
        last = far
        far = max(1, far // 2) if step < 0 else max(far + 1, far * 2)
        if far == last or not at / FURTHEST <= far <= min(max(at, 1) * FURTHEST, BOUNDS["tokens"][1]):
            return None
    while abs(far - last) > 1:
        middle = (far + last) // 2
        far, last = (middle, last) if planned(middle) != plan.name else (far, middle)
    return far, planned(far)


def _routings(plan: Plan, hardware: Hardware, settings: Settings) -> list[str]:
    found = []
    for routing in (UNIFORM, "zipf1.2", "hot"):
        other = decide(plan.problem, hardware, None, replace(settings, routing=routing))
        if routing != plan.routing and other.name != plan.name:
            found.append(f"{routing} routing: {other.name}")
    return found
