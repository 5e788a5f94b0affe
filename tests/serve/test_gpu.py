"""The embedded engine on a Hopper GPU: our kernels, and none compiled once it is ready."""

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
from serve_process import TINY, Server

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
