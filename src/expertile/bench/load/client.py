"""One request to the endpoint, and when each part of its answer was here. The extra `bench` brings aiohttp."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import aiohttp

from ...errors import ExpertileError
from .stream import DONE, Events, StreamFault, error_message, parse

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
QUESTION_S = 10.0  # for /v1/models and the like


@dataclass
class Sample:
    """One request as seen from here; times in seconds, `start` when it was sent.

    first, last     when the first and the last event with choices was here; None before
    gaps            between such events
    error           why it failed; empty when it did not, or was cut off
    cut             it is under way still: at the end of a measurement, that it was cut off
    """

    input_tokens: int
    start: float = 0.0
    first: float | None = None
    last: float | None = None
    gaps: list[float] = field(default_factory=list)
    output_tokens: int | None = None
    counted: bool = True
    error: str = ""
    cut: bool = True

    @property
    def good(self) -> bool:
        return not self.error and not self.cut


class Client:
    """The endpoint: what is asked of it, in every request alike.

    body      joined to each request
    timeout   seconds for a whole answer
    key       sent as a bearer token; shown nowhere
    """

    def __init__(self, url: str, api: str, body: Mapping[str, Any], timeout: float, key: str | None = None):
        self.url, self.api, self.body, self.timeout = url, api, dict(body), timeout
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    async def __aenter__(self) -> Client:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), headers=self._headers, trust_env=True,
            timeout=aiohttp.ClientTimeout(total=self.timeout), read_bufsize=1 << 18,
        )  # fmt: skip
        return self

    async def __aexit__(self, *_):
        await self._session.close()

    async def facts(self, path: str) -> Any:
        """The JSON that a GET gives. ExpertileError says why there is none."""
        try:
            limit = aiohttp.ClientTimeout(total=QUESTION_S)
            async with self._session.get(self.url + path, timeout=limit) as response:
                text = await response.text()
                if response.status != 200:
                    raise ExpertileError(f"GET {self.url}{path}: {_refusal(response.status, response.reason, text)}")
                return json.loads(text)
        except ValueError:
            raise ExpertileError(f"GET {self.url}{path}: the answer is not JSON") from None
        except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
            raise ExpertileError(f"GET {self.url}{path}: {_reason(error, QUESTION_S, begun=False)}") from None

    async def ask(self, prompt: str | list[int], output: int, sample: Sample) -> Sample:
        """Sends the request and follows the stream to its end; the sample is filled in as it goes."""
        sample.start = perf_counter()
        try:
            async with self._session.post(self.url + PATHS[self.api], json=self._request(prompt, output)) as response:
                if response.status != 200:
                    text = (await response.content.read(1 << 16)).decode("utf-8", "replace")
                    raise StreamFault(_refusal(response.status, response.reason, text))
                await self._follow(response.content, sample)
        except StreamFault as fault:
            sample.error = str(fault)
        except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
            sample.error = _reason(error, self.timeout, begun=sample.first is not None)
        sample.cut = False
        return sample

    def _request(self, prompt, output: int) -> dict:
        text = {"prompt": prompt} if self.api == "completions" else {"messages": [{"role": "user", "content": prompt}]}
        options = {"max_tokens": output, "stream": True, "stream_options": {"include_usage": True}}
        return {**text, **options, **self.body}

    async def _follow(self, content: aiohttp.StreamReader, sample: Sample) -> None:
        events, chunks, finished = Events(), 0, False
        async for data in content.iter_any():
            for text in events.feed(data):
                if text.strip() == DONE:
                    finished = True
                    continue
                event = parse(text)
                now = perf_counter()
                if event.choices:
                    if sample.first is None:
                        sample.first = now
                    else:
                        sample.gaps.append(now - sample.last)
                    sample.last, chunks = now, chunks + 1
                finished = finished or event.finished
                if event.output_tokens is not None:
                    sample.output_tokens = event.output_tokens
                if event.input_tokens is not None:
                    sample.input_tokens = event.input_tokens
        if sample.first is None:
            raise StreamFault("no token: the stream ended before the first")
        if events.unfinished or not finished:
            raise StreamFault("the stream ended in the middle of an answer")
        if sample.output_tokens is None:
            sample.output_tokens, sample.counted = chunks, False


def _refusal(status: int, reason: str | None, text: str) -> str:
    """A status, and the sentence of the error where there is one."""
    try:
        message = error_message(json.loads(text))
    except ValueError:
        message = ""
    return f"HTTP {status} {message or reason or ''}".strip()


def _reason(error: BaseException, timeout: float, begun: bool) -> str:
    if isinstance(error, asyncio.TimeoutError):
        return f"timeout: no complete answer in {timeout:g} s"
    if isinstance(error, aiohttp.ClientConnectorError):
        return f"cannot connect: {error.os_error.strerror or type(error.os_error).__name__}"
    if isinstance(error, (aiohttp.ServerDisconnectedError, aiohttp.ClientPayloadError, aiohttp.ClientOSError, OSError)):
        return "disconnected in the middle of an answer" if begun else "disconnected before the first token"
    return f"{type(error).__name__}: {error}"[:120]
