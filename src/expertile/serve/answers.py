"""Requests -> sequences of the engine -> responses, whole or streamed."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from fastapi import Request
from fastapi.responses import StreamingResponse
from jinja2 import TemplateError

from . import protocol
from .engine import Engine, EngineStopped, QueueFull
from .errors import ApiError, body_of
from .model import LanguageModel
from .protocol import ChatBody, CompletionBody
from .sequences import Event, Sequence

DEFAULT_COMPLETION_TOKENS = 16  # as OpenAI's completions endpoint has it; chat goes on to the end of the context
PATIENCE = 0.5  # seconds between two looks whether the client is still there
PLAIN_STOP = "\nuser:"  # where a model without a chat template begins to write the other's part


class Answer:
    """The choices of one request on their way, and the shape that they are told in.

    prompt_tokens   of all prompts together
    """

    def __init__(self, body: CompletionBody | ChatBody, model: LanguageModel, name: str, prompts: list[list[int]]):
        self.body, self.name = body, name
        self.chat = isinstance(body, ChatBody)
        self.id = f"{'chatcmpl' if self.chat else 'cmpl'}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.prompt_tokens = sum(map(len, prompts))
        self._events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        stops = body.stops + ((PLAIN_STOP,) if self.chat and not model.tokenizer.chat_template else ())
        ends = frozenset() if body.ignore_eos else model.ends
        self.sequences = []
        for prompt in prompts:
            most = _most_tokens(body, len(prompt), model.context)
            for choice in range(body.n or 1):
                emit = self._emit(len(self.sequences))
                self.sequences.append(Sequence(prompt, most, body.sampling(choice), stops, ends, emit))

    def _emit(self, index: int):
        return lambda event: self._events.put_nowait((index, event))

    def submit(self, engine: Engine) -> None:
        """ApiError 400, 429 or 503 when the engine does not take it."""
        if len(self.sequences) > engine.slots + engine.max_queue:
            raise ApiError(400, f"n: {len(self.sequences)} choices at once are more than this server ever holds", "n")
        try:
            engine.submit(self.sequences)
        except QueueFull as error:
            seconds = engine.metrics.recent()["seconds"] or 1.0
            wait = seconds * (1 + len(engine.waiting) / engine.slots)
            raise ApiError(429, f"{error}; try again later", code="queue_full", retry_after=_soon(wait)) from None
        except EngineStopped as error:
            raise ApiError(503, str(error)) from None

    async def events(self) -> AsyncIterator[tuple[int, Event]]:
        """Index and event of the choices until all have ended. Raises _Failed with the first error."""
        left = len(self.sequences)
        while left:
            index, event = await self._events.get()
            if event.finish == "error":
                raise _Failed(event.error)
            left -= event.finish is not None
            yield index, event

    async def whole(self, engine: Engine, request: Request) -> protocol.Completion | protocol.ChatCompletion:
        """The response, once it is there. The slots are free again when the client goes away."""
        told = [_Told() for _ in self.sequences]
        gone = asyncio.ensure_future(_gone(request))
        work = asyncio.ensure_future(self._collect(told))
        try:
            await asyncio.wait((gone, work), return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise ApiError(499, "the client has gone away")
            work.result()
        except _Failed as error:
            raise ApiError(503 if engine.stopped else 500, str(error)) from None
        finally:
            gone.cancel()
            work.cancel()
            self._leave(engine)
        usage = self._usage([each.tokens for each in told])
        if self.chat:
            choices = [
                protocol.ChatChoice(
                    index=index, message=protocol.ChatMessage(content="".join(each.parts)), finish_reason=each.finish
                )
                for index, each in enumerate(told)
            ]
            return protocol.ChatCompletion(
                id=self.id, created=self.created, model=self.name, choices=choices, usage=usage
            )
        choices = [
            protocol.CompletionChoice(index=index, text="".join(each.parts), finish_reason=each.finish)
            for index, each in enumerate(told)
        ]
        return protocol.Completion(id=self.id, created=self.created, model=self.name, choices=choices, usage=usage)

    async def _collect(self, told: list[_Told]) -> None:
        async for index, event in self.events():
            told[index].parts.append(event.text)
            told[index].tokens, told[index].finish = event.tokens, event.finish

    def stream(self, engine: Engine) -> StreamingResponse:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        return StreamingResponse(self._lines(engine), media_type="text/event-stream", headers=headers)

    async def _lines(self, engine: Engine) -> AsyncIterator[str]:
        """Server-sent events. Left early, as when the client goes away, the slots are free again."""
        tokens = [0] * len(self.sequences)
        try:
            if self.chat:
                for index in range(len(tokens)):
                    yield self._chunk(index, {"role": "assistant", "content": ""}, None)
            async for index, event in self.events():
                tokens[index] = event.tokens
                if event.text or (event.finish and not self.chat):
                    delta = {"content": event.text} if self.chat else event.text
                    yield self._chunk(index, delta, None if self.chat else event.finish)
                if event.finish and self.chat:
                    yield self._chunk(index, {}, event.finish)
            if self.body.wants_usage:
                yield self._line(choices=[], usage=self._usage(tokens).model_dump())
            yield "data: [DONE]\n\n"
        except _Failed as error:
            yield f"data: {json.dumps(body_of(503 if engine.stopped else 500, str(error)))}\n\n"
        finally:
            self._leave(engine)

    def _leave(self, engine: Engine) -> None:
        """Frees what is left of the slots. The sequences know us by `emit`: without them we are gone at once."""
        engine.cancel(self.sequences)
        self.sequences = []

    def _chunk(self, index: int, text, finish: str | None) -> str:
        choice = {"index": index, "delta" if self.chat else "text": text, "logprobs": None, "finish_reason": finish}
        return self._line(choices=[choice], **({"usage": None} if self.body.wants_usage else {}))

    def _line(self, **fields) -> str:
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        head = {"id": self.id, "object": kind, "created": self.created, "model": self.name}
        return f"data: {json.dumps(head | fields)}\n\n"

    def _usage(self, tokens: list[int]) -> protocol.Usage:
        made = sum(tokens)
        return protocol.Usage(
            prompt_tokens=self.prompt_tokens, completion_tokens=made, total_tokens=self.prompt_tokens + made
        )


@dataclass
class _Told:
    parts: list[str] = field(default_factory=list)
    tokens: int = 0
    finish: str | None = None


class _Failed(Exception):
    """The engine failed on the request."""


async def _gone(request: Request) -> None:
    while not await request.is_disconnected():
        await asyncio.sleep(PATIENCE)


async def prompts_of(body: CompletionBody | ChatBody, model: LanguageModel) -> list[list[int]]:
    """Token ids of every prompt. ApiError 400 for one that cannot be."""
    if isinstance(body, ChatBody):
        found = [await asyncio.to_thread(lambda: _encoded(model, _chat_text(body, model), "messages", False))]
    else:
        if len(body.prompts) * (body.n or 1) > protocol.MOST_CHOICES:
            raise ApiError(400, f"prompt: n times the prompts is more than {protocol.MOST_CHOICES} choices", "prompt")
        found = [
            each if isinstance(each, list) else await asyncio.to_thread(_encoded, model, each, "prompt", True)
            for each in body.prompts
        ]
    field = "messages" if isinstance(body, ChatBody) else "prompt"
    for ids in found:
        if not ids:
            raise ApiError(400, f"{field}: there is no token in it", field)
        if max(ids) >= model.vocabulary:
            raise ApiError(400, f"{field}: token {max(ids)} is not among the model's {model.vocabulary}", field)
        if len(ids) >= model.context:
            raise _too_long(field, f"{len(ids)} tokens", model)
    return found


def _encoded(model: LanguageModel, text: str, field: str, plain: bool) -> list[int]:
    if len(text) > model.longest_text:
        raise _too_long(field, f"{len(text)} characters", model)
    return model.encode(text, special=plain or not model.tokenizer.chat_template)


def _chat_text(body: ChatBody, model: LanguageModel) -> str:
    """The messages by the model's template, else as "role: content" lines."""
    if not model.tokenizer.chat_template:
        return "".join(f"{message.role}: {message.text}\n" for message in body.messages) + "assistant:"
    messages = [{"role": message.role, "content": message.text} for message in body.messages]
    try:
        return model.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except (TemplateError, ValueError, TypeError) as error:
        why = " ".join(str(error).split())
        raise ApiError(400, f"messages: the model's chat template refuses them: {why}", "messages") from None


def _most_tokens(body: CompletionBody | ChatBody, prompt: int, context: int) -> int:
    room, field = context - prompt, "max_tokens"
    if isinstance(body, ChatBody):
        wanted, default = body.max_tokens or body.max_completion_tokens, room
        field = field if body.max_tokens else "max_completion_tokens"
    else:
        wanted, default = body.max_tokens, min(room, DEFAULT_COMPLETION_TOKENS)
    if wanted is not None and wanted > room:
        raise ApiError(
            400, f"{field}: {wanted} and the prompt's {prompt} tokens are more than the context of {context}",
            field, "context_length_exceeded",
        )  # fmt: skip
    return wanted or default


def _too_long(field: str, what: str, model: LanguageModel) -> ApiError:
    message = f"{field}: {what} are more than the context of {model.context} tokens has room for"
    return ApiError(400, message, field, "context_length_exceeded")


def _soon(seconds: float) -> int:
    return max(1, min(60, round(seconds)))
