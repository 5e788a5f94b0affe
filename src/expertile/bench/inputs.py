"""What a measurement works on: weights, and calls that each have their own x and their own routing.

Sizes     w13 ~ N(0, 1/H), w2 ~ N(0, 1/I), x ~ N(0, 1), biases ~ N(0, 0.1^2): g, u, h and y all stay near 1
fp8       quantised by `prepare`, so every expert, row or block has a scale of its own; static scales reach |x| = 8 and
          |h| = 64, beyond anything these inputs give, so nothing saturates
Rotation  the calls of one measurement differ in x and routing; a layer smaller than four times L2 also gets several
          copies of its weights, one a call in turn: weights come from memory, as in a model with many layers
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ..api import prepare
from ..hardware import Hardware
from ..policy.histogram import ZIPF, check_name
from ..problem import Problem
from ..router import Router
from ..weights import DTYPES, FP8_MAX, Weights
from . import trace
from .floor import weight_bytes

X_REACH, H_REACH = 8.0, 64.0  # largest |x| and |h| that the static scales can hold
BIAS_STD = 0.1
L2_TIMES = 4  # layers with fewer bytes than this many L2 caches get copies
ROUTINGS = ("uniform", "zipf1.2", "hot")


@dataclass(frozen=True, eq=False)
class Call:
    """One call's input: x [T, H], ids [T, k] int32, probs [T, k] fp32, logits [T, E] fp32, and which weights it uses.

    ids and probs are what `topk_softmax` makes of the logits; the layer benchmark gives the logits to its own router.
    """

    x: torch.Tensor
    ids: torch.Tensor
    probs: torch.Tensor
    logits: torch.Tensor
    copy: int = 0

    @property
    def tokens(self) -> int:
        return self.x.shape[0]


@dataclass(frozen=True, eq=False)
class Inputs:
    """What all calls of one problem and quant share.

    problem      its `tokens` are the most that any call will bring
    weights      copies of one layer, with different numbers
    router       None in the `experts` benchmark: ids and probs are given
    router_bias  fp32 [E], where the router takes a correction bias
    """

    problem: Problem
    weights: tuple[Weights, ...]
    router: Router | None = None
    router_bias: torch.Tensor | None = None

    @property
    def device(self) -> torch.device:
        return self.weights[0].device


def copies(problem: Problem, hardware: Hardware, sets: int) -> int:
    """Weights to make, so that a call does not find its own in L2 from the call before."""
    layer = weight_bytes(problem, problem.experts)
    return max(1, min(sets, math.ceil(L2_TIMES * hardware.l2_bytes / layer)))


def make_weights(problem: Problem, device: torch.device, seed: int) -> Weights:
    """Random weights of the problem's shape, quantised as it says."""
    generator = torch.Generator(device).manual_seed(seed)
    experts, hidden, inter = problem.experts, problem.hidden, problem.inter
    w13 = _normal((experts, problem.w13_rows, hidden), hidden**-0.5, problem, generator)
    w2 = _normal((experts, hidden, inter), inter**-0.5, problem, generator)
    fields = {}
    if problem.bias:
        fields["w13_bias"] = _normal((experts, problem.w13_rows), BIAS_STD, problem, generator)
        fields["w2_bias"] = _normal((experts, hidden), BIAS_STD, problem, generator)
    if problem.static_scale:
        fields["x_scale"] = torch.tensor(X_REACH / FP8_MAX, device=device)
        fields["h_scale"] = torch.tensor(H_REACH / FP8_MAX, device=device)
    return prepare(w13, w2, quant=problem.quant, activation=problem.activation, **fields)


def make_calls(problem: Problem, routing: str, inputs: Inputs, sets: int, seed: int) -> list[Call]:
    """`sets` calls of problem.tokens tokens each, with that kind of routing; they take the inputs' weights in turn."""
    calls, device = [], inputs.device
    for number in range(sets):
        generator = torch.Generator(device).manual_seed(_mix(seed, number, problem.tokens))
        x = torch.randn(problem.tokens, problem.hidden, device=device, generator=generator).to(DTYPES[problem.dtype])
        logits = make_logits(problem, routing, generator)
        best, ids = logits.topk(problem.top_k, dim=-1)
        calls.append(Call(x, ids.to(torch.int32), best.softmax(-1), logits, number % len(inputs.weights)))
    return calls


def make_logits(problem: Problem, routing: str, generator: torch.Generator) -> torch.Tensor:
    """fp32 [T, E] whose top_k largest are the experts of each token; those of one token are always distinct.

    uniform  every expert alike
    zipf<a>  drawn without replacement with probability ~ 1 / rank^a; which expert has which rank differs between calls
    hot      one expert has half of all slots, or, where distinct ids forbid that (top_k > 2), one slot of every token
    trace:<file>  as recorded (trace.py), from a token on that differs between calls
    """
    tokens, experts, device = problem.tokens, problem.experts, generator.device
    noise = -torch.empty(tokens, experts, device=device).exponential_(generator=generator).log()  # Gumbel
    order = torch.randperm(experts, device=device, generator=generator)
    if routing.startswith(trace.PREFIX):
        start = int(torch.randint(1 << 30, (), device=device, generator=generator))
        return trace.logits(problem, routing, noise, start)
    found = ZIPF.fullmatch(routing)
    if found:
        return noise - float(found[1]) * (order + 1.0).log()
    if routing == "hot":
        visitors = min(tokens, math.ceil(tokens * problem.top_k / 2))
        column = noise.amin(dim=1) - 1.0
        chosen = torch.randperm(tokens, device=device, generator=generator)[:visitors]
        column[chosen] = noise[chosen].amax(dim=1) + 1.0
        noise[:, order[0]] = column
    elif routing != "uniform":
        check_routing(routing)
    return noise


def check_routing(routing: str) -> None:
    """Raises ShapeError for a routing that `make_logits` does not know."""
    if routing.startswith(trace.PREFIX):
        trace.load(routing.removeprefix(trace.PREFIX))
    else:
        check_name(routing)


def experts_hit(ids: torch.Tensor) -> int:
    return ids.unique().numel()


def _normal(shape, std: float, problem: Problem, generator: torch.Generator) -> torch.Tensor:
    """Drawn one expert at a time, so that no second copy in fp32 is needed."""
    out = torch.empty(shape, device=generator.device, dtype=DTYPES[problem.dtype])
    for part in out:
        part.copy_(torch.randn(shape[1:], device=generator.device, generator=generator).mul_(std))
    return out


def _mix(*numbers: int) -> int:
    """One seed of several: the same arguments give the same inputs on every run."""
    seed = 0
    for number in numbers:
        seed = (seed * 1_000_003 + number + 1) % (1 << 62)
    return seed
