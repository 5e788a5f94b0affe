"""Benchmark `serve`: vLLM with and without us, engines side by side on one machine, measured in turn.

Each arm is a vLLM engine in a process of its own, with the same arguments but for what the arm is about; all are
started together and stay, so A B A B takes no restart. Weights are random, the model's sizes are full.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import ExpertileError
from ..policy import json_file
from ..policy.json_file import shown
from . import rows, serve_engine
from .serve_engine import Load

STOCK, OURS = "stock", "ours"
_ARM = re.compile(r"(stock|ours)(?:-([\w.]+))?(?:=(\{.*))?", re.DOTALL)
START_S, ANSWER_S = 900.0, 600.0
#: (input, output) tokens of a mix with a long tail, drawn from alike.
MIX = ((32, 32),) * 4 + ((128, 64),) * 4 + ((128, 256),) * 3 + ((512, 128),) * 3 + ((1024, 64),) * 2 + (
    (2048, 128), (3500, 256),
)  # fmt: skip
WARM_SEED = 1 << 20


@dataclass(frozen=True, eq=False)
class Arm:
    """One engine: stock vLLM or ours, perhaps a variant with arguments and environment variables of its own."""

    kind: str
    variant: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def key(self) -> str:
        return f"{self.kind}-{self.variant}" if self.variant else self.kind

    def impl(self, vllm: str) -> str:
        """`impl` of its rows."""
        if self.kind == OURS:
            return f"expertile:{self.variant}" if self.variant else "expertile"
        return f"vllm-{vllm}-{self.variant}" if self.variant else f"vllm-{vllm}"


def parse_arm(text: str) -> Arm:
    """
    >>> parse_arm('stock-triton={"moe_backend": "triton"}').arguments
    {'moe_backend': 'triton'}
    >>> parse_arm('ours-split={"specialise": true}').environment["EXPERTILE_BENCH_SPECIALISED"]
    '1'
    >>> parse_arm('ours-noblock={"env": {"EXPERTILE_VLLM_OFF": "fp8_block"}}').environment["EXPERTILE_VLLM_OFF"]
    'fp8_block'
    """
    found = _ARM.fullmatch(text.strip())
    if not found:
        raise ExpertileError(f"arm {text!r}: give stock or ours, or a variant as in stock-NAME={{engine arguments}}")
    kind, variant, body = found.groups()
    given = json_file.parsed(body or "{}", f"arm {shown(text)}")
    changed = given.pop("env", {})
    if not isinstance(changed, dict) or not all(isinstance(value, str) for value in changed.values()):
        raise ExpertileError(f"arm {shown(text)}: env={shown(changed)} is not an object of texts")
    environment = {"EXPERTILE_VLLM": "1" if kind == OURS else "0", **changed}
    if given.pop("specialise", False):
        if kind != OURS:
            raise ExpertileError(f"arm {text!r}: specialise is about our kernels, which {kind} has none of")
        environment[serve_engine.SPECIALISED] = "1"
    return Arm(kind, variant or "", given, environment)


def engine_arguments(model: Path, engines: int, kv_bytes: int, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of vllm.LLM that every arm has. Keys and values have fixed memory: engines can start together."""
    return {
        "model": str(model), "load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 4096,
        "max_num_seqs": 128, "max_num_batched_tokens": 8192, "enable_prefix_caching": False, "seed": 0,
        "gpu_memory_utilization": round(0.9 / engines, 2), "kv_cache_memory_bytes": kv_bytes,
        "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64, 128]}, **changes,
    }  # fmt: skip


class Process:
    """An engine's process, seen from here."""

    def __init__(self, arm: Arm, arguments: Mapping[str, Any], environment: Mapping[str, str], log: Path):
        self.arm, self.log = arm, log
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        given = (theirs, {**environment, **arm.environment}, {**arguments, **arm.arguments}, str(log))
        self.process = context.Process(target=serve_engine.main, args=given)
        self.process.start()
        theirs.close()
        self.about: dict[str, Any] = {}

    def started(self) -> dict:
        """What the engine says about itself once it is up. ExpertileError, with its last words, when it does not come
        up, or when it is not what the arm is: ours without a layer of ours, stock with one.
        """
        self.about = self._answer(START_S)
        ours, layers = self.about["ours"], self.about["layers"]
        if (self.arm.kind == OURS) != (ours > 0):
            raise ExpertileError(f"{self.arm.key}: {ours} of {layers} layers are expertile's; see {self.log}")
        return self.about

    def ask(self, verb: str, *arguments):
        self.pipe.send((verb, arguments))
        return self._answer(ANSWER_S)

    def _answer(self, within_s: float):
        deadline = time.monotonic() + within_s
        while not self.pipe.poll(1.0):
            if not self.process.is_alive() and not self.pipe.poll(0.0):
                raise ExpertileError(f"{self.arm.key}: the engine died; {self.last_words()}")
            if time.monotonic() > deadline:
                raise ExpertileError(f"{self.arm.key}: no answer in {within_s:.0f} s; {self.last_words()}")
        try:
            state, result = self.pipe.recv()
        except EOFError:
            raise ExpertileError(f"{self.arm.key}: the engine died; {self.last_words()}") from None
        if state != "done":
            raise ExpertileError(f"{self.arm.key}: {result.strip()}\nsee {self.log}")
        return result

    def last_words(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return f"the end of {self.log}:\n" + "\n".join(lines[-15:])

    def late_compilations(self) -> list[str]:
        """What vLLM's monitor said was compiled after its warm-up."""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return re.findall(r"(?:JIT compilation|autotuning) during inference: (\S+?)[.\s]", text)

    def stop(self) -> None:
        with contextlib.suppress(OSError):
            self.pipe.send(None)
        self.process.join(20)
        if self.process.is_alive():
            self.process.terminate()
            self.process.join(10)
        if self.process.is_alive():
            self.process.kill()


def start(arms: Sequence[Arm], arguments, environment, folder: Path, one_by_one: bool,
          say: Callable[[str], None] = lambda text: None) -> list[Process]:  # fmt: skip
    """Engines for all arms, up. What is left of them is stopped when one fails."""
    folder.mkdir(parents=True, exist_ok=True)
    processes: list[Process] = []
    try:
        for arm in arms:
            log = folder / f"{arm.key}.log"
            log.unlink(missing_ok=True)
            processes.append(Process(arm, arguments, environment, log))
            if one_by_one:
                processes[-1].started()
        for process in processes:
            about = process.about or process.started()
            text = f"{about['start_s']:.0f} s, {about['ours']} of {about['layers']} layers are expertile's"
            say(f"{process.arm.key}: vLLM {about['vllm']}, {text}")
    except BaseException:
        stop(processes)
        raise
    return processes


def stop(processes: Sequence[Process]) -> None:
    for process in processes:
        process.stop()


def measure(
    processes: Sequence[Process], loads: Sequence[Load], runs: int, fields: Mapping[str, Any]
) -> Iterator[tuple[str, Load, int, dict]]:
    """(impl, load, run, row) as they come; the order of arms turns with every run. Each load is tried once before.

    fields    what all rows share: the environment, problem and quant
    """
    for load in loads:
        short = Load(load.batch, load.input, min(load.output, 4), load.batch) if not load.rate else Load(8, 512, 4, 8)
        for process in processes:
            process.ask("serve", short, WARM_SEED)
    for run in range(runs):
        for load in loads:
            for process in (processes, processes[::-1])[run % 2]:
                found = process.ask("serve", load, run)
                version = process.about["vllm"].split("+")[0]
                impl = process.arm.impl(version)
                yield impl, load, run, _row(fields, impl, f"vllm-{version}", load, run, found)


def _row(shared: Mapping[str, Any], impl: str, engine: str, load: Load, run: int, found: Mapping[str, float]) -> dict:
    names = ("output_tokens_per_s", "ttft_ms_p50", "ttft_ms_p99", "tpot_ms_p50", "tpot_ms_p99")
    common = {name: value for name, value in shared.items() if name not in ("problem", "quant")}
    return rows.make(
        "serve", common, impl=impl, problem=shared["problem"], quant=shared["quant"], engine=engine, batch=load.batch,
        input=load.input, output=load.output, requests=load.requests, run=run,
        **{name: round(found[name], 3) for name in names},
    )  # fmt: skip
