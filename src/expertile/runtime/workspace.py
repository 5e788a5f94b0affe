"""Scratch memory of a call, taken once and shared by all layers that run one after the other."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ..errors import ShapeError
from ..plans import ALIGN, RING_TOKENS, Backend, GemmConfig, Plan, Stream
from ..problem import Problem
from ..weights import FP8
from .launches import Calls

ITEMS = {"i32": torch.int32, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": FP8}


@dataclass(frozen=True, eq=False)
class Workspace:
    """One allocation that every plan whose workspace_bytes it holds can use, also under CUDA-graph capture.

    Its memory holds nothing between calls. Calls that share it must run on one stream.

    calls   launches of calls that used it: the next call of such a plan starts its kernels without describing them
            anew. None: nothing is kept
    """

    memory: torch.Tensor  # uint8
    calls: Calls | None = field(default_factory=Calls)

    @classmethod
    def for_plan(cls, plan: Plan, device, **calls: Calls | None) -> Workspace:
        return cls(torch.empty(plan.workspace_bytes, dtype=torch.uint8, device=device), **calls)

    @classmethod
    def for_tokens(cls, problem: Problem, device) -> Workspace:
        """Memory for every plan of this problem with 1 to problem.tokens tokens; see most_bytes."""
        return cls(torch.empty(most_bytes(problem), dtype=torch.uint8, device=device))

    def tensors(self, plan: Plan) -> dict[str, torch.Tensor]:
        """The plan's buffers as views of the memory. ShapeError when it is too small for them."""
        need = plan.workspace_bytes
        if self.memory.numel() < need:
            raise ShapeError(
                f"the workspace has {self.memory.numel()} bytes, this plan (T={plan.problem.tokens}) needs {need}: "
                f"make it for the plan that needs most (not always that of the most tokens)"
            )
        found, start = {}, 0
        for buffer in plan.buffers:
            part = self.memory[start : start + buffer.bytes]
            found[buffer.name] = part.view(ITEMS[buffer.item]).view(buffer.shape)
            start += -(-buffer.bytes // ALIGN) * ALIGN
        return found


def most_bytes(problem: Problem) -> int:
    """What no plan for 1 to problem.tokens tokens exceeds, whatever its tiles; grows with the tokens.

    Found without deciding anything: the plan that has every buffer there is, tiled as finely as tiles go, or a ring,
    whose h has a row for every expert and token.
    """
    finest = GemmConfig(16, 16, 16, 1, 1)
    most = Plan(problem, "", Backend.TRITON, finest, finest).workspace_bytes
    if problem.tokens == 0:
        return most
    few = problem.with_tokens(min(problem.tokens, RING_TOKENS))
    ring = GemmConfig(max(8, 1 << (few.tokens - 1).bit_length()), 16, 16, 1, 1)
    return max(most, Plan(few, "", Backend.TRITON, ring, ring, stream=Stream.RING).workspace_bytes)
