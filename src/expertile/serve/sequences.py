"""One choice of one request on its way through the engine."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from .sampling import Sampler, Sampling
from .text import Growing, StopStrings

FINISHES = ("stop", "length", "error", "cancelled")


@dataclass(frozen=True)
class Event:
    """What a step brought for a sequence.

    tokens   made so far, the one that ended the text included
    finish   None while it goes on, else one of FINISHES
    """

    text: str
    tokens: int
    finish: str | None = None
    error: str = ""


@dataclass(eq=False)
class Sequence:
    """A prompt and the rules for its continuation.

    max_tokens   most tokens of the answer; prompt and answer together fit into the model's context
    ends         tokens that end the text; empty to go on regardless
    emit         called in the event loop's thread with each Event
    """

    prompt: list[int]
    max_tokens: int
    sampling: Sampling
    stops: tuple[str, ...]
    ends: frozenset[int]
    emit: Callable[[Event], None]

    def __post_init__(self):
        self.sampler = Sampler(self.sampling)
        self.cancelled = False
        self.filled = 0  # tokens whose keys and values are in the cache
        self.tokens = 0  # of the answer
        self.last = -1  # the token to compute with next
        self.arrived = time.perf_counter()
        self.first_token: float | None = None

    def begin(self, decode: Callable[[list[int]], str]) -> None:
        self._text, self._stop = Growing(decode, self.prompt), StopStrings(self.stops)

    @property
    def is_filling(self) -> bool:
        return self.filled < len(self.prompt)

    def take(self, token: int) -> Event:
        """The next token of the answer."""
        self.tokens, self.last = self.tokens + 1, token
        self.first_token = self.first_token or time.perf_counter()
        ended = token in self.ends
        text = "" if ended else self._stop.push(self._text.push(token))
        if self._stop.stopped:
            return Event(text, self.tokens, "stop")
        if not ended and self.tokens < self.max_tokens:
            return Event(text, self.tokens)
        text += self._stop.push(self._text.rest())
        return Event(text + self._stop.rest(), self.tokens, "stop" if ended or self._stop.stopped else "length")
