"""expertile itself, as the policy decides, on a backend of choice, or with parts of its plan replaced."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping

import torch

from ..api import moe, plan
from ..errors import ExpertileError
from ..hardware import Hardware
from ..plans import Backend, GemmConfig, Plan, Stream
from ..problem import Problem
from ..router import Router
from .implementation import Implementation, Run
from .inputs import Call, Inputs

CHANGEABLE = ("backend", "gemm1", "gemm2", "stream", "fuse_quant", "pdl")
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
    try:
        changes = json.loads(body)
    except json.JSONDecodeError as error:
        raise ExpertileError(f"plan override {text!r} is not JSON: {error}") from None
    if not isinstance(changes, dict) or not set(changes) <= set(CHANGEABLE):
        raise ExpertileError(f"plan override {text!r}: give a JSON object with some of {', '.join(CHANGEABLE)}")
    return variant, changes


def changed(base: Plan, changes: Mapping) -> Plan:
    """The plan with fields replaced; a GemmConfig may be given in part, and takes the rest from the plan's own."""
    if not changes:
        return base
    fields: dict = {}
    for name, value in changes.items():
        if name in ("gemm1", "gemm2"):
            known = getattr(base, name)
            try:
                fields[name] = GemmConfig(**{**(dataclasses.asdict(known) if known else {}), **value})
            except TypeError as error:
                raise ExpertileError(f"plan override {name}={value!r}: {error}") from None
        elif name == "backend":
            known = [member.value for member in Backend]
            if value not in known:
                raise ExpertileError(f"plan override backend={value!r}: use one of {', '.join(known)}")
            fields[name] = Backend(value)
        elif name == "stream":
            if value not in [member.value for member in Stream]:
                raise ExpertileError(f"plan override stream={value!r}: use one of no, down, both")
            fields[name] = Stream(value)
        else:
            fields[name] = bool(value)
    return dataclasses.replace(base, source="forced", time_us=None, **fields)
