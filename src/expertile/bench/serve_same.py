"""Whether engines give the same answers: greedy tokens, their log-probabilities, and the loss on a text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

Continuation = Sequence[tuple[int, float]]  # (token, log-probability)


@dataclass(frozen=True)
class Difference:
    """How far two engines' answers to the same prompts are apart.

    same         prompts whose greedy continuations are the same tokens to the end
    prompts      of how many
    agreed       mean share of a continuation before the first other token
    largest      difference of log-probabilities, over the tokens before that
    """

    same: int
    prompts: int
    agreed: float
    largest: float


def difference(a: Sequence[Continuation], b: Sequence[Continuation]) -> Difference:
    """
    >>> difference([[(5, -0.1), (6, -0.5)]], [[(5, -0.3), (7, -0.6)]])
    Difference(same=0, prompts=1, agreed=0.5, largest=0.2)
    """
    shares, largest = [], 0.0
    for first, second in zip(a, b, strict=True):
        shared = 0
        for (token, chance), (other, other_chance) in zip(first, second, strict=True):
            if token != other:
                break
            shared += 1
            largest = max(largest, abs(chance - other_chance))
        shares.append(shared / len(first))
    return Difference(sum(share == 1.0 for share in shares), len(shares), fmean(shares), round(largest, 6))


def loss(scores: Sequence[Sequence[float]]) -> float:
    """Mean negative log-probability of a token."""
    return -fmean(chance for text in scores for chance in text)


def apart(a: Sequence[Sequence[float]], b: Sequence[Sequence[float]]) -> float:
    """Root mean square of how far the log-probabilities of the same tokens of the same texts are apart.

    >>> apart([[-1.0, -2.0]], [[-1.0, -2.2]])
    0.141421
    """
    pairs = (pair for first, second in zip(a, b, strict=True) for pair in zip(first, second, strict=True))
    return round(fmean((one - other) ** 2 for one, other in pairs) ** 0.5, 6)


@dataclass(frozen=True)
class Verdict:
    """Stock against itself (in batches of another size; without torch.compile and CUDA graphs) and ours against stock.

    stock, eager, ours         greedy continuations: other batches, stock run eagerly, ours, each against stock
    eager_apart, ours_apart    log-probabilities of a text's tokens, see `apart`
    """

    stock: Difference
    eager: Difference
    ours: Difference
    stock_loss: float
    ours_loss: float
    eager_apart: float
    ours_apart: float
    loss_bar: float = 0.001

    @property
    def loss_change(self) -> float:
        return self.ours_loss / self.stock_loss - 1.0

    @property
    def faults(self) -> list[str]:
        """What is further apart than stock is from itself, by more than a tenth (a continuation parts where two tokens
        are nearly equally likely); empty when nothing is.
        """
        found = []
        agreed = min(self.stock.agreed, self.eager.agreed)
        if self.ours.agreed < agreed - 0.1:
            found.append(f"continuations agree over {self.ours.agreed:.2f} of their length, stock's over {agreed:.2f}")
        if self.ours_apart > self.eager_apart * 1.1:
            found.append(f"log-probabilities are {self.ours_apart} apart, stock's from its own {self.eager_apart}")
        if abs(self.loss_change) > self.loss_bar:
            found.append(f"the loss is {self.ours_loss:.5f}, stock's {self.stock_loss:.5f}: {self.loss_change:+.3%}")
        return found
