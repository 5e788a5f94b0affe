"""The torch backend against float64, no row further from it than 1.5 times what plain torch in the same dtype is."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from expertile import reference
from expertile.problem import ACTIVATIONS, Quant
from expertile.runtime import torch_experts as backend
from expertile.runtime.torch_experts import torch_experts

from .kernel_inputs import DEVICE, Case, Layer, Poisoned, make_layer, row_error

EPSILON = 2e-6  # fp32 sums in another order
#: One value of h on the edge between two e4m3 numbers goes the other way: much less than h unquantised would be off.
FLIP = 4e-3
#: Cost of a call -> which way of multiplying is taken: one expert at a time, as measured, all of them in one batch.
WAYS = {"apart": 0, "measured": backend.CALL_COST, "batched": 10**15}
ODD = dict(hidden=176, inter=200, experts=6, top_k=3, tokens=9)


def plain_torch(layer: Layer, scaling_factor: float = 1.0):
    """Slot by slot with F.linear in the layer's dtype (in fp32 where operands are e4m3), summed in fp32."""
    x, w, case, dtype = layer.x, layer.weights, layer.case, layer.x.dtype
    quantised = w.quant is not Quant.NONE

    def operand(rows, scale):
        return reference.dequantize(*reference.quantize(rows, w.quant, scale)).float() if quantised else rows

    def linear(rows, matrix, bias):
        product = F.linear(rows, matrix.float() if quantised else matrix.to(dtype))
        return product if bias is None else (product.float() + bias.float()).to(dtype)

    out = torch.zeros(x.shape, device=x.device)
    for token, slot in (layer.local >= 0).nonzero().tolist():
        expert = layer.local[token, slot]
        w13, w2 = (matrix[0] for matrix in reference.dequantize_weights(w, expert[None]))
        gate_up = linear(operand(x[token : token + 1], w.x_scale), w13, None)
        prob = layer.probs[token, slot]
        if case.weight_on_input:
            gate_up = gate_up.float() * prob
        if w.w13_bias is not None:
            gate_up = gate_up.float() + w.w13_bias[expert].float()
        h = reference.activate(gate_up, w.activation).to(dtype)
        y = linear(operand(h, w.h_scale), w2, None if w.w2_bias is None else w.w2_bias[expert]).to(dtype)
        out[token] += scaling_factor * y[0].float() * (1.0 if case.weight_on_input else prob)
    return out.to(dtype)


def options(layer: Layer) -> dict:
    return dict(expert_map=layer.expert_map, weight_on_input=layer.case.weight_on_input)


def check(layer: Layer, scaling_factor: float = 1.0):
    arguments = (layer.x, layer.weights, layer.ids, layer.probs)
    before = layer.x.clone()
    out = Poisoned(layer.x.shape, layer.x.dtype)
    given = torch_experts(*arguments, **options(layer), scaling_factor=scaling_factor, out=out.tensor)
    y = torch_experts(*arguments, **options(layer), scaling_factor=scaling_factor)
    out.check()
    assert given is out.tensor and torch.equal(given, y) and y.dtype == layer.x.dtype
    assert torch.equal(layer.x, before), "x was written (case 22)"
    want = reference.moe(*arguments, **options(layer), scaling_factor=scaling_factor, round_h=True)
    quantised = layer.case.quant != "none"
    bar = 1.5 * row_error(plain_torch(layer, scaling_factor), want) + EPSILON + (FLIP if quantised else 0.0)
    assert bar < {"fp32": 1e-5, "fp16": 2e-3, "bf16": 2e-2}[layer.case.dtype] + (FLIP if quantised else 0.0)
    assert row_error(y, want) <= bar


@pytest.fixture(params=WAYS)
def way(request, monkeypatch):
    monkeypatch.setattr(backend, "CALL_COST", WAYS[request.param])


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("bias", [False, True])
def test_activations_dtypes_and_biases(way, dtype, activation, bias):
    check(make_layer(Case(**ODD, dtype=dtype, activation=activation, bias=bias)))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_beyond_their_limits(name, interleaved):
    activation = ACTIVATIONS[name]
    if interleaved and activation.gated:
        activation = replace(activation, interleaved=True)
    gate_up = torch.randn(50, 64, generator=torch.Generator().manual_seed(0)) * 20
    want = reference.activate(gate_up, activation)
    assert torch.allclose(backend._activate(gate_up, activation).double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("quant", ["fp8_tensor", "fp8_channel", "fp8_block"])
@pytest.mark.parametrize(
    "case", [{}, {"bias": True, "activation": "swiglu_oai", "interleaved": True}, {"activation": "relu2"}]
)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_fp8(way, quant, case, dtype):
    """Cases 14 and 16 to 19: no padding of odd sizes, and every scale in its place."""
    check(make_layer(Case(**ODD, quant=quant, dtype=dtype, **case)))


def test_static_scales(way):
    check(make_layer(Case(**ODD, quant="fp8_tensor", static=True, dtype="bf16")))


@pytest.mark.parametrize("inter", [192, 320])
@pytest.mark.parametrize("split_scale", [False, True])
def test_case_19_scale_blocks_that_do_not_end_with_gate(way, inter, split_scale):
    check(make_layer(Case(**ODD | dict(inter=inter), quant="fp8_block", split_scale=split_scale, dtype="bf16")))


def test_unquantised_activations_would_not_pass():
    """The bar of fp8 has teeth: x and h left as they are, everything else right, is beyond it."""
    layer = make_layer(Case(**ODD, quant="fp8_channel", dtype="bf16"))
    arguments = (layer.x, layer.weights, layer.ids, layer.probs)
    w13, w2 = reference.dequantize_weights(layer.weights)
    w13[w13.isnan()] = 0
    open_weights = replace(layer.weights, quant=Quant.NONE, w13=w13, w2=w2.nan_to_num(), w13_scale=None, w2_scale=None)
    want = reference.moe(*arguments, round_h=True)
    bar = 1.5 * row_error(plain_torch(layer), want) + EPSILON + FLIP
    assert row_error(reference.moe(layer.x, open_weights, layer.ids, layer.probs), want) > bar


@pytest.mark.parametrize("ids", ["one", "none", "bad", "twice"])
@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("quant", ["none", "fp8_block"])
@pytest.mark.parametrize("tokens", [1, 40])
def test_cases_6_to_9_ids(way, ids, mapped, quant, tokens):
    """make_layer fills experts without a token with NaN: not one value of theirs may reach the output."""
    case = Case(**ODD | dict(tokens=tokens), quant=quant, dtype="bf16", ids=ids, mapped=mapped, bias=True)
    for id_dtype in (torch.int32, torch.int64):  # case 23
        check(make_layer(replace(case, id_dtype=id_dtype)))


def test_case_8_rows_without_an_expert_are_exactly_zero(way):
    layer = make_layer(Case(tokens=2, experts=4, top_k=2, dtype="bf16"))
    ids = torch.tensor([[0, -1], [-1, -1]], device=DEVICE)
    expert_map = torch.tensor([2, 3, -1, -1, 0, 1, -1, -1], dtype=torch.int32, device=DEVICE)
    weights = replace(layer.weights, w13=torch.randn_like(layer.weights.w13), w2=torch.randn_like(layer.weights.w2))
    y = torch_experts(layer.x, weights, ids, layer.probs, expert_map=expert_map)
    assert (y[1] == 0).all() and (y[0] != 0).any()


@pytest.mark.parametrize("ids", ["bad", "none"])
def test_probs_of_skipped_slots_are_not_read(way, ids):
    layer = make_layer(Case(**ODD, dtype="bf16", ids=ids))
    check(replace(layer, probs=layer.probs.masked_fill(layer.local < 0, torch.nan)))


@pytest.mark.parametrize("probs_dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("tokens", [0, 1, 2, 300])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_tokens_and_probs_of_any_dtype(way, tokens, probs_dtype, dtype):
    layer = make_layer(Case(tokens=tokens, top_k=4, experts=16, hidden=64, inter=32, dtype=dtype))
    layer = replace(layer, probs=layer.probs.to(probs_dtype))
    y = torch_experts(layer.x, layer.weights, layer.ids, layer.probs, scaling_factor=2.5)
    want = reference.moe(layer.x, layer.weights, layer.ids, layer.probs, scaling_factor=2.5)
    assert y.shape == layer.x.shape
    assert row_error(y, want) <= {"bf16": 1e-2, "fp16": 1e-3, "fp32": 1e-6}[dtype]


def test_probs_in_fp32_are_not_rounded_to_bf16():
    """Two equal experts with weights 1 + 2^-9 and -1: rounded to bf16 first, they would cancel."""
    layer = make_layer(Case(tokens=3, dtype="bf16"))
    ids = torch.zeros(3, 2, dtype=torch.int32, device=DEVICE)
    probs = torch.tensor([[1 + 2**-9, -1.0]] * 3, device=DEVICE)
    weights = replace(layer.weights, w13=torch.randn_like(layer.weights.w13), w2=torch.randn_like(layer.weights.w2))
    one = torch_experts(layer.x, weights, ids[:, :1], torch.ones(3, 1, device=DEVICE))
    assert torch.allclose(torch_experts(layer.x, weights, ids, probs).float(), one.float() * 2**-9, rtol=0.02)


def test_case_13_weight_on_input(way):
    for quant in ("none", "fp8_tensor"):
        check(make_layer(Case(tokens=7, top_k=1, weight_on_input=True, dtype="bf16", bias=True, quant=quant)), 0.5)


def test_transposed_weights_are_read_where_they_lie(way):
    """[E, H, 2I] and [E, I, H] as gpt-oss stores them: the same result as from rows, without a copy."""
    for quant in ("none", "fp8_channel"):
        layer = make_layer(Case(**ODD, dtype="bf16", quant=quant, activation="swiglu_oai", interleaved=True, bias=True))
        w13, w2 = (w.transpose(1, 2).contiguous().transpose(1, 2) for w in (layer.weights.w13, layer.weights.w2))
        assert w13.stride(1) == 1
        check(replace(layer, weights=replace(layer.weights, w13=w13, w2=w2)))


def test_case_14_the_widths_of_nemotron():
    check(
        make_layer(
            Case(
                tokens=2,
                hidden=2688,
                inter=1856,
                experts=3,
                top_k=2,
                activation="relu2",
                quant="fp8_tensor",
                dtype="bf16",
            )
        )
    )


def test_rows_do_not_depend_on_their_neighbours_inf():
    """A token of inf beside others, in one batch: theirs stay finite."""
    layer = make_layer(Case(tokens=6, experts=2, top_k=2, dtype="bf16"))
    x = layer.x.clone()
    x[2] = torch.inf
    y = torch_experts(x, layer.weights, layer.ids, layer.probs)
    clean = torch_experts(layer.x, layer.weights, layer.ids, layer.probs)
    others = [0, 1, 3, 4, 5]
    assert torch.equal(y[others], clean[others]) and not y[2].isfinite().any()


def test_both_ways_of_multiplying_are_taken():
    """Small experts in one batch, of those hit or of all; large ones, or all rows on one of many, one at a time."""
    small = make_layer(Case(tokens=64, experts=8, top_k=4, dtype="bf16"))
    assert backend._arrange(small.ids, small.weights, None).experts is None
    few = make_layer(Case(tokens=2, experts=64, top_k=2, dtype="bf16"))
    assert 0 < len(backend._arrange(few.ids, few.weights, None).experts) <= 4
    large = make_layer(Case(tokens=64, hidden=1024, inter=512, experts=4, top_k=1, ids="one", dtype="bf16"))
    assert backend._arrange(large.ids, large.weights, None).spans
