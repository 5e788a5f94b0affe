"""One grouped product at a time, operands given, against float64: no row further off than 1.5 times its rounding.

The four ways to compute it are held to the same: operands as they are, swapped, swapped with weights by TMA, and
specialised warps (on a GPU only).
"""

from dataclasses import replace

import pytest
import torch

from expertile import reference
from expertile.errors import ShapeError
from expertile.hardware import H200
from expertile.kernels.grouped_gemm import grouped_gemm
from expertile.kernels.tiles import Product
from expertile.plans import GemmConfig
from expertile.problem import ACTIVATIONS, Quant
from expertile.runtime.triton_experts import gemm, products
from expertile.weights import FP8

from .kernel_inputs import (
    DEVICE,
    DTYPES_HERE,
    EPSILON,
    FP8_SUM,
    PLAIN,
    SPECIALIZED,
    SWAP,
    TMA,
    Case,
    Poisoned,
    fitted,
    make_layer,
    make_plan,
    on_device,
    row_error,
    skip_if_refused,
    torch_routing,
    widened,
)

ALL = pytest.mark.parametrize("config", [SWAP, TMA, PLAIN, SPECIALIZED], ids=lambda config: config.name)
DTYPE = pytest.mark.parametrize("dtype", DTYPES_HERE)
QUANTS = [
    dict(quant="fp8_tensor"),
    dict(quant="fp8_tensor", static=True),
    dict(quant="fp8_channel"),
    dict(quant="fp8_block"),
    dict(quant="fp8_block", split_scale=True),
]


class Operands:
    """Both products of a layer: GEMM1 reads x by token, GEMM2 reads h [R, I] in routed order and writes by slot."""

    def __init__(self, layer, config: GemmConfig, gemm: int, backwards: bool = False):
        w, config = layer.weights, fitted(config, layer)
        plan = replace(make_plan(layer, config), fuse_quant=False)
        skip_if_refused(plan)
        self.product = products(plan, w.split_scale)[gemm - 1]
        self.layer, self.config, self.gemm = layer, config, gemm
        self.routing = torch_routing(layer.local, w.experts, config.block_m, backwards=backwards)
        self.rows = int(self.routing.offsets[-1])
        self.slot = self.routing.gather[: self.rows].long()
        self.w, self.w_scale, self.bias = ((w.w13, w.w13_scale, w.w13_bias), (w.w2, w.w2_scale, w.w2_bias))[gemm - 1]
        self.x, static = layer.x, w.x_scale
        if gemm == 2:
            generator = torch.Generator().manual_seed(1)
            h = torch.randn(layer.ids.numel(), w.inter, generator=generator).to(layer.x.dtype)
            self.x, static = widened(on_device(h)), w.h_scale
        self.x_scale = None
        if w.quant is not Quant.NONE:
            self.x, self.x_scale = reference.quantize(self.x, w.quant, static)
        self.probs = layer.probs if layer.case.weight_on_input and gemm == 1 else None

    def run(self):
        y = Poisoned((self.layer.ids.numel(), self.product.n), self.layer.x.dtype)
        gemm(self.config, H200.sms)(
            self.x, self.w, self.routing, self.config, self.product, y.tensor,
            x_scale=self.x_scale, w_scale=self.w_scale, bias=self.bias, probs=self.probs,
        )  # fmt: skip
        y.check()
        return y.tensor

    @property
    def written(self):
        """The rows of y that must be written, in routed order."""
        return self.slot if self.gemm == 2 else torch.arange(self.rows, device=DEVICE)

    def exact(self):
        """[rows, n] float64, in routed order."""
        expert = self.layer.local.reshape(-1)[self.slot]
        x = self.x.double() if self.x_scale is None else reference.dequantize(self.x, self.x_scale)
        x = x[self.slot // self.product.top_k] if self.gemm == 1 else x[: self.rows]
        y = reference.grouped_gemm(x, reference.dequantize_weights(self.layer.weights)[self.gemm - 1], expert)
        if self.probs is not None:
            y *= self.probs.reshape(-1, 1)[self.slot]
        if self.bias is not None:
            y += self.bias[expert].double()
        return reference.activate(y, self.layer.weights.activation) if self.gemm == 1 else y


def check(layer, config: GemmConfig, gemms=(1, 2), backwards=False):
    for which in gemms:
        operands = Operands(layer, config, which)
        y, exact = operands.run(), operands.exact()
        left = torch.ones(len(y), dtype=torch.bool, device=DEVICE)
        left[operands.written] = False
        assert (y[left].view(torch.int16) == -1).all(), "a row that nobody asked for was written"
        rounding = row_error(exact.to(y.dtype), exact)
        assert rounding < 8e-3, "rounding alone is off: the bar would mean nothing"
        bar = 1.5 * rounding + EPSILON + (0.0 if operands.x_scale is None else FP8_SUM)
        assert row_error(y[operands.written], exact) <= bar, f"gemm{which}"

        again = Operands(layer, config, which, backwards=True).run() if backwards else y
        assert torch.equal(again.view(torch.int16), y.view(torch.int16)), "depends on the order of the tiles"


@DTYPE
@ALL
@pytest.mark.parametrize(
    ("activation", "interleaved"),
    [(name, False) for name in ACTIVATIONS] + [(name, True) for name, act in ACTIVATIONS.items() if act.gated],
)
def test_activations_and_biases(activation, interleaved, config, dtype):
    """Case 12: the gate is the first half, or the even rows, and limits and offsets are where they belong."""
    check(make_layer(Case(activation=activation, interleaved=interleaved, bias=True, dtype=dtype)), config)


@DTYPE
@ALL
@pytest.mark.parametrize(
    ("hidden", "inter", "activation"),
    [(176, 320, "silu"), (704, 192, "silu"), (2688, 24, "relu2"), (72, 1856, "relu2"), (40, 8, "silu")],
)
def test_sizes_off_the_tile(hidden, inter, activation, config, dtype):
    """Case 14: no padding is read, written or needed."""
    check(
        make_layer(Case(tokens=2, hidden=hidden, inter=inter, experts=2, top_k=1, activation=activation, dtype=dtype)),
        config,
        backwards=True,
    )


@DTYPE
@ALL
@pytest.mark.parametrize(
    "case",
    [
        Case(tokens=1),
        Case(tokens=1, top_k=1),
        Case(tokens=150, ids="one"),
        Case(tokens=40, ids="bad"),
        Case(tokens=40, ids="twice"),
        Case(tokens=40, ids="bad", mapped=True),
        Case(tokens=9, ids="none"),
        Case(tokens=6, experts=60, top_k=4),
        Case(tokens=4, experts=384, top_k=8, hidden=32, inter=16),
        Case(tokens=33, top_k=1, weight_on_input=True, bias=True),
        Case(tokens=33, top_k=1, weight_on_input=True, quant="fp8_tensor"),
    ],
    ids=str,
)
def test_spreads_of_rows_over_experts(case, config, dtype):
    """Cases 6, 7, 9 and 13: experts without rows are NaN, one expert has all, ids name no expert, x is weighted
    first.
    """
    check(make_layer(replace(case, dtype=dtype)), config, backwards=True)


@DTYPE
@ALL
@pytest.mark.parametrize("fields", QUANTS, ids=str)
@pytest.mark.parametrize(("hidden", "inter"), [(176, 192), (320, 320)])
def test_scales_that_differ_everywhere(hidden, inter, fields, config, dtype):
    """Cases 16, 17 and 19: no two neighbouring scales are equal, I is not a multiple of the scale blocks' 128."""
    check(make_layer(Case(tokens=4, hidden=hidden, inter=inter, experts=2, bias=True, dtype=dtype, **fields)), config)


@ALL
@pytest.mark.parametrize(
    "fields", [dict(activation="relu2"), dict(interleaved=True), dict(interleaved=True, split_scale=True)], ids=str
)
@pytest.mark.parametrize("inter", [192, 256])
def test_block_scales_of_other_row_orders(inter, fields, config):
    check(
        make_layer(Case(tokens=3, hidden=64, inter=inter, experts=2, quant="fp8_block", **fields)), config, gemms=(1,)
    )


@ALL
@pytest.mark.parametrize("large", [0, 1])
def test_the_short_last_block_has_its_own_scale(large, config):
    """Case 18: K = 192, one of the two blocks' scales is 10^4 times the other's; in w, then in x."""
    layer = make_layer(Case(hidden=192, inter=192, quant="fp8_block", split_scale=True))
    for scale in (layer.weights.w13_scale, layer.weights.w2_scale):
        scale[:, :, 1 - large] *= 1e-4
    check(layer, config)
    layer.x[:, 128 * large : 128 + 64 * large] *= 1e-4  # makes up for it: both blocks count alike
    layer.weights.w13_scale.mul_(1e4)
    check(layer, config, gemms=(1,))


@ALL
def test_each_expert_has_its_own_scale(config):
    """Case 16: scales 1, 10, 100, 1000, one token an expert."""
    layer = make_layer(Case(tokens=4, top_k=1, activation="relu2", quant="fp8_tensor"))
    layer.ids.copy_(torch.arange(4)[:, None])
    layer = replace(layer, weights=make_layer(replace(layer.case, tokens=64)).weights)  # of all experts, none poisoned
    for scale in (layer.weights.w13_scale, layer.weights.w2_scale):
        scale.copy_(torch.tensor([1.0, 10.0, 100.0, 1000.0]) * 1e-4)
    check(layer, config)


@pytest.mark.parametrize(
    "config",
    [
        GemmConfig(16, 128, 32, 4, 3, True),
        GemmConfig(32, 256, 128, 4, 3, True, 2),
        GemmConfig(64, 64, 16, 4, 3, True, 8),
        GemmConfig(16, 16, 256, 4, 3, False),
        GemmConfig(32, 32, 64, 4, 3, False, 3),
        GemmConfig(128, 128, 64, 8, 3, False, 8),
    ],
    ids=lambda config: config.name,
)
def test_tiles_of_every_shape(config):
    """group_m deals the same tiles out in another order; its last group is short here."""
    check(make_layer(Case(tokens=50, hidden=96, inter=104, experts=3)), config, backwards=True)


@ALL
def test_weights_with_rows_apart(config):
    """w is read by its strides: NaN lies behind each row, and an expert's rows do not follow the last one's."""
    layer = make_layer(Case(hidden=80, inter=40))
    apart = replace(layer.weights, w13=widened(layer.weights.w13), w2=widened(layer.weights.w2))
    if config.tma or config.specialized:
        with pytest.raises(ShapeError, match=r"strides \(7680, 96, 1\)"):
            check(replace(layer, weights=apart), config)
    else:
        check(replace(layer, weights=apart), config)


@pytest.mark.parametrize("swap", [True, False])
@pytest.mark.parametrize("out_quant", ["static", "block"])
def test_quantising_in_the_epilogue(out_quant, swap):
    """Where every value fits e4m3 exactly the answer is bitwise known: x holds such values, w picks a column for each
    row.
    """
    rows, columns, k = 21, 320, 64
    config = GemmConfig(16, 128, 32, 4, 3, swap)
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(1, 8, (rows, k), generator=generator) * 2.0 ** torch.randint(
        -4, 3, (rows, k), generator=generator
    )
    x[:, ::8] = 28.0  # with the factor 16 below: 448 in every group of 128
    pick = torch.arange(columns) % k
    w = torch.zeros(2, columns, k)
    w[:, torch.arange(columns), pick] = 16.0
    w[1] *= 2.0
    expert = torch.arange(rows) % 2
    routing = torch_routing(expert, 2, config.block_m)
    values = (x[:, pick] * 16.0)[routing.gather.long().cpu()]  # [rows, columns], of expert 0
    factor = (1 + expert)[routing.gather.long().cpu()][:, None]
    if out_quant == "static":
        scale, want_scale = torch.tensor([2.0], device=DEVICE), None
        want = (values * factor / 2.0).clamp(-448, 448).to(FP8)
    else:
        scale = Poisoned((rows, 3), torch.float32)
        want_scale, want = (factor * torch.ones(1, 3)).float(), values.to(FP8)
    product = Product(columns, k, 1, True, False, "fp16", quant=Quant.NONE, out_quant=out_quant)
    y = Poisoned((rows, columns), FP8)
    y_scale = scale if want_scale is None else scale.tensor
    grouped_gemm(on_device(x.half()), on_device(w.half()), routing, config, product, y.tensor, y_scale=y_scale)
    y.check()
    assert torch.equal(y.tensor.cpu().view(torch.uint8), want.view(torch.uint8))
    if want_scale is not None:
        scale.check()
        assert torch.equal(scale.tensor.cpu(), want_scale)


@pytest.mark.parametrize(
    ("config", "fields", "said"),
    [
        (GemmConfig(32, 64, 64, 4, 3), {}, "block_m=32"),
        (GemmConfig(16, 48, 64, 4, 3), {}, "block_n=48"),
        (GemmConfig(16, 64, 8, 4, 3), {}, "block_k=8"),
        (GemmConfig(16, 64, 256, 4, 3), dict(quant=Quant.FP8_BLOCK), "block_k=256"),
        (GemmConfig(16, 128, 64, 4, 3), dict(activation=ACTIVATIONS["silu"], out_quant="block"), "block_n=128"),
    ],
    ids=str,
)
def test_a_tile_that_does_not_fit_is_refused_before_the_launch(config, fields, said):
    product = Product(32, 64, 1, True, False, "fp16", **fields)
    with pytest.raises(ShapeError, match=said):
        grouped_gemm(None, None, torch_routing(torch.tensor([0]), 1, 16), config, product, None)
