"""What is refused before a route sees it: bodies that are too large, requests without the API key."""

from __future__ import annotations

import hmac

from fastapi import HTTPException
from fastapi.responses import JSONResponse

from .errors import body_of


class BodyLimit:
    """ASGI middleware: 413 for a body of more than `limit` bytes, announced or not."""

    def __init__(self, app, limit: int):
        self.app, self.limit = app, limit

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        announced = dict(scope["headers"]).get(b"content-length", b"0")
        message = f"the body is larger than {self.limit} bytes"
        if announced.isdigit() and int(announced) > self.limit:
            return await JSONResponse(body_of(413, message), 413)(scope, receive, send)
        seen = 0

        async def counted():
            nonlocal seen
            part = await receive()
            seen += len(part.get("body", b""))
            if seen > self.limit:
                raise HTTPException(413, message)
            return part

        return await self.app(scope, counted, send)


class ApiKey:
    """ASGI middleware: 401 for paths that begin with one of `prefixes` without `Authorization: Bearer KEY`."""

    def __init__(self, app, key: str, prefixes: tuple[str, ...]):
        self.app, self.prefixes = app, prefixes
        self._wanted = f"Bearer {key}".encode()

    async def __call__(self, scope, receive, send):
        if scope["type"] == "http" and scope["path"].startswith(self.prefixes):
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self._wanted):
                answer = JSONResponse(
                    body_of(401, "give the API key as Authorization: Bearer KEY", code="invalid_api_key"), 401,
                    {"WWW-Authenticate": "Bearer"},
                )  # fmt: skip
                return await answer(scope, receive, send)
        return await self.app(scope, receive, send)


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
