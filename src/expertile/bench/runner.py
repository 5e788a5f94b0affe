"""Measures implementations on the same inputs in one process: check first, then time them in turn, then a row each.

One cell is one problem, quant, routing and number of tokens. Weights are made once per problem and quant.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum
from statistics import mean

import torch

from ..errors import ExpertileError
from ..hardware import Hardware
from ..problem import Problem, named_problem
from ..router import Router
from ..runtime.measure import Replay, Timing, capture, interleave
from . import check, rows
from .floor import floor_us
from .implementation import Implementation, Run
from .inputs import Call, Inputs, copies, experts_hit, make_calls, make_weights

BIAS_SEED = 7_919


@dataclass(frozen=True)
class Request:
    """What to measure.

    sets     calls, each with its own input, that make one CUDA graph; the protocol wants at least six
    replays  of that graph, over which the median is taken
    """

    bench: str
    problems: tuple[str, ...]
    quants: tuple[str, ...]
    tokens: tuple[int, ...]
    routings: tuple[str, ...] = ("uniform",)
    sets: int = 8
    replays: int = 15
    seed: int = 0

    def __post_init__(self):
        for name, least, most in (("sets", 1, 1 << 20), ("replays", 1, 1 << 20), ("seed", 0, 1 << 62)):
            if not least <= getattr(self, name) <= most:
                raise ExpertileError(f"{name}={getattr(self, name)}: give a number from {least} to {most}")


@dataclass(frozen=True)
class Setting:
    """Where it is measured. `shared`: the fields all rows have, from `rows.environment`."""

    device: torch.device
    hardware: Hardware
    shared: dict[str, str]


class State(str, Enum):
    MEASURED = "measured"
    ABSENT = "absent"  # not on this machine, or not for this problem
    WRONG = "wrong"  # the check was red
    CRASHED = "crashed"


@dataclass(frozen=True)
class Outcome:
    """What became of one implementation in one cell; without tokens in all cells of that problem, without it in all."""

    impl: str
    state: State
    problem: str = ""
    quant: str = ""
    routing: str = ""
    tokens: int | None = None
    message: str = ""
    row: dict | None = None


@dataclass(frozen=True)
class _Cell:
    problem: str
    quant: str
    routing: str
    tokens: int
    inputs: Inputs
    calls: Sequence[Call]

    def outcome(self, impl: str, state: State, message: str = "", row: dict | None = None) -> Outcome:
        return Outcome(impl, state, self.problem, self.quant, self.routing, self.tokens, message, row)


def run(
    request: Request,
    implementations: Sequence[Implementation],
    setting: Setting,
    router_of: Callable[[str], Router | None] = lambda problem: None,
) -> Iterator[Outcome]:
    """Outcomes as they come, rows among them; a cell's rows are complete when its last outcome has been given out.

    router_of   problem name -> the router whose logits are given (layer), or None: ids and probs are given (experts)
    """
    with ExitStack() as stack:
        usable = []
        sessions: dict[Callable, str | None] = {}
        for impl in implementations:
            reasons = impl.available(setting.device)
            if not reasons and impl.session not in sessions:
                enter = lambda session=impl.session: stack.enter_context(session())
                sessions[impl.session] = attempt(enter, impl.name, setting.device)[1]
            if reasons:
                yield Outcome(impl.name, State.ABSENT, message="; ".join(reasons))
            elif sessions[impl.session] is not None:
                yield Outcome(impl.name, State.CRASHED, message=sessions[impl.session])
            else:
                usable.append(impl)
        for name in request.problems:
            for quant in request.quants:
                yield from _measure(request, name, quant, usable, setting, router_of(name))
                gc.collect()
                if setting.device.type == "cuda":
                    torch.cuda.empty_cache()


def _measure(request: Request, name: str, quant: str, implementations, setting: Setting, router) -> Iterator[Outcome]:
    """All cells of one problem and quant."""
    problem = _problem(name, quant, max(request.tokens))
    if router is not None:
        router.check(problem.experts, problem.top_k)
    runs: dict[str, tuple[Implementation, Run]] = {}
    try:
        inputs = _inputs(problem, request, setting, router)
    except RuntimeError as error:  # torch's for too little memory, on any device
        raise ExpertileError(f"{name} {quant}: its weights cannot be made here: {str(error).splitlines()[0]}") from None
    for impl in implementations:
        if reasons := impl.fits(problem, router):
            yield Outcome(impl.name, State.ABSENT, name, quant, message="; ".join(reasons))
            continue
        ready, message = attempt(lambda impl=impl: impl.prepare(inputs), impl.name, setting.device)
        if message is None:
            runs[impl.name] = (impl, ready)
        else:
            yield Outcome(impl.name, State.CRASHED, name, quant, message=message)
    for routing in request.routings:
        for tokens in request.tokens:
            calls = make_calls(problem.with_tokens(tokens), routing, inputs, request.sets, request.seed)
            yield from _cell(_Cell(name, quant, routing, tokens, inputs, calls), runs, request, setting)


def _cell(cell: _Cell, runs, request: Request, setting: Setting) -> Iterator[Outcome]:
    """Check all, capture all, time all that are left, one row each."""
    hit = mean(experts_hit(check.routing(cell.inputs, call)[0]) for call in cell.calls)
    samples = _samples(cell, setting.device)
    errors: dict[str, float] = {}
    for name, (_, run_call) in runs.items():
        found, message = attempt(lambda run_call=run_call: _errors(run_call, samples), name, setting.device)
        if message is not None:
            yield cell.outcome(name, State.CRASHED, message)
        elif wrong := check.red(found, check.bar(cell.inputs.weights[0])):
            yield cell.outcome(name, State.WRONG, wrong)
        else:
            errors[name] = found.max().item()
    replays: dict[str, Replay] = {}
    for name in errors:
        run_call = runs[name][1]
        calls = [lambda call=call, run_call=run_call: run_call(call) for call in cell.calls]
        on_gpu = setting.device.type == "cuda"
        replay, message = attempt(lambda calls=calls, gpu=on_gpu: capture(calls, gpu), name, setting.device)
        if message is not None:
            yield cell.outcome(name, State.CRASHED, message)
        else:
            replays[name] = replay
    for name, timing in interleave(replays, request.replays).items():
        row = _row(cell, runs[name][0], timing, errors[name], hit, request, setting)
        yield cell.outcome(name, State.MEASURED, row=row)


def _row(cell: _Cell, impl, timing: Timing, error: float, hit: float, request: Request, setting: Setting) -> dict:
    problem = cell.inputs.problem.with_tokens(cell.tokens)
    fields = {} if cell.inputs.router is None else {"router": _router_text(cell.inputs.router)}
    return rows.make(
        request.bench,
        setting.shared,
        impl=impl.name,
        problem=cell.problem,
        quant=cell.quant,
        tokens=cell.tokens,
        routing=cell.routing,
        experts_hit=round(hit, 2),
        time_us=round(timing.median, 3),
        floor_us=max(round(floor_us(problem, hit, setting.hardware), 3), 0.001),
        err=round(error, 6),
        plan=impl.plan_name(cell.inputs, cell.tokens),
        p10_us=round(timing.p10, 3),
        p90_us=round(timing.p90, 3),
        **fields,
    )


def _samples(cell: _Cell, device) -> list[tuple[Call, torch.Tensor, torch.Tensor]]:
    """(call, rows, float64 answer) of every call: each has its own routing and, where copied, its own weights."""
    most = max(1, check.SAMPLE // len(cell.calls))
    chosen = check.sample(cell.tokens, most).to(device)
    return [(call, chosen, check.expected(cell.inputs, call, chosen)) for call in cell.calls]


def _errors(run_call: Run, samples) -> torch.Tensor:
    """Relative errors of the rows looked at. y will likely get memory full of NaN: rows left unwritten show."""
    found = []
    for call, chosen, want in samples:
        poison = torch.full_like(call.x, float("nan"))
        del poison
        found.append(check.row_errors(run_call(call)[chosen], want))
    return torch.cat(found)


def _problem(name: str, quant: str, tokens: int) -> Problem:
    """fp8_tensor is measured with static activation scales, as checkpoints of that kind bring them."""
    return named_problem(name, tokens, quant, static_scale=quant == "fp8_tensor")


def _inputs(problem: Problem, request: Request, setting: Setting, router: Router | None) -> Inputs:
    number = copies(problem, setting.hardware, request.sets)
    weights = tuple(make_weights(problem, setting.device, request.seed + index) for index in range(number))
    bias = None
    if router is not None and _takes_bias(router):
        generator = torch.Generator(setting.device).manual_seed(request.seed + BIAS_SEED)
        bias = torch.randn(problem.experts, device=setting.device, generator=generator) * 0.01
    return Inputs(problem, weights, router, bias)


def _takes_bias(router: Router) -> bool:
    """Models that score by sigmoid and renormalise carry a correction bias (DeepSeek-V3, Nemotron)."""
    return router.score.value == "sigmoid" and router.renormalize


def _router_text(router: Router) -> str:
    text = router.score.value + ("+softmax_after" if router.softmax_after else "")
    text += "+renormalize" if router.renormalize else ""
    text += f"+groups{router.groups}/{router.top_groups}" if router.groups > 1 else ""
    return text + (f"*{router.scaling_factor:g}" if router.scaling_factor != 1.0 else "")


def attempt(action: Callable[[], object], name: str, device: torch.device):
    """(result, None), or (None, message) when it crashed.

    Raises ExpertileError when the crash took the GPU with it: everything after it would fail too.
    """
    try:
        result = action()
        _synchronize(device)
        return result, None
    except ExpertileError as error:
        return None, str(error)
    # The only broad one: a foreign library may raise anything, and that must not cost the others their turn.
    except Exception as error:
        message = f"{type(error).__name__}: {(str(error) or 'no message').strip().splitlines()[0][:300]}"
    try:
        _synchronize(device)
    except RuntimeError as error:
        raise ExpertileError(
            f"{name} left the GPU unusable ({message}; then {error}): earlier rows are written, leave it out by --impl"
        ) from None
    return None, message


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


__all__ = ["Outcome", "Request", "Setting", "State", "run"]
