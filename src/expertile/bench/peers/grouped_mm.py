"""torch's grouped matrix product, with a sort before and a weighted sum behind: what plain torch offers today."""

from __future__ import annotations

import torch

from ...problem import Activation, DType, Gate, Problem, Quant
from ...router import Router, Score
from ..implementation import Implementation, Run
from ..inputs import Call, Inputs


class GroupedMM(Implementation):
    key = "torch-grouped-mm"

    @property
    def name(self) -> str:
        return self.key

    def available(self, device: torch.device) -> list[str]:
        return [] if hasattr(torch, "_grouped_mm") else [f"torch {torch.__version__} has no grouped matrix product"]

    def fits(self, problem: Problem, router: Router | None) -> list[str]:
        reasons = []
        if problem.quant is not Quant.NONE or problem.dtype is not DType.BF16:
            reasons.append(f"takes bf16, not {problem.label}")
        if problem.hidden % 8 or problem.inter % 8:
            reasons.append(f"needs rows of 16 bytes: H={problem.hidden}, I={problem.inter} must be multiples of 8")
        if router is not None and router.groups > 1:
            reasons.append("no plain torch for a grouped router here")
        return reasons

    def prepare(self, inputs: Inputs) -> Run:
        def run(call: Call) -> torch.Tensor:
            ids, probs = call.ids, call.probs
            if inputs.router is not None:
                ids, probs = route(call.logits, inputs.router, inputs.problem.top_k, inputs.router_bias)
            return experts(call.x, ids, probs, inputs.weights[call.copy])

        return run


def experts(x: torch.Tensor, ids: torch.Tensor, probs: torch.Tensor, weights) -> torch.Tensor:
    """y [T, H] of x [T, H]: slots sorted by expert, two grouped products, an indexed sum."""
    top_k = ids.shape[1]
    expert, slot = torch.sort(ids.flatten())
    token = slot // top_k
    count = torch.zeros(weights.experts, device=x.device, dtype=torch.int32)
    count.scatter_add_(0, expert.long(), torch.ones_like(expert))
    ends = torch.cumsum(count, 0, dtype=torch.int32)
    h = torch._grouped_mm(x[token], weights.w13.transpose(1, 2), offs=ends)
    if weights.w13_bias is not None:
        h = h + weights.w13_bias[expert.long()]
    y = torch._grouped_mm(activate(h, weights.activation), weights.w2.transpose(1, 2), offs=ends)
    if weights.w2_bias is not None:
        y = y + weights.w2_bias[expert.long()]
    y = y * probs.flatten()[slot].unsqueeze(-1)
    return torch.zeros(x.shape, device=x.device, dtype=torch.float32).index_add_(0, token, y.float()).to(x.dtype)


def activate(h: torch.Tensor, activation: Activation) -> torch.Tensor:
    """h [R, 2I] (or [R, I] without a gate) -> [R, I], in h's dtype."""
    gate = {
        Gate.SILU: lambda g: g * torch.sigmoid(activation.alpha * g),
        Gate.GELU_TANH: lambda g: torch.nn.functional.gelu(g, approximate="tanh"),
        Gate.GELU_ERF: torch.nn.functional.gelu,
        Gate.RELU2: lambda g: torch.relu(g).square(),
    }[activation.gate]
    if activation.gate is Gate.SILU and activation.alpha == 1.0:
        gate = torch.nn.functional.silu
    if not activation.gated:
        return gate(h)
    g, u = (h[:, 0::2], h[:, 1::2]) if activation.interleaved else h.chunk(2, dim=-1)
    if activation.limit is not None:
        g, u = g.clamp(max=activation.limit), u.clamp(-activation.limit, activation.limit)
    return gate(g) * (u + activation.beta if activation.beta else u)


def route(logits: torch.Tensor, router: Router, top_k: int, bias: torch.Tensor | None):
    """(ids, probs) by torch's own operations, for routers without groups."""
    score = {
        Score.SOFTMAX: lambda z: z.softmax(-1),
        Score.SIGMOID: torch.sigmoid,
        Score.SQRT_SOFTPLUS: lambda z: torch.nn.functional.softplus(z).sqrt(),
        Score.NONE: lambda z: z,
    }[router.score](logits.float())
    ids = (score if bias is None else score + bias).topk(top_k, dim=-1).indices
    probs = score.gather(1, ids)
    if router.softmax_after:
        probs = probs.softmax(-1)
    if router.renormalize:
        probs = probs / (probs.sum(-1, keepdim=True) + router.epsilon)
    return ids.to(torch.int32), probs * router.scaling_factor
