"""The command `expertile serve MODEL`: an OpenAI-compatible endpoint, by vLLM where it can run, else embedded."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, get_type_hints

import typer

from .errors import ExpertileError
from .serve import container

#: For typer: what it does not know are vLLM's own arguments.
SETTINGS = dict(allow_extra_args=True, ignore_unknown_options=True)
API_KEY = "EXPERTILE_API_KEY"
EMBEDDED_ONLY = ("quant", "max_queue", "prefill_chunk", "drain_seconds")

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


def main(arguments: list[str]) -> None:
    """Runs the command; where SageMaker has started us, its variables come last and so win."""
    added = from_environment(arguments, os.environ)
    first = added[:1] if added and not added[0].startswith("-") else []  # MODEL comes first, or an option's value is it
    app(args=[*first, *arguments, *added[len(first) :]], prog_name="expertile serve")


def from_environment(arguments: list[str], environment: Mapping[str, str]) -> list[str]:
    """What SageMaker's variables add: with --sagemaker, or in its container with no argument at all."""
    if "--sagemaker" not in arguments and (arguments or not container.is_container(environment)):
        return []
    container.check(environment, _kinds())
    named = arguments and not arguments[0].startswith("-")
    model = [] if named else [container.model_path(environment)]
    return [*model, "--sagemaker", *container.arguments(environment, container.PREFIX)]


def _kinds() -> dict[str, str]:
    """What each of our options takes, by its flags."""
    hints, kinds = get_type_hints(serve), {int: "integer", int | None: "integer", bool: "boolean"}
    return {
        flag: kinds.get(hints.get(each.name or ""), "text")
        for each in typer.main.get_command(app).params
        for flag in (*each.opts, *each.secondary_opts)
    }


@app.command(context_settings=SETTINGS)
def serve(
    context: typer.Context,
    model: Annotated[
        str | None, typer.Argument(help="folder of a model; in SageMaker's container /opt/ml/model")
    ] = None,
    host: Annotated[str | None, typer.Option(help="127.0.0.1, or 0.0.0.0 for SageMaker")] = None,
    port: Annotated[int | None, typer.Option(help="8000, or 8080 for SageMaker")] = None,
    engine: Annotated[str, typer.Option(help="vllm, embedded, or auto: vllm where it and a Hopper GPU are")] = "auto",
    name: Annotated[str, typer.Option("--served-model-name", help="default: the folder's name")] = "",
    api_key: Annotated[
        str | None, typer.Option(help=f"asked for by /v1 and /status; better in {API_KEY}, where `ps` does not show it")
    ] = None,
    dtype: Annotated[str, typer.Option(help="auto (the checkpoint's) bfloat16 float16 float32")] = "auto",
    quant: Annotated[
        str, typer.Option(help="quantise 16-bit experts: none fp8_tensor fp8_channel fp8_block (embedded)")
    ] = "none",
    max_seqs: Annotated[int, typer.Option(help="sequences computed at once, at most 256 (embedded)")] = 32,
    max_queue: Annotated[int, typer.Option(help="sequences that may wait; beyond, 429 (embedded)")] = 256,
    max_len: Annotated[int | None, typer.Option(help="most tokens of prompt and answer; default: up to 8192")] = None,
    prefill_chunk: Annotated[int, typer.Option(help="tokens of prompts taken in by a step (embedded)")] = 512,
    drain_seconds: Annotated[int, typer.Option(help="after SIGTERM, for what is under way (embedded)")] = 25,
    guard: Annotated[str, typer.Option(help="compilations while serving: off count warn error")] = "warn",
    trust_remote_code: Annotated[bool, typer.Option(help="run Python code that comes with the model")] = False,
    sagemaker: Annotated[bool, typer.Option(help="SageMaker's port, folder, environment and JSON logs")] = False,
    json_logs: Annotated[bool, typer.Option(help="logs as lines of JSON")] = False,
):
    """Serve a model folder: /v1/completions, /v1/chat/completions, /v1/models, /health, /metrics, and a page at /.

    Options that are not listed here go to vLLM as they are; without vLLM they are refused.
    """
    from .serve import launch

    if model is None and not sagemaker:
        raise ExpertileError("give the folder of a model: expertile serve MODEL")
    if model is not None and model.startswith("-"):
        raise ExpertileError(f"{model}: give the model first, then vLLM's arguments")
    folder = model if model is not None else container.model_path()
    host = host or (container.HOST if sagemaker else "127.0.0.1")
    port = port if port is not None else (container.PORT if sagemaker else 8000)
    api_key = api_key if api_key is not None else os.environ.get(API_KEY) or None
    said = os.environ if sagemaker else {}
    with container.blamed(said):
        serves = launch.chosen(engine)
    if serves == "vllm":
        arguments = _for_vllm(context) + list(context.args)
        if sagemaker:
            arguments += container.arguments(os.environ, container.VLLM_PREFIX)
        command = launch.vllm_command(folder, host, port, name, arguments)
        launch.become(command, launch.vllm_environment(os.environ, api_key, guard))
    if context.args:
        against = "; ".join(launch.reasons_against_vllm()) or "engine=embedded"
        strange = container.unknown(said, _kinds()) or context.args
        raise ExpertileError(f"{' '.join(strange)}: only vLLM knows this, which does not serve here ({against})")
    launch.check_extra()
    from .serve.settings import Settings

    with container.blamed(said):
        settings = Settings(
            model=Path(folder), host=host, port=port, name=name, api_key=api_key, dtype=dtype, quant=quant,
            max_seqs=max_seqs, max_queue=max_queue, max_len=max_len, prefill_chunk=prefill_chunk,
            drain_seconds=drain_seconds, guard=guard, trust_remote_code=trust_remote_code, sagemaker=sagemaker,
            json_logs=json_logs or sagemaker,
        )  # fmt: skip
    from .serve.server import serve as run  # last: what was said wrong is known before torch is imported

    run(settings)


def _for_vllm(context: typer.Context) -> list[str]:
    """Options of ours that vLLM has too, by its names. ExpertileError for one that it has not."""
    given = {
        name: value
        for name, value in context.params.items()
        if context.get_parameter_source(name).name != "DEFAULT"  # by name: typer brings a click of its own
    }
    if alien := [name for name in EMBEDDED_ONLY if name in given]:
        raise ExpertileError(
            f"--{alien[0].replace('_', '-')} is of the embedded engine: leave it out, or --engine embedded"
        )
    found = []
    for name, theirs in (("dtype", "--dtype"), ("max_seqs", "--max-num-seqs"), ("max_len", "--max-model-len")):
        found += [theirs, str(given[name])] if given.get(name) is not None else []
    return found + (["--trust-remote-code"] if given.get("trust_remote_code") else [])
