"""Benchmark `experts`: top-k ids and weights given, x in, y out; quantisation of x included, the router not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from . import runner
from .implementation import Implementation

BENCH = "experts"


def run(
    request: runner.Request, implementations: Sequence[Implementation], setting: runner.Setting
) -> Iterator[runner.Outcome]:
    return runner.run(request, implementations, setting)
