"""Prompts with a wanted number of tokens: token ids, or words as many as the server's own count says."""

from __future__ import annotations

import random
from dataclasses import dataclass

_TEXT = """
time people way water day part place work year thing name man world house page country answer school study
plant food sun state city tree farm story point line side hand life night paper group music book letter mile
river car feet care second money voice power town color figure field rest order ship area half rock fire
problem piece king space heat ground table open green early light stand start slow sing sleep walk young dark
hard clear deep strong full round warm cold free small
"""
WORDS = _TEXT.split()
FIRST_ID = 10  # below lie special tokens of most vocabularies


@dataclass(frozen=True)
class Words:
    """Text: a prompt of n words has about `per_word` n + `fixed` tokens, as the server counts them."""

    per_word: float = 1.0
    fixed: float = 0.0

    def prompt(self, tokens: int, chance: random.Random) -> str:
        return words(max(1, round((tokens - self.fixed) / self.per_word)), chance)


@dataclass(frozen=True)
class Ids:
    """Token ids, drawn alike from a vocabulary of that size; exact, and only for /v1/completions."""

    vocabulary: int

    def prompt(self, tokens: int, chance: random.Random) -> list[int]:
        return [chance.randrange(min(FIRST_ID, self.vocabulary - 1), self.vocabulary) for _ in range(tokens)]


def words(count: int, chance: random.Random) -> str:
    """Text that no cache of prefixes knows: the order is drawn."""
    return " ".join(chance.choices(WORDS, k=count))


def fitted(counts: tuple[int, int], tokens: tuple[int, int]) -> Words:
    """The line through two prompts of that many words, which the server counted as that many tokens.

    >>> fitted((16, 128), (20, 132))
    Words(per_word=1.0, fixed=4.0)
    """
    per_word = (tokens[1] - tokens[0]) / (counts[1] - counts[0])
    if per_word <= 0:
        return Words()
    return Words(per_word, tokens[0] - per_word * counts[0])
