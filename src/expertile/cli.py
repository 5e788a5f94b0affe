"""The command `expertile`: explain, demo, bench, tune, watch, audit, cache, version.

Each command imports its room only when it runs.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from . import cli_cache, cli_watch
from .cli_audit import audit
from .errors import ExpertileError, ShapeError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Mixture-of-Experts layers for Hopper GPUs, with the reasons for each choice.",
)


@app.command()
def explain(
    problem: Annotated[str, typer.Option(help="a known layer, or H,I,E,k")] = "qwen3-30b-a3b",
    quant: Annotated[str, typer.Option(help="bf16 fp16 fp32 fp8_tensor fp8_channel fp8_block")] = "bf16",
    tokens: Annotated[str, typer.Option(help="one number, or several: 1,16,256")] = "1,16,256,4096",
    device: Annotated[str, typer.Option(help="h200 h100 cpu, or auto for this machine")] = "h200",
    backend: Annotated[str | None, typer.Option(help="force one: triton torch reference")] = None,
    json: Annotated[bool, typer.Option("--json", help="one plan as JSON on each line")] = False,
):
    """How a layer would be computed on a device, and why not otherwise. Needs no GPU."""
    from .policy import decide
    from .policy import explain as in_words
    from .problem import named_problem

    hardware, forced = _hardware(device), _backend(backend)
    plans = [decide(named_problem(problem, count, quant), hardware, forced) for count in _numbers(tokens)]
    print("\n".join(plan.to_json() for plan in plans) if json else "\n\n".join(map(in_words, plans)))


@app.command()
def demo(
    model: Annotated[Path | None, typer.Option(help="folder of tiny-moe; default: models/tiny-moe")] = None,
    eval_tokens: Annotated[int, typer.Option(help="tokens of eval.txt that the losses are taken over")] = 16384,
):
    """A real model through our experts, the plans for six known layers, and what the compiler makes of the kernels."""
    from .demo import run

    run(model, eval_tokens)


@app.command(add_help_option=False, context_settings=dict(allow_extra_args=True, ignore_unknown_options=True))
def bench(context: typer.Context):
    """Measure ours and the peers on this machine: `expertile bench --help`."""
    from .cli_bench import app as bench_app  # its options are known only to its own room, which needs torch

    bench_app(args=context.args, prog_name="expertile bench")


@app.command()
def tune(
    problem: Annotated[str, typer.Option(help="a known layer, or H,I,E,k")],
    quant: Annotated[str, typer.Option(help="bf16 fp16 fp8_tensor fp8_channel fp8_block")],
    out: Annotated[Path, typer.Option(help="table to add to (JSON); made if it is not there")],
    tokens: Annotated[str, typer.Option(help="numbers of tokens to measure")] = "1,4,16,64,256,1024,4096",
    replays: Annotated[int, typer.Option(help="the median is taken over these")] = 11,
):
    """Measure tiles for a layer on this machine's Hopper GPU and write the winners as a policy table."""
    from rich.progress import Progress

    from .cli_bench import setting_of
    from .tune import tune as measure
    from .tune import write

    counts, setting = tuple(_numbers(tokens)), setting_of("auto", None)
    with Progress() as progress:
        task = progress.add_task(f"{problem} {quant}", total=len(counts))
        entries = measure(problem, quant, counts, setting, replays=replays, report=lambda entry: progress.advance(task))
    write(out, entries, setting.shared)
    print(f"{len(entries)} entries in {out}")


app.command(context_settings=cli_watch.SETTINGS)(cli_watch.watch)
app.command()(audit)
app.add_typer(cli_cache.app, name="cache")


@app.command()
def version():
    """The versions that matter, and the device found."""
    print(f"expertile {_version('expertile')}")
    print(f"python    {sys.version.split()[0]}")
    for name in ("torch", "triton", "transformers", "vllm"):
        print(f"{name:<9} {_version(name)}")
    found = _hardware("auto").name if _version("torch") != "not installed" else "unknown without torch"
    print(f"device    {found}")


def _hardware(name: str):
    """The Hardware of that name; `auto` asks the driver, and only then is torch imported."""
    if name == "auto":
        from .runtime.device import detect

        return detect()
    from .policy import device

    return device(name)


def _backend(name: str | None):
    from .plans import Backend

    if name is None:
        return None
    if name not in [member.value for member in Backend]:
        raise ShapeError(f"backend={name!r} is not known: use one of {', '.join(member.value for member in Backend)}")
    return Backend(name)


def _numbers(text: str) -> list[int]:
    """The integers in "1,16"."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ShapeError(f"tokens={text!r}: give a number, or several with commas between them") from None


def _version(package: str) -> str:
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed

    try:
        return installed(package)
    except PackageNotFoundError:
        return "from source" if package == "expertile" else "not installed"


def main() -> None:
    """Entry point: what is wrong with the input is one line on stderr and exit code 2, never a traceback."""
    try:
        app()
    except ExpertileError as error:
        print(f"expertile: {error}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
