"""JSON files that a user names: an object, or ShapeError in one sentence that names the file."""

from __future__ import annotations

import json
from pathlib import Path
from reprlib import Repr
from typing import Any

from ..errors import ShapeError

MOST_BYTES = 1 << 25  # far more than any table has: what is larger is another kind of file
_SHOWN = Repr()
_SHOWN.maxstring = _SHOWN.maxother = 80


def read(path: Path, what: str) -> dict[str, Any]:
    """The object in the file; `what` says in errors which file was wanted."""
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a path with a zero byte
        raise ShapeError(f"{what} {path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if len(data) > MOST_BYTES:
        raise ShapeError(f"{what} {path} has more than {MOST_BYTES >> 20} MiB: give another file")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ShapeError(f"{what} {path} is not UTF-8: {error.reason} at byte {error.start}") from None
    return parsed(text, f"{what} {path}")


def parsed(text: str, what: str) -> dict[str, Any]:
    """The object that the text is."""
    try:
        found = json.loads(text, object_pairs_hook=_once, parse_constant=_no_number)
    except RecursionError:
        raise ShapeError(f"{what} is nested too deeply") from None
    except ValueError as error:  # besides JSONDecodeError: a number of thousands of digits
        raise ShapeError(f"{what} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ShapeError(f"{what} is not an object but {shown(found)}: give a JSON object")
    return found


def shown(value: Any) -> str:
    """The value as an error shows it: cut where it is long."""
    return _SHOWN.repr(value)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{shown(name)} is there twice")
        found[name] = value
    return found


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is no number in JSON")
