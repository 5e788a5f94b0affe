"""How the server begins and ends: an address that cannot be had, and what is under way when the drain is over."""

import json
import socket
import subprocess
import sys
import threading
import time

import httpx
import pytest
from serve_process import TINY, Server, free_port

LONG = dict(prompt="import os", max_tokens=2000, ignore_eos=True)


def started_and_ended(*arguments) -> str:
    """The last line of a start that fails with exit code 2."""
    command = [sys.executable, "-m", "expertile.cli", "serve", str(TINY), "--engine", "embedded", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    return done.stderr.splitlines()[-1]


def test_a_port_in_use_is_one_line():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = started_and_ended("--port", str(port))
    assert said.startswith(f"expertile: cannot listen on http://127.0.0.1:{port}: address already in use;")


@pytest.mark.parametrize("host", ["no.such.host.invalid", "192.0.2.1", "a" * 300, "::zz", "fe80::1%nowhere"])
def test_a_host_that_is_not_here_is_one_line(host):
    assert started_and_ended("--host", host, "--port", "0").startswith("expertile: cannot listen on http://")


def test_a_port_that_is_not_allowed_is_one_line(monkeypatch):
    from expertile.errors import ExpertileError
    from expertile.serve import server

    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(socket, "create_server", refuse)
    with pytest.raises(ExpertileError, match=r"http://127\.0\.0\.1:80: permission denied"):
        server._listening("127.0.0.1", 80)


def test_all_addresses_of_ipv6_are_served_and_the_url_has_brackets():
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 here")
    port = free_port()
    with Server(str(TINY), "--host", "::", "--max-seqs", "1", "--port", str(port), port=port) as server:
        server.client = httpx.Client(base_url=f"http://[::1]:{port}", timeout=60)
        server.wait_ready()
        assert f"http://[::]:{port}" in server.log


@pytest.mark.parametrize("seconds", [0, 1])
def test_what_the_drain_leaves_over_is_told_so(seconds):
    with Server(str(TINY), "--max-seqs", "2", "--drain-seconds", str(seconds)) as server:
        server.wait_ready()
        streams, answers, slow = [], [], socket.create_connection(("127.0.0.1", server.port))
        slow.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n")
        slow.sendall(b"Content-Length: 100\r\n\r\n{")

        def stream(path, body):
            with httpx.stream("POST", server.url + path, json=body | dict(stream=True), timeout=60) as answer:
                streams.append([line for line in answer.iter_lines() if line])  # an end that is torn would raise

        def whole():
            answers.append(httpx.post(f"{server.url}/v1/completions", json=LONG, timeout=60))

        chat = dict(messages=[dict(role="user", content="x")], ignore_eos=True)
        tasks = [(stream, "/v1/completions", LONG), (stream, "/v1/chat/completions", chat)]
        threads = [threading.Thread(target=do, args=with_) for do, *with_ in [*tasks, (whole,), (whole,)]]
        for each in threads:
            each.start()
        deadline = time.monotonic() + 20
        while server.metric("expertile_serve_waiting") < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert server.terminate() == 0
        for each in threads:
            each.join()
        slow.settimeout(10)
        torn = b"".join(iter(lambda: slow.recv(65536), b""))
        slow.close()
        assert "Traceback" not in server.log and "Exception" not in server.log
    wanted = dict(message="the server is shutting down", type="server_error", param=None, code=None)
    assert [(each.status_code, each.json()["error"]) for each in answers] == [(503, wanted)] * 2
    assert [json.loads(lines[-1].removeprefix("data: ")) for lines in streams] == [dict(error=wanted)] * 2
    head, _, body = torn.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503") and json.loads(body)["error"] == wanted
