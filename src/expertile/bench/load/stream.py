"""Server-sent events and what each says about the answer under way."""

from __future__ import annotations

import json
from dataclasses import dataclass

MOST_BYTES = 8 << 20  # of one event: more is no stream of tokens
DONE = "[DONE]"
_FIELDS = ("data", "event", "id", "retry")


class StreamFault(Exception):
    """The stream is not what OpenAI's API says it is; the message is a reason to count."""


class Events:
    """Bytes as they arrive -> the data of events as they become complete."""

    def __init__(self):
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, data: bytes) -> list[str]:
        *lines, self._rest = (self._rest + data).replace(b"\r\n", b"\n").split(b"\n")
        if len(self._rest) + sum(map(len, self._data)) > MOST_BYTES:
            raise StreamFault(f"malformed stream: an event of more than {MOST_BYTES >> 20} MiB")
        found = []
        for line in lines:
            if not line:
                if self._data:
                    found.append(_text(b"\n".join(self._data)))
                    self._data = []
                continue
            name, _, value = line.partition(b":")
            if name == b"data":
                self._data.append(value.removeprefix(b" "))
            elif name and name.decode("latin-1") not in _FIELDS:  # no name: a comment, by which servers keep lines open
                raise StreamFault(f"malformed stream: a line that begins {_text(line[:24], 'replace')!r}")
        return found

    @property
    def unfinished(self) -> bool:
        """Whether an event has begun and not ended."""
        return bool(self._rest.strip() or self._data)


@dataclass(frozen=True)
class Event:
    """What one event says: that tokens are there (choices), that a choice is complete, how many tokens it all was."""

    choices: bool
    finished: bool = False
    input_tokens: int | None = None
    output_tokens: int | None = None


def parse(data: str) -> Event:
    """An event that is not DONE. StreamFault for what is not JSON of that kind, or reports an error."""
    try:
        body = json.loads(data)
    except ValueError:
        raise StreamFault(f"malformed stream: {data[:24]!r} is not JSON") from None
    if not isinstance(body, dict):
        raise StreamFault(f"malformed stream: {data[:24]!r} is no object")
    if body.get("error"):
        raise StreamFault(f"error in the stream: {error_message(body)}")
    choices = body.get("choices") or []
    if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
        raise StreamFault("malformed stream: choices is no list of objects")
    usage = body.get("usage")
    usage = usage if isinstance(usage, dict) else {}
    finished = any(choice.get("finish_reason") for choice in choices)
    return Event(bool(choices), finished, _count(usage, "prompt_tokens"), _count(usage, "completion_tokens"))


def error_message(body) -> str:
    """The sentence in an error of OpenAI's shape, or of FastAPI's; short, on one line."""
    found = body.get("error", body.get("detail", body.get("message"))) if isinstance(body, dict) else body
    if isinstance(found, dict):
        found = found.get("message", found)
    return " ".join(str(found).split())[:120]


def _count(usage: dict, name: str) -> int | None:
    found = usage.get(name)
    return found if isinstance(found, int) and found >= 0 else None


def _text(data: bytes, errors: str = "strict") -> str:
    try:
        return data.decode("utf-8", errors)
    except UnicodeDecodeError:
        raise StreamFault("malformed stream: not UTF-8") from None
