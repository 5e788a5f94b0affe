"""From router logits to top-k ids and weights: the kinds of router in use, as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from .errors import ShapeError, check_count, check_flag, check_number, member


class Score(str, Enum):
    """score(logit), in fp32. SOFTMAX is over all experts."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"
    SQRT_SOFTPLUS = "sqrt_softplus"
    NONE = "none"  # the logit itself


class GroupScore(str, Enum):
    """What a group of experts is chosen by: its best member (DeepSeek-V2) or the sum of its best two (DeepSeek-V3)."""

    MAX = "max"
    TOP2 = "top2"


@dataclass(frozen=True)
class Router:
    """ids = the top_k experts by score(logits) + bias, lowest id first among equals; probs = their scores without bias.

    softmax_after   probs = softmax over the chosen scores (top-k, then softmax)
    renormalize     probs are divided by their sum (plus `epsilon`)
    groups, top_groups, group_score   only experts of the best top_groups groups of E / groups neighbours compete
    scaling_factor  multiplies probs, last and once
    Logits: +inf and -inf count as the largest and smallest finite fp32, NaN as the smallest: ids are always distinct
    and in [0, E), probs always finite.

    >>> ROUTERS["deepseek_v3"].score
    <Score.SIGMOID: 'sigmoid'>
    """

    score: Score = Score.SOFTMAX
    softmax_after: bool = False
    renormalize: bool = False
    groups: int = 1
    top_groups: int = 1
    group_score: GroupScore = GroupScore.MAX
    scaling_factor: float = 1.0
    epsilon: float = 0.0

    def __post_init__(self):
        object.__setattr__(self, "score", member(Score, self.score, "score"))
        object.__setattr__(self, "group_score", member(GroupScore, self.group_score, "group_score"))
        for name in ("softmax_after", "renormalize"):
            check_flag(getattr(self, name), f"router {name}")
        for name in ("groups", "top_groups"):
            check_count(getattr(self, name), f"router {name}")
        for name in ("scaling_factor", "epsilon"):
            check_number(getattr(self, name), f"router {name}")
        if self.epsilon < 0:
            raise ShapeError(f"router epsilon={self.epsilon!r}: it keeps a sum from being zero, give at least 0")
        if self.top_groups > self.groups:
            raise ShapeError(f"top_groups={self.top_groups} must be between 1 and groups={self.groups}")
        if self.softmax_after and self.renormalize:
            raise ShapeError("softmax_after already sums to one: leave renormalize off")

    def check(self, experts: int, top_k: int) -> None:
        """Raises ShapeError when it cannot choose top_k of that many experts."""
        check_count(top_k, "top_k")
        if experts % self.groups:
            raise ShapeError(f"{experts} experts do not divide into groups={self.groups}")
        size = experts // self.groups
        if top_k > size * self.top_groups:
            raise ShapeError(
                f"top_k={top_k} of {experts} experts, of which {size * self.top_groups} compete "
                f"({self.top_groups} of {self.groups} groups)"
            )
        if self.group_score is GroupScore.TOP2 and self.groups > 1 and size < 2:
            raise ShapeError(f"group_score=top2 needs two experts a group, {experts} / {self.groups} is {size}")


#: Routers by the names users give: `moe(..., logits=..., router="sigmoid")`.
ROUTERS = {
    "softmax": Router(),
    "softmax_renormalize": Router(renormalize=True),  # Mixtral, Qwen3
    "topk_softmax": Router(score=Score.NONE, softmax_after=True),  # gpt-oss
    "sigmoid": Router(score=Score.SIGMOID, renormalize=True, epsilon=1e-20),
    "deepseek_v2": Router(groups=8, top_groups=3, scaling_factor=16.0),
    "deepseek_v3": Router(
        Score.SIGMOID,
        False,
        True,
        groups=8,
        top_groups=4,
        group_score=GroupScore.TOP2,
        scaling_factor=2.5,
        epsilon=1e-20,
    ),
    "deepseek_v4": Router(Score.SQRT_SOFTPLUS, False, True, scaling_factor=2.5, epsilon=1e-20),
    "llama4": Router(score=Score.SIGMOID),  # top_k = 1, with weight_on_input
}


def router(name: str | Router) -> Router:
    if isinstance(name, Router):
        return name
    if not isinstance(name, str) or name not in ROUTERS:
        raise ShapeError(f"router={name!r} is not known: use one of {', '.join(ROUTERS)} or a Router")
    return ROUTERS[name]
