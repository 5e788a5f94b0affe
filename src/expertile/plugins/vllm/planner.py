"""A layer's plans and scratch memory, by number of tokens: looked up on every call, shared by layers of one shape."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from ...api import settings
from ...hardware import Hardware
from ...plans import Plan
from ...policy import decide
from ...problem import Problem
from ...runtime.launches import Calls
from ...runtime.workspace import most_bytes


class Planner:
    """What calls of one Problem need, for any number of tokens.

    warmed    tokens up to which its kernels were compiled; layers of one shape need it once a process
    calls     launches of earlier calls: a step's second layer starts its kernels as the first did
    """

    def __init__(self, problem: Problem, hardware: Hardware):
        self.problem, self.hardware = problem, hardware
        self.warmed = 0
        self.calls = Calls()
        self._plans: dict[int, Plan] = {}
        self._bytes: dict[int, int] = {}

    def plan(self, tokens: int) -> Plan:
        if tokens not in self._plans:
            ours = replace(settings(), others=False)  # vLLM has its own way to the other libraries
            self._plans[tokens] = decide(self.problem.with_tokens(tokens), self.hardware, None, ours)
        return self._plans[tokens]

    def bytes(self, tokens: int) -> int:
        """Scratch memory of every call with up to that many tokens."""
        if tokens not in self._bytes:
            self._bytes[tokens] = most_bytes(self.problem.with_tokens(tokens))
        return self._bytes[tokens]


@lru_cache(maxsize=64)
def planner(problem: Problem, hardware: Hardware) -> Planner:
    """The Planner that all layers of this problem (its tokens do not matter, give 1) share."""
    return Planner(problem, hardware)
