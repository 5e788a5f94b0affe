"""The command `expertile watch -- COMMAND`: any Python program under the guard, and at its end a table of causes."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from .errors import ExpertileError
from .outputs import check_file

LOG_WIDTH = 160  # of the table where stderr is no terminal
#: For typer: options of ours end where the command begins, with or without `--`.
SETTINGS = dict(allow_interspersed_args=False, ignore_unknown_options=False)


def watch(
    command: Annotated[list[str], typer.Argument(help="python ..., or whatever starts a Python", metavar="COMMAND")],
    ready_line: Annotated[str | None, typer.Option(help="armed from the first line of output with this regex")] = None,
    ready_after: Annotated[float | None, typer.Option(help="armed after so many seconds")] = None,
    mode: Annotated[str, typer.Option(help="count, warn (log each cause as well) or error (raise instead)")] = "count",
    out: Annotated[Path | None, typer.Option("--json", help="file for causes and events")] = None,
):
    """Run a Python program with the guard armed once it is ready; ends with a table of what was compiled after that.

    Ready is the first of: a line of output, a time, a call of expertile.guard.ready() in the program. Child processes
    are watched too. The exit code is the program's.
    """
    from .guard.watcher import watch as run

    if out is not None:
        if not out.parent.is_dir():
            raise ExpertileError(f"json={str(out)!r}: there is no folder {str(out.parent)!r}")
        check_file(out, "json")
    watched = run(command, mode=mode, ready_line=ready_line, ready_after=ready_after)
    _report(watched, out)
    raise typer.Exit(watched.exit_code)


def _report(watched, out: Path | None) -> None:
    """On stderr, so that the program's own output stays what it is."""
    from rich.console import Console

    from .guard.report import causes, table

    found, console = causes(watched.events), Console(stderr=True)
    if not console.is_terminal:
        console = Console(stderr=True, width=LOG_WIDTH)
    for line in _remarks(watched):
        console.print(line, markup=False, highlight=False)
    if found:
        console.print(table(found))
    lost = sum(cause.ms for cause in found)
    counts = f"{_count(len(watched.events), 'event')} of {_count(len(found), 'cause')}, {lost:.0f} ms"
    summary = counts if found else "nothing was compiled"
    if watched.ready and watched.processes:
        console.print(f"expertile watch: {summary} after readiness", markup=False, highlight=False)
    if out is not None:
        text = json.dumps(asdict(watched) | {"causes": [asdict(cause) for cause in found]}, indent=1) + "\n"
        try:
            out.write_text(text)
        except OSError as error:  # the exit code stays the program's
            console.print(f"expertile watch: cannot write {out}: {error.strerror or error}", markup=False)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _remarks(watched) -> list[str]:
    """What makes an empty table mean less than it seems to."""
    said = []
    if not watched.processes:
        said.append("no Python process of the program imported Triton")
    elif not watched.ready:
        said.append(
            "the guard was never armed: no line matched, no time came, and nobody called expertile.guard.ready()"
        )
    said += [f"process {each['pid']} was not watched: {each['error']}" for each in watched.processes if each["error"]]
    return [f"expertile watch: {line}" for line in said]
