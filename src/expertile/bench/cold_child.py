"""One process of `expertile bench cold`: nothing was compiled before it. Prints what it found as a line of JSON."""

from __future__ import annotations

import json
import sys
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch

from .. import guard
from ..api import moe
from ..guard import cache
from ..problem import named_problem
from ..runtime.device import detect
from ..runtime.measure import pass_ms
from ..runtime.workspace import Workspace
from ..warming import variants, warm
from .cold import PACKED, SPECIALISED, WARM, stream
from .inputs import Inputs, make_calls, make_weights
from .specialised import specialise


def main(ask: dict) -> dict:
    device = torch.device(ask["device"])
    hardware, quant = detect(device), ask["quant"]
    problem = named_problem(ask["problem"], ask["most"], quant, static_scale=quant == "fp8_tensor")
    if ask["impl"] == SPECIALISED:
        specialise()
    if ask["impl"] == PACKED:
        cache.unpack(ask["archive"])
    weights = make_weights(problem, device, 0)
    call = make_calls(problem, "uniform", Inputs(problem, (weights,)), 1, 0)[0]
    workspace = Workspace.for_tokens(problem, device)
    found: dict = {}
    if ask["impl"] in (WARM, PACKED):
        first, compiles = _warmed(weights, problem, hardware, workspace)
        again, _ = _warmed(weights, problem, hardware, workspace)
        found["start"] = dict(first_ms=first, steady_ms=again, compiles=compiles)
        if ask["impl"] == WARM and device.type == "cuda":
            cache.pack(Path(ask["archive"]))

    def work(tokens: int):
        return moe(call.x[:tokens], weights, call.ids[:tokens], call.probs[:tokens], workspace=workspace)

    calls = [partial(work, tokens) for tokens in stream(ask["most"])]
    with guard.seal("count") if device.type == "cuda" else nullcontext() as sealed:
        first = pass_ms(calls)
        compiles = sealed.compiles if sealed else 0
        steady = pass_ms(calls)
    found["stream"] = dict(first_ms=first, steady_ms=steady, compiles=compiles)
    return found


def _warmed(weights, problem, hardware, workspace) -> tuple[float, int]:
    """(milliseconds, variants compiled), as the vLLM plugin warms: all variants side by side, then a call of each."""
    start, compiled = time.perf_counter(), 0
    if weights.device.type == "cuda":
        asked = variants(problem, hardware, problem.tokens, weights.split_scale)
        compiled = guard.warm(asked, progress=False).compiled
    warm(weights, problem.top_k, problem.tokens, hardware=hardware, workspace=workspace)
    if weights.device.type == "cuda":
        torch.cuda.synchronize(weights.device)
    return (time.perf_counter() - start) * 1e3, compiled


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
