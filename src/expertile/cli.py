"""The command `expertile`: explain, demo, serve, sagemaker, bench, tune, watch, audit, cache, version.

Each command imports its room only when it runs.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from . import cli_cache, cli_sagemaker, cli_watch
from .cli_audit import audit
from .errors import ExpertileError, ShapeError
from .outputs import refuse_unused

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Mixture-of-Experts layers for Hopper GPUs, with the reasons for each choice.",
)


def _say_version(asked: bool) -> None:
    if asked:
        from . import __version__

        print(f"expertile {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_say_version, is_eager=True, help="expertile's alone; others': `version`"),
    ] = False,
):
    """What stands before a command."""


@app.command(short_help="How a layer would be computed, and why not otherwise; no GPU.")
def explain(
    problem: Annotated[
        str | None,
        typer.Option(help="a known layer, or H,I,E,k[,activation][,bias]", show_default="qwen3-30b-a3b"),
    ] = None,
    model: Annotated[Path | None, typer.Option(help="instead: a model's config.json, or its folder")] = None,
    tensor_parallel: Annotated[int, typer.Option(help="with --model: ranks that a layer's inter is cut into")] = 1,
    quant: Annotated[
        str | None,
        typer.Option(help="bf16 fp16 fp32 fp8_tensor fp8_channel fp8_block", show_default="the model's, or bf16"),
    ] = None,
    tokens: Annotated[str, typer.Option(help="one number, or several: 1,16,256")] = "1,16,256,4096",
    device: Annotated[str, typer.Option(help="h200 h100 cpu, or auto for this machine")] = "h200",
    backend: Annotated[str | None, typer.Option(help="force one: triton torch reference vllm-triton ...")] = None,
    json: Annotated[bool, typer.Option("--json", help="one plan as JSON on each line")] = False,
    full: Annotated[
        bool, typer.Option("--full", help="also every other library, the table's row, and what would change it")
    ] = False,
    routing: Annotated[
        str | None, typer.Option(help="expected: uniform, zipf1.2, hot", show_default="uniform, or the policy's")
    ] = None,
    static_scale: Annotated[bool, typer.Option("--static-scale", help="fp8_tensor: activation scales given")] = False,
    libraries: Annotated[
        str, typer.Option(help="to choose from: vllm=0.26.0,flashinfer-python=0.6.14, or `installed`")
    ] = "",
    layout: Annotated[str | None, typer.Option(help="the weights were loaded as: checkpoint, up_first")] = None,
    policy: Annotated[
        str, typer.Option(envvar="EXPERTILE_POLICY", help="a backend, `others`, or a file of problems (.json)")
    ] = "",
):
    """How a layer, or a model's experts, would be computed on a device, and why not otherwise. Needs no GPU."""
    import json as json_module

    from .policy import decide
    from .policy import explain as in_words
    from .policy.changes import as_data, in_full
    from .problem import named_problem

    hardware, forced = _hardware(device), _backend(backend)
    settings = _settings(policy, libraries, routing, layout)
    problem, quant = _layer(problem, model, tensor_parallel, quant)
    fields = {"static_scale": True} if static_scale else {}
    problems = [named_problem(problem, count, quant, **fields) for count in _numbers(tokens)]
    plans = [decide(each, hardware, forced, settings) for each in problems]
    if json:
        texts = [json_module.dumps(as_data(p, hardware, settings)) if full else p.to_json() for p in plans]
        print("\n".join(texts))
    else:
        print("\n\n".join(in_full(plan, hardware, settings) if full else in_words(plan) for plan in plans))


@app.command(short_help="A real model through our experts, on this machine.")
def demo(
    model: Annotated[Path | None, typer.Option(help="folder of tiny-moe; default: models/tiny-moe")] = None,
    eval_tokens: Annotated[int, typer.Option(help="tokens of eval.txt that the losses are taken over")] = 16384,
):
    """A real model through our experts, the plans for six known layers, and what the compiler makes of the kernels."""
    from .demo import run

    run(model, eval_tokens)


@app.command(
    add_help_option=False,
    short_help="An OpenAI-compatible endpoint from a model's folder.",
    context_settings=dict(allow_extra_args=True, ignore_unknown_options=True),
)
def serve(context: typer.Context):
    """An OpenAI-compatible endpoint from the folder of a model: `expertile serve --help`."""
    from .cli_serve import main as serve_main  # SageMaker's environment adds arguments of its own

    serve_main(context.args)


@app.command(
    add_help_option=False,
    short_help="Measure ours and other libraries, load an endpoint.",
    context_settings=dict(allow_extra_args=True, ignore_unknown_options=True),
)
def bench(context: typer.Context):
    """Measure ours and the peers on this machine: `expertile bench --help`."""
    from .cli_bench import app as bench_app  # its options are known only to its own room, which needs torch

    bench_app(args=context.args, prog_name="expertile bench")


@app.command(short_help="Measure plans for a layer on this GPU: a table for the policy.")
def tune(
    context: typer.Context,
    out: Annotated[Path, typer.Option(help="table to add to (JSON); with --export the folder for the engine's file")],
    problem: Annotated[str | None, typer.Option(help="a known layer, or H,I,E,k[,activation][,bias]")] = None,
    model: Annotated[Path | None, typer.Option(help="instead: a model's config.json, or its folder")] = None,
    tensor_parallel: Annotated[int, typer.Option(help="with --model: ranks that a layer's inter is cut into")] = 1,
    quant: Annotated[
        str | None, typer.Option(help="bf16 fp16 fp8_tensor fp8_channel fp8_block; default: the model's")
    ] = None,
    tokens: Annotated[str, typer.Option(help="numbers of tokens to measure: 1,8,64 or 1-4096")] = "1-4096",
    routing: Annotated[str, typer.Option(help="some of uniform,zipf1.2,hot,trace:FILE")] = "uniform",
    others: Annotated[bool, typer.Option("--others", help="other libraries that are installed as well")] = False,
    replays: Annotated[int, typer.Option(help="the median is taken over these")] = 11,
    budget_seconds: Annotated[float | None, typer.Option(help="begin nothing after that many")] = None,
    flashinfer_module: Annotated[
        Path | None, typer.Option(envvar="FI_SO", help="FlashInfer's fused_moe_90.so, where it was built beforehand")
    ] = None,
    export: Annotated[
        str | None, typer.Option(help="vllm or sglang: search the parameters of vLLM's own kernel instead")
    ] = None,
    peers_from: Annotated[
        list[Path] | None, typer.Option(help="benchmark rows: put the peers' times into --out, measure nothing")
    ] = None,
    worker: Annotated[bool, typer.Option("--worker", hidden=True)] = False,
):
    """Measure plans for a layer on this machine's Hopper GPU and write the winners as a policy table.

    A run that was killed goes on where it was: what is measured is kept beside --out, in a journal.
    """
    from .tune import command

    if peers_from:
        refuse_unused(context, "--peers-from", {"out", "peers_from"})
        print(f"{command.add_peers(out, peers_from)} times of other libraries in {out}")
        return
    from .cli_bench import parse_tokens, setting_of

    task = command.task(
        problem, model, tensor_parallel, quant, parse_tokens(tokens), routing, others, replays, budget_seconds,
        flashinfer_module,
    )  # fmt: skip
    if export:
        raise typer.Exit(command.export(export, task, setting_of("auto", None), out))
    if worker:
        raise typer.Exit(command.work(task, setting_of("auto", None), out))
    raise typer.Exit(command.supervised([sys.executable, "-m", "expertile.cli", *sys.argv[1:], "--worker"], out))


app.command(
    context_settings=cli_watch.SETTINGS, short_help="Run a program; what compiled after it was ready, and why."
)(cli_watch.watch)
app.command(short_help="Kernels that would compile again as sizes vary, in sources.")(audit)
app.add_typer(cli_cache.app, name="cache", short_help="Compiled kernels as one file: pack, unpack, verify.")
app.add_typer(cli_sagemaker.app, name="sagemaker", short_help="A model's folder to an endpoint on SageMaker AI.")


@app.command()
def version():
    """The versions that matter, and the device found."""
    print(f"expertile    {_version('expertile')}")
    print(f"python       {sys.version.split()[0]}")
    for name in ("torch", "triton", "transformers", "vllm"):
        print(f"{name:<12} {_version(name)}")
    found = _hardware("auto").name if _version("torch") != "not installed" else "unknown without torch"
    print(f"device       {found}")


def _layer(problem: str | None, model: Path | None, tensor_parallel: int, quant: str | None) -> tuple[str, str]:
    """(what named_problem takes, the format) of a layer that is named or a model's."""
    if model is not None and problem is not None:
        raise ShapeError("give one of --problem and --model")
    if model is not None:
        from .policy.model_config import read

        layer = read(model, tensor_parallel, quant)
        return layer.problem, layer.quant
    if tensor_parallel != 1:
        raise ShapeError(f"tensor_parallel={tensor_parallel} goes with --model; --problem has the sizes of a rank")
    return ("qwen3-30b-a3b" if problem is None else problem), ("bf16" if quant is None else quant)


def _hardware(name: str):
    """The Hardware of that name; `auto` asks the driver, and only then is torch imported."""
    if name == "auto":
        from .runtime.device import detect

        return detect()
    from .policy import device

    return device(name)


def _settings(policy: str, libraries: str, routing: str | None, layout: str | None):
    from dataclasses import replace

    from .plans import Layout
    from .policy.histogram import check_name
    from .policy.settings import VARIABLE, from_environment

    known = [member.value for member in Layout]
    if layout is not None and layout not in known:
        raise ShapeError(f"layout={layout!r}: use one of {', '.join(known)}")
    settings = from_environment({VARIABLE: policy}, _libraries(libraries))
    return replace(
        settings,
        others=settings.others or bool(libraries),
        routing=settings.routing if routing is None else check_name(routing),
        layout=Layout(layout) if layout else settings.layout,
    )


def _libraries(text: str) -> tuple[tuple[str, str], ...]:
    """(package, version) of each in "vllm=0.26.0,flashinfer-python=0.6.14"; `installed`: of those that are here."""
    from .policy.libraries import LIBRARIES

    if text == "installed":
        from .runtime.backends import installed

        return installed()
    found = [tuple(part.strip().split("=", 1)) for part in text.split(",")] if text else []
    if not all(len(pair) == 2 and pair[1][:1] in tuple("0123456789") for pair in found):
        raise ShapeError(f"libraries={text!r}: give package=version, or several with commas between them")
    known = {package for library in LIBRARIES.values() for package, _ in library.packages}
    for name, _ in found:
        if name not in known:
            raise ShapeError(f"libraries={text!r}: {name} is not known, use some of {', '.join(sorted(known))}")
    if len(dict(found)) < len(found):
        raise ShapeError(f"libraries={text!r}: give each package once")
    return tuple(found)


def _backend(name: str | None):
    from .plans import Backend

    if name is None:
        return None
    if name not in [member.value for member in Backend]:
        raise ShapeError(f"backend={name!r} is not known: use one of {', '.join(member.value for member in Backend)}")
    return Backend(name)


def _numbers(text: str) -> list[int]:
    """The integers in "1,16"."""
    from .problem import whole_number

    found = [whole_number(part.strip()) for part in text.split(",")]
    if None in found:
        raise ShapeError(f"tokens={text!r}: give a number, or several with commas between them")
    return found


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
        try:
            app()
        finally:
            if sys.stdout:
                sys.stdout.flush()  # a full disk is found out here, not when Python has ended
    except ExpertileError as error:
        print(f"expertile: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is still in the buffer must not fail again
        if isinstance(error, BrokenPipeError):
            raise SystemExit(1) from None  # as typer does: whoever read has had enough
        print(f"expertile: {error}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
