"""Logits -> next tokens, each row by the rules of its own request."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

import torch

LARGEST_SEED = 2**63 - 1
COLDEST = 1e-5  # temperatures below leave the likeliest token alone, as in vLLM; to divide by 1e-310 gives no number


@dataclass(frozen=True)
class Sampling:
    """temperature below COLDEST takes the likeliest token; top_p and top_k (0: all) keep likely ones; seed None: any"""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None


class Sampler:
    """Draws the tokens of one sequence. Its random numbers are its own: neighbours in a batch do not shift them."""

    def __init__(self, sampling: Sampling):
        self.sampling = sampling
        seed = secrets.randbelow(LARGEST_SEED) if sampling.seed is None else sampling.seed
        self._generator = torch.Generator().manual_seed(seed & LARGEST_SEED)

    def pick(self, logits: torch.Tensor) -> int:
        """A token id by logits [vocabulary], fp32, on any device. ValueError when they are no numbers."""
        if not logits.isfinite().any() or logits.isnan().any():
            raise ValueError("the model's logits are not numbers")
        if self.sampling.temperature < COLDEST:
            return int(logits.argmax())
        probs = _kept(torch.softmax(logits.cpu().double() / self.sampling.temperature, -1), self.sampling)
        race = torch.empty(len(probs), dtype=torch.float64).exponential_(generator=self._generator)
        return int((probs / race).argmax())  # as likely as probs says


def _kept(probs: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """probs, with 0 where top_k and top_p leave a token out; the likeliest always stays."""
    if sampling.top_k == 0 and sampling.top_p >= 1:
        return probs
    ranked, order = probs.sort(descending=True)
    out = ranked.cumsum(0) - ranked >= sampling.top_p
    if sampling.top_k:
        out[sampling.top_k :] = True
    out[0] = False
    return probs.index_fill(0, order[out], 0.0)
