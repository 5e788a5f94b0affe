"""expertile itself, as the policy decides, on a backend of choice, or with parts of its plan replaced."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import torch

from ..api import moe, plan
from ..hardware import Hardware
from ..plans import Backend, Plan, Stream
from ..policy import json_file
from ..policy.json_file import shown
from ..policy.json_values import Take, flag, mapping, one_of, taken, tile
from ..problem import Problem
from ..router import Router
from .implementation import Implementation, Run
from .inputs import Call, Inputs

_NAMED = re.compile(r"([\w.-]+)=(\{.*)", re.DOTALL)


class Expertile(Implementation):
    """`expertile.moe` under the policy's plan, or a variant of it.

    variant   appears behind the colon in a row's impl: "expertile:torch"
    backend   forced; None: the policy's choice
    changes   fields of the Plan to replace, as `--plan-override` gives them
    """

    key = "expertile"

    def __init__(
        self, hardware: Hardware, variant: str = "", backend: str | None = None, changes: Mapping | None = None
    ):
        self.hardware = hardware
        self.variant = variant
        self.backend = backend
        self.changes = changes or {}

    @property
    def name(self) -> str:
        return f"{self.key}:{self.variant}" if self.variant else self.key

    def available(self, device: torch.device) -> list[str]:
        return []

    def fits(self, problem: Problem, router: Router | None) -> list[str]:
        return []

    def plan(self, inputs: Inputs, tokens: int) -> Plan:
        problem = inputs.weights[0].problem(tokens, inputs.problem.top_k)
        return changed(plan(problem, self.hardware, self.backend), self.changes)

    def plan_name(self, inputs: Inputs, tokens: int) -> str:
        return self.plan(inputs, tokens).name

    def prepare(self, inputs: Inputs) -> Run:
        plans: dict[int, Plan] = {}

        def run(call: Call) -> torch.Tensor:
            if call.tokens not in plans:
                plans[call.tokens] = self.plan(inputs, call.tokens)
            chosen, weights = plans[call.tokens], inputs.weights[call.copy]
            if inputs.router is None:
                return moe(call.x, weights, call.ids, call.probs, plan=chosen)
            return moe(
                call.x,
                weights,
                logits=call.logits,
                router=inputs.router,
                top_k=inputs.problem.top_k,
                bias=inputs.router_bias,
                plan=chosen,
            )

        return run


def parse_override(text: str) -> tuple[str, dict]:
    """(variant, changes) of `--plan-override`: a JSON object with fields of the Plan, optionally behind NAME=.

    >>> parse_override('narrow={"gemm1": {"block_n": 64}}')
    ('narrow', {'gemm1': {'block_n': 64}})
    """
    found = _NAMED.fullmatch(text.strip())
    variant, body = (found[1], found[2]) if found else ("override", text)
    changes = json_file.parsed(body, f"plan override {shown(text)}")
    taken(changes, CHANGEABLE, "plan override ")
    return variant, changes


def changed(base: Plan, changes: Mapping) -> Plan:
    """The plan with fields replaced; a GemmConfig may be given in part, and takes the rest from the plan's own."""
    if not changes:
        return base
    fields = taken(changes, CHANGEABLE, "plan override ")
    for name in ("gemm1", "gemm2"):
        if name in fields:
            known = getattr(base, name)
            fields[name] = tile({**(asdict(known) if known else {}), **fields[name]}, f"plan override {name}")
    return replace(base, source="forced", time_us=None, **fields)


def _part_of_tile(value: Any, where: str) -> dict:
    """Some fields of a GemmConfig, checked beside others that are good."""
    tile({"block_m": 16, "block_n": 16, "block_k": 16, "warps": 1, "stages": 1, **mapping(value, where)}, where)
    return value


CHANGEABLE: dict[str, Take] = {
    "backend": one_of(Backend),
    "gemm1": _part_of_tile,
    "gemm2": _part_of_tile,
    "stream": one_of(Stream),
    "fuse_quant": flag,
    "pdl": flag,
}
