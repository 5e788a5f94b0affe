"""The oracle against numbers worked out by hand, and against itself where two ways must agree."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from expertile import reference
from expertile.problem import ACTIVATIONS, Activation, DType, Gate, Quant
from expertile.weights import FP8, Weights

from .kernel_inputs import Case, make_layer


def identity_weights(scale=None, *, experts=1, size=2, **fields) -> Weights:
    """Experts without a gate that give relu2(x) back: both matrices are the identity."""
    eye = torch.eye(size).expand(experts, size, size)
    fields = dict(dtype=DType.FP32, quant=Quant.NONE, activation=ACTIVATIONS["relu2"]) | fields
    if fields["quant"] is not Quant.NONE:
        eye, fields = eye.to(FP8), fields | dict(w13_scale=scale, w2_scale=torch.ones_like(scale))
    return Weights(eye, eye, **fields)


@pytest.mark.parametrize(
    "value, rounded",
    [
        (448.0, 448.0),
        (17.0, 16.0),
        (19.0, 20.0),
        (18.9, 18.0),
        (500.0, 448.0),
        (-500.0, -448.0),
        (2**-10, 0.0),
        (3 * 2**-10, 2**-8),
    ],
)
def test_quantize_rounds_to_nearest_even_and_clamps(value, rounded):
    q, scale = reference.quantize(torch.tensor([[value]]), Quant.FP8_TENSOR, torch.tensor(1.0))
    assert q.dtype == FP8 and q.item() == rounded and scale.item() == 1.0


def test_quantize_scales_are_per_token_or_per_128_values():
    x = torch.zeros(3, 192)
    x[0, 0], x[0, 150], x[1, 5] = 448.0, -4.48, 1.0
    _, by_token = reference.quantize(x, Quant.FP8_CHANNEL)
    assert by_token.tolist() == [[1.0], [pytest.approx(1 / 448)], [pytest.approx(1e-10 / 448, rel=1e-6, abs=0)]]
    q, by_block = reference.quantize(x, Quant.FP8_BLOCK)
    assert by_block.shape == (3, 2) and by_block[0].tolist() == [1.0, pytest.approx(0.01)]
    assert reference.dequantize(q, by_block)[0, 150].item() == pytest.approx(-4.48)


@pytest.mark.parametrize(
    "name, gate, up, h",
    [
        ("silu", 10.0, 0.1, 0.99995),
        ("silu", 0.1, 10.0, 0.52498),
        ("swiglu_clamp", 50.0, -50.0, -99.9955),
        ("swiglu_oai", 1.0, 0.0, 0.84580),
        ("silu", 1.0, 0.0, 0.0),
        ("gelu_tanh", 1.0, 2.0, 1.68238),
        ("gelu_erf", 1.0, 2.0, 1.68269),
    ],
)
def test_case_12_activations(name, gate, up, h):
    activation = ACTIVATIONS[name]
    assert reference.activate(torch.tensor([[gate, up]]), activation).item() == pytest.approx(h, rel=1e-5)
    swapped = torch.tensor([[gate, 0.0, up, 0.0]])
    alternating = torch.tensor([[gate, up, 0.0, 0.0]])
    interleaved = reference.activate(alternating, replace(activation, interleaved=True))
    assert torch.equal(interleaved, reference.activate(swapped, activation))


def test_an_activation_without_a_gate_keeps_the_width():
    h = reference.activate(torch.tensor([[3.0, -3.0, 0.5]]), ACTIVATIONS["relu2"])
    assert h.tolist() == [[9.0, 0.0, 0.25]]
    silu = reference.activate(torch.tensor([[1.0]]), Activation(Gate.SILU, gated=False))
    assert silu.item() == pytest.approx(0.731059, rel=1e-5)


def test_case_13_a_weight_on_the_input_is_not_one_on_the_output():
    x, probs, ids = torch.tensor([[2.0, 4.0]]), torch.tensor([[0.25]]), torch.tensor([[0]])
    on_output = reference.moe(x, identity_weights(), ids, probs)
    on_input = reference.moe(x, identity_weights(), ids, probs, weight_on_input=True, scaling_factor=3.0)
    assert on_output.tolist() == [[1.0, 4.0]]
    assert on_input.tolist() == [[0.75, 3.0]]


@pytest.mark.parametrize("quant", [Quant.FP8_TENSOR, Quant.FP8_CHANNEL])
def test_case_16_each_expert_uses_its_own_scale(quant):
    scales = torch.tensor([1.0, 10.0, 100.0, 1000.0])
    scales = scales if quant is Quant.FP8_TENSOR else scales[:, None].expand(4, 2).contiguous()
    weights = identity_weights(scales, experts=4, quant=quant)
    y = reference.moe(torch.ones(4, 2), weights, torch.arange(4)[:, None], torch.ones(4, 1))
    assert y[:, 0].tolist() == pytest.approx([1.0, 1e2, 1e4, 1e6])


def test_cases_17_to_19_block_scales_by_position():
    """w of ones with scales that tell every block: a row of w13 is known from its sum."""
    hidden, inter = 192, 192
    w13, w2 = torch.ones(1, 2 * inter, hidden).to(FP8), torch.ones(1, hidden, inter).to(FP8)
    s13 = torch.tensor([[[1.0, 1e4], [2.0, 2e4], [3.0, 3e4], [4.0, 4e4]]])
    s2 = torch.tensor([[[1.0, 10.0], [100.0, 1000.0]]])
    common = dict(dtype=DType.BF16, quant=Quant.FP8_BLOCK, activation=ACTIVATIONS["silu"], w2_scale=s2)
    split, found2 = reference.dequantize_weights(Weights(w13, w2, w13_scale=s13, split_scale=True, **common))
    sums = split[0].sum(1)
    block = 128 + 64e4  # of a row whose scales are 1 and 1e4
    assert sums[[0, 127, 128, 191, 192, 319, 320, 383]].tolist() == [block * k for k in (1, 1, 2, 2, 3, 3, 4, 4)]
    merged, _ = reference.dequantize_weights(Weights(w13, w2, w13_scale=s13[:, :3], split_scale=False, **common))
    assert merged[0].sum(1)[[127, 128, 255, 256, 383]].tolist() == [block * k for k in (1, 2, 2, 3, 3)]
    assert found2[0, [0, 0, 191, 191], [0, 191, 0, 191]].tolist() == [1.0, 10.0, 100.0, 1000.0]
    alternating = replace(ACTIVATIONS["silu"], interleaved=True)
    weights = Weights(w13, w2, w13_scale=s13, split_scale=True, **(common | dict(activation=alternating)))
    assert reference.dequantize_weights(weights)[0][0].sum(1)[[0, 1, 254, 256, 257]].tolist() == [
        block * k for k in (1, 3, 1, 2, 4)
    ]


def test_case_18_the_tail_block_of_the_activations_has_its_own_scale():
    x = torch.ones(1, 192)
    x[:, 128:] = 1e4
    found = reference.dequantize(*reference.quantize(x * 1.05, Quant.FP8_BLOCK))
    assert torch.allclose(found, x.double() * 1.05, rtol=1e-6)
    one_scale = reference.dequantize(*reference.quantize(x * 1.05, Quant.FP8_CHANNEL))
    assert one_scale[0, 0] != found[0, 0]


def test_static_scales_are_used_as_they_are():
    scale, one = torch.ones(1), torch.tensor([1.0])
    weights = identity_weights(scale, quant=Quant.FP8_TENSOR, x_scale=one, h_scale=one * 2)
    y = reference.moe(torch.tensor([[17.0, 1000.0]]), weights, torch.tensor([[0]]), torch.ones(1, 1))
    assert y.tolist() == [[256.0, 896.0]]  # 17 -> 16, 16^2; 1000 -> 448, 448^2 / 2 -> 448, times 2


def test_h_is_rounded_before_it_is_quantised_when_asked():
    weights = identity_weights(torch.ones(1), quant=Quant.FP8_TENSOR, x_scale=torch.ones(1), h_scale=torch.ones(1))
    weights = replace(weights, w13_bias=torch.tensor([[0.0, 4.1234]]), w2_bias=torch.zeros(1, 2))
    x = torch.zeros(1, 2, dtype=torch.bfloat16)
    h = 4.1234**2  # 17.0024: e4m3 has 16 and 18; bf16 has 17.0, which goes to even
    for round_h, want in ((False, 18.0), (True, 16.0)):
        y = reference.moe(x, weights, torch.tensor([[0]]), torch.ones(1, 1), round_h=round_h)
        assert y[0, 1].item() == want, h


def test_case_6_ids_that_name_no_expert_contribute_nothing():
    ids = torch.tensor([[0, -1], [-1, -1], [1, 2**30], [8, 1]])
    assert reference.local_ids(ids, 2).tolist() == [[0, -1], [-1, -1], [1, -1], [-1, 1]]
    assert reference.local_ids(ids, 1, torch.tensor([-1, 0], dtype=torch.int32)).tolist() == [
        [-1, -1],
        [-1, -1],
        [0, -1],
        [-1, 0],
    ]
    y = torch.full((8, 1), torch.nan)
    y[[0, 4, 7]] = torch.tensor([[1.0], [2.0], [3.0]])
    probs = torch.where(torch.tensor([[1, 0], [0, 0], [1, 0], [0, 1]]) == 1, 0.5, torch.nan)
    combined = reference.combine(y, reference.local_ids(ids, 2), probs, scaling_factor=2.0)
    assert combined.tolist() == [[1.0], [0.0], [2.0], [3.0]]


def test_case_7_an_expert_named_twice_counts_twice():
    x, ids = torch.tensor([[1.0, 2.0]]), torch.tensor([[0, 0]])
    assert reference.moe(x, identity_weights(), ids, torch.tensor([[0.25, 0.5]])).tolist() == [[0.75, 3.0]]


@pytest.mark.parametrize("quant", [q.value for q in Quant])
def test_case_9_experts_without_a_token_are_not_read(quant):
    layer = make_layer(Case(hidden=192, inter=136, experts=9, tokens=2, quant=quant, bias=True, ids="bad"))
    y = reference.moe(layer.x, layer.weights, layer.ids, layer.probs)
    assert y.isfinite().all() and (y[(layer.local < 0).all(1)] == 0).all()


def test_case_3_no_tokens():
    layer = make_layer(Case(tokens=0, quant="fp8_block"))
    assert reference.moe(layer.x, layer.weights, layer.ids, layer.probs).shape == (0, 64)


@pytest.mark.parametrize("quant", ["none", "fp8_channel", "fp8_block"])
def test_the_layer_is_the_chain_of_its_ops(quant):
    layer = make_layer(Case(tokens=7, hidden=192, inter=136, quant=quant, split_scale=quant == "fp8_block"))
    layer_quant, slots = layer.weights.quant, layer.local.reshape(-1)
    w13, w2 = reference.dequantize_weights(layer.weights)
    x = layer.x.repeat_interleave(2, 0)
    if quant != "none":
        x = reference.dequantize(*reference.quantize(x, layer_quant))
    h = reference.activate(reference.grouped_gemm(x, w13, slots), layer.weights.activation)
    if quant != "none":
        h = reference.dequantize(*reference.quantize(h, layer_quant))
    y = reference.combine(reference.grouped_gemm(h, w2, slots), layer.local, layer.probs)
    assert torch.equal(y, reference.moe(layer.x, layer.weights, layer.ids, layer.probs))
