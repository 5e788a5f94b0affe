"""What would change a decision: it does."""

import re

import pytest

from expertile.hardware import CPU, H200
from expertile.plans import Backend
from expertile.policy import Settings, decide
from expertile.policy.changes import as_data, changes, in_full, row
from expertile.problem import named_problem

INSTALLED = (("flashinfer-python", "0.6.14"), ("vllm", "0.26.0"))


@pytest.mark.parametrize(("quant", "tokens"), [("bf16", 16), ("fp8_block", 300), ("fp8_tensor", 1), ("bf16", 4000)])
def test_token_counts_that_are_named_get_that_plan_and_their_neighbour_does_not(quant, tokens):
    def planned(count):
        return decide(named_problem("qwen3-30b-a3b", count, quant), H200)

    plan, named = planned(tokens), 0
    for change in changes(plan, H200):
        if found := re.fullmatch(r"(fewer|more) tokens: from T=(\d+) on (.*)", change):
            turn, toward = int(found[2]), 1 if found[1] == "fewer" else -1
            assert planned(turn).name == found[3] != plan.name
            assert planned(turn + toward).name == plan.name
            named += 1
    assert named >= 1


def test_every_other_backend_is_spoken_of():
    plan = decide(named_problem("qwen3-30b-a3b", 16, "fp8_tensor"), H200)
    text = in_full(plan, H200)
    for backend in Backend:
        assert backend.value in text
    said = "\n".join(changes(plan, H200))
    assert all(backend.value in said for backend in Backend if backend not in (plan.backend, Backend.REFERENCE))


def test_a_forced_choice_is_changed_by_not_forcing_it():
    plan = decide(named_problem("qwen3-30b-a3b", 16), H200, Backend.TORCH)
    (said,) = changes(plan, H200)
    assert said.startswith("not forcing it: triton[")


def test_the_row_is_the_one_that_counted():
    exact = decide(named_problem("qwen3-30b-a3b", 16), H200)
    assert f"T=16 H=2048 I=768 E=128 top-k=8 bf16, uniform routing: {exact.time_us:.1f} us" in row(exact, H200)
    other = decide(named_problem("4096,704,128,8", 100), H200)
    assert "nearest in rows an expert, hidden and inter together" in row(other, H200)
    assert "nothing measured on cpu" in row(decide(named_problem("64,64,8,2", 1), CPU), CPU)


def test_as_data_it_is_the_plan_with_two_fields_more():
    settings = Settings(installed=INSTALLED, others=True)
    plan = decide(named_problem("qwen3-30b-a3b", 16, "fp8_block"), H200, None, settings)
    found = as_data(plan, H200, settings)
    assert found["backend"] == "triton" and found["would_change"] and "T=16" in found["table_row"]
    rival = next(c for c in found["candidates"] if c["backend"] == "vllm-deepgemm")
    assert rival["scratch_bytes"] > 0 and rival["layout"] == "checkpoint"
    assert any("tune --others" in change for change in found["would_change"])


def test_no_tokens_and_no_gpu_are_explained_too():
    for hardware, tokens in ((H200, 0), (CPU, 0), (CPU, 5)):
        assert "what would change it" in in_full(decide(named_problem("64,64,8,2", tokens), hardware), hardware)
