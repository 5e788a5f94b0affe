"""On a Hopper GPU: the embedded engine, our kernels, none compiled once it is ready; vLLM behind the same command."""

import importlib.util
import random
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from serve_process import TINY, Server
from test_faults import stream_a_little

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("quant", ["none", "fp8_block"])
def test_nothing_is_compiled_while_serving(quant):
    arguments = ["--engine", "embedded", "--quant", quant, "--guard", "error", "--max-seqs", "16"]
    with Server(str(TINY), *arguments) as server:
        server.wait_ready(300)
        draw = random.Random(0)
        bodies = [
            dict(prompt=[draw.randrange(4096) for _ in range(draw.randint(1, 900))], max_tokens=draw.randint(1, 40))
            for _ in range(60)
        ]
        with ThreadPoolExecutor(24) as pool:
            answers = list(pool.map(lambda body: server.post("/v1/completions", body), bodies))
        assert {answer.status_code for answer in answers} == {200}, server.log
        assert server.metric("expertile_serve_compiles_after_ready") == 0
        status = server.get("/status").json()
        assert status["device"].startswith("cuda") and {plan["backend"] for plan in status["plans"]} == {"triton"}
        assert server.terminate() == 0


#: What no engine can do, each with 4xx.
BAD = [
    dict(temperature=-0.1), dict(top_p=1.1), dict(max_tokens=-5), dict(max_tokens=10**30), dict(n=0), dict(prompt=[-1]),
]  # fmt: skip


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM")
def test_vllm_behind_the_command_goes_on_after_bad_requests_and_clients_that_leave():
    limits = "--max-model-len 2048 --max-num-seqs 16 --kv-cache-memory-bytes 2000000000"
    sampler = {"VLLM_USE_FLASHINFER_SAMPLER": "0"}  # its kernels are built by nvcc, for minutes
    with Server(str(TINY), "--engine", "vllm", *limits.split(), environment=sampler) as server:
        server.wait_ready(300)
        assert "expertile takes" in server.log
        good = dict(prompt="import os", max_tokens=8, temperature=0)
        before = server.post("/v1/completions", good).json()["choices"][0]["text"]
        statuses = [server.post("/v1/completions", good | wrong).status_code for wrong in BAD]
        assert all(400 <= status < 500 for status in statuses), list(zip(BAD, statuses, strict=True))
        with ThreadPoolExecutor(24) as pool:
            list(pool.map(lambda _: stream_a_little(server), range(24)))
        end = time.monotonic() + 20
        while server.metric("vllm:num_requests_running") and time.monotonic() < end:
            time.sleep(0.1)
        assert server.metric("vllm:num_requests_running") == 0 == server.metric("vllm:num_requests_waiting")
        assert server.post("/v1/completions", good).json()["choices"][0]["text"] == before
        assert server.post("/invocations", good).status_code == 200
        assert server.terminate() == 0, server.log[-2000:]
