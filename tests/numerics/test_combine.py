"""out[t] = factor * sum over j of probs[t, j] * y[t * top_k + j]: skipped slots are never read."""

from dataclasses import replace

import pytest
import torch

from expertile import reference
from expertile.kernels.combine import combine

from .kernel_inputs import DEVICE, DTYPES_HERE, EPSILON, Case, Poisoned, make_layer, on_device, row_error

DTYPE = pytest.mark.parametrize("dtype", DTYPES_HERE)


def inputs(case: Case):
    """A layer, and y [T * top_k, H] in which the rows of skipped slots are NaN."""
    layer = make_layer(case)
    generator = torch.Generator().manual_seed(1)
    y = on_device(torch.randn(layer.ids.numel(), case.hidden, generator=generator)).to(layer.x.dtype)
    y[layer.local.reshape(-1) < 0] = torch.nan
    return layer, y


def check(case: Case, probs="float32", factor=1.0):
    layer, y = inputs(case)
    probs = None if probs is None else layer.probs.to(getattr(torch, probs))
    out = Poisoned(layer.x.shape, layer.x.dtype)
    combine(y, layer.ids, probs, out.tensor, case.experts, expert_map=layer.expert_map, factor=factor)
    out.check()
    exact = reference.combine(y, layer.local, probs, factor)
    assert row_error(out.tensor, exact) <= 1.5 * row_error(exact.to(y.dtype), exact) + EPSILON
    return out.tensor, layer


@DTYPE
@pytest.mark.parametrize(
    "case",
    [
        Case(tokens=1),
        Case(tokens=3, hidden=176, top_k=3),
        Case(tokens=65, hidden=2688, top_k=1),  # above 64 tokens one program takes more columns
        Case(tokens=2, hidden=2688, top_k=1),
        Case(tokens=20, ids="bad", id_dtype=torch.int64),
        Case(tokens=20, ids="bad", mapped=True),
        Case(tokens=20, ids="twice"),
        Case(tokens=6, ids="none"),
        Case(tokens=9, experts=60, top_k=8),
    ],
    ids=str,
)
@pytest.mark.parametrize("factor", [1.0, 2.5])
def test_weighted_sums(case, factor, dtype):
    """Cases 6, 7, 11 and 23: skipped slots hold NaN, the factor counts once, int64 ids."""
    check(replace(case, dtype=dtype), factor=factor)


@pytest.mark.parametrize("probs", ["float16", "float64", None])
def test_weights_of_other_dtypes_and_none(probs):
    """Case 13: with the weight on the input, combine adds what is there."""
    check(Case(tokens=5, ids="bad"), probs)


def test_a_rank_without_any_of_a_tokens_experts_adds_nothing():
    """Case 8: E = 8, half of them here, ids [[0, -1], [-1, -1]]: row 1 is exactly 0, row 0 is its one expert's."""
    y = on_device(torch.full((4, 16), torch.nan))
    y[0] = 2.0
    ids = on_device(torch.tensor([[0, -1], [-1, -1]], dtype=torch.int32))
    here = on_device(torch.tensor([0, 1, 2, 3, -1, -1, -1, -1], dtype=torch.int32))
    out = Poisoned((2, 16), torch.float32)
    combine(y, ids, on_device(torch.full((2, 2), 0.5)), out.tensor, 4, expert_map=here)
    assert out.tensor.tolist() == [[1.0] * 16, [0.0] * 16]


def test_rows_of_out_may_lie_apart():
    layer, y = inputs(Case(tokens=5, hidden=40))
    memory = torch.full((5, 56), torch.nan, dtype=torch.float16, device=DEVICE)
    combine(y, layer.ids, layer.probs, memory[:, :40], 4)
    assert memory[:, 40:].isnan().all()
    exact = reference.combine(y, layer.local, layer.probs)
    assert row_error(memory[:, :40], exact) <= 1.5 * row_error(exact.half(), exact) + EPSILON


def test_the_sum_is_in_the_order_of_the_slots():
    """So it is the same on every run: 2^24 + 1 is lost in fp32, then -2^24 leaves 0; in another order 1 would be
    left.
    """
    y = on_device(torch.tensor([2.0**24, 1.0, -(2.0**24)]).repeat_interleave(16).view(3, 16))
    out = Poisoned((1, 16), torch.float32)
    ids = on_device(torch.zeros(1, 3, dtype=torch.int32))
    combine(y, ids, None, out.tensor, 1)
    assert out.tensor.tolist() == [[0.0] * 16]
