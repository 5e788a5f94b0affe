"""A load's figures for the eye."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.table import Table

from .figures import PERCENTS, TIMES

MEANING = {
    "ttft": "TTFT, to the first token",
    "tpot": "TPOT, a token after the first",
    "itl": "ITL, between two events",
    "e2el": "E2EL, to the last token",
}


def table(row: Mapping) -> Table:
    """The times of one load, in ms."""
    made = Table(title=f"{row['problem']}: {row['arrival']}, lengths {row['lengths']}")
    made.add_column("ms")
    for name in ("mean", *(f"p{percent}" for percent in PERCENTS)):
        made.add_column(name, justify="right")
    for name in TIMES:
        values = [row[f"{name}_ms_{what}"] for what in ("mean", *(f"p{percent}" for percent in PERCENTS))]
        made.add_row(MEANING[name], *(f"{value:.2f}" for value in values))
    return made


def lines(row: Mapping, failures: Sequence[tuple[str, int]]) -> list[str]:
    """What stands below the table."""
    found = [
        f"{row['requests']} requests in {row['seconds']:.1f} s, {row['input_tokens']} tokens in and "
        f"{row['output_tokens']} out: {row['requests_per_s']:.2f} requests/s, "
        f"{row['output_tokens_per_s']:.1f} tokens/s out, {row['tokens_per_s']:.1f} in and out"
    ]
    if "slo" in row:
        share = row["goodput_per_s"] / row["requests_per_s"] if row["requests_per_s"] else 0.0
        found.append(f"goodput under {row['slo']}: {row['goodput_per_s']:.2f} requests/s, {share:.1%} of those above")
    if row["cut"]:
        found.append(f"{row['cut']} requests were under way at the end and count nowhere")
    if row["failed"]:
        found.append(f"{row['failed']} requests failed:")
        found += [f"  {count} x {reason}" for reason, count in failures]
    return found
