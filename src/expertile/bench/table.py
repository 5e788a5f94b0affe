"""What rows say, as a table: ours, the peers, the floor, and how much faster we are than the fastest peer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import exp, fsum, log

from rich.table import Table

GROUP = ("bench", "problem", "quant", "routing", "gpu")
OURS = "expertile"
TIMED = ("experts", "layer")


def groups(rows: Iterable[Mapping]) -> dict[tuple, list[Mapping]]:
    """Rows that belong in one table, in the order they come; benches without times by tokens are left out."""
    found: dict[tuple, list[Mapping]] = {}
    for row in rows:
        if row.get("bench") in TIMED:
            found.setdefault(tuple(row[name] for name in GROUP), []).append(row)
    return found


def without_table(rows: Iterable[Mapping]) -> list[str]:
    """Benches of these rows that get no table."""
    return sorted({str(row.get("bench")) for row in rows} - {*TIMED})


def implementations(rows: Iterable[Mapping]) -> list[str]:
    """Ours first, its variants, then the peers as they come."""
    names = list(dict.fromkeys(row["impl"] for row in rows))
    return sorted(names, key=lambda name: (name != OURS, not is_ours(name)))


def is_ours(name: str) -> bool:
    return name.split(":")[0] == OURS


def by_tokens(rows: Iterable[Mapping]) -> dict[int, dict[str, Mapping]]:
    """tokens -> impl -> row; of several rows of one implementation the last counts."""
    found: dict[int, dict[str, Mapping]] = {}
    for row in rows:
        found.setdefault(row["tokens"], {})[row["impl"]] = row
    return dict(sorted(found.items()))


def best_peer(line: Mapping[str, Mapping]) -> Mapping | None:
    """The fastest row that is not ours."""
    peers = [row for name, row in line.items() if not is_ours(name)]
    return min(peers, key=lambda row: row["time_us"]) if peers else None


def speedup(line: Mapping[str, Mapping]) -> float | None:
    """Time of the fastest peer over ours: above 1, we are faster. None without either."""
    peer = best_peer(line)
    return peer["time_us"] / line[OURS]["time_us"] if peer is not None and OURS in line else None


def geometric_mean(values: Sequence[float]) -> float | None:
    """
    >>> geometric_mean([2.0, 8.0])
    4.0
    """
    return exp(fsum(log(value) for value in values) / len(values)) if values else None


def tables(rows: Iterable[Mapping]) -> list[Table]:
    """One table for each problem, quant, routing and GPU."""
    return [table(key, members) for key, members in groups(rows).items()]


def table(key: tuple, rows: Sequence[Mapping]) -> Table:
    """Times in microseconds. Last line: the geometric mean of (peer's time / ours) over all tokens both have."""
    bench, problem, quant, routing, gpu = key
    names = implementations(rows)
    lines = by_tokens(rows)
    made = Table(title=f"{bench} {problem} {quant} {routing} on {gpu}, us", title_justify="left")
    for heading in ("tokens", *names, "floor", "floor / ours", "best peer / ours"):
        made.add_column(_wrappable(heading), justify="right", overflow="fold")
    for tokens, line in lines.items():
        fastest = min(row["time_us"] for row in line.values())
        floor = min(row["floor_us"] for row in line.values())
        share = floor / line[OURS]["time_us"] if OURS in line else None
        times = [_time(line.get(name), fastest) for name in names]
        made.add_row(str(tokens), *times, f"{floor:.1f}", _ratio(share), _ratio(speedup(line)))
    means = [_mean_over(lines, name) for name in names]
    overall = geometric_mean([ratio for line in lines.values() if (ratio := speedup(line)) is not None])
    if overall is not None:
        made.add_section()
        made.add_row("vs ours", *(_ratio(mean) for mean in means), "", "", _ratio(overall))
    return made


def _mean_over(lines: Mapping[int, Mapping[str, Mapping]], name: str) -> float | None:
    """Geometric mean of that implementation's time over ours."""
    both = [line for line in lines.values() if name in line and OURS in line]
    return geometric_mean([line[name]["time_us"] / line[OURS]["time_us"] for line in both])


def _wrappable(name: str) -> str:
    """Columns are narrow: "vllm-0.26.0-triton" may break at its hyphens, "expertile:torch" at its colon."""
    return name.replace("-", " ").replace(":", " ")


def _time(row: Mapping | None, fastest: float) -> str:
    if row is None:
        return "-"
    text = f"{row['time_us']:.1f}"
    return f"[bold]{text}[/bold]" if row["time_us"] == fastest else text


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
