"""What the command `expertile tune` does with its options: the task, the worker's side, the watching side, exports."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ..bench import rows
from ..bench.inputs import check_routing
from ..bench.runner import Setting
from ..errors import ShapeError, UnsupportedProblem
from ..outputs import check_file
from ..policy import model_config
from ..runtime.backends import installed
from . import engine_files, peers, tables
from .search import GpuLost, Machine, Task, journal_path, tune
from .supervise import AGAIN, REFUSED, supervise


def task(
    problem: str | None, model: Path | None, tensor_parallel: int, quant: str | None, tokens: tuple[int, ...],
    routing: str, others: bool, replays: int, budget_s: float | None, flashinfer_module: Path | None,
) -> Task:  # fmt: skip
    """The Task of the command's options; ShapeError where they do not name one layer and format."""
    if (problem is None) == (model is None):
        raise ShapeError("give one of --problem and --model")
    if tensor_parallel < 1:
        raise ShapeError(f"tensor_parallel={tensor_parallel}: give at least 1")
    if problem is not None and tensor_parallel != 1:
        raise ShapeError(f"tensor_parallel={tensor_parallel} goes with --model; --problem has the sizes of a rank")
    if replays < 1:
        raise ShapeError(f"replays={replays}: give at least 1")
    if budget_s is not None and not budget_s >= 0:
        raise ShapeError(f"budget_seconds={budget_s}: give at least 0")
    if model is not None:
        layer = model_config.read(model, tensor_parallel, quant)
        problem, quant = layer.problem, layer.quant
    if quant is None:
        raise ShapeError("--problem goes with --quant: bf16 fp16 fp8_tensor fp8_channel fp8_block")
    if quant == "fp32":
        raise ShapeError("quant='fp32' has no kernels that could be measured: give --quant bf16 or fp16")
    routings = tuple(dict.fromkeys(part.strip() for part in routing.split(",")))
    for name in routings:
        check_routing(name)
    return Task(problem, quant, tokens, routings, others, replays, budget_s, flashinfer_module)


def machine_of(setting: Setting, others: bool) -> Machine:
    """This machine: the device's normalised name, size and memory, and the versions that times hang on."""
    hardware, memory = setting.hardware, 0
    if setting.device.type == "cuda":
        memory = round(torch.cuda.get_device_properties(setting.device).total_memory / 2**30)
    own = ("torch", "triton")
    versions = {name: version for name, version in installed() if others or name in own}
    return Machine({"name": hardware.name, "sms": hardware.sms, "memory_gib": memory}, versions)


def work(task: Task, setting: Setting, out: Path) -> int:
    """The worker: measures, and tells its parent a JSON object a line. Returns its exit code."""
    machine = machine_of(setting, task.others)
    try:
        tune(task, setting, machine, out, report=lambda event: print(json.dumps(event), flush=True))
    except GpuLost as error:
        print(f"left out: {error}", flush=True)
        return AGAIN
    return 0


def supervised(command: Sequence[str], out: Path) -> int:
    """The parent: starts the worker (again, where it died), shows how far it is; the exit code of the command."""
    check_file(out)
    check_file(journal_path(out))
    console, left_out = Console(), {}

    def report(event: dict) -> None:
        follow(event)
        if event.get("state") in ("wrong", "crashed"):
            left_out[event["plan"]] = event["state"]

    with _progress("cells", console) as follow:
        starts = supervise(command, journal_path(out), report)
    if starts == REFUSED:
        return 2
    for plan, state in left_out.items():
        console.print(f"left out: {plan} was {state}", markup=False, highlight=False)
    entries = len(tables.read(out)["entries"])
    console.print(f"{entries} entries in {out}; all times in {journal_path(out)}", markup=False, highlight=False)
    return 0


def add_peers(out: Path, files: Sequence[Path]) -> int:
    """Puts the peers' times of benchmark rows into the table `out`; returns how many."""
    found = [rows.read(file) for file in files]
    if not out.exists():
        raise ShapeError(f"out={str(out)!r} is not there: give the table that the times go into")
    check_file(out)
    table = tables.read(out)
    count = sum(peers.add(table, each) for each in found)
    if count:
        tables.save(out, table)
    return count


def export(engine: str, task: Task, setting: Setting, folder: Path) -> int:
    """Searches vLLM's kernel and writes the engine's file below `folder`; the exit code of the command."""
    from . import export as search_vllm

    engine_files.variable(engine)  # what is no engine is said before a GPU is asked for
    device_name = _device_name(setting)
    problem = task.problem_at(max(task.tokens))
    triton = dict(installed()).get("triton", "none")
    check_file(engine_files.file_path(engine, folder, problem, device_name, triton))
    console = Console()
    with _progress(f"{engine} {task.problem} {task.quant}", console) as follow:
        found = search_vllm.search(task, setting, follow)
    path = search_vllm.write(engine, folder, problem, device_name, triton, found)
    for tokens, each in found.items():
        stock_us, time_us = each["stock_us"], each["time_us"]
        line = (
            f"T={tokens}: {stock_us:.1f} us as vLLM is, {time_us:.1f} us in the file ({stock_us / time_us:.3f} times)"
        )
        console.print(line, highlight=False)
    console.print(f"{path}: read where {engine_files.variable(engine)}={folder}", markup=False, highlight=False)
    return 0


def _device_name(setting: Setting) -> str:
    if not setting.hardware.is_hopper:
        raise UnsupportedProblem(f"kernels are measured on a Hopper GPU; this machine is {setting.hardware.name}")
    return torch.cuda.get_device_name(setting.device)


@contextmanager
def _progress(what: str, console: Console):
    """Events {"total"} and {"done"} as a bar with the time left."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, TextColumn("left"), TimeRemainingColumn(), console=console, transient=True) as bar:
        shown = bar.add_task(what, total=None)

        def follow(event: dict) -> None:
            if "total" in event:
                bar.update(shown, total=event["total"])
            if "done" in event:
                bar.update(shown, completed=event["done"])
            if "plan" in event:
                bar.update(shown, description=f"{what} T={event['cell']['tokens']} {event['cell']['routing']}")

        yield follow
