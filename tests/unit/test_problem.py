"""Problem, Activation, Router: what they refuse, what they compute; the examples in their docstrings."""

import doctest
from importlib import import_module
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertile.errors import ExpertileError, ShapeError
from expertile.problem import (
    ACTIVATIONS,
    LAYERS,
    Activation,
    DType,
    Gate,
    Problem,
    Quant,
    activation,
    named_activation,
    named_problem,
)
from expertile.router import ROUTERS, GroupScore, Router, router

SMALL = dict(tokens=4, hidden=64, inter=32, experts=8, top_k=2)


@pytest.mark.parametrize("module", ["errors", "problem", "hardware", "router", "plans", "policy"])
def test_docstring_examples(module):
    assert doctest.testmod(import_module(f"expertile.{module}")).failed == 0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (dict(tokens=-1), "tokens=-1"),
        (dict(tokens=2.0), "tokens=2.0"),
        (dict(tokens=True), "tokens=True"),
        (dict(hidden=0), "hidden=0"),
        (dict(experts=0), "experts=0"),
        (dict(top_k=0), "top_k=0"),
        (dict(top_k=9), "top_k=9"),
        (dict(dtype="bf17"), "bf17"),
        (dict(quant="fp7"), "fp7"),
        (dict(activation="swish"), "swish"),
        (dict(weight_on_input=True), "top_k=2"),
        (dict(static_scale=True), "none"),
        (dict(static_scale=True, quant="fp8_block"), "fp8_block"),
        (dict(total_experts=7), "total_experts=7"),
        (dict(total_experts=8.0), "total_experts=8.0"),
        (dict(tokens=10**20), "tokens=1"),
        (dict(hidden=1 << 40), "hidden=1"),
        (dict(experts=10**9), "experts=1"),
    ],
    ids=str,
)
def test_a_bad_value_is_refused_and_named(change, said):
    with pytest.raises(ShapeError, match=said) as caught:
        Problem(**{**SMALL, **change})
    assert isinstance(caught.value, ExpertileError)


def test_names_become_members():
    p = Problem(**SMALL, dtype="fp16", quant="fp8_tensor", activation="gelu_erf", static_scale=True)
    assert (p.dtype, p.quant, p.activation.gate) == (DType.FP16, Quant.FP8_TENSOR, Gate.GELU_ERF)
    assert p.label == "fp8_tensor"
    assert Problem(**SMALL, dtype="fp16").label == "fp16"


def test_equal_problems_are_equal_and_hash_alike():
    a, b = Problem(**SMALL), Problem(**SMALL, total_experts=8, dtype="bf16")
    assert a == b and hash(a) == hash(b)


def test_no_tokens_is_a_problem_with_no_rows():
    p = Problem(**{**SMALL, "tokens": 0})
    assert (p.rows, p.rows_per_expert, p.experts_hit) == (0, 0, 0)


@given(tokens=st.integers(0, 5000), experts=st.integers(1, 300), data=st.data())
def test_experts_hit_is_between_none_and_all(tokens, experts, data):
    top_k = data.draw(st.integers(1, experts))
    p = Problem(tokens=tokens, hidden=8, inter=8, experts=experts, top_k=top_k)
    assert 0 <= p.experts_hit <= min(experts, p.rows) + 1e-9
    assert p.with_tokens(tokens + 1).experts_hit >= p.experts_hit


def test_expert_parallel_rank_sees_its_share_of_rows():
    p = Problem(tokens=64, hidden=64, inter=32, experts=4, top_k=2, total_experts=16)
    assert p.rows_per_expert == 64 * 2 / 16
    assert p.experts_hit < 4


def test_activation_without_a_gate_has_half_the_rows():
    assert Problem(**SMALL, activation="relu2").w13_rows == 32
    assert Problem(**SMALL).w13_rows == 64


@pytest.mark.parametrize(
    "fields",
    [
        dict(limit=0.0),
        dict(limit=float("nan")),
        dict(gated=False, beta=1.0),
        dict(gated=False, interleaved=True),
        dict(gate="gelu_tanh", alpha=2.0),
        dict(gate="tanh"),
    ],
    ids=str,
)
def test_a_contradictory_activation_is_refused(fields):
    with pytest.raises(ShapeError):
        Activation(**fields)


def test_activation_names_are_distinct_and_read_back():
    for name, interleaved in product(ACTIVATIONS, (False, True)):
        if interleaved and not ACTIVATIONS[name].gated:
            continue
        found = activation(name, interleaved=interleaved)
        assert found.name == name + ("/interleaved" if interleaved else "")
    assert activation("silu", limit=3.0).name == "silu,limit=3"


@pytest.mark.parametrize(
    "made",
    [
        *ACTIVATIONS.values(),
        activation("swiglu_oai", interleaved=True),
        activation("silu", limit=3.5, interleaved=True),
        activation("swiglu_oai", limit=5.0),
        Activation(Gate.GELU_TANH, gated=False),
    ],
    ids=lambda made: made.name,
)
def test_an_activation_is_found_by_the_name_that_it_has(made):
    assert named_activation(made.name) == made
    problem = named_problem(f"64,32,8,2,{made.name},bias", 1)
    assert (problem.activation, problem.bias) == (made, True)


@pytest.mark.parametrize("text", ["swish", "silu,limit=", "silu,limit=1-2", "silu,limit=1e999", "silu,limit=-1", ""])
def test_an_activation_that_has_no_such_name_is_refused(text):
    with pytest.raises(ShapeError):
        named_activation(text)
    with pytest.raises(ShapeError, match=r"problem='64,32,8,2,.*'"):
        named_problem(f"64,32,8,2,{text}", 1)


def test_known_layers_are_those_of_the_results():
    sizes = {
        name: tuple(layer[key] for key in ("hidden", "inter", "experts", "top_k")) for name, layer in LAYERS.items()
    }
    assert sizes == {
        "qwen3-30b-a3b": (2048, 768, 128, 8),
        "qwen3-next-80b-a3b": (2048, 512, 512, 10),
        "nemotron-3-nano": (2688, 1856, 128, 6),
        "deepseek-v3-tp8": (7168, 256, 256, 8),
        "mixtral-8x7b-tp2": (4096, 7168, 8, 2),
        "gpt-oss-120b": (2880, 2880, 128, 4),
    }
    assert not named_problem("nemotron-3-nano", 1).activation.gated
    assert named_problem("gpt-oss-120b", 1).bias


@pytest.mark.parametrize(
    "name",
    [
        "nope",
        "1,2,3",
        "64,32,8,x",
        "64,32,8,2,1",
        "",
        "64,32,8,2,silu/",
        "64,32,8,2,silu/interleaved/interleaved",
        "\u00b2,32,8,2",
        "\uff16\uff14,32,8,2",
        "1_0,32,8,2",
        "9" * 5000,
    ],
)
def test_an_unknown_layer_is_refused_with_the_known_ones(name):
    with pytest.raises(ShapeError, match="qwen3-30b-a3b"):
        named_problem(name, 1)


@pytest.mark.parametrize(
    "fields",
    [dict(groups=4, top_groups=5), dict(top_groups=0), dict(softmax_after=True, renormalize=True)],
    ids=str,
)
def test_a_contradictory_router_is_refused(fields):
    with pytest.raises(ShapeError):
        Router(**fields)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Router(score="foo"), "score='foo'.*softmax"),
        (lambda: Router(group_score=["max"]), r"group_score=\['max'\].*top2"),
        (lambda: Router(renormalize="no"), "renormalize='no'.*True or False"),
        (lambda: Router(groups="8"), "groups='8'.*integer"),
        (lambda: Router(groups=8, top_groups=2.0), "top_groups=2.0.*integer"),
        (lambda: Router(scaling_factor="2.5"), "scaling_factor='2.5'.*finite"),
        (lambda: Router(scaling_factor=float("nan")), "scaling_factor=nan.*finite"),
        (lambda: Router(epsilon=-1e-20), "epsilon=-1e-20.*at least 0"),
        (lambda: Router().check(8, 2.0), "top_k=2.0.*integer"),
        (lambda: Router().check(8, True), "top_k=True.*integer"),
        (lambda: Router().check(8, 0), "top_k=0"),
        (lambda: router(["softmax"]), r"router=\['softmax'\].*softmax_renormalize"),
        (lambda: Activation(limit="7"), "limit='7'.*number"),
        (lambda: Activation(limit=10**400), "limit=1000.*number"),
        (lambda: Activation(alpha=None), "alpha=None.*number"),
        (lambda: Activation(beta=float("inf")), "beta=inf.*number"),
        (lambda: Activation(gated=1), "gated=1: give True or False"),
        (lambda: Activation(gate={}), "gate={}.*silu"),
        (lambda: activation(["silu"]), r"activation=\['silu'\].*swiglu_oai"),
        (lambda: Problem(**SMALL, bias=1), "bias=1: give True or False"),
    ],
)
def test_a_value_of_another_kind_is_refused_and_named(make, said):
    with pytest.raises(ShapeError, match=said):
        make()


def test_a_router_says_what_it_cannot_choose_from():
    with pytest.raises(ShapeError, match="groups=8"):
        ROUTERS["deepseek_v3"].check(60, 4)
    with pytest.raises(ShapeError, match="top_k=5"):
        Router(groups=4, top_groups=1).check(16, 5)
    with pytest.raises(ShapeError, match="two experts a group"):
        Router(groups=8, top_groups=4, group_score=GroupScore.TOP2).check(8, 2)
    with pytest.raises(ShapeError, match="softmax_renormalize"):
        router("softmax_twice")
    for known in ROUTERS.values():
        known.check(256, 1)
