"""Benchmark `layer`: router logits in, y out. Ours by `moe(logits=...)`; a peer by its own router, then its experts.

The logits are fp32: in 16 bits they tie, and then it is a matter of taste which expert is right.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..router import Router, Score
from ..router import router as named_router
from . import runner
from .implementation import Implementation

BENCH = "layer"
DEFAULT = "softmax_renormalize"
#: The router that a problem's model has; any other problem gets DEFAULT.
ROUTERS = {
    "nemotron-3-nano": Router(Score.SIGMOID, renormalize=True, scaling_factor=2.5, epsilon=1e-20),
    "deepseek-v3-tp8": "deepseek_v3",
    "gpt-oss-120b": "topk_softmax",
}


def router_of(problem: str, name: str | None = None) -> Router:
    """The router by that name, or the one of the problem's model.

    >>> router_of("mixtral-8x7b-tp2").renormalize
    True
    """
    return named_router(name if name is not None else ROUTERS.get(problem, DEFAULT))


def run(
    request: runner.Request,
    implementations: Sequence[Implementation],
    setting: runner.Setting,
    router: str | None = None,
) -> Iterator[runner.Outcome]:
    """`router`: a key of expertile.router.ROUTERS, for all problems; None: each model's own."""
    return runner.run(request, implementations, setting, lambda problem: router_of(problem, router))
