"""What a value in a JSON file that a user wrote must be: each function takes the value and where it stands, and gives
what is made of it, or ShapeError with file, key, value and what is allowed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from enum import Enum
from typing import Any

from ..errors import ShapeError
from ..plans import GemmConfig
from ..problem import ACTIVATIONS, is_activation_name
from .json_file import shown

MOST = 1 << 62  # of tokens and bytes
Take = Callable[[Any, str], Any]


def wrong(where: str, value: Any, allowed: str) -> ShapeError:
    return ShapeError(f"{where}={shown(value)}: {allowed}")


def taken(data: Any, kinds: Mapping[str, Take], where: str, more: tuple[str, ...] = ()) -> dict[str, Any]:
    """The values of an object, each as its key's kind takes it.

    where   what stands before a key: "policy.json: ", "policy.json: problems[0]."
    more    keys that are known too, and left alone
    """
    found = {}
    for name, value in mapping(data, where[:-1]).items():
        if name in kinds:
            found[name] = kinds[name](value, f"{where}{name}")
        elif name not in more:
            known = ", ".join(sorted((*kinds, *more)))
            raise wrong(where + shown(name)[1:-1], value, f"{shown(name)} is not known, use some of {known}")
    return found


def mapping(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ShapeError(f"{where}={shown(value)} is not an object")
    return value


def one_of(kind: type[Enum]) -> Take:
    def take(value: Any, where: str) -> Enum:
        known = [member.value for member in kind]
        if value not in known:
            raise wrong(where, value, f"use one of {', '.join(known)}")
        return kind(value)

    return take


def or_null(take: Take) -> Take:
    return lambda value, where: None if value is None else take(value, where)


def made_by(make: Callable[[str], Any], allowed: str) -> Take:
    """A text that `make` makes something of, or refuses by ShapeError."""

    def take(value: Any, where: str) -> Any:
        try:
            return make(text(value, where, allowed))
        except ShapeError as error:
            said = str(error)
        if said.startswith(where):
            raise ShapeError(said)
        name = where.replace(" ", ".").rpartition(".")[2]
        raise wrong(where, value, said.removeprefix(f"{name}={value!r}").lstrip(": "))

    return take


def flag(value: Any, where: str) -> bool:
    if not isinstance(value, bool):
        raise wrong(where, value, "give true or false")
    return value


def is_count(value: Any, least: int = 0) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= MOST


def count(value: Any, where: str) -> int:
    if not is_count(value):
        raise wrong(where, value, "give an integer from 0 to 2**62")
    return value


def size(value: Any, where: str) -> int:
    if not is_count(value, 1):
        raise wrong(where, value, "give an integer of at least 1")
    return value


def token_range(value: Any, where: str) -> tuple[int, int]:
    if not isinstance(value, list) or len(value) != 2 or not all(map(is_count, value)) or value[0] > value[1]:
        raise wrong(where, value, "give [least, most], two integers from 0 to 2**62")
    return value[0], value[1]


def time(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise wrong(where, value, "give a number above 0")
    return value


def text(value: Any, where: str, allowed: str = "give a text") -> str:
    if not isinstance(value, str) or not value:
        raise wrong(where, value, allowed)
    return value


def activation_name(value: Any, where: str) -> str:
    if not isinstance(value, str) or not is_activation_name(value):
        raise wrong(where, value, f"use one of {', '.join(ACTIVATIONS)}, or one of them with /interleaved behind it")
    return value


def file_names(value: Any, where: str) -> list[str]:
    if not isinstance(value, list):
        raise wrong(where, value, "give a list of files")
    return [text(each, f"{where}[{place}]", "give a file") for place, each in enumerate(value)]


def tile(value: Any, where: str) -> GemmConfig:
    """A GemmConfig by its fields' names."""
    known = {field.name: field.default is MISSING for field in fields(GemmConfig)}
    taken(value, {}, f"{where}.", more=tuple(known))
    if missing := [name for name, needed in known.items() if needed and name not in value]:
        raise wrong(where, value, f"give {', '.join(missing)} too")
    try:
        return GemmConfig(**value)
    except ShapeError as error:
        raise ShapeError(f"{where}.{error}") from None


def tile_in_order(value: Any, where: str) -> GemmConfig:
    """A GemmConfig as tables have it: its fields in order."""
    if not isinstance(value, list) or not 5 <= len(value) <= len(fields(GemmConfig)):
        raise wrong(where, value, "give the fields of GemmConfig in order")
    return tile({field.name: each for field, each in zip(fields(GemmConfig), value, strict=False)}, where)
