"""Searches the parameters of vLLM's own Triton kernel and writes them as the engines' files.

What vLLM takes by itself (its own file, else its defaults) is measured among them and stays where nothing beats it by
more than noise. SGLang's kernel is of the same descent with the same parameters: its files hold what was measured with
vLLM's, and are worth a measurement there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import monotonic

from ..bench.experts import run as run_experts
from ..bench.peers.vllm import VLLMTriton
from ..bench.runner import Request, Setting, State
from ..errors import ExpertileError
from ..hardware import Hardware
from ..problem import BLOCK, Problem, Quant
from ..runtime.backends import module
from ..runtime.backends.vllm import LAYERS
from ..weights import Weights
from . import engine_files
from .engine_files import KEYS, Config
from .search import Task
from .tables import MARGIN

STOCK = "stock"
BEST = 3  # how many of the first round get a second


class Configured(VLLMTriton):
    """vLLM's kernel with the given parameters; with None, as vLLM would run it."""

    def __init__(self, number: str, config: Config | None):
        self.number, self.config = number, config

    @property
    def name(self) -> str:
        return f"{super().name}:{self.number}"

    def experts(self, weights: Weights, problem: Problem):
        call = super().experts(weights, problem)
        if self.config is None:
            return call

        def run(x, ids, probs):
            with _override(self.config):
                return call(x, ids, probs)

        return run


@contextmanager
def _override(config: Config) -> Iterator[None]:
    """As vLLM's override_config, which leaves its parameters behind when a call fails."""
    package = module(LAYERS)
    old, package._config = package._config, config
    try:
        yield
    finally:
        package._config = old


def stock_config(problem: Problem) -> Config:
    """What vLLM would take: the entry of its file, else its default."""
    w13 = (problem.experts, problem.w13_rows, problem.hidden)
    w2 = (problem.experts, problem.hidden, problem.inter)
    dtype = None if problem.quant is Quant.NONE else "fp8_w8a8"
    block = [BLOCK, BLOCK] if problem.quant is Quant.FP8_BLOCK else None
    choose = module(f"{LAYERS}.fused_moe").try_get_optimal_moe_config
    return dict(choose(w13, w2, problem.top_k, dtype, problem.tokens, block))


def search(
    task: Task, setting: Setting, report: Callable[[dict], None] = lambda event: None, *, measure=run_experts,
    stock: Callable[[Problem], Config] = stock_config,
) -> dict[int, dict]:  # fmt: skip
    """tokens -> {"config", "time_us", "stock_us"}; left out after task.budget_s seconds, and where nothing ran.

    report is told {"total": n} and {"done": n} of token counts.
    """
    found: dict[int, dict] = {}
    started = monotonic()
    report({"total": len(task.tokens)})
    for number, tokens in enumerate(sorted(task.tokens), 1):
        if task.budget_s is not None and monotonic() - started > task.budget_s:
            break
        if best := _best(task, setting, tokens, measure, stock):
            found[tokens] = best
        report({"done": number})
    return found


def _best(task: Task, setting: Setting, tokens: int, measure, stock) -> dict | None:
    problem, hardware = task.problem_at(tokens), setting.hardware
    first = _times(task, setting, tokens, engine_files.tiles(problem, hardware), measure)
    second = _distinct(second_round(first, problem, hardware), [config for config, _ in first[0]])
    times, stock_us = _times(task, setting, tokens, [*(c for c, _ in first[0][:BEST]), *second], measure)
    if stock_us is None or not times:
        return None
    config, time_us = times[0]
    if time_us > stock_us / (1 + MARGIN):
        return dict(config=_whole(stock(problem)), time_us=stock_us, stock_us=stock_us)
    return dict(config=config, time_us=time_us, stock_us=stock_us)


def second_round(first, problem: Problem, hardware: Hardware) -> list[Config]:
    """Neighbours of the fastest of the first round."""
    return [each for config, _ in first[0][:BEST] for each in engine_files.neighbours(config, problem, hardware)]


def _distinct(configs: Sequence[Config], known: Sequence[Config]) -> list[Config]:
    found: list[Config] = []
    for config in configs:
        if config not in found and config not in known:
            found.append(config)
    return found


def _times(task: Task, setting: Setting, tokens: int, configs: Sequence[Config], measure):
    """([(config, time_us)], fastest first; what vLLM does by itself)."""
    request = Request("experts", (task.problem,), (task.quant,), (tokens,), task.routings[:1], replays=task.replays)
    named = {str(number): config for number, config in enumerate(configs)}
    contenders = [Configured(STOCK, None), *(Configured(number, config) for number, config in named.items())]
    times: dict[str, float] = {}
    for outcome in measure(request, contenders, setting):
        if outcome.state is State.MEASURED:
            times[outcome.impl.rpartition(":")[2]] = outcome.row["time_us"]
        elif outcome.state is State.ABSENT:
            raise ExpertileError(f"vLLM's kernel cannot be measured here: {outcome.message}")
    stock_us = times.pop(STOCK, None)
    return sorted(((named[n], t) for n, t in times.items()), key=lambda pair: pair[1]), stock_us


def _whole(config: Mapping[str, int]) -> Config:
    """vLLM's own entry with all keys of a file: older ones lack warps and stages, which are Triton's then."""
    return {**dict(zip(KEYS, (64, 64, 32, 1, 4, 3), strict=True)), **{k: v for k, v in config.items() if k in KEYS}}


def write(
    engine: str, folder: Path, problem: Problem, device_name: str, triton: str, found: Mapping[int, Mapping]
) -> Path:  # fmt: skip
    """The engine's file below `folder`; returns its path."""
    if not found:
        raise ExpertileError("nothing was measured: no file is written")
    path = engine_files.file_path(engine, folder, problem, device_name, triton)
    path.parent.mkdir(parents=True, exist_ok=True)
    configs = {tokens: each["config"] for tokens, each in found.items()}
    path.write_text(engine_files.text(engine, configs, triton), encoding="utf-8")
    return path
