"""The commands `expertile bench vllm` and `bench vllm-same`: engines are started, asked in turn, and stopped."""

from __future__ import annotations

import math
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer

from ..errors import ExpertileError
from ..outputs import check_file, check_folder
from ..policy import json_file
from ..policy.json_file import shown
from ..problem import whole_number
from . import rows, serve, serve_models, serve_same
from .serve import Load
from .serve_table import serve_table

#: Of a machine whose time is short: what the measurement does not need is not warmed; for all arms alike.
ENVIRONMENT = {
    "VLLM_DEEP_GEMM_WARMUP": "skip", "VLLM_USE_DEEP_GEMM": "0", "VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # built by nvcc at the first start, for minutes; greedy tokens need no sampler
}  # fmt: skip
GIB = 1 << 30
#: Stock's other way of running a model: the same backends, roundings where no compiler fused them away.
EAGER = 'stock-eager={"enforce_eager": true}'
FORMATS = ("bf16", "fp8_tensor", "fp8_channel", "fp8_block")


def vllm(
    model: Annotated[
        str, typer.Option(help=f"{', '.join(serve_models.MODELS)}, or a folder with config.json")
    ] = "qwen3-30b-a3b",
    quant: Annotated[
        str, typer.Option(help="bf16 fp8_tensor fp8_channel fp8_block; as-is: what config.json says")
    ] = "bf16",
    arm: Annotated[
        list[str] | None,
        typer.Option(
            help='stock, ours, or a variant: stock-triton={"moe_backend":"triton"}; may be repeated',
            show_default="stock, ours",
        ),
    ] = None,
    runs: Annotated[int, typer.Option(min=1, help="of every load on every arm, in turn")] = 3,
    batches: Annotated[
        str, typer.Option(help="requests at once with 128 tokens in and out; empty: none")
    ] = "1,8,16,64,128",
    prompts: Annotated[
        str, typer.Option(help="2048-token prompts at once, for the time to the first token; empty: none")
    ] = "1,16",
    poisson: Annotated[float, typer.Option(min=0.0, help="also a mix of lengths at that many requests a second")] = 0.0,
    poisson_requests: Annotated[int, typer.Option(min=1, help="requests of that mix")] = 2000,
    layers: Annotated[int | None, typer.Option(min=1, help="only so many layers, for a quick look")] = None,
    kv_gib: Annotated[float, typer.Option(min=0.1, help="memory for keys and values of each engine")] = 4.0,
    engine: Annotated[str, typer.Option(help="further arguments of vllm.LLM for all arms, as JSON")] = "{}",
    one_by_one: Annotated[bool, typer.Option("--one-by-one", help="start engines one after the other")] = False,
    out: Annotated[
        Path | None, typer.Option(help="appended to", show_default="benchmarks/results/<date>-<gpu>-serve.jsonl")
    ] = None,
    logs: Annotated[Path, typer.Option(help="what the engines print")] = Path("build/serve"),
    commit: Annotated[str | None, typer.Option(help="for the rows, where there is no git checkout")] = None,
):  # fmt: skip
    """vLLM with random weights at full size, stock and ours in turn: time to the first token, throughput."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(highlight=False)
    if not math.isfinite(poisson) or not math.isfinite(kv_gib):
        raise ExpertileError(f"poisson={poisson}, kv_gib={kv_gib}: give finite numbers")
    arms = [serve.parse_arm(text) for text in arm or (serve.STOCK, serve.OURS)]
    loads = _loads(batches, prompts, poisson, poisson_requests)
    shared = {
        **_environment(commit),
        "problem": model if model in serve_models.MODELS else Path(model).resolve().name,
        "quant": quant,
    }
    path = check_file(out or rows.default_path(shared, "serve"))
    check_folder(logs, "logs")
    began, measured = time.monotonic(), []
    with tempfile.TemporaryDirectory() as folder:
        serve_models.write_config(Path(folder) / "model", model, quant, layers)
        arguments = serve.engine_arguments(Path(folder) / "model", len(arms), int(kv_gib * GIB), _json(engine))
        console.print(f"starting {', '.join(each.key for each in arms)}; what they print is in {logs}")
        processes = serve.start(arms, arguments, ENVIRONMENT, logs, one_by_one, console.print)
        try:
            console.print(
                f"{time.monotonic() - began:.0f} s so far; {runs} runs of {len(loads)} loads on {len(arms)} engines"
            )
            columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
            with Progress(*columns, console=console, transient=True) as progress:
                task = progress.add_task("serve", total=runs * len(loads) * len(arms))
                for impl, load, run, row in serve.measure(processes, loads, runs, shared):
                    rows.write(path, [row])
                    measured.append(row)
                    progress.update(task, description=f"run {run}: {load.name}, {impl}", advance=1)
        finally:
            serve.stop(processes)
    console.print(serve_table(measured))
    late = {process.arm: process.late_compilations() for process in processes}
    for each, names in late.items():
        console.print(f"{each.key}: {len(names)} kernels compiled after the warm-up {names or ''}", markup=False)
    console.print(f"{len(measured)} rows in {path}, {time.monotonic() - began:.0f} s")
    by_stock = {name for each, names in late.items() if each.kind == serve.STOCK for name in names}
    if any(set(names) - by_stock for each, names in late.items() if each.kind == serve.OURS):
        raise typer.Exit(1)


def vllm_same(
    model: Annotated[Path, typer.Option(help="folder of tiny-moe")] = Path("models/tiny-moe"),
    quant: Annotated[str, typer.Option(help=f"some of {','.join(FORMATS)}")] = ",".join(FORMATS),
    prompts: Annotated[int, typer.Option(min=1, help="prompts that are continued")] = 32,
    tokens: Annotated[int, typer.Option(min=1, help="tokens of a continuation")] = 64,
    texts: Annotated[int, typer.Option(min=1, help="windows of 512 tokens of eval.txt that are scored")] = 32,
    engine: Annotated[str, typer.Option(help="further arguments of vllm.LLM for every engine, as JSON")] = "{}",
    logs: Annotated[Path, typer.Option(help="what the engines print")] = Path("build/serve"),
):  # fmt: skip
    """Greedy tokens, log-probabilities and loss of a trained model: ours against stock, and stock against itself (in
    other batches, and without torch.compile and CUDA graphs).
    """
    from rich.console import Console

    console, good = Console(highlight=False), True
    check_folder(logs, "logs")
    for name in quant.split(","):
        if name not in FORMATS:
            raise ExpertileError(f"quant={name!r} is not known here: use some of {', '.join(FORMATS)}")
    ids = _eval_ids(model)
    if len(ids) < 512 * texts:
        raise ExpertileError(f"--texts {texts}: eval.txt has {len(ids)} tokens, {len(ids) // 512} windows")
    windows = [ids[start : start + 512] for start in range(0, 512 * texts, 512)]
    starts = [window[:48] for window in windows[:prompts]]
    for name in quant.split(","):
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = serve_models.quantized_copy(model, Path(folder) / "model", name)
            arguments = serve.engine_arguments(checkpoint, 8, GIB, {
                "load_format": "auto", "max_model_len": 2048, "max_num_batched_tokens": 2048, "dtype": "bfloat16",
                "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32]}, **_json(engine),
            })  # fmt: skip
            arms = [serve.parse_arm(text) for text in (serve.STOCK, EAGER, serve.OURS)]
            processes = serve.start(arms, arguments, ENVIRONMENT, logs, False, console.print)
            try:
                verdict = _compare(*processes, starts, windows, tokens)
            finally:
                serve.stop(processes)
        for what, found in (
            ("stock, other batches", verdict.stock), ("stock, eager", verdict.eager), ("ours", verdict.ours)
        ):  # fmt: skip
            console.print(
                f"{name}, {what}: {found.same} of {found.prompts} continuations the same, {found.agreed:.1%} of their "
                f"length, log-probabilities within {found.largest:.4f}", markup=False,
            )  # fmt: skip
        console.print(
            f"{name}: log-probabilities of the text apart from stock's: {verdict.eager_apart} stock run eagerly, "
            f"{verdict.ours_apart} ours"
        )
        console.print(
            f"{name}: loss {verdict.stock_loss:.5f} stock, {verdict.ours_loss:.5f} ours ({verdict.loss_change:+.4%})"
        )
        for fault in verdict.faults:
            good = False
            console.print(f"{name}: NOT THE SAME: {fault}", markup=False)
    if not good:
        raise typer.Exit(1)


def _compare(stock, eager, ours, starts, windows, tokens: int) -> serve_same.Verdict:
    together = stock.ask("continue_greedily", starts, tokens, len(starts))
    alone = stock.ask("continue_greedily", starts, tokens, max(1, len(starts) // 8))
    others = [process.ask("continue_greedily", starts, tokens, len(starts)) for process in (eager, ours)]
    scores = [process.ask("score", windows, 4) for process in (stock, eager, ours)]
    batches, eager_found, ours_found = (serve_same.difference(together, found) for found in (alone, *others))
    return serve_same.Verdict(
        batches, eager_found, ours_found, serve_same.loss(scores[0]), serve_same.loss(scores[2]),
        serve_same.apart(scores[0], scores[1]), serve_same.apart(scores[0], scores[2]),
    )  # fmt: skip


def _eval_ids(model: Path) -> list[int]:
    """eval.txt as the model's tokens."""
    from transformers import AutoTokenizer

    if not (model / "eval.txt").is_file():
        raise ExpertileError(f"no eval.txt in {model}: give the folder of tiny-moe with --model")
    text = (model / "eval.txt").read_text(encoding="utf-8")
    return AutoTokenizer.from_pretrained(model)(text, verbose=False)["input_ids"]


def _loads(batches: str, prompts: str, poisson: float, requests: int) -> tuple[Load, ...]:
    """The loads that the options ask for."""
    chosen = [Load(batch, 2048, 1, max(batch, 8)) for batch in _numbers(prompts)]
    chosen += [Load(batch, 128, 128, max(batch, 2)) for batch in _numbers(batches)]
    if poisson:
        given, made = (round(sum(pair[part] for pair in serve.MIX) / len(serve.MIX)) for part in (0, 1))
        chosen.append(Load(0, given, made, requests, poisson, serve.MIX))
    if not chosen:
        raise ExpertileError("nothing to serve: --batches, --prompts and --poisson are all empty")
    return tuple(chosen)


def _numbers(text: str) -> list[int]:
    found = [whole_number(part.strip()) or 0 for part in text.split(",") if part.strip()]
    if not all(0 < number <= 128 for number in found):
        raise ExpertileError(f"{text!r}: give numbers from 1 to 128 with commas between them")
    return found


def _json(text: str) -> dict:
    return json_file.parsed(text, f"--engine {shown(text)}")


def _environment(commit: str | None) -> dict[str, str]:
    from ..runtime.device import detect

    hardware = detect()
    if not hardware.is_gpu:
        raise ExpertileError("bench vllm measures engines on a GPU, and torch finds none here")
    return rows.environment(hardware.name, commit)
