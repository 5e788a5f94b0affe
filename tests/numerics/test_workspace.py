"""Scratch memory for a range of token counts: never less than any plan in it needs, and all its buffers fit."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from expertile.errors import ShapeError
from expertile.hardware import H100, H200
from expertile.plans import Backend, GemmConfig, Plan, Stream
from expertile.policy import decide
from expertile.problem import LAYERS, Problem, named_problem
from expertile.runtime.workspace import Workspace, most_bytes

QUANTS = ("bf16", "fp8_tensor", "fp8_channel", "fp8_block")


@pytest.mark.parametrize("quant", QUANTS)
@pytest.mark.parametrize("name", LAYERS)
def test_no_plan_of_fewer_tokens_needs_more(name, quant):
    """Every count to 400, where plans change, then some; static scales and expert maps too."""
    problem = named_problem(name, 1, quant, static_scale=quant == "fp8_tensor")
    for hardware in (H200, H100):
        for tokens in (*range(1, 401), 1000, 1449, 2048, 4096, 5000, 8192):
            plan = decide(problem.with_tokens(tokens), hardware)
            assert 0 < plan.workspace_bytes <= most_bytes(plan.problem), plan.name


@given(
    tokens=st.integers(1, 5000), hidden=st.integers(1, 300), inter=st.integers(1, 300), experts=st.integers(1, 300),
    top_k=st.integers(1, 10), quant=st.sampled_from(["none", *QUANTS[1:]]), static=st.booleans(),
    block_m=st.sampled_from([16, 32, 64, 128, 256]), stream=st.sampled_from(Stream), fuse=st.booleans(),
    fewer=st.integers(0, 5000),
)  # fmt: skip
@settings(max_examples=300, deadline=None)
def test_no_plan_at_all_needs_more(
    tokens, hidden, inter, experts, top_k, quant, static, block_m, stream, fuse, fewer
):  # fmt: skip
    top_k = min(top_k, experts)
    problem = Problem(tokens, hidden, inter, experts, top_k, quant=quant, static_scale=static and quant == "fp8_tensor")
    tile = GemmConfig(block_m, 64, 64, 4, 3)
    least = problem.with_tokens(max(1, tokens - fewer))
    if stream is Stream.RING:  # its tile holds all tokens, 64 at most
        least = problem.with_tokens(min(least.tokens, 64))
        tile = GemmConfig(max(8, 1 << (least.tokens - 1).bit_length()), 64, 64, 4, 3)
    plan = Plan(least, "h200", Backend.TRITON, tile, tile, stream, fuse_quant=fuse and quant != "none")
    assert plan.workspace_bytes <= most_bytes(problem)


def test_every_plan_up_to_the_tokens_finds_its_buffers():
    problem = named_problem("64,48,8,2", 40, "fp8_block")
    workspace = Workspace.for_tokens(problem, "cpu")
    for tokens in range(1, 41):
        plan = decide(problem.with_tokens(tokens), H200)
        found = workspace.tensors(plan)
        assert [tuple(tensor.shape) for tensor in found.values()] == [buffer.shape for buffer in plan.buffers]
    too_many = decide(problem.with_tokens(400), H200)
    with pytest.raises(ShapeError, match=r"this plan \(T=400\) needs"):
        workspace.tensors(too_many)


def test_it_is_not_far_from_what_the_plan_takes():
    """At most 16-bit h beside its e4m3, which a plan that quantises in GEMM1's epilogue does without."""
    for name in LAYERS:
        for quant in QUANTS:
            problem = named_problem(name, 8192, quant)
            plan = decide(problem, H200)
            spare = 2 * problem.rows * problem.inter + (1 << 20)
            assert most_bytes(problem) <= plan.workspace_bytes + spare


def test_nothing_is_needed_for_no_tokens():
    assert most_bytes(replace(named_problem("64,48,8,2", 1), tokens=0)) < 4096
    assert Workspace.for_tokens(named_problem("64,48,8,2", 1), "cpu").memory.dtype is torch.uint8
