"""What a tuning run has done so far, a line each, beside the table that it will write: a run that was killed goes on.

{"cell": {...}, "plan": name, "state": "trying" | "ran" | a bench State, and "time_us", "p10_us", "p90_us", "err" or
"message"}; {"cell": {...}, "state": "done"}. A cell says all that its times hang on: device, versions, layer, tokens
and routing.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import ShapeError

TRYING, RAN, DONE, MEASURED, CRASHED = "trying", "ran", "done", "measured", "crashed"
MOST_TRIES = 2  # a plan during whose first call the process ended as often is not tried again


@dataclass
class Journal:
    """The lines of a file, made where there is none. A last line that the end of a process cut off is dropped."""

    path: Path
    lines: list[dict] = field(default_factory=list)

    @classmethod
    def open(cls, path: Path) -> Journal:
        found = cls(path)
        if path.is_file():
            try:
                text = path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise ShapeError(f"journal {path} cannot be read: {error}") from None
            whole = text[: text.rfind("\n") + 1]
            found.lines = [_line(line, f"{path}:{number}") for number, line in enumerate(whole.splitlines(), 1)]
            if whole != text:
                path.write_text(whole, encoding="utf-8")
        return found

    def write(self, cell: dict, state: str, plan: str | None = None, **fields) -> None:
        line = {"cell": cell, "state": state, **({"plan": plan} if plan else {}), **fields}
        self.lines.append(line)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def of(self, cell: dict) -> list[dict]:
        return [line for line in self.lines if line["cell"] == cell]

    def is_done(self, cell: dict) -> bool:
        return any(line["state"] == DONE for line in self.of(cell))

    def measured(self, cell: dict) -> dict[str, dict]:
        """plan -> its last line with a time."""
        return {line["plan"]: line for line in self.of(cell) if line["state"] == MEASURED}

    def skipped(self, cell: dict) -> dict[str, str]:
        """plan -> why it is not tried (again) in this cell."""
        tries: dict[str, int] = {}
        found: dict[str, str] = {}
        for line in self.of(cell):
            if line["state"] == TRYING:
                tries[line["plan"]] = tries.get(line["plan"], 0) + 1
            elif line["state"] == RAN:
                tries[line["plan"]] = 0
            elif line["state"] not in (DONE, MEASURED):
                found[line["plan"]] = line.get("message", line["state"])
        for plan, count in tries.items():
            if count >= MOST_TRIES:
                found.setdefault(plan, f"the process ended {count} times in its first call")
        return found

    def unfinished(self, cell: dict) -> str | None:
        """The plan whose first call began and did not end in any way, if one is left so."""
        last = [line for line in self.of(cell) if line["state"] != DONE]
        return last[-1]["plan"] if last and last[-1]["state"] == TRYING else None


def _line(text: str, where: str) -> dict:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ShapeError(f"{where} is not JSON ({error}): mend the journal, or move it away to begin anew") from None
    if not isinstance(found, dict) or not {"cell", "state"} <= found.keys():
        raise ShapeError(f"{where} is no line of a journal: mend it, or move it away to begin anew")
    if found["state"] != DONE and not isinstance(found.get("plan"), str):
        raise ShapeError(f"{where} names no plan: mend it, or move it away to begin anew")
    return found
