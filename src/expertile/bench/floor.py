"""The time no implementation can beat: each weight that is needed read once, each product done once."""

from __future__ import annotations

from ..hardware import Hardware
from ..problem import Problem, Quant


def expert_elements(problem: Problem) -> int:
    """Weights of one expert."""
    return (problem.w13_rows + problem.inter) * problem.hidden


def weight_bytes(problem: Problem, experts_hit: float) -> float:
    """Bytes of the weights of that many experts. Scales and biases, below one part in a hundred, are left out."""
    item = problem.dtype.bytes if problem.quant is Quant.NONE else 1
    return experts_hit * expert_elements(problem) * item


def bytes_moved(problem: Problem, experts_hit: float) -> float:
    """The weights of the experts that got a token, x read and y written."""
    return weight_bytes(problem, experts_hit) + 2 * problem.tokens * problem.hidden * problem.dtype.bytes


def flops(problem: Problem) -> float:
    """Multiplications and additions of both products."""
    return 2.0 * problem.rows * expert_elements(problem)


def floor_us(problem: Problem, experts_hit: float, hardware: Hardware) -> float:
    """max(bytes / memory rate, flops / matrix rate), in microseconds. `experts_hit` as counted in the routing.

    >>> from expertile.hardware import H200
    >>> from expertile.problem import named_problem
    >>> round(floor_us(named_problem("qwen3-30b-a3b", tokens=1), 8, H200), 1)
    17.2
    """
    rate = hardware.flops_per_s_16 if problem.quant is Quant.NONE else hardware.flops_per_s_8
    return 1e6 * max(bytes_moved(problem, experts_hit) / hardware.hbm_bytes_per_s, flops(problem) / rate)
