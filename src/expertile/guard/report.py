"""Events grouped by cause, as plain data and as a table."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from .events import Event

MOST = 4  # examples of values, and call sites, in the table
DOING = {"compile": "compiled", "load": "loaded from disk", "autotune": "tuned", "launcher": "C launcher compiled"}


@dataclass
class Cause:
    """All events that one remedy removes. values: of the arguments to blame, one entry a launch; ms: lost in all."""

    kind: str
    kernel: str
    blame: str
    count: int = 0
    ms: float = 0.0
    values: list[str] = field(default_factory=list)
    sites: list[str] = field(default_factory=list)
    pids: list[int] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)


def causes(events: Iterable[Event | dict]) -> list[Cause]:
    """The causes of the events, the most expensive first."""
    found: dict[str, Cause] = {}
    for each in events:
        event = each.to_dict() if isinstance(each, Event) else each
        cause = found.setdefault(event["cause"], Cause(event["kind"], event["kernel"], event["blame"]))
        cause.count += 1
        cause.ms += event["ms"] or 0.0
        named = [difference for difference in event["differences"] if difference["argument"]]
        _note(cause.values, ", ".join(f"{each['argument']}={each['value'] or each['now']}" for each in named))
        _note(cause.sites, event["site"])
        _note(cause.pids, event["pid"])
        for advice in event["advice"]:
            _note(cause.advice, advice)
    return sorted(found.values(), key=lambda cause: (-cause.ms, -cause.count))


def _note(seen: list, value) -> None:
    if value not in (*seen, ""):
        seen.append(value)


def table(found: list[Cause]):
    """The causes as a rich Table."""
    from rich.table import Table
    from rich.text import Text  # brackets in it are no markup

    made = Table(show_lines=True)
    for name, justify in (("times", "right"), ("ms", "right"), ("what differs", "left"), ("where, what to do", "left")):
        made.add_column(name, justify=justify, overflow="fold")
    for cause in found:
        what = [cause.kernel, f"{DOING[cause.kind]}: {cause.blame}", *_some(cause.values)]
        todo = [*_some(cause.sites), *(f"-> {advice}" for advice in cause.advice)]
        made.add_row(*map(Text, (str(cause.count), f"{cause.ms:.0f}", "\n".join(what), "\n".join(todo))))
    return made


def _some(values: list[str]) -> list[str]:
    return values[:MOST] + ([f"and {len(values) - MOST} more"] if len(values) > MOST else [])
