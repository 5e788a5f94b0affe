"""FlashInfer's CUTLASS fused experts, tuned by its own tuner; x is quantised, and the router run, by vLLM's kernels.

That is how FlashInfer is used: it quantises no activations itself and leaves the router to the engine.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch

from ...problem import DType, Problem, Quant
from ...router import Router
from ...runtime.backends.flashinfer import ACTIVATIONS, cutlass_experts
from ..implementation import Implementation, Run
from ..inputs import Call, Inputs
from ..rows import version
from . import vllm


class FlashInferCutlass(Implementation):
    """module   a fused_moe_90 library built beforehand (compiling it takes over an hour of processor time), or None"""

    key = "flashinfer-cutlass"

    def __init__(self, module: Path | None = None):
        self.module = module
        self.session = partial(flashinfer_session, module)

    @property
    def name(self) -> str:
        installed = version("flashinfer-python")
        return f"flashinfer-{installed}-cutlass" if installed else self.key

    def available(self, device: torch.device) -> list[str]:
        reasons = [] if find_spec("flashinfer") else ["flashinfer is not installed"]
        if self.module is not None and not self.module.is_file():
            reasons.append(f"its module {self.module} does not exist")
        return reasons + vllm.missing(device)

    def fits(self, problem: Problem, router: Router | None) -> list[str]:
        reasons = [] if router is None else vllm.router_reasons(router)
        if problem.quant not in (Quant.NONE, Quant.FP8_TENSOR) or problem.dtype is DType.FP32:
            reasons.append(f"is not called here for {problem.label}")
        if problem.quant is Quant.NONE and self.module is not None:
            # A missing symbol ends the whole process, so it cannot be tried.
            reasons.append("the module built beforehand lacks symbols that 16-bit calls need")
        if problem.activation.name not in ACTIVATIONS:
            reasons.append(f"has no activation {problem.activation.name}")
        if problem.bias:
            reasons.append("is not called here with a bias")
        return reasons

    def prepare(self, inputs: Inputs) -> Run:
        from flashinfer.autotuner import autotune

        experts = [cutlass_experts(weights) for weights in inputs.weights]
        route = vllm.router_call(inputs) if inputs.router is not None else None
        tuned: set[int] = set()

        def run(call: Call) -> torch.Tensor:
            ids, probs = (call.ids, call.probs) if route is None else route(call)
            if call.tokens not in tuned:
                tuned.add(call.tokens)
                with autotune(True):
                    experts[call.copy](call.x, ids, probs)
            return experts[call.copy](call.x, ids, probs)

        return run


@contextmanager
def flashinfer_session(module: Path | None) -> Iterator[None]:
    """vLLM's session, and the module where FlashInfer looks for it."""
    from flashinfer.jit import env

    if module is not None:
        folder = env.FLASHINFER_AOT_DIR / "fused_moe_90"
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(module, folder / "fused_moe_90.so")
    with vllm.vllm_session():
        yield
