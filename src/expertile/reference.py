"""The obvious answer to every op, in float64: what kernels and runtime are judged by, so it shares no code with them.

Numbers stored as fp8 are taken as exactly what they are. Activations are quantised where the problem says so, with
their scales in fp32 as on the device; everything else is float64. What belongs to experts without a token is not read.
"""

from __future__ import annotations

import torch

from .problem import BLOCK, Activation, Gate, Quant
from .router import GroupScore, Router, Score
from .weights import FP8, FP8_MAX, Weights

F64 = torch.float64
LARGEST = torch.finfo(torch.float32).max


def quantize(x, quant: Quant, scale=None):
    """q = round_e4m3(clamp(x / scale, -448, 448)), scale = max(absmax, 1e-10) / 448.

    Shapes    x [R, W] -> q [R, W], scale [R, 1], or [R, ceil(W / 128)] for fp8_block
    Dtypes    x any floating, read as fp32; q e4m3; scale fp32
    Scale     one value for all of x when given (static), and then returned as it is
    """
    x = x.float()
    if scale is None:
        width = BLOCK if quant is Quant.FP8_BLOCK else max(x.shape[1], 1)
        peaks = [part.abs().amax(1, keepdim=True) for part in x.split(width, 1)]
        scale = torch.cat(peaks, 1).clamp(min=1e-10) / FP8_MAX
    wide = _columns(scale, x.shape[1]) if scale.ndim == 2 else scale
    return (x / wide).clamp(-FP8_MAX, FP8_MAX).to(FP8), scale


def dequantize(q, scale):
    """q * scale of `quantize`, in float64."""
    wide = _columns(scale, q.shape[1]) if scale.ndim == 2 else scale
    return q.to(F64) * wide.to(F64)


def dequantize_weights(weights: Weights, experts=None):
    """w13 [E, N, H] and w2 [E, H, I] in float64, of the listed experts only when given."""
    if experts is None:
        experts = torch.arange(weights.experts, device=weights.device)
    w13, w2 = weights.w13[experts].to(F64), weights.w2[experts].to(F64)
    if weights.quant is Quant.NONE:
        return w13, w2
    s13, s2 = weights.w13_scale[experts].to(F64), weights.w2_scale[experts].to(F64)
    if weights.quant is Quant.FP8_TENSOR:
        return w13 * s13[:, None, None], w2 * s2[:, None, None]
    if weights.quant is Quant.FP8_CHANNEL:
        return w13 * s13[:, :, None], w2 * s2[:, :, None]
    out_rows = torch.arange(weights.hidden, device=weights.device) // BLOCK
    s13, s2 = s13[:, _w13_block_rows(weights)], s2[:, out_rows]
    return w13 * _columns(s13, weights.hidden), w2 * _columns(s2, weights.inter)


def _w13_block_rows(weights: Weights):
    """The row of w13's scale table for each row of w13."""
    row = torch.arange(weights.w13.shape[1], device=weights.device)
    if not weights.split_scale:
        return row // BLOCK
    if weights.activation.interleaved:
        up, column = row % 2, row // 2
    else:
        up, column = row // weights.inter, row % weights.inter
    return up * -(-weights.inter // BLOCK) + column // BLOCK


def _columns(scale, width: int):
    """One scale per `ceil(width / groups)`-or-128 columns -> one per column. A single one serves the whole width."""
    if scale.shape[-1] == 1:
        return scale
    return scale.repeat_interleave(BLOCK, -1)[..., :width]


def route(logits, router: Router, top_k: int, bias=None):
    """ids, probs of `router` (see Router): ids int64 [T, top_k], probs float64 [T, top_k].

    Scores are computed in float64; experts are chosen by the score rounded to fp32, plus the bias, in fp32: two logits
    whose fp32 scores are equal are equal, and the lower id goes first.
    """
    router.check(logits.shape[1], top_k)
    scores = _scores(_finite(logits), router.score)
    choice = scores.float()
    if bias is not None:
        choice = _finite((choice + bias.float()).to(F64)).float()
    if router.groups > 1:
        choice = _only_best_groups(choice, router)
    ids = choice.sort(dim=1, descending=True, stable=True).indices[:, :top_k]
    probs = scores.gather(1, ids)
    if router.softmax_after:
        probs = probs.softmax(1)
    if router.renormalize:
        total = probs.sum(1, keepdim=True) + router.epsilon
        probs = probs / torch.where(total == 0, 1.0, total)
    return ids, probs * router.scaling_factor


def _finite(logits):
    """float64, with +-inf as the largest fp32 and NaN as the smallest."""
    return logits.to(F64).nan_to_num(nan=-LARGEST).clamp(-LARGEST, LARGEST)


def _scores(logits, score: Score):
    if score is Score.SOFTMAX:
        return logits.softmax(1)
    if score is Score.SIGMOID:
        return logits.sigmoid()
    if score is Score.SQRT_SOFTPLUS:
        return (logits.clamp(min=0) + (-logits.abs()).exp().log1p()).sqrt()
    return logits


def _only_best_groups(choice, router: Router):
    tokens, experts = choice.shape
    groups = choice.view(tokens, router.groups, experts // router.groups)
    if router.group_score is GroupScore.TOP2:
        score = groups.topk(2, dim=2).values.sum(2).clamp(-LARGEST, LARGEST)
    else:
        score = groups.amax(2)
    best = score.sort(dim=1, descending=True, stable=True).indices[:, : router.top_groups]
    keep = torch.zeros_like(score, dtype=torch.bool).scatter_(1, best, True)
    return groups.masked_fill(~keep[:, :, None], -torch.inf).view(tokens, experts)


def activate(gate_up, activation: Activation):
    """h of `activation` (see Activation): gate_up [R, 2I] -> [R, I], or [R, I] -> [R, I] without a gate; float64."""
    gate_up = gate_up.to(F64)
    if not activation.gated:
        return _gate(gate_up, activation)
    if activation.interleaved:
        gate, up = gate_up[:, ::2], gate_up[:, 1::2]
    else:
        gate, up = gate_up.chunk(2, 1)
    if activation.limit is not None:
        gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
    return _gate(gate, activation) * (up + activation.beta)


def _gate(g, activation: Activation):
    if activation.gate is Gate.SILU:
        return g * torch.sigmoid(activation.alpha * g)
    if activation.gate is Gate.GELU_TANH:
        return 0.5 * g * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (g + 0.044715 * g**3)))
    if activation.gate is Gate.GELU_ERF:
        return 0.5 * g * (1 + torch.erf(g / 2**0.5))
    return g.clamp(min=0) ** 2


def grouped_gemm(x, w, ids):
    """y[r] = x[r] @ w[ids[r]].T, and 0 where ids[r] names no expert; float64.

    Shapes    x [R, K] | w [E, N, K] | ids [R] -> y [R, N]
    """
    y = torch.zeros(x.shape[0], w.shape[1], dtype=F64, device=x.device)
    for expert in ids.unique().tolist():
        if 0 <= expert < w.shape[0]:
            rows = ids == expert
            y[rows] = x[rows].to(F64) @ w[expert].to(F64).T
    return y


def local_ids(ids, experts: int, expert_map=None):
    """ids as int64, by expert_map if given; -1 where a slot is skipped."""
    ids = ids.long()
    if expert_map is not None:
        known = (ids >= 0) & (ids < expert_map.numel())
        ids = torch.where(known, expert_map.long()[ids * known], -1)
    return torch.where((ids >= 0) & (ids < experts), ids, -1)


def combine(y, ids, probs=None, scaling_factor: float = 1.0):
    """out[t] = scaling_factor * sum over j of probs[t, j] * y[t * top_k + j] without skipped slots (ids < 0); float64.

    Shapes    y [T * top_k, H] | ids, probs [T, top_k] -> out [T, H]; probs None: every weight is one
    """
    tokens, top_k = ids.shape
    y = y.to(F64).view(tokens, top_k, y.shape[-1])
    if probs is not None:
        y = y * probs.to(F64)[:, :, None]
    return scaling_factor * y.masked_fill((ids < 0)[:, :, None], 0.0).sum(1)


def moe(x, weights: Weights, ids, probs, *, expert_map=None, weight_on_input=False, scaling_factor=1.0, round_h=False):
    """out[t] = scaling_factor * sum over j of probs[t, j] * (activate(x[t] @ w13[e].T + b13[e]) @ w2[e].T + b2[e])

    Shapes    x [T, H] | ids, probs [T, top_k] -> out [T, H] float64; e = ids[t, j], skipped when it is no expert here
    weight_on_input   x @ w13.T is multiplied by probs instead (as if x were: the product is linear), the sum is not
    round_h   h is rounded to the weights' dtype before it is quantised, as where quantisation is a pass of its own
    """
    ids = local_ids(ids, weights.experts, expert_map)
    hit = ids[ids >= 0].unique()
    w13, w2 = dequantize_weights(weights, hit)
    slots = torch.where(ids >= 0, torch.searchsorted(hit, ids), -1).reshape(-1)
    used = slots >= 0

    rows = _as_operand(x, weights.quant, weights.x_scale).repeat_interleave(ids.shape[1], 0)
    gate_up = grouped_gemm(rows, w13, slots)
    if weight_on_input:
        gate_up = gate_up * probs.to(F64).reshape(-1, 1)
    if weights.w13_bias is not None:
        gate_up[used] += weights.w13_bias[hit][slots[used]].to(F64)
    h = activate(gate_up, weights.activation)
    if round_h:
        h = h.to(x.dtype)
    y = grouped_gemm(_as_operand(h, weights.quant, weights.h_scale), w2, slots)
    if weights.w2_bias is not None:
        y[used] += weights.w2_bias[hit][slots[used]].to(F64)
    return combine(y, ids, None if weight_on_input else probs, scaling_factor)


def _as_operand(x, quant: Quant, scale):
    """x in float64 after the rounding that `quant` implies."""
    return x.to(F64) if quant is Quant.NONE else dequantize(*quantize(x, quant, scale))
