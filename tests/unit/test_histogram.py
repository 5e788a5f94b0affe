"""What a plan assumes about routing: shares of experts, and the expectations that follow, against drawn routings."""

import random
from dataclasses import replace
from time import perf_counter

import pytest

from expertile.errors import ShapeError
from expertile.hardware import H200
from expertile.policy import Settings, decide
from expertile.policy.candidates import candidates
from expertile.policy.histogram import check_name, experts_hit, mean_rows, shares
from expertile.policy.model import expected_tiles, floor_us
from expertile.problem import named_problem

ROUTINGS = ("uniform", "zipf0.7", "zipf1.2", "hot")
LAYERS = ("64,64,8,1", "64,64,8,2", "64,64,64,8", "64,64,300,10", "64,64,4,4")


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("layer", LAYERS)
def test_shares_are_chances_that_add_up_to_top_k(layer, routing):
    problem = named_problem(layer, 16)
    found = shares(problem, routing)
    assert sum(count for count, _ in found) == pytest.approx(problem.experts)
    assert sum(count * share for count, share in found) == pytest.approx(problem.top_k, rel=1e-3)
    assert all(0 <= share <= 1 for _, share in found)
    half = replace(problem, total_experts=2 * problem.experts)
    assert sum(count for count, _ in shares(half, routing)) == pytest.approx(problem.experts)


def drawn(problem, routing: str, seed: int) -> list[int]:
    """Rows of each expert, as the benchmarks draw them: the largest of noise plus a bias."""
    generator, counts = random.Random(seed), [0] * problem.experts
    exponent = float(routing[4:]) if routing.startswith("zipf") else 0.0
    weights = [(rank + 1) ** -exponent for rank in range(problem.experts)]
    for token in range(problem.tokens):
        # the first to turn up, at rates that are the weights: drawing without replacement
        times = [generator.expovariate(weight) for weight in weights]
        order = sorted(range(problem.experts), key=times.__getitem__)
        if routing == "hot" and token < -(-problem.tokens * problem.top_k // 2):
            order = [0, *(expert for expert in order if expert)]
        elif routing == "hot":
            order = [expert for expert in order if expert]
        for expert in order[: problem.top_k]:
            counts[expert] += 1
    return counts


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize(("layer", "tokens"), [("64,64,32,4", 3), ("64,64,32,4", 40), ("64,64,16,2", 100)])
def test_expectations_agree_with_drawn_routings(layer, tokens, routing):
    problem, block = named_problem(layer, tokens), 16
    sample = [drawn(problem, routing, seed) for seed in range(60)]
    hit = sum(sum(count > 0 for count in counts) for counts in sample) / len(sample)
    tiles = sum(sum(-(-count // block) for count in counts) for counts in sample) / len(sample)
    assert experts_hit(problem, routing) == pytest.approx(hit, rel=0.08)
    assert expected_tiles(problem, block, routing) == pytest.approx(tiles, rel=0.08)


def test_skewed_routing_hits_fewer_experts_and_thickens_the_busy_ones():
    problem = named_problem("qwen3-30b-a3b", 64)
    hit = [experts_hit(problem, routing) for routing in ("uniform", "zipf0.7", "zipf1.2")]
    assert hit == sorted(hit, reverse=True)
    assert mean_rows(problem, "hot") > mean_rows(problem) == problem.rows_per_expert
    assert floor_us(problem, H200, "zipf1.2") < floor_us(problem, H200)


def test_a_plan_says_what_it_assumed():
    problem = named_problem("qwen3-30b-a3b", 64, "fp8_tensor", static_scale=True)
    plan = decide(problem, H200, None, Settings(routing="hot"))
    assert plan.routing == "hot" and decide(problem, H200).routing == "uniform"
    assert "measured for T=64 with uniform routing" in plan.source and plan.source.startswith("model")
    assert plan.time_us < decide(problem, H200).time_us, "fewer experts are read"


def test_thick_tiles_are_candidates_where_some_experts_are_busy():
    problem = named_problem("qwen3-30b-a3b", 64)
    blocks = {routing: {plan.gemm1.block_m for plan in candidates(problem, H200, routing)} for routing in ROUTINGS}
    assert blocks["zipf1.2"] > blocks["uniform"]


@pytest.mark.parametrize("name", ["zipf", "uniformly", "hot1", ""])
def test_an_unknown_routing_is_refused(name):
    with pytest.raises(ShapeError, match=r"zipf1.2"):
        check_name(name)


def test_shares_of_many_experts_are_quick():
    began = perf_counter()
    shares(named_problem("64,64,60000,8", 16), "zipf1.2")
    assert perf_counter() - began < 20, "the level is found once, not for each expert"
