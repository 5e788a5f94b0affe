"""The command `expertile audit`. Needs Python alone: it reads sources and imports none of them."""

from __future__ import annotations

import json as text
from typing import Annotated

import typer

from .errors import ExpertileError

LEVELS = ("any", "warning", "error")


def audit(
    paths: Annotated[list[str], typer.Argument(help="files and folders of Python sources", metavar="PATH")],
    json: Annotated[
        bool, typer.Option("--json", help="everything as one JSON object, suppressed findings too")
    ] = False,
    fail_on: Annotated[
        str | None, typer.Option(help="exit code 1 where a finding is at least this: any, warning, error")
    ] = None,
    suppressed: Annotated[
        bool, typer.Option("--suppressed", help="show suppressed findings with their reasons")
    ] = False,
):
    """Which kernels would compile again as sizes vary: reads Triton and Gluon sources without running them."""
    from .audit import audit as search
    from .audit import in_words

    if fail_on is not None and fail_on not in LEVELS:
        raise ExpertileError(f"fail-on={fail_on!r} is not known: use one of {', '.join(LEVELS)}")
    report = search(paths)
    if json:
        print(text.dumps(report.to_dict(), indent=1))
    else:
        print("\n".join(in_words(report, suppressed)))
    if fail_on is not None and report.reaches(fail_on):
        raise typer.Exit(1)
