"""`expertile.moe` under given plans: what tune and `bench policy` measure, other libraries' backends among them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ..hardware import Hardware
from ..plans import Backend, Plan
from ..policy.libraries import LIBRARIES
from ..problem import Problem, Quant
from .inputs import Call, Inputs
from .ours import Expertile

Session = Callable[[], AbstractContextManager[Any]]


class Fixed(Expertile):
    """plans   tokens -> the plan of that cell (its problem is replaced by that of the weights that are measured)
    began, ran   told (tokens) before and after the first call of a cell: what kills the process is known by that
    """

    def __init__(
        self, hardware: Hardware, variant: str, plans: dict[int, Plan], session: Session = nullcontext,
        began: Callable[[int], None] = lambda tokens: None, ran: Callable[[int], None] = lambda tokens: None,
    ):  # fmt: skip
        super().__init__(hardware, variant)
        self.plans, self.session, self.began, self.ran = plans, session, began, ran

    def plan(self, inputs: Inputs, tokens: int) -> Plan:
        problem = inputs.weights[0].problem(tokens, inputs.problem.top_k)
        return replace(self.plans[tokens], problem=problem)

    def prepare(self, inputs: Inputs):
        call_it, seen = super().prepare(inputs), set()

        def run(call: Call):
            if call.tokens in seen:
                return call_it(call)
            seen.add(call.tokens)
            self.began(call.tokens)
            y = call_it(call)
            self.ran(call.tokens)
            return y

        return run


def session_of(backend: Backend, flashinfer_module: Path | None = None) -> Session:
    """What a library wants around its calls; the same object for all backends of one library, so it is entered once."""
    if backend not in LIBRARIES:
        return nullcontext
    if backend is Backend.FLASHINFER_CUTLASS and flashinfer_module is not None:
        from .peers.flashinfer import flashinfer_session

        return partial(flashinfer_session, flashinfer_module)
    from ..runtime.backends.vllm import session

    return session


def endangers(backend: Backend, problem: Problem, flashinfer_module: Path | None) -> bool:
    """Whether a call would end the whole process: a FlashInfer module that was built beforehand lacks symbols that
    16-bit calls need."""
    return backend is Backend.FLASHINFER_CUTLASS and flashinfer_module is not None and problem.quant is Quant.NONE
