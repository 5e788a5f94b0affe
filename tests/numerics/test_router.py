"""Routers, the kernel and torch's: the experts that the oracle chooses, with its weights, whatever the logits are."""

from __future__ import annotations

import pytest
import torch

from expertile.errors import ShapeError
from expertile.kernels.router import router as router_kernel
from expertile.reference import route as reference_route
from expertile.router import ROUTERS, GroupScore, Router, Score
from expertile.runtime.torch_router import route_torch

from .kernel_inputs import DEVICE, Poisoned, on_device

BOTH = pytest.mark.parametrize("route", [router_kernel, route_torch], ids=["kernel", "torch"])
KINDS = ROUTERS | {
    "uneven groups": Router(Score.SOFTMAX, renormalize=True, groups=5, top_groups=2),
    "scores as they are": Router(Score.NONE, scaling_factor=0.5),
}


def spread_logits(tokens: int, experts: int, dtype=torch.float32, seed: int = 0):
    """Logits of one token no two of which are close, so that the choice does not hang on the last bit."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(tokens, experts, generator=generator).argsort(1)
    return on_device(((order - experts / 2) * (8 / experts)).to(dtype))


def check(route, logits, router, top_k, bias=None):
    ids, probs = route(logits, router, top_k, bias)
    want_ids, want_probs = reference_route(logits, router, top_k, bias)
    assert ids.dtype == torch.int32 and probs.dtype == torch.float32
    assert torch.equal(ids.long(), want_ids)
    assert torch.allclose(probs.double(), want_probs, rtol=5e-6, atol=1e-30)
    return ids, probs


def fitting_sizes():
    for kind, router in KINDS.items():
        for experts, top_k in ((8, 2), (60, 4), (160, 6), (384, 8), (512, 10)):
            size = experts // router.groups
            if experts % router.groups == 0 and size > 1 and top_k <= size * router.top_groups:
                yield pytest.param(kind, experts, top_k, id=f"{kind}-{experts}")


@BOTH
@pytest.mark.parametrize("kind, experts, top_k", fitting_sizes())
def test_every_kind_chooses_as_the_oracle(route, kind, experts, top_k):
    logits = spread_logits(5, experts)
    generator = torch.Generator().manual_seed(1)
    bias = on_device(torch.linspace(-0.3, 0.3, experts)[torch.randperm(experts, generator=generator)])
    check(route, logits, KINDS[kind], top_k)
    check(route, logits, KINDS[kind], top_k, bias)


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 3, 64])
def test_logits_of_any_dtype_and_stride(route, dtype, tokens):
    logits = spread_logits(tokens, 32, dtype)
    apart = torch.full((tokens, 47), torch.nan, dtype=dtype, device=DEVICE)
    apart[:, :32] = logits
    found, plain = (route(values, KINDS["softmax"], 4) for values in (apart[:, :32], logits))
    assert torch.equal(found[0], plain[0]) and torch.equal(found[1], plain[1])
    check(route, logits, KINDS["softmax"], 4)


@BOTH
def test_no_tokens(route):
    ids, probs = route(torch.empty(0, 16, device=DEVICE), ROUTERS["softmax"], 4)
    assert ids.shape == probs.shape == (0, 4)


@pytest.mark.parametrize("tokens, experts", [(1, 8), (5, 60), (33, 128)])
def test_the_kernel_writes_its_rows_and_no_others(tokens, experts):
    ids, probs = Poisoned((tokens, 3), torch.int32), Poisoned((tokens, 3), torch.float32)
    logits = spread_logits(tokens, experts)
    router_kernel(logits, ROUTERS["softmax"], 3, ids=ids.tensor, probs=probs.tensor)
    ids.check()
    probs.check()
    assert torch.equal(ids.tensor.long(), reference_route(logits, ROUTERS["softmax"], 3)[0])
    assert probs.tensor.isfinite().all()


@BOTH
@pytest.mark.parametrize("kind", KINDS)
def test_case_5_nan_and_infinities_stay_in_their_row(route, kind):
    """A row of NaN, one NaN, +inf, -inf: ids distinct and in range, probs finite, every other row bitwise unchanged."""
    experts, top_k, router = 160, 6, KINDS[kind]
    good = spread_logits(9, experts)
    bad = good.clone()
    bad[1] = torch.nan
    bad[3, 17] = torch.nan
    bad[5, [2, 140]] = torch.inf
    bad[7] = -torch.inf
    ids, probs = route(bad, router, top_k)
    want_ids, want_probs = route(good, router, top_k)
    touched = torch.tensor([1, 3, 5, 7], device=ids.device)
    others = torch.tensor([0, 2, 4, 6, 8], device=ids.device)
    assert torch.equal(ids[others], want_ids[others]) and torch.equal(probs[others], want_probs[others])
    assert ((ids >= 0) & (ids < experts)).all() and probs.isfinite().all()
    assert all(row.unique().numel() == top_k for row in ids[touched])
    assert torch.equal(ids.long(), reference_route(bad, router, top_k)[0])


def test_infinity_is_chosen_first_and_nan_last():
    logits = torch.tensor([[0.0, torch.nan, torch.inf, -5.0]], device=DEVICE)
    for route in (router_kernel, route_torch):
        assert route(logits, ROUTERS["topk_softmax"], 4)[0].tolist() == [[2, 0, 3, 1]]


@BOTH
@pytest.mark.parametrize("kind", KINDS)
def test_among_equals_the_lowest_id_goes_first(route, kind):
    router = KINDS[kind]
    ids, _ = route(torch.full((3, 40), 1.5, device=DEVICE), router, 4)
    assert ids.tolist() == [[0, 1, 2, 3]] * 3
    signed_zeros = torch.tensor([[-0.0, 0.0, -0.0, 0.0]], device=DEVICE)
    assert route(signed_zeros, Router(Score.NONE), 4)[0].tolist() == [[0, 1, 2, 3]]


@BOTH
def test_case_10_the_bias_is_added_in_fp32(route):
    bias = on_device(torch.linspace(6.8, 7.1, 256))
    ids, probs = route(torch.zeros(4, 256, device=DEVICE), ROUTERS["sigmoid"], 8, bias)
    assert ids.tolist() == [list(range(255, 247, -1))] * 4
    assert torch.allclose(probs, torch.full_like(probs, 1 / 8))  # the bias chooses, it does not weigh
    rounded = bias.bfloat16().float()
    assert route(torch.zeros(4, 256, device=DEVICE), ROUTERS["sigmoid"], 8, rounded)[0].tolist() != ids.tolist()


@BOTH
@pytest.mark.parametrize("renormalize", [False, True])
def test_case_11_the_scaling_factor_is_applied_once(route, renormalize):
    logits = spread_logits(6, 32)
    ids, probs = route(logits, Router(Score.SIGMOID, renormalize=renormalize), 4)
    scaled_ids, scaled = route(logits, Router(Score.SIGMOID, renormalize=renormalize, scaling_factor=2.5), 4)
    assert torch.equal(ids, scaled_ids) and torch.allclose(scaled, probs * 2.5)
    assert torch.allclose(probs.sum(1), torch.ones(6, device=probs.device)) == renormalize


@BOTH
def test_case_11_softmax_before_and_after_the_choice_differ(route):
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]], device=DEVICE)
    _, before = route(logits, ROUTERS["softmax"], 2)
    _, after = route(logits, ROUTERS["topk_softmax"], 2)
    assert before[0].tolist() == pytest.approx([0.643914, 0.236883], rel=1e-5)
    assert after[0].tolist() == pytest.approx([0.731059, 0.268941], rel=1e-5)


@BOTH
def test_only_the_best_groups_compete(route):
    """Four groups of two: by their best member 0 and 3 win, by the sum of two 1 and 2."""
    logits = torch.tensor([[5.0, -5.0, 3.0, 3.5, 3.2, 3.1, 4.0, -4.0]], device=DEVICE)
    best = Router(Score.NONE, groups=4, top_groups=2, group_score=GroupScore.MAX)
    both = Router(Score.NONE, groups=4, top_groups=2, group_score=GroupScore.TOP2)
    assert route(logits, best, 4)[0].tolist() == [[0, 6, 7, 1]]
    assert route(logits, both, 4)[0].tolist() == [[3, 4, 5, 2]]


@BOTH
def test_weights_that_sum_to_zero_stay_zero(route):
    _, probs = route(torch.full((2, 8), -1000.0, device=DEVICE), Router(Score.SIGMOID, renormalize=True), 2)
    assert (probs == 0).all()


@BOTH
def test_the_score_of_small_logits_keeps_its_digits(route):
    """log(1 + e^x) for x << 0: added to one first, everything below 6e-8 would be lost."""
    logits = torch.tensor([[-30.0, -20.0, -12.0, -4.0, 0.0, 4.0, 20.0, 80.0]], device=DEVICE)
    check(route, logits, Router(Score.SQRT_SOFTPLUS), 8)


@BOTH
@pytest.mark.parametrize(
    "router, experts, top_k, words",
    [
        (ROUTERS["softmax"], 4, 5, "top_k=5 of 4"),
        (ROUTERS["deepseek_v3"], 60, 4, "60 experts do not divide"),
        (ROUTERS["deepseek_v3"], 16, 9, "8 compete"),
        (ROUTERS["deepseek_v3"], 8, 2, "two experts a group"),
    ],
)
def test_what_cannot_be_chosen_is_refused(route, router, experts, top_k, words):
    with pytest.raises(ShapeError, match=words):
        route(torch.zeros(2, experts, device=DEVICE), router, top_k)


def test_the_kernel_names_a_tensor_that_does_not_fit():
    logits = torch.zeros(4, 8, device=DEVICE)
    for arguments, words in (
        (dict(bias=torch.zeros(8, dtype=torch.bfloat16, device=DEVICE)), "bias is torch.bfloat16"),
        (dict(bias=torch.zeros(7, device=DEVICE)), r"bias is torch.float32 \(7,\)"),
        (dict(ids=torch.zeros(4, 2, dtype=torch.int64, device=DEVICE)), "ids is torch.int64"),
        (dict(probs=torch.zeros(4, 3, device=DEVICE)), r"probs is torch.float32 \(4, 3\)"),
    ):
        with pytest.raises(ShapeError, match=words):
            router_kernel(logits, ROUTERS["softmax"], 2, **arguments)
    with pytest.raises(ShapeError, match="must be contiguous"):
        router_kernel(torch.zeros(8, 4, device=DEVICE).T, ROUTERS["softmax"], 2)
