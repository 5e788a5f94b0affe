"""What is measured for a table, and what becomes of it. Measuring itself needs a GPU."""

import json
from dataclasses import replace

import pytest

from expertile import tune
from expertile.errors import ExpertileError
from expertile.hardware import H200
from expertile.plans import Backend, Stream
from expertile.policy import decide
from expertile.policy.rules import stream_reasons, tile_reasons
from expertile.problem import LAYERS, named_problem

QUANTS = ("bf16", "fp8_tensor", "fp8_channel", "fp8_block")


@pytest.mark.parametrize("quant", QUANTS)
@pytest.mark.parametrize("name", LAYERS)
def test_candidates_can_run_and_are_different(name, quant):
    for tokens in (1, 2, 8, 64, 300, 4096):
        problem = named_problem(name, tokens, quant)
        plans = tune.candidates(problem, H200)
        assert 2 <= len(plans) <= 20 and len({plan.name for plan in plans}) == len(plans)
        for plan in plans:
            if plan.stream is not Stream.NO:
                assert not stream_reasons(problem)
            if plan.stream is not Stream.BOTH:
                assert not tile_reasons(plan.gemm1, problem, H200)
            if plan.stream is Stream.NO:
                assert plan.gemm1.block_m == plan.gemm2.block_m and not tile_reasons(plan.gemm2, problem, H200)


def test_the_fastest_wins_but_not_by_noise():
    plans = tune.candidates(named_problem("64,64,8,2", 512, "bf16"), H200)
    slow = dict.fromkeys(range(len(plans)), 50.0)
    assert tune._winner(plans, slow | {0: 10.05, 1: 10.0})["time_us"] == 10.05
    assert tune._winner(plans, slow | {0: 10.5, 1: 10.0})["time_us"] == 10.0
    assert tune._winner(plans, {}) is None


@pytest.mark.parametrize("tokens", [1, 8, 512, 4096])
def test_the_first_candidate_is_what_is_chosen_without_a_table(tokens):
    problem = named_problem("96,160,8,2", tokens, "fp16")  # no table has fp16
    first, chosen = tune.candidates(problem, H200)[0], decide(problem, H200, Backend.TRITON)
    assert (first.stream, first.gemm1, first.gemm2) == (chosen.stream, chosen.gemm1, chosen.gemm2)


def test_a_table_is_added_to_and_read_back(tmp_path):
    path = tmp_path / "h200.json"
    plans = tune.candidates(named_problem("64,64,8,2", 4, "bf16"), H200)
    first = tune._winner(plans, {0: 3.0})
    tune.write(path, [first], {"gpu": "h200"})
    tune.write(path, [{**first, "time_us": 2.0}, {**first, "tokens": 8}], {"gpu": "h200"})
    table = json.loads(path.read_text())
    assert [(entry["tokens"], entry["time_us"]) for entry in table["entries"]] == [(4, 2.0), (8, 3.0)]
    assert table["measured_with"] == {"gpu": "h200"}
    with pytest.raises(ExpertileError, match="nothing was measured"):
        tune.write(tmp_path / "none.json", [], {})


@pytest.mark.parametrize("quant", QUANTS)
def test_what_the_shipped_table_holds_can_run(quant):
    for name in LAYERS:
        for tokens in (1, 3, 40, 700, 5000):
            plan = decide(named_problem(name, tokens, quant), H200)
            assert replace(plan, candidates=()).workspace_bytes > 0
            assert plan.time_us > plan.floor_us
