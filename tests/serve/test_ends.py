"""How the server begins and ends: an address that cannot be had, and what is under way when the drain is over."""

import json
import signal
import socket
import subprocess
import sys
import threading
import time

import httpx
import pytest
from serve_process import TINY, Server, free_port

from expertile.errors import ExpertileError
from expertile.serve import server as server_module

LONG = dict(prompt="import os", max_tokens=2000, ignore_eos=True)


def test_a_port_in_use_is_one_line_and_exit_code_2():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = [
            sys.executable,
            "-m",
            "expertile.cli",
            "serve",
            str(TINY),
            "--engine",
            "embedded",
            "--port",
            str(port),
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"expertile: cannot listen on http://127.0.0.1:{port}: address already in use;")


@pytest.mark.parametrize("host", ["no.such.host.invalid", "192.0.2.1", "a" * 300, "::zz", "fe80::1%nowhere", "a\0b"])
def test_a_host_that_is_not_here_is_refused(host):
    with pytest.raises(ExpertileError, match="cannot listen on http://"):
        server_module._listening(host, 0)


def test_a_port_that_is_not_allowed_is_refused(monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(socket, "create_server", refuse)
    with pytest.raises(ExpertileError, match=r"http://127\.0\.0\.1:80: permission denied"):
        server_module._listening("127.0.0.1", 80)


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


@pytest.mark.parametrize("after", [0.0, 0.1, 0.3])
def test_sigterm_while_the_model_is_loaded_is_a_clean_end(after):
    with Server(str(TINY)) as server:
        deadline = time.monotonic() + 60
        while "expertile.serve: loading" not in server.log and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(after)
        assert server.terminate() == 0, server.log
        assert "Traceback" not in server.log


def test_ctrl_c_twice_ends_at_once():
    with Server(str(TINY), "--max-seqs", "2") as server:
        server.wait_ready()
        answers = []
        asking = threading.Thread(target=lambda: answers.append(server.post("/v1/completions", LONG)))
        asking.start()
        while not server.metric("expertile_serve_running"):
            time.sleep(0.01)
        server.process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(10) == 0
        asking.join()
        assert answers[0].status_code == 503 and "Traceback" not in server.log


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
