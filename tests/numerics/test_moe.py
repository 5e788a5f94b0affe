"""A whole layer on the kernels, chained as a call chains them: against float64, in poisoned memory."""

from dataclasses import replace

import pytest
import torch

from expertile import reference
from expertile.plans import GemmConfig
from expertile.runtime import execute, triton_experts
from expertile.weights import FP8

from .kernel_inputs import (
    DEVICE,
    DTYPES_HERE,
    PLAIN,
    SPECIALIZED,
    SWAP,
    TMA,
    Case,
    check_moe,
    make_layer,
    make_plan,
    make_ring_plan,
    make_stream_plan,
    row_error,
    run_kernels,
    skip_if_refused,
)

BOTH = pytest.mark.parametrize("tile", [SWAP, PLAIN], ids=lambda tile: tile.name)
ALL = pytest.mark.parametrize("tile", [SWAP, TMA, PLAIN], ids=lambda tile: tile.name)
DTYPE = pytest.mark.parametrize("dtype", DTYPES_HERE)
QUANTS = ["none", "fp8_tensor", "fp8_channel", "fp8_block"]


def check(case: Case, tile: GemmConfig, scaling_factor: float = 1.0):
    layer = make_layer(case)
    plan = make_plan(layer, tile)
    return check_moe(plan, layer, scaling_factor), layer


@DTYPE
@ALL
@pytest.mark.parametrize("quant", QUANTS)
@pytest.mark.parametrize("tokens", [1, 21])
def test_a_layer(tokens, quant, tile, dtype):
    check(Case(tokens=tokens, hidden=176, inter=96, quant=quant, dtype=dtype), tile)


@DTYPE
@pytest.mark.parametrize("tokens", [1, 21, 300])  # a short tile an expert, and full ones before a short one
@pytest.mark.parametrize(
    "fields",
    [
        dict(),
        dict(activation="swiglu_oai", interleaved=True, bias=True, inter=96),
        dict(activation="relu2", quant="fp8_tensor", static=True),
        dict(activation="relu2", quant="fp8_block", inter=96),
        dict(quant="fp8_tensor", ids="bad", mapped=True, bias=True),
        dict(quant="fp8_channel", ids="one"),
        dict(quant="fp8_block", ids="twice"),
        dict(quant="fp8_block", split_scale=True, bias=True),
    ],
    ids=str,
)
def test_a_layer_by_specialized_warps(fields, tokens, dtype):
    layer = make_layer(Case(**{"tokens": tokens, "hidden": 288, "inter": 128, "dtype": dtype, **fields}))
    plan = make_plan(layer, SPECIALIZED)
    skip_if_refused(plan)
    there, back = check_moe(plan, layer), run_kernels(plan, layer, backwards=True)
    assert torch.equal(there.view(torch.int16), back.view(torch.int16)), "depends on the order of the tiles"


@DTYPE
@pytest.mark.parametrize("tokens", [1, 3, 16, 21, 64])
@pytest.mark.parametrize(
    "fields",
    [
        dict(),
        dict(hidden=416, inter=80, top_k=3),
        dict(activation="relu2", bias=True),
        dict(activation="relu2", quant="fp8_tensor", static=True, inter=96),
        dict(quant="fp8_tensor", ids="bad", mapped=True, bias=True),
        dict(quant="fp8_tensor", static=True, ids="twice"),
        dict(quant="fp8_channel", ids="one", hidden=2064, inter=640),
        dict(quant="fp8_block", hidden=416, inter=256),
        dict(quant="fp8_block", bias=True, mapped=True, ids="bad"),
        dict(quant="fp8_block", activation="relu2", inter=320, ids="twice"),
    ],
    ids=str,
)
def test_a_layer_in_one_ring(fields, tokens, dtype):
    layer = make_layer(Case(**{"tokens": tokens, "hidden": 288, "inter": 128, "dtype": dtype, **fields}))
    plan = make_ring_plan(layer, block_n=256 if layer.case.quant == "fp8_block" else 128)
    skip_if_refused(plan)
    first = check_moe(plan, layer)
    again = run_kernels(plan, layer)
    assert torch.equal(first.view(torch.int16), again.view(torch.int16)), "depends on which block comes first"


@BOTH
@pytest.mark.parametrize("quant", QUANTS)
def test_the_order_of_the_tiles_does_not_matter(quant, tile):
    """The interpreter runs programs in order: a tile that writes into the next one's rows would be overwritten,
    unseen.
    """
    layer = make_layer(Case(tokens=21, inter=40, experts=3, quant=quant, dtype=DTYPES_HERE[0]))
    plan = make_plan(layer, tile)
    there, back = run_kernels(plan, layer), run_kernels(plan, layer, backwards=True)
    assert torch.equal(there.view(torch.int16), back.view(torch.int16))


@BOTH
def test_gemm2_may_have_a_tile_of_its_own(tile):
    layer = make_layer(Case(tokens=9, hidden=176, inter=96))
    plan = make_plan(layer, tile, replace(tile, block_n=128, block_k=32, swap=not tile.swap, group_m=2))
    check_moe(plan, layer)


@DTYPE
@BOTH
@pytest.mark.parametrize("fields", [dict(), dict(quant="fp8_tensor", static=True), dict(quant="fp8_block")], ids=str)
def test_every_option_at_once(fields, tile, dtype):
    """Cases 6, 7, 9, 11, 17, 19 and 23 together: what is right alone may not be right beside the others."""
    case = Case(
        tokens=19, hidden=200, inter=192, bias=True, ids="bad", mapped=True, id_dtype=torch.int64, dtype=dtype, **fields
    )
    check(replace(case, activation="swiglu_oai", interleaved=True), tile, scaling_factor=2.5)
    check(
        replace(case, activation="swiglu_clamp", split_scale="quant" in fields and fields["quant"] == "fp8_block"), tile
    )


@DTYPE
@BOTH
def test_the_scaling_factor_counts_once(tile, dtype):
    """Case 11: 2.5 times as much, and no more."""
    case = Case(tokens=3, dtype=dtype)
    once, layer = check(case, tile, scaling_factor=2.5)
    exact = reference.moe(layer.x, layer.weights, layer.ids, layer.probs)
    assert row_error(once.double() / 2.5, exact) < 0.01


@DTYPE
@pytest.mark.parametrize(
    ("activation", "gate", "up", "h"),
    [("silu", 10.0, 0.1, 0.99995), ("swiglu_clamp", 50.0, -50.0, -99.995), ("swiglu_oai", 1.0, 0.0, 0.84579)],
)
def test_gate_comes_before_up(activation, gate, up, h, dtype):
    """Case 12: swapped, the first would be 0.52; without the limit the second -2500; plain SwiGLU makes the third 0."""
    layer = make_layer(Case(tokens=1, hidden=16, inter=16, experts=1, top_k=1, activation=activation, dtype=dtype))
    layer.x.fill_(1.0)
    layer.probs.fill_(1.0)
    layer.weights.w13.zero_()
    layer.weights.w13[:, :16, 0], layer.weights.w13[:, 16:, 0] = gate, up
    layer.weights.w2.copy_(torch.eye(16))
    y = run_kernels(make_plan(layer, SWAP), layer)
    assert torch.allclose(y.float().cpu(), torch.tensor(h), rtol=2**-7 if dtype == "bf16" else 2**-10)


@DTYPE
@BOTH
def test_the_weight_on_the_input_goes_through_the_activation(tile, dtype):
    """Case 13: k = 1, weight 0.25. silu is not linear: as a factor of the output it would be 0.25 * silu(4) * 4 =
    3.93.
    """
    layer = make_layer(Case(tokens=2, hidden=16, inter=16, experts=1, top_k=1, weight_on_input=True, dtype=dtype))
    layer.x.fill_(1.0)
    layer.probs.fill_(0.25)
    layer.weights.w13.zero_()
    layer.weights.w13[:, :, 0] = 4.0
    layer.weights.w2.copy_(torch.eye(16))
    y = run_kernels(make_plan(layer, tile), layer)
    assert torch.allclose(y.float().cpu(), torch.tensor(0.731059), rtol=2**-7 if dtype == "bf16" else 2**-10)


@DTYPE
@pytest.mark.parametrize("tile", [SWAP, PLAIN, TMA], ids=lambda tile: tile.name)
def test_nemotron_without_a_gate(tile, dtype):
    """Case 14: relu2, H = 2688, I = 1856, fp8 per tensor: w13 has I rows, and no padding of H is visible outside."""
    y, _ = check(
        Case(
            tokens=1, hidden=2688, inter=1856, experts=2, top_k=1, activation="relu2", quant="fp8_tensor", dtype=dtype
        ),
        tile,
    )
    assert y.shape == (1, 2688)


@BOTH
@pytest.mark.parametrize("quant", QUANTS)
def test_no_tokens(quant, tile):
    """Case 3: (0, H), and no kernel is launched."""
    layer = make_layer(Case(tokens=0, quant=quant))
    out = torch.empty(0, 64, dtype=layer.x.dtype, device=DEVICE)
    plan = make_plan(layer, tile)
    assert (plan.problem.rows, plan.problem.experts_hit) == (0, 0)
    with pytest.MonkeyPatch.context() as patch:
        for module in (
            triton_experts.row_routing,
            triton_experts.quantize,
            triton_experts.grouped_gemm,
            triton_experts.swapped_gemm,
            triton_experts.hopper_gemm,
            triton_experts.stream,
            triton_experts.combine,
        ):
            for name in (
                "route_rows", "quantize", "grouped_gemm", "swapped_gemm", "hopper_gemm", "stream_up", "combine",
            ):  # fmt: skip
                patch.setattr(module, name, None, raising=False)
        assert execute.run(plan, layer.x, layer.weights, layer.ids, layer.probs, out).shape == (0, 64)


@BOTH
def test_tokens_none_of_whose_experts_are_here(tile):
    """Cases 6 and 8: exactly zero, whatever lies in the memory that was not written."""
    layer = make_layer(Case(tokens=6, ids="none", quant="fp8_block"))
    y = run_kernels(make_plan(layer, tile), layer)
    assert (y == 0).all()


@DTYPE
@pytest.mark.parametrize("tile", [SWAP, replace(PLAIN, block_m=16)], ids=lambda tile: tile.name)
def test_a_row_does_not_depend_on_its_batch(tile, dtype):
    """Case 24: with the same tiles, a token alone and in a batch is bitwise equal."""
    layer = make_layer(Case(tokens=23, hidden=176, inter=96, dtype=dtype))
    together = run_kernels(make_plan(layer, tile), layer)
    for t in (0, 11, 22):
        row = slice(t, t + 1)
        alone = replace(
            layer, case=replace(layer.case, tokens=1), x=layer.x[row], ids=layer.ids[row], probs=layer.probs[row]
        )
        assert torch.equal(run_kernels(make_plan(alone, tile), alone), together[row])


@pytest.mark.parametrize(
    "gemm1", [replace(SWAP, block_n=256), replace(PLAIN, block_n=256), replace(TMA, block_n=256)], ids=lambda c: c.name
)
@pytest.mark.parametrize(
    "fields", [dict(quant="fp8_tensor", static=True), dict(quant="fp8_block", split_scale=True)], ids=str
)
def test_quantisation_in_the_first_products_epilogue(fields, gemm1):
    """The plan says so, and h never exists in 16 bits."""
    layer = make_layer(Case(tokens=9, hidden=128, inter=320, bias=True, ids="bad", dtype=DTYPES_HERE[0], **fields))
    plan = make_plan(layer, gemm1)
    assert plan.fuse_quant and "h" not in {buffer.name for buffer in plan.buffers}
    check_moe(plan, layer)


STREAMED = pytest.mark.parametrize("gemm1", [None, SWAP, TMA], ids=["both", "down after swap", "down after swap-tma"])


@DTYPE
@STREAMED
@pytest.mark.parametrize("quant", QUANTS)
@pytest.mark.parametrize(
    "fields",
    [
        dict(tokens=1),
        dict(tokens=3, hidden=200, inter=192, bias=True, ids="bad", mapped=True, id_dtype=torch.int64),
        dict(tokens=2, top_k=3, inter=48, activation="relu2", ids="twice"),
        dict(tokens=4, ids="none"),
    ],
    ids=str,
)
def test_a_streamed_layer(fields, quant, gemm1, dtype):
    layer = make_layer(Case(quant=quant, dtype=dtype, **fields))
    plan = make_stream_plan(layer, gemm1)
    skip_if_refused(plan)
    check_moe(plan, layer, 2.5)


@DTYPE
@STREAMED
@pytest.mark.parametrize(
    "fields",
    [
        dict(quant="fp8_tensor", static=True, bias=True),
        dict(quant="fp8_block", split_scale=True),
        dict(quant="fp8_block", split_scale=True, interleaved=True),
        dict(activation="swiglu_oai", interleaved=True, bias=True),
        dict(top_k=1, weight_on_input=True),
    ],
    ids=str,
)
def test_a_streamed_layer_with_options(fields, gemm1, dtype):
    layer = make_layer(Case(**{"tokens": 2, "hidden": 176, "inter": 192, "dtype": dtype, **fields}))
    plan = make_stream_plan(layer, gemm1)
    skip_if_refused(plan)
    check_moe(plan, layer)


def test_the_poison_is_nan_in_every_dtype():
    for dtype in (torch.float16, torch.bfloat16, torch.float32, FP8):
        poison = torch.full((8,), 0xFF, dtype=torch.uint8).view(dtype)
        assert poison.float().isnan().all()


@pytest.mark.gpu  # Triton's interpreter keeps NaN in any minimum and loses it in its cast to e4m3
@DTYPE
@pytest.mark.parametrize("quant", QUANTS)
@pytest.mark.parametrize("activation", ["silu", "relu2", "swiglu_oai"])
def test_nan_in_a_token_is_nan_in_its_output_and_nowhere_else(activation, quant, dtype):
    layer = make_layer(Case(tokens=21, hidden=64, inter=64, quant=quant, activation=activation, dtype=dtype))
    layer.x[3, 5] = float("nan")
    for plan in (make_plan(layer, SWAP), make_stream_plan(layer)):
        y = execute.run(plan, layer.x, layer.weights, layer.ids, layer.probs, torch.zeros_like(layer.x))
        assert y[3].isnan().all() and int(y.isnan().any(dim=1).sum()) == 1
