"""What a route never sees: bodies that are too large, requests without the API key, HEAD, an end before the answer."""

from __future__ import annotations

import asyncio
import hmac

from fastapi import HTTPException
from fastapi.responses import JSONResponse

from .errors import ApiError, body_of, response_of

#: Lists, objects and members of a body, as 10,000 messages have. Python reads 2 million in seconds, and all wait.
MOST_MEMBERS = 32_768
MOST_VALUES = 2**20  # with commas behind them: 128 prompts of 8192 token ids


class BodyLimit:
    """ASGI middleware: 413 for a body of more than `limit` bytes, announced or not; 400 for one of too many values."""

    def __init__(self, app, limit: int):
        self.app, self.limit = app, limit

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        announced = dict(scope["headers"]).get(b"content-length", b"0")
        message = f"the body is larger than {self.limit} bytes"
        if announced.isdigit() and int(announced) > self.limit:
            return await JSONResponse(body_of(413, message), 413)(scope, receive, send)
        seen = bytearray()

        async def counted():
            part = await receive()
            if part["type"] != "http.request":
                return part
            seen.extend(part.get("body", b""))
            if len(seen) > self.limit:
                raise HTTPException(413, message)
            if not part.get("more_body"):
                whole = bytes(seen)
                seen.clear()
                if wrong := _reason_against(whole):
                    raise HTTPException(400, wrong)
            return part

        return await self.app(scope, counted, send)


def _reason_against(body: bytes) -> str:
    """Why a JSON text is not to be read; "" when it may be. What stands in its strings does not count."""
    if b"\0" in body:
        return "the body is not JSON in UTF-8"  # UTF-16 is what Python would read too, and we would miscount
    if _members(body) <= MOST_MEMBERS and body.count(b",") <= MOST_VALUES:
        return ""
    body = body.replace(rb"\\", b"").replace(rb"\"", b"")
    strings = body.count(b'"') // 2
    bare = b"" if strings > MOST_VALUES + MOST_MEMBERS else b"".join(body.split(b'"')[::2])
    if _members(bare) > MOST_MEMBERS:
        return f"the body has more than {MOST_MEMBERS} lists, objects and members"
    values = max(bare.count(b","), strings - MOST_MEMBERS)
    return f"the body has more than {MOST_VALUES} values" if values > MOST_VALUES else ""


def _members(text: bytes) -> int:
    return sum(map(text.count, (b"[", b"{", b":")))


class Head:
    """ASGI middleware: HEAD is GET, of which the server sends the head alone."""

    def __init__(self, app):
        self.app = app

    async def __call__(self, scope, receive, send):
        await self.app(scope | {"method": "GET"} if scope.get("method") == "HEAD" else scope, receive, send)


class ApiKey:
    """ASGI middleware: 401 for paths that begin with one of `prefixes` without `Authorization: Bearer KEY`."""

    def __init__(self, app, key: str, prefixes: tuple[str, ...]):
        self.app, self.prefixes = app, prefixes
        self._wanted = key.encode()

    async def __call__(self, scope, receive, send):
        if scope["type"] == "http" and scope["path"].startswith(self.prefixes):
            scheme, _, given = dict(scope["headers"]).get(b"authorization", b"").partition(b" ")
            if not hmac.compare_digest(given.strip(), self._wanted) or scheme.lower() != b"bearer":
                answer = JSONResponse(
                    body_of(401, "give the API key as Authorization: Bearer KEY", code="invalid_api_key"), 401,
                    {"WWW-Authenticate": "Bearer"},
                )  # fmt: skip
                return await answer(scope, receive, send)
        return await self.app(scope, receive, send)


class Cut:
    """ASGI middleware: 503 for a request that is cancelled, at the end of the server, before its answer has begun."""

    def __init__(self, app):
        self.app = app

    async def __call__(self, scope, receive, send):
        begun = False

        async def noted(message):
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self.app(scope, receive, noted)
        except asyncio.CancelledError:
            if scope["type"] != "http":
                raise
            if not begun:
                answer = response_of(ApiError(503, "the server is shutting down"))
                answer.headers["Connection"] = "close"  # the rest of the request is not read
                await answer(scope, receive, send)


class Counted:
    """ASGI middleware: counts answers by route and status."""

    def __init__(self, app, requests, routes: frozenset[str]):
        self.app, self.requests, self.routes = app, requests, routes

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        path = scope["path"] if scope["path"] in self.routes else "other"  # a label's values must stay few

        async def noted(message):
            if message["type"] == "http.response.start":
                self.requests.labels(path, str(message["status"])).inc()
            await send(message)

        return await self.app(scope, receive, noted)
