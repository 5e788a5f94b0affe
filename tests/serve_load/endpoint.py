"""An endpoint made for the tests: answers at programmed moments, or misbehaves in a programmed way; and the command."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import threading
from dataclasses import dataclass, field

HEAD = "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nConnection: keep-alive\r\n"
STREAM = HEAD.format(status="200 OK", kind="text/event-stream") + "Transfer-Encoding: chunked\r\n\r\n"


@dataclass
class Endpoint:
    """How it answers.

    first, gap     seconds to the first token and between tokens
    fault          "" or: 429, hang, disconnect, cut, html, garbage, error, silent, half, binary
    every          only each every-th request is given the fault
    usage          whether the last event says how many tokens it was
    together       tokens in one event
    comment        whether the stream begins with one, which vLLM's client does not understand
    key            the bearer token that it wants
    """

    first: float = 0.05
    gap: float = 0.01
    fault: str = ""
    every: int = 1
    usage: bool = True
    together: int = 1
    comment: bool = True
    key: str = ""
    owner: str = "maker"
    bodies: list = field(default_factory=list)
    arrived: list = field(default_factory=list)
    under_way: int = 0
    most: int = 0

    async def serve(self, reader, writer):
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = re.search(r"content-length: (\d+)", head.lower())
                body = await reader.readexactly(int(length[1]) if length else 0)
                if self.key and f"authorization: bearer {self.key}" not in head.lower():
                    await self.whole(writer, "401 Unauthorized", {"error": {"message": "a key is needed"}})
                elif head.startswith("GET"):
                    await self.about(writer, head.split()[1])
                else:
                    self.under_way += 1
                    self.most = max(self.most, self.under_way)
                    try:
                        await self.answer(writer, json.loads(body), "chat" in head.split()[1])
                    finally:
                        self.under_way -= 1
        writer.close()

    async def about(self, writer, path):
        if path == "/v1/models":
            await self.whole(writer, "200 OK", {"data": [{"id": "small", "owned_by": self.owner}]})
        elif path == "/version":
            await self.whole(writer, "200 OK", {"version": "0.26.0"})
        else:
            await self.whole(writer, "404 Not Found", {"detail": "no such path"})

    async def whole(self, writer, status, body):
        text = json.dumps(body).encode()
        writer.write(HEAD.format(status=status, kind="application/json").encode())
        writer.write(b"Content-Length: %d\r\n\r\n" % len(text) + text)
        await writer.drain()

    async def answer(self, writer, body, chat):
        self.bodies.append(body)
        self.arrived.append(asyncio.get_running_loop().time())
        prompt = body["messages"][0]["content"] if chat else body["prompt"]
        given = len(prompt.split()) * 2 + 3 if isinstance(prompt, str) else len(prompt)  # two tokens a word, three more
        made = body.get("max_tokens") or body["max_completion_tokens"]
        probe = made == 1 and len(self.bodies) <= 2
        fault = "" if probe or len(self.bodies) % self.every else self.fault
        if fault == "429":
            await self.whole(writer, "429 Too Many Requests", {"error": {"message": "the queue is full"}})
            return
        if fault == "disconnect":
            writer.transport.abort()
            return
        if fault == "hang":
            await asyncio.sleep(60)
        writer.write(STREAM.encode())
        raw = {"html": "<html>busy</html>\n\n", "garbage": "data: {nope\n\n", "silent": "data: [DONE]\n\n"}
        if fault in raw:
            await self.chunk(writer, raw[fault])
            await self.end(writer)
            return
        await asyncio.sleep(self.first)
        await self.tokens(writer, made, given, chat, fault)

    async def tokens(self, writer, made, given, chat, fault):
        if self.comment:
            await self.chunk(writer, ": still here\r\n\r\n")
        for number in range(0, made, self.together):
            if number:
                await asyncio.sleep(self.gap)
            if number and fault in ("cut", "half"):
                await self.end(writer) if fault == "half" else writer.transport.abort()
                return
            if number and fault == "binary":
                await self.chunk(writer, b"data: \xff\xfe\n\n")
            if number and fault == "error":
                await self.chunk(writer, 'data: {"error": {"message": "engine died"}}\n\n')
            last = number + self.together >= made
            said = {"delta": {"content": "ä"}} if chat else {"text": "ä"}
            await self.event(writer, {"choices": [{**said, "index": 0, "finish_reason": "length" if last else None}]})
        if self.usage:
            await self.event(writer, {"choices": [], "usage": {"prompt_tokens": given, "completion_tokens": made}})
        await self.chunk(writer, "data: [DONE]\n\n")
        await self.end(writer)

    async def event(self, writer, body):
        await self.chunk(writer, f"data: {json.dumps(body, ensure_ascii=False)}\n\n")

    async def chunk(self, writer, text):
        data = text if isinstance(text, bytes) else text.encode()
        writer.write(b"%x\r\n" % len(data) + data + b"\r\n")
        await writer.drain()

    async def end(self, writer):
        writer.write(b"0\r\n\r\n")
        await writer.drain()


@contextlib.contextmanager
def running(endpoint: Endpoint):
    """Its URL, while it runs in a thread of its own."""
    loop, ready, port = asyncio.new_event_loop(), threading.Event(), []

    async def main():
        server = await asyncio.start_server(endpoint.serve, "127.0.0.1", 0)
        port.append(server.sockets[0].getsockname()[1])
        ready.set()

    def life():
        asyncio.set_event_loop(loop)
        loop.run_until_complete(main())
        loop.run_forever()
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))

    thread = threading.Thread(target=life, daemon=True)
    thread.start()
    assert ready.wait(10)
    try:
        yield f"http://127.0.0.1:{port[0]}"
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)


def run(tmp_path, url, *options):
    """(exit code, output, rows)"""
    from typer.testing import CliRunner

    from expertile.bench import rows
    from expertile.cli_bench import app

    path = tmp_path / "rows.jsonl"
    fixed = ("--gpu", "none", "--commit", "abc", "--out", str(path), "--warm-up", "0")
    done = CliRunner().invoke(app, ["serve", url, *fixed, *options], env={"COLUMNS": "200", "EXPERTILE_API_KEY": None})
    if done.exception and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.output, rows.read(path) if path.exists() else []
