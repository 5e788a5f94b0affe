"""How many tokens requests have in and out: fixed, uniform, or a list with weights."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

from ...errors import ExpertileError
from ..serve import MIX

#: The mix that `expertile bench vllm --poisson` draws from.
LONG_TAIL = "long-tail"
MOST = 1 << 20
_PART = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?/([0-9]{1,18})(?:-([0-9]{1,18}))?(?:\*([0-9]{1,18}))?")


@dataclass(frozen=True)
class Part:
    """Requests with input[0] ... input[1] tokens in and output[0] ... output[1] out, drawn `weight` times as often."""

    input: tuple[int, int]
    output: tuple[int, int]
    weight: int = 1


@dataclass(frozen=True)
class Lengths:
    text: str
    parts: tuple[Part, ...]

    @property
    def longest(self) -> int:
        """Tokens in and out of the longest request."""
        return max(part.input[1] + part.output[1] for part in self.parts)

    def draw(self, chance: random.Random) -> tuple[int, int]:
        """(tokens in, tokens out) of one request."""
        part = chance.choices(self.parts, [each.weight for each in self.parts])[0]
        return chance.randint(*part.input), chance.randint(*part.output)


def parse_lengths(text: str) -> Lengths:
    """IN/OUT, each a number or a range; several with commas between them, *N for one that is N times as likely.

    >>> parse_lengths("128/128").draw(random.Random(0))
    (128, 128)
    >>> parse_lengths("64-512/16-32,2048/128*3").parts[1]
    Part(input=(2048, 2048), output=(128, 128), weight=3)
    >>> parse_lengths("long-tail").longest
    3756
    """
    if text == LONG_TAIL:
        return Lengths(text, tuple(Part((given, given), (made, made)) for given, made in MIX))
    return Lengths(text, tuple(_part(piece.strip(), text) for piece in text.split(",")))


def _part(piece: str, text: str) -> Part:
    found = _PART.fullmatch(piece)
    if not found:
        raise ExpertileError(
            f"lengths={text!r}: {piece!r} is not IN/OUT, as in 128/128, 64-512/16-32, 32/32*4,2048/128 or {LONG_TAIL}"
        )
    low_in, high_in, low_out, high_out, weight = (int(each) if each else None for each in found.groups())
    part = Part((low_in, high_in or low_in), (low_out, high_out or low_out), 1 if weight is None else weight)
    for low, high in (part.input, part.output):
        if not 1 <= low <= high <= MOST:
            raise ExpertileError(f"lengths={text!r}: {piece!r} needs 1 <= first <= last <= {MOST}")
    if part.weight < 1:
        raise ExpertileError(f"lengths={text!r}: {piece!r} would never be drawn, leave it out")
    return part
