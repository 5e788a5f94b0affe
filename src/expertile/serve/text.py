"""Tokens -> text as it grows, cut at the first stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence

CONTEXT = 6  # tokens of the prompt that are decoded along: how a token reads may hang on those before it
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # what a part of a character decodes to
LONGEST_CHARACTER = 8  # tokens, and some; more of them are no character in the making


class Growing:
    """Decodes one token after the other; a character that is spread over several tokens comes with its last one."""

    def __init__(self, decode: Callable[[list[int]], str], prompt: list[int]):
        self._decode = decode
        self._ids = prompt[-CONTEXT:]
        self._known = len(self._ids)  # tokens whose text is out

    def push(self, token: int) -> str:
        self._ids.append(token)
        text = self._new()
        waiting = len(self._ids) - self._known
        return "" if text.endswith(INCOMPLETE) and waiting <= LONGEST_CHARACTER else self._take(text)

    def rest(self) -> str:
        """What is left of a character that was never completed."""
        return self._take(self._new()) if self._known < len(self._ids) else ""

    def _new(self) -> str:
        before, now = self._decode(self._ids[: self._known]), self._decode(self._ids)
        return now[len(before) :]

    def _take(self, text: str) -> str:
        self._ids = self._ids[self._known :]
        self._known = len(self._ids)
        return text


class StopStrings:
    """Lets text through up to the first stop string; what may be the beginning of one waits for what follows."""

    def __init__(self, stops: Sequence[str]):
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """Text that is certain by now; nothing any more once `stopped`."""
        if self.stopped:
            return ""
        self._held += text
        found = [at for at in map(self._held.find, self._stops) if at >= 0]
        if found:
            self.stopped = True
            out, self._held = self._held[: min(found)], ""
            return out
        keep = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        out, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return out

    def rest(self) -> str:
        """What was held back, when no more text comes."""
        out, self._held = self._held, ""
        return out


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of text that a stop string begins with."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if stop.startswith(text[-n:])), 0)
