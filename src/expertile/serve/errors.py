"""Whatever goes wrong with a request, as a status and OpenAI's error object with one clear sentence."""

from __future__ import annotations

import logging
from itertools import pairwise

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

log = logging.getLogger("expertile.serve")
TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
#: What is said instead of the framework's own words.
SAID = {"There was an error parsing the body": "the body is no JSON in UTF-8, or too deep, or has too long a number"}
UNIONS = {
    "prompt": "give a text, a list of token ids, or a list of either",
    "stop": "give a string or a list of strings",
    "content": "give a text, or a list of parts of type text",
}
TAGS = ("body", "chat", "completion", "text", "ids", "texts", "lists")  # of unions: no part of a field's path
LONGEST_NAME, LONGEST_MESSAGE = 64, 280  # characters of what a client hears back of its own words, and of a sentence


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(BaseModel):
    """The shape of every answer with a status of 400 or more."""

    error: ErrorDetail


#: For FastAPI's `responses`.
FAILS = {"4XX": {"model": ErrorBody}, "5XX": {"model": ErrorBody}}


class ApiError(Exception):
    """A request that is answered with `status` and a sentence; `param` names the field to blame."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None, retry_after=None):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = {} if retry_after is None else {"Retry-After": str(retry_after)}


def shown(text: str) -> str:
    """A client's own words as an answer may repeat them: on one line, encodable, short."""
    words = repr(text[: LONGEST_NAME + 1])[1:-1]
    return f"{words[:LONGEST_NAME]}..." if len(words) > LONGEST_NAME else words


def body_of(status: int, message: str, param: str | None = None, code: str | None = None) -> dict:
    if len(message) > LONGEST_MESSAGE:
        message = f"{message[:LONGEST_MESSAGE]}..."
    kind = TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return ErrorBody(error=ErrorDetail(message=message, type=kind, param=param, code=code)).model_dump()


def response_of(error: ApiError) -> JSONResponse:
    return JSONResponse(body_of(error.status, error.message, error.param, error.code), error.status, error.headers)


def install(app: FastAPI) -> None:
    """Every error of the app in OpenAI's shape."""

    @app.exception_handler(ApiError)
    async def _(request: Request, error: ApiError):
        return response_of(error)

    @app.exception_handler(RequestValidationError)
    async def _(request: Request, error: RequestValidationError):
        if isinstance(error.body, bytes) and error.body:  # it was not read as JSON
            return response_of(ApiError(400, _wrong_type(request.headers.get("content-type"))))
        return JSONResponse(body_of(400, *_first_mistake(error)), 400)

    @app.exception_handler(HTTPException)
    async def _(request: Request, error: HTTPException):
        said = SAID.get(str(error.detail), str(error.detail))
        return JSONResponse(body_of(error.status_code, said), error.status_code, error.headers)

    @app.exception_handler(Exception)
    async def _(request: Request, error: Exception):
        return JSONResponse(body_of(500, "internal error; the server's log has the details"), 500)


def _wrong_type(given: str | None) -> str:
    what = f"Content-Type is '{shown(given)}'" if given else "there is no Content-Type"
    return f"{what}: send the body as application/json"


def _first_mistake(error: RequestValidationError) -> tuple[str, str | None]:
    """A sentence, and the field that it is about."""
    mistakes = error.errors()
    field = next(iter(_path(mistakes[0])), None)
    about = [each for each in mistakes if next(iter(_path(each)), None) == field]  # of a union one for each kind
    mistake = next((each for each in about if not each["type"].endswith("_type")), about[0])
    path, kind = _path(mistake), mistake["type"]
    if kind == "json_invalid":
        return f"the body is not valid JSON: {mistake.get('ctx', {}).get('error', 'it cannot be parsed')}", None
    if kind == "stranger":
        name = mistake["ctx"]["name"]
        return f"{'.'.join([*path, name])} is not a parameter of this endpoint", field or name
    if kind == "at_field":
        return mistake["msg"], mistake["ctx"]["field"]
    if kind == "missing":
        return (f"{'.'.join(path)} is missing" if path else "the request has no body"), field
    if not field:
        what = "the body is no JSON object" if kind == "model_attributes_type" else f"the body: {_message(mistake)}"
        return what, None
    where = ".".join(path)
    if kind == "none_required" or (kind == "too_long" and mistake["ctx"]["max_length"] == 0):
        return f"{where} is not supported here", field
    union = next((name for name in reversed(path) if name in UNIONS), "")
    if union and kind.endswith("_type"):
        return f"{where[: where.rindex(union)]}{union}: {UNIONS[union]}", field
    return f"{where}: {_message(mistake)}", field


def _path(mistake: dict) -> list[str]:
    """Names and indices; behind an index there is a name, not a tag."""
    loc = mistake["loc"]
    names = [part for last, part in pairwise(("", *loc)) if part not in TAGS or isinstance(last, int)]
    return [str(part) for part in names if "[" not in str(part)]


def _message(mistake: dict) -> str:
    if mistake["type"] == "too_long":
        return f"give at most {mistake['ctx']['max_length']}"
    text = mistake["msg"].removeprefix("Value error, ")
    return text[:1].lower() + text[1:]
