"""Is the answer right? Every implementation is asked before it is timed; a wrong one gets no row.

The judge is float64, with the weights as they are stored (dequantised, exact) and x and h not rounded at all. So `err`
says how far an implementation is from what the layer means, and nobody's own choice of rounding is the norm.

A row's error is ||y - want|| / ||want||. Both bars must hold over the tokens looked at, some of every call:
            all rows (rms)   any row   why
    16 bit  0.01             0.02      rounding h, the slots and y to bf16 gives 0.004, at most 0.005 in a row
    fp8     0.06             0.15      e4m3 has 3 mantissa bits: x and h in fp8 give 0.037 to 0.047 whatever the scales'
                                       granularity, also when rounded up to powers of two (DeepGEMM); single rows of
                                       a layer 256 wide reach 0.06, of a toy 0.115; one slot of eight lost: 0.35
They say "computes this layer", for peers that round in other places. Ours is held to tighter ones by the tests.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .. import reference
from ..problem import DType, Quant
from ..weights import Weights
from .inputs import Call, Inputs


@dataclass(frozen=True)
class Bar:
    """The most that all rows together (root mean square) and any one of them may be off."""

    rms: float
    row: float


SIXTEEN_BIT = Bar(rms=0.01, row=0.02)
BARS = {DType.FP32: Bar(rms=1e-5, row=1e-4), DType.BF16: SIXTEEN_BIT, DType.FP16: SIXTEEN_BIT}
FP8_BAR = Bar(rms=0.06, row=0.15)
SAMPLE = 64  # tokens that are checked, over all calls


def bar(weights: Weights) -> Bar:
    return BARS[weights.dtype] if weights.quant is Quant.NONE else FP8_BAR


def red(errors: torch.Tensor, most: Bar) -> str | None:
    """What is wrong with those row errors; None when they are within the bar."""
    rms, worst = errors.square().mean().sqrt().item(), errors.max().item()
    if rms <= most.rms and worst <= most.row:
        return None
    return (
        f"relative error {rms:.3g} over all rows, {worst:.3g} in the worst; the bars are {most.rms:g} and {most.row:g}"
    )


def sample(tokens: int, most: int) -> torch.Tensor:
    """Up to `most` tokens, evenly spread, the first and the last among them.

    >>> sample(5, 3).tolist(), sample(2, 3).tolist()
    ([0, 2, 4], [0, 1])
    """
    return torch.linspace(0, tokens - 1, min(tokens, most)).round().long()


def routing(inputs: Inputs, call: Call, rows: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, probs) that the call means for those tokens (all by default): as given, or by the router in float64."""
    if inputs.router is None:
        return (call.ids, call.probs) if rows is None else (call.ids[rows], call.probs[rows])
    logits = call.logits if rows is None else call.logits[rows]
    return reference.route(logits, inputs.router, inputs.problem.top_k, bias=inputs.router_bias)


def expected(inputs: Inputs, call: Call, rows: torch.Tensor) -> torch.Tensor:
    """float64 [n, H]: the right answer for the tokens `rows`."""
    ids, probs = routing(inputs, call, rows)
    used, local = ids.unique(return_inverse=True)
    weights = dequantized(inputs.weights[call.copy], used)
    return reference.moe(call.x[rows], weights, local.view_as(ids), probs)


def row_errors(y: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """||y - want|| / ||want|| of each row, infinite where y is not finite. One norm of all would forgive a lost row."""
    errors = (y.double() - want).norm(dim=1) / want.norm(dim=1).clamp(min=1e-30)
    return errors.nan_to_num(nan=float("inf"), posinf=float("inf"))


def dequantized(weights: Weights, experts: torch.Tensor) -> Weights:
    """The experts of that list with the very values they stand for, in float64: a layer that quantises nothing."""
    w13, w2 = reference.dequantize_weights(weights, experts)
    biases = {
        name: bias[experts].double() for name in ("w13_bias", "w2_bias") if (bias := getattr(weights, name)) is not None
    }
    return Weights(w13, w2, DType.FP32, Quant.NONE, weights.activation, **biases)
