"""Router logits to ids and probs with torch's own ops, on any device: see `router.Router` for the semantics."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..router import GroupScore, Router, Score

LARGEST = torch.finfo(torch.float32).max


@torch.no_grad()
def route_torch(logits, router: Router, top_k: int, bias=None):
    """ids = the top_k experts by score(logits) + bias; probs = their scores, weighted as `router` says.

    Shapes    logits [T, E] | bias [E] -> ids, probs [T, top_k]
    Dtypes    logits any floating; ids int32; probs fp32; all arithmetic fp32
    Raises    ShapeError when the router cannot choose top_k of E experts
    """
    router.check(logits.shape[1], top_k)
    scores = _scores(_finite(logits.float()), router.score)
    choice = scores if bias is None else _finite(scores + bias.float())
    if router.groups > 1:
        choice = choice.masked_fill(~_best_groups(choice, router), -torch.inf)
    # topk promises no order among equals, a stable sort does
    ids = choice.sort(dim=1, descending=True, stable=True).indices[:, :top_k]
    probs = scores.gather(1, ids)
    if router.softmax_after:
        probs = probs.softmax(1)
    if router.renormalize:
        total = probs.sum(1, keepdim=True) + router.epsilon
        probs = probs / torch.where(total == 0, 1.0, total)
    return ids.int(), probs * router.scaling_factor


def _finite(values):
    return values.nan_to_num(nan=-LARGEST, posinf=LARGEST, neginf=-LARGEST)


def _scores(logits, score: Score):
    if score is Score.SOFTMAX:
        return logits.softmax(1)
    if score is Score.SIGMOID:
        return logits.sigmoid()
    if score is Score.SQRT_SOFTPLUS:
        return F.softplus(logits).sqrt()
    return logits


def _best_groups(choice, router: Router):
    """bool [T, E]: whether the expert's group is one of the best top_groups, the lower group first among equals."""
    tokens, experts = choice.shape
    groups = choice.view(tokens, router.groups, experts // router.groups)
    score = groups.amax(2) if router.group_score is GroupScore.MAX else _finite(groups.topk(2, dim=2).values.sum(2))
    best = score.sort(dim=1, descending=True, stable=True).indices[:, : router.top_groups]
    keep = torch.zeros_like(score, dtype=torch.bool).scatter_(1, best, True)
    return keep[:, :, None].expand_as(groups).reshape(tokens, experts)
