"""Tokens are drawn as the distribution says, within top_p and top_k, and the same again with the same seed."""

import math

import pytest
import torch

from expertile.serve.sampling import Sampler, Sampling

PROBS = torch.tensor([0.5, 0.25, 0.15, 0.1])


def drawn(sampling: Sampling, times: int = 4000, logits=None) -> torch.Tensor:
    sampler = Sampler(sampling)
    logits = PROBS.log() if logits is None else logits
    return torch.bincount(torch.tensor([sampler.pick(logits) for _ in range(times)]), minlength=4) / times


def close(found, probs, times=4000):
    bound = [5 * math.sqrt(p * (1 - p) / times) + 1e-9 for p in probs]
    return all(abs(f - p) <= b for f, p, b in zip(found.tolist(), probs, bound, strict=True))


@pytest.mark.parametrize(
    "sampling, probs",
    [
        (dict(), [0.5, 0.25, 0.15, 0.1]),
        (dict(temperature=0.0), [1, 0, 0, 0]),
        (dict(temperature=0.5), [p * p / 0.345 for p in (0.5, 0.25, 0.15, 0.1)]),
        (dict(top_p=0.6), [2 / 3, 1 / 3, 0, 0]),
        (dict(top_p=0.5), [1, 0, 0, 0]),
        (dict(top_p=1e-9), [1, 0, 0, 0]),
        (dict(top_k=1), [1, 0, 0, 0]),
        (dict(top_k=3), [0.5 / 0.9, 0.25 / 0.9, 0.15 / 0.9, 0]),
        (dict(top_k=3, top_p=0.6), [2 / 3, 1 / 3, 0, 0]),
    ],
)
def test_frequencies(sampling, probs):
    assert close(drawn(Sampling(seed=1, **sampling)), probs)


def test_a_seed_repeats_itself_and_others_differ():
    logits = torch.zeros(1000)
    draw = lambda seed: (
        [Sampler(Sampling(seed=seed)).pick(logits) for _ in range(1)]
        + [token for sampler in [Sampler(Sampling(seed=seed))] for token in (sampler.pick(logits) for _ in range(20))]
    )
    assert draw(7) == draw(7) != draw(8)
    assert draw(-1) == draw(-1)
    assert draw(None) != draw(None)


def test_logits_that_are_no_numbers_raise():
    with pytest.raises(ValueError, match="not numbers"):
        Sampler(Sampling()).pick(torch.tensor([1.0, float("nan")]))
    assert Sampler(Sampling()).pick(torch.tensor([float("-inf"), 0.0])) == 1


@pytest.mark.parametrize("temperature", [1e-310, 5e-324, 1e-45, 1e-8, 0.99e-5])
def test_next_to_zero_is_as_zero_with_equals_too(temperature):
    logits = torch.tensor([float("-inf"), -3.0, 7.0, 7.0, 6.999])
    assert {Sampler(Sampling(temperature=temperature, seed=seed)).pick(logits) for seed in range(20)} == {2}


@pytest.mark.parametrize("temperature", [1e-5, 1e-4])
def test_the_coldest_temperatures_draw_among_equals_only(temperature):
    logits = torch.tensor([-3.0, 7.0, 7.0, 6.99])
    assert {Sampler(Sampling(temperature=temperature, seed=seed)).pick(logits) for seed in range(40)} == {1, 2}
