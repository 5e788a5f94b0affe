"""What the runner asks of anything it measures, ours and the peers alike."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ..problem import Problem
from ..router import Router
from .inputs import Call, Inputs

Run = Callable[[Call], torch.Tensor]


class Implementation(ABC):
    """One way to compute the layer. Its library is imported by `session` and `prepare`, never before.

    key      how `--impl` names it, without a version
    session  a context the library wants around all its calls; entered once for all implementations that share it
    """

    key: str
    session: Callable[[], AbstractContextManager[Any]] = staticmethod(nullcontext)

    @property
    @abstractmethod
    def name(self) -> str:
        """`impl` of a row: the key with the version in it."""

    @abstractmethod
    def available(self, device: torch.device) -> list[str]:
        """Why it cannot run on this machine at all; empty when it can."""

    @abstractmethod
    def fits(self, problem: Problem, router: Router | None) -> list[str]:
        """Why it cannot compute this problem (with this router, in the layer benchmark); empty when it can."""

    @abstractmethod
    def prepare(self, inputs: Inputs) -> Run:
        """Takes the weights in, once; the result computes one call: the whole layer's when inputs.router is set."""

    def plan_name(self, inputs: Inputs, tokens: int) -> str:
        """`plan` of a row; peers have none."""
        return ""
