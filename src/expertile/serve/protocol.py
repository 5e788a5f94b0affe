"""Bodies of OpenAI's completions and chat completions: the part that the embedded engine serves, checked strictly."""

from __future__ import annotations

from typing import Annotated, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from .errors import shown
from .sampling import LARGEST_SEED, Sampling

MOST_CHOICES = 128  # n times the number of prompts
MOST_STOPS, LONGEST_STOP = 16, 1024
#: For FastAPI's `responses`.
STREAMS = {"content": {"text/event-stream": {}}, "description": "the response, or with stream=true its chunks"}


def _only(allowed, refusal: str) -> AfterValidator:
    """For a parameter with one value that asks nothing of us. Not Literal, which takes false for 0 and true for 1."""

    def check(value):
        if value != allowed:
            raise ValueError(refusal)
        return value

    return AfterValidator(check)


Penalty = Annotated[
    float, _only(0, "the embedded engine has no penalties"), WithJsonSchema({"type": "number", "enum": [0]})
]
Zero = Annotated[int, _only(0, "Input should be 0"), WithJsonSchema({"type": "integer", "enum": [0]})]
One = Annotated[int, _only(1, "Input should be 1"), WithJsonSchema({"type": "integer", "enum": [1]})]
No = Annotated[bool, _only(False, "Input should be false"), WithJsonSchema({"type": "boolean", "enum": [False]})]
Yes = Annotated[bool, _only(True, "Input should be true"), WithJsonSchema({"type": "boolean", "enum": [True]})]


def _whole(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("it has half of a surrogate pair, which is no text") from None
    return text


Text = Annotated[str, AfterValidator(_whole)]
Item = TypeVar("Item")
Few = Annotated[
    list[Item], Field(fail_fast=True)
]  # the first mistake ends the check: a body can hold a million of them


#: What OpenAI has and we do not: null, and what says nothing, is as good as absent.
NoList = Annotated[list, Field(max_length=0)]
NoObject = Annotated[dict, Field(max_length=0)]


def _at(field: str, message: str) -> PydanticCustomError:
    """A mistake of a whole body that one field is to blame for."""
    return PydanticCustomError("at_field", "{field}: {message}", {"field": field, "message": message})


class Body(BaseModel):
    """A parameter that would be ignored is refused by name instead."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, hide_input_in_errors=True)

    @model_validator(mode="before")
    @classmethod
    def _no_stranger(cls, data):
        stranger = next((key for key in data if key not in cls.model_fields), None) if isinstance(data, dict) else None
        if stranger is not None:  # here, not by extra="forbid", which would list every one of them
            raise PydanticCustomError("stranger", "it is not a parameter of this endpoint", {"name": shown(stranger)})
        return data


class StreamOptions(Body):
    include_usage: bool | None = None


class Generation(Body):
    """What both kinds of request have in common. null is as good as absent."""

    model: Text | None = None
    n: int | None = Field(None, ge=1, le=MOST_CHOICES)
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=2**31 - 1)
    seed: int | None = Field(None, ge=-LARGEST_SEED, le=LARGEST_SEED)
    stop: Text | Few[Text] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    user: Text | None = None
    logit_bias: NoObject | None = None

    @field_validator("stop")
    @classmethod
    def _few_and_short(cls, value):
        stops = [value] if isinstance(value, str) else value or []
        if len(stops) > MOST_STOPS:
            raise ValueError(f"give at most {MOST_STOPS} stop strings")
        if any(not 0 < len(stop) <= LONGEST_STOP for stop in stops):
            raise ValueError(f"a stop string has 1 to {LONGEST_STOP} characters")
        return value

    @model_validator(mode="after")
    def _options_go_with_a_stream(self):
        if self.stream_options is not None and not self.stream:
            raise _at("stream_options", "it goes with stream=true")
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def sampling(self, choice: int) -> Sampling:
        """For the n choices of a request seeds count up, so that they differ and are the same the next time."""
        return Sampling(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(0, self.top_k or 0),
            seed=None if self.seed is None else self.seed + choice,
        )

    @property
    def wants_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


TokenId = Annotated[int, Field(ge=0)]


def _prompt_kind(prompt) -> str:
    """By the first item alone: tried as each kind in turn, a long list would be gone through as often."""
    first = prompt[0] if isinstance(prompt, list) and prompt else None
    if isinstance(prompt, list):
        return "texts" if isinstance(first, str) else "lists" if isinstance(first, list) else "ids"
    return "text"


Several = Annotated[list[Item], Field(fail_fast=True, max_length=MOST_CHOICES)]
Prompt = Annotated[
    Annotated[Text, Tag("text")]
    | Annotated[Few[TokenId], Tag("ids")]
    | Annotated[Several[Text], Tag("texts")]
    | Annotated[Several[Few[TokenId]], Tag("lists")],
    Discriminator(_prompt_kind),
]


class CompletionBody(Generation):
    """POST /v1/completions. prompt: text or token ids, one or several."""

    prompt: Prompt
    echo: No | None = None
    best_of: One | None = None
    logprobs: None = None
    suffix: None = None

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        several = isinstance(self.prompt, list) and self.prompt and not isinstance(self.prompt[0], int)
        return self.prompt if several else [self.prompt]


class TextPart(Body):
    type: Literal["text"]
    text: Text


class Message(Body):
    role: Literal["system", "developer", "user", "assistant"]
    content: Text | Few[TextPart]
    name: Text | None = None

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ResponseFormat(Body):
    type: Literal["text"]


class ChatBody(Generation):
    """POST /v1/chat/completions."""

    messages: Few[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: No | None = None
    response_format: ResponseFormat | None = None
    tools: NoList | None = None
    functions: NoList | None = None
    tool_choice: Literal["none"] | None = None
    function_call: Literal["none"] | None = None
    parallel_tool_calls: Yes | None = None
    top_logprobs: Zero | None = None
    store: No | None = None
    audio: None = None
    metadata: None = None
    modalities: None = None
    prediction: None = None
    prompt_cache_key: None = None
    prompt_cache_retention: None = None
    reasoning_effort: None = None
    safety_identifier: None = None
    service_tier: None = None
    verbosity: None = None
    web_search_options: None = None

    @model_validator(mode="after")
    def _one_number_of_tokens(self):
        both = (self.max_tokens, self.max_completion_tokens)
        if None not in both and both[0] != both[1]:
            raise _at("max_completion_tokens", f"{both[1]} and max_tokens {both[0]} differ: give one of them")
        return self


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CompletionChoice(BaseModel):
    index: int
    text: str
    finish_reason: str | None = None
    logprobs: None = None


class Completion(BaseModel):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class ChatMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str


class ChatChoice(BaseModel):
    index: int
    message: ChatMessage
    finish_reason: str | None = None
    logprobs: None = None


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class Model(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "expertile"
    max_model_len: int


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[Model]
