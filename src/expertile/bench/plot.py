"""Time over tokens as a picture: each implementation and the floor, both axes logarithmic. Needs the extra `bench`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import ceil
from pathlib import Path

from ..errors import ExpertileError, MissingExtra
from .table import by_tokens, groups, implementations, is_ours

COLUMNS = 3
PANEL_INCHES = (5.0, 4.0)


def plot(rows: Iterable[Mapping], path: str | Path) -> Path:
    """Writes a PNG with one panel for each problem, quant, routing and GPU.

    Raises MissingExtra without matplotlib, ExpertileError when no row has a time by tokens.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtra("a plot needs matplotlib: pip install 'expertile[bench]'") from None
    found = groups(rows)
    if not found:
        raise ExpertileError("nothing to plot: no row of bench experts or layer")
    columns = min(COLUMNS, len(found))
    lines = ceil(len(found) / columns)
    figure = Figure(figsize=(PANEL_INCHES[0] * columns, PANEL_INCHES[1] * lines), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(lines, columns, squeeze=False).flatten()
    for panel, (key, members) in zip(panels, found.items(), strict=False):
        _panel(panel, key, members)
    for panel in panels[len(found) :]:
        panel.set_axis_off()
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, format="png")
    return path


def _panel(panel, key: tuple, rows) -> None:
    bench, problem, quant, routing, gpu = key
    lines = by_tokens(rows)
    for name in implementations(rows):
        points = [(tokens, line[name]["time_us"]) for tokens, line in lines.items() if name in line]
        panel.plot(
            *zip(*points, strict=True), marker="o", markersize=3, linewidth=2 if is_ours(name) else 1, label=name
        )
    floor = [(tokens, min(row["floor_us"] for row in line.values())) for tokens, line in lines.items()]
    panel.plot(*zip(*floor, strict=True), color="black", linestyle=":", label="floor")
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set_xticks(list(lines), [str(tokens) for tokens in lines], fontsize=7)
    panel.set_xlabel("tokens")
    panel.set_ylabel("microseconds")
    panel.set_title(f"{problem} {quant} {routing}\n{bench} on {gpu}", fontsize=9)
    panel.grid(True, which="major", alpha=0.3)
    panel.legend(fontsize=7)
