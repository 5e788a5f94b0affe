"""Clients that vanish, too many of them, and what stays in memory."""

import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

LONG = dict(prompt="import os", max_tokens=1500, ignore_eos=True)  # many seconds of work


def stream_a_little(server, body=LONG) -> None:
    """Reads the first chunk of a stream and goes away."""
    with server.client.stream("POST", "/v1/completions", json=body | dict(stream=True)) as answer:
        assert answer.status_code == 200
        assert next(answer.iter_lines()).startswith("data: ")


def test_a_client_that_leaves_its_stream_frees_the_slot(server):
    assert server.idle()
    cancelled = server.metric("expertile_serve_sequences_total", finish="cancelled")
    for _ in range(3):
        stream_a_little(server)
    assert server.idle(5)
    assert server.metric("expertile_serve_sequences_total", finish="cancelled") == cancelled + 3


def test_a_client_that_does_not_wait_for_its_answer_frees_the_slot(server):
    with pytest.raises(httpx.ReadTimeout):
        server.client.post("/v1/completions", json=LONG, timeout=0.5)
    assert server.idle(5)


def test_a_client_that_leaves_its_stream_before_the_first_token_frees_the_queue(server):
    assert server.idle()
    with httpx.stream("POST", f"{server.url}/v1/completions", json=LONG | dict(n=4, stream=True), timeout=30) as answer:
        lines = answer.iter_lines()  # kept: the stream ends with it
        assert answer.status_code == 200 and next(lines)
        for path, body in (
            ("/v1/completions", LONG),
            ("/v1/chat/completions", dict(messages=[dict(role="user", content="x")])),
        ):
            with (
                pytest.raises(httpx.ReadTimeout),
                httpx.stream("POST", server.url + path, json=body | dict(stream=True), timeout=0.5) as waiting,
            ):
                list(waiting.iter_lines())
            deadline = time.monotonic() + 3
            while server.get("/status").json()["waiting"] and time.monotonic() < deadline:
                time.sleep(0.05)
            status = server.get("/status").json()
            assert (status["running"], status["waiting"]) == (4, 0)
    assert server.idle(5)


def test_clients_that_leave_while_they_wait_free_the_queue(server):
    def leave(_):
        with pytest.raises(httpx.ReadTimeout):
            server.client.post("/v1/completions", json=LONG, timeout=1.0)

    with ThreadPoolExecutor(10) as pool:
        list(pool.map(leave, range(10)))
    assert server.idle(8)


def test_more_than_the_queue_holds_gets_429_with_retry_after(server):
    assert server.idle()
    with httpx.stream(
        "POST", f"{server.url}/v1/completions", json=LONG | dict(n=12, stream=True), timeout=30
    ) as answer:
        lines = answer.iter_lines()  # kept: the stream ends with it
        assert answer.status_code == 200 and next(lines)
        deadline = time.monotonic() + 5
        while server.get("/status").json()["waiting"] < 8 and time.monotonic() < deadline:
            time.sleep(0.05)
        refused = server.post("/v1/completions", dict(prompt="x", max_tokens=2))
        streamed = server.post("/v1/completions", dict(prompt="x", max_tokens=2, stream=True))
    for each in (refused, streamed):
        assert each.status_code == 429 and 1 <= int(each.headers["Retry-After"]) <= 60
        assert each.json()["error"]["code"] == "queue_full"
    assert server.idle(5)
    assert server.post("/v1/completions", dict(prompt="x", max_tokens=2)).status_code == 200


def test_memory_is_flat_over_hundreds_of_requests(server):
    def ask(i):
        body = dict(prompt="import os\n" * (1 + i % 9), max_tokens=1 + i % 5, temperature=i % 2, stream=i % 3 == 0)
        answer = server.post("/v1/completions", body)
        return answer.status_code

    def many(count):
        with ThreadPoolExecutor(8) as pool:
            assert set(pool.map(ask, range(count))) == {200}

    many(60)
    before = server.resident_bytes
    many(200)
    assert server.resident_bytes - before < 8e6
