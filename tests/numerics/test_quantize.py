"""Activations to e4m3, by the kernel of its own and by the launch that also routes."""

import pytest
import torch

from expertile.kernels.quantize import quantize
from expertile.kernels.routing import route_rows
from expertile.plans import route_programs
from expertile.problem import BLOCK, Quant
from expertile.routing import Routing
from expertile.weights import FP8, FP8_MAX

from .kernel_inputs import (
    DEVICE,
    DTYPES_BY_NAME,
    DTYPES_HERE,
    Case,
    Poisoned,
    make_layer,
    on_device,
    torch_routing,
    widened,
)

DTYPE = pytest.mark.parametrize("dtype", [*DTYPES_HERE, "fp32"])


def groups(quant: Quant, width: int) -> int:
    return -(-width // BLOCK) if quant is Quant.FP8_BLOCK else 1


def spread(scale, width: int):
    """[rows, groups] -> [rows, width]"""
    return scale.repeat_interleave(BLOCK if scale.shape[1] > 1 else width, 1)[:, :width]


def run(x, quant: Quant, scale=None, rows=None):
    q = Poisoned(x.shape, FP8)
    found = Poisoned((x.shape[0], groups(quant, x.shape[1])), torch.float32)
    given = found.tensor if scale is None else scale
    quantize(x, q.tensor, given, quant, static=scale is not None, rows=rows)
    q.check()
    found.check()
    return q.tensor, given


def run_with_routing(x, quant: Quant, scale=None):
    """The same by the launch that also routes; what routing gives must not depend on it."""
    layer = make_layer(Case(tokens=x.shape[0], hidden=16, inter=16, top_k=2))
    want = torch_routing(layer.local, 4, 16, spare=0)
    routing = Routing(want.gather * 0, want.offsets * 0, want.tiles * 0, want.tile_count * 0, want.next_tile + 1, 16)
    q = Poisoned(x.shape, FP8)
    found = Poisoned((x.shape[0], groups(quant, x.shape[1])), torch.float32)
    given = found.tensor if scale is None else scale
    counts = torch.empty(route_programs(layer.ids.numel()), 4, dtype=torch.int32, device=DEVICE)
    route_rows(layer.ids, 4, routing, counts, x=x, x_q=q.tensor, x_scale=given, quant=quant, static=scale is not None)
    q.check()
    found.check()
    assert torch.equal(routing.gather, want.gather) and torch.equal(routing.tiles[:, :3], want.tiles[:, :3])
    assert torch.equal(routing.tile_count, want.tile_count)
    return q.tensor, given


BY = pytest.mark.parametrize("run", [run, run_with_routing], ids=["alone", "with routing"])


@BY
@DTYPE
@pytest.mark.parametrize("width", [1, 100, 128, 176, 384, 2688])
@pytest.mark.parametrize("quant", [Quant.FP8_CHANNEL, Quant.FP8_BLOCK], ids=lambda quant: quant.value)
def test_values_go_to_the_nearest_e4m3(quant, width, dtype, run):
    """The last group may be short; what lies behind a row is NaN."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(12, width, generator=generator) * torch.logspace(-4, 4, 12)[:, None]
    x = widened(on_device(x.clamp(-6e4, 6e4).to(DTYPES_BY_NAME[dtype])))
    q, scale = run(x, quant)
    parts = x.float().split(BLOCK if quant is Quant.FP8_BLOCK else width, 1)
    peaks = torch.cat([part.abs().amax(1, keepdim=True) for part in parts], 1)
    assert torch.allclose(scale, peaks.clamp(min=1e-10) / FP8_MAX, rtol=3e-7, atol=0)
    is_nearest(q, x.double() / spread(scale, width).double())


@BY
@DTYPE
@pytest.mark.parametrize("width", [100, 2688])
def test_a_static_scale_clamps(width, dtype, run):
    generator = torch.Generator().manual_seed(0)
    x = on_device((torch.randn(5, width, generator=generator) * 300).to(DTYPES_BY_NAME[dtype]))
    scale = on_device(torch.tensor([0.7]))
    q, given = run(x, Quant.FP8_TENSOR, scale)
    assert given.item() == scale.item() and (x.abs() > 0.7 * FP8_MAX).any()
    is_nearest(q, x.double() / scale.double())


def is_nearest(q, value):
    """No e4m3 number is nearer; an fp32 division may decide a tie otherwise."""
    value = value.clamp(-FP8_MAX, FP8_MAX)
    nearest = (value.float().to(FP8).double() - value).abs()
    assert ((q.double() - value).abs() <= nearest + 1e-6 * value.abs()).all()


@BY
@pytest.mark.parametrize("quant", [Quant.FP8_TENSOR, Quant.FP8_BLOCK], ids=lambda quant: quant.value)
def test_a_row_of_zeros_stays_finite(quant, run):
    q, scale = run(on_device(torch.zeros(2, 200)), quant)
    assert (q.float() == 0).all()
    assert torch.allclose(scale, torch.full_like(scale, 1e-10 / FP8_MAX), rtol=1e-6, atol=0)


@pytest.mark.parametrize("there", [0, 3, 5])
def test_rows_that_do_not_exist_are_neither_read_nor_written(there):
    """Rows of h behind the last routed one: their number is known on the device only."""
    x = on_device(torch.ones(5, 176))
    x[there:] = torch.nan
    q, scale = run(x, Quant.FP8_BLOCK, rows=on_device(torch.tensor([there], dtype=torch.int32)))
    assert (q[:there].float() == FP8_MAX).all()
    assert (q[there:].view(torch.uint8) == 0xFF).all()
    assert scale[:there].isfinite().all() and scale[there:].isnan().all()
