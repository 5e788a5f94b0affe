"""Rows of the benchmark `serve` as a table: medians over the runs, and each arm against stock."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import median

from rich.table import Table

FIGURES = {
    "output_tokens_per_s": "tok/s",
    "ttft_ms_p50": "TTFT p50",
    "ttft_ms_p99": "TTFT p99",
    "tpot_ms_p50": "TPOT p50",
}


def medians(rows: Iterable[Mapping]) -> dict[tuple, dict[str, dict[str, float]]]:
    """(batch, input, output) -> impl -> figure -> median over runs, in the order in which they come."""
    found: dict[tuple, dict[str, list[Mapping]]] = {}
    for row in rows:
        load = tuple(row[name] for name in ("batch", "input", "output"))
        found.setdefault(load, {}).setdefault(row["impl"], []).append(row)
    return {
        load: {impl: {name: median(row[name] for row in each) for name in FIGURES} for impl, each in impls.items()}
        for load, impls in found.items()
    }


def serve_table(rows: Iterable[Mapping]) -> Table:
    """A line for each load and arm; behind a figure how it compares with the first stock arm's."""
    rows = list(rows)
    first = rows[0]
    runs = 1 + max(row["run"] for row in rows)
    table = Table(
        title=f"{first['problem']} {first['quant']}, {first['engine']} on {first['gpu']}, median of {runs} runs"
    )
    for name in ("load", "impl", *FIGURES.values()):
        table.add_column(name, justify="left" if name in ("load", "impl") else "right")
    for (batch, given, output), impls in medians(rows).items():
        stock = next((figures for impl, figures in impls.items() if impl == first["engine"]), None)
        load = f"{'poisson' if not batch else f'batch {batch}'}, {given} in, {output} out"
        for impl, figures in impls.items():
            cells = [_cell(figures[name], stock and stock[name], stock is figures) for name in FIGURES]
            table.add_row(load, impl, *cells)
            load = ""
        table.add_section()
    return table


def _cell(value: float, against: float | None, itself: bool) -> str:
    if itself or not against:
        return f"{value:.1f}"
    return f"{value:.1f} ({value / against - 1.0:+.1%})"
