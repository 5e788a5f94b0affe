"""Every error that expertile raises on purpose, with the value that was wrong and what to do about it; and the checks
of plain values that raise them.
"""

from __future__ import annotations

import sys
from enum import Enum
from typing import Any, TypeVar

Member = TypeVar("Member", bound=Enum)


class ExpertileError(Exception):
    """Base of all errors raised on purpose: `except ExpertileError` catches exactly these."""


class ShapeError(ExpertileError, ValueError):
    """A tensor's shape, stride, dtype or device does not fit the others, or an option has no valid value."""


class UnsupportedProblem(ExpertileError):
    """No backend, or not the backend that was asked for, can run this problem; the message lists the reasons."""


class Recompiled(ExpertileError):
    """A kernel would be compiled after the guard was sealed; the message names the argument to blame."""


class MissingExtra(ExpertileError, ImportError):
    """An optional dependency is not installed; the message says which extra brings it."""


def member(kind: type[Member], value: Any, name: str) -> Member:
    """The member of an Enum of texts that the value of `name` stands for; ShapeError lists them where it is none.

    Searched, as torch.compile cannot trace a lookup that fails.
    """
    if isinstance(value, str):
        for each in kind:
            if each == value:
                return each
    known = ", ".join(each.value for each in kind)
    raise ShapeError(f"{name}={value!r} is not known: use one of {known}")


def check_number(value: Any, name: str) -> None:
    """ShapeError unless it is a finite number."""
    largest = sys.float_info.max
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not -largest <= value <= largest:
        raise ShapeError(f"{name}={value!r}: give a finite number")


def check_flag(value: Any, name: str) -> None:
    """ShapeError unless it is True or False."""
    if not isinstance(value, bool):
        raise ShapeError(f"{name}={value!r}: give True or False")


def check_count(value: Any, name: str, least: int = 1, most: int | None = None) -> None:
    """ShapeError unless it is an integer from least to most."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least or (most is not None and value > most):
        span = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise ShapeError(f"{name}={value!r}: give an integer {span}")
