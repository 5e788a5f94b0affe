"""The command `expertile bench serve URL`."""

from __future__ import annotations

import asyncio
import importlib.util
import os
from collections import deque
from datetime import date
from pathlib import Path
from time import perf_counter
from typing import Annotated
from urllib.parse import urlsplit

import typer

from ...errors import ExpertileError, MissingExtra
from ...outputs import check_file
from ...policy import json_file
from ...policy.json_file import shown
from ...problem import whole_number
from .. import rows

KEY = "EXPERTILE_API_KEY"
LOCAL = ("localhost", "127.0.0.1", "::1", "0.0.0.0")
BOUNDS = {"concurrency": 65536.0, "rate": 1e6}


def serve(
    url: Annotated[str, typer.Argument(help="of the endpoint, e.g. http://localhost:8000; with or without /v1")],
    concurrency: Annotated[
        str | None,
        typer.Option(help="requests at once; several, in turn: 1,8,64", show_default="8; no bound with --rate"),
    ] = None,
    rate: Annotated[str | None, typer.Option(help="requests a second instead, a Poisson process: 4 or 2,4,8")] = None,
    lengths: Annotated[
        str, typer.Option(help="tokens IN/OUT: 128/128, ranges 64-512/16-32, lists 32/32*4,2048/128, or long-tail")
    ] = "128/128",
    requests: Annotated[int, typer.Option(min=1, max=10_000_000, help="of each load, at most")] = 200,
    seconds: Annotated[float, typer.Option(min=0.1, help="for each load: then no more are sent")] = 300.0,
    drain: Annotated[float, typer.Option(min=0.0, help="seconds that requests under way have then to finish")] = 30.0,
    timeout: Annotated[float, typer.Option(min=0.1, help="seconds for one whole answer")] = 600.0,
    warm_up: Annotated[int, typer.Option(min=0, help="requests before each load that count nowhere")] = 8,
    slo: Annotated[
        str, typer.Option(help="goodput: requests a second within ttft=500ms,tpot=50ms,e2el=10s (some of these)")
    ] = "",
    api: Annotated[str, typer.Option(help="completions or chat")] = "completions",
    model: Annotated[str | None, typer.Option(help="default: the first that the endpoint lists")] = None,
    prompts: Annotated[
        str, typer.Option(help="text, fitted to the server's count of tokens; or ids:VOCABULARY, exact (completions)")
    ] = "text",
    temperature: Annotated[float, typer.Option(min=0.0, help="0: greedy")] = 0.0,
    ignore_eos: Annotated[
        bool, typer.Option(help="answers as long as wanted; vLLM, SGLang and expertile know it, OpenAI does not")
    ] = True,
    body: Annotated[str, typer.Option(help="further fields of each request, as JSON")] = "{}",
    api_key_env: Annotated[str, typer.Option(help="environment variable that holds the API key, if any")] = KEY,
    seed: Annotated[int, typer.Option(help="of lengths, prompts and arrivals")] = 0,
    impl: Annotated[str | None, typer.Option(help="for the rows; default: what the endpoint says it is")] = None,
    quant: Annotated[str, typer.Option(help="for the rows: the endpoint does not say")] = "as-is",
    gpu: Annotated[str | None, typer.Option(help="for the rows; default: this machine's for a local URL")] = None,
    out: Annotated[
        Path | None, typer.Option(help="appended to", show_default="benchmarks/results/<date>-<gpu>-load.jsonl")
    ] = None,
    commit: Annotated[str | None, typer.Option(help="for the rows, where there is no git checkout")] = None,
):
    """Load any OpenAI-compatible endpoint: TTFT, TPOT, ITL, throughput, goodput. Ctrl-C reports what there is."""
    if importlib.util.find_spec("aiohttp") is None:
        raise MissingExtra("bench serve needs aiohttp: pip install 'expertile[bench]'")
    from .client import Client
    from .figures import parse_slo
    from .lengths import parse_lengths
    from .session import Interrupted, Request, measure

    base = parse_url(url)
    if not quant:
        raise ExpertileError("quant='': give what the rows are to say")
    labels = {**_environment(base, gpu, commit), "quant": quant, **({"impl": impl} if impl else {})}
    request = Request(
        loads=_loads(concurrency, rate, requests, seconds, drain), lengths=parse_lengths(lengths), model=model,
        prompts=_prompts(prompts, api), warm_up=warm_up, seed=seed, slo=parse_slo(slo) if slo else {}, slo_text=slo,
        labels=labels,
    )  # fmt: skip
    extra = {"temperature": temperature, **({"ignore_eos": True} if ignore_eos else {}), **_json(body)}
    client = Client(base, api, extra, timeout, os.environ.get(api_key_env) or None)
    path = check_file(out or rows.default_path(labels, "load"))
    try:
        with _Shown(request.loads) as progress:
            outcome = asyncio.run(measure(client, request, lambda row: rows.write(path, [row]), progress))
    except (Interrupted, KeyboardInterrupt):
        typer.echo("interrupted before anything was measured", err=True)
        raise typer.Exit(130) from None
    progress.console.print(f"{len(outcome.rows)} rows in {path}", markup=False)
    if outcome.signal:
        raise typer.Exit(128 + outcome.signal)
    if outcome.failed:
        raise typer.Exit(1)


class _Shown:
    """Progress on the terminal: requests, failures and tokens a second so far; a table after each load."""

    def __init__(self, loads):
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self.console, self.loads = Console(highlight=False), loads
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        self.progress = Progress(*columns, TextColumn("{task.fields[note]}"), console=self.console, transient=True)
        self.task = self.progress.add_task("asking the endpoint", total=None, note="")
        self.failed = 0
        self.recent: deque[tuple[float, int]] = deque(maxlen=64)

    def __enter__(self):
        self.progress.start()
        return self

    def __exit__(self, *_):
        self.progress.stop()

    def say(self, text: str) -> None:
        self.console.print(text, markup=False)

    def begin(self, load) -> None:
        self.failed = 0
        self.recent.clear()
        self.progress.reset(self.task, total=load.requests, description=load.name, note="")

    def seen(self, sample) -> None:
        self.failed += bool(sample.error)
        self.recent.append((perf_counter(), sample.output_tokens or 0))
        span = self.recent[-1][0] - self.recent[0][0]
        tokens = sum(count for _, count in list(self.recent)[1:])
        note = f"{tokens / span:.0f} tokens/s" if span else ""
        self.progress.update(self.task, advance=1, note=f"{note}, {self.failed} failed" if self.failed else note)

    def end(self, row: dict, reasons) -> None:
        from .report import lines, table

        self.console.print(table(row))
        for line in lines(row, reasons):
            self.console.print(line, markup=False)


def parse_url(text: str) -> str:
    """
    >>> parse_url("http://localhost:8000/v1/"), parse_url("localhost:8000")
    ('http://localhost:8000', 'http://localhost:8000')
    """
    given = text if "://" in text else f"http://{text}"
    try:
        parts = urlsplit(given)
        good = parts.scheme in ("http", "https") and parts.hostname and (parts.port or True)
    except ValueError:
        good = False
    if not good or parts.query or parts.fragment:
        raise ExpertileError(f"url={text!r}: give that of an endpoint, e.g. http://localhost:8000")
    return given.rstrip("/").removesuffix("/v1").rstrip("/")


def _loads(concurrency: str | None, rate: str | None, requests: int, seconds: float, drain: float) -> tuple:
    from .drive import Load

    many = _numbers("concurrency", concurrency) if concurrency else [0.0 if rate else 8.0]
    if any(number != int(number) for number in many):
        raise ExpertileError(f"concurrency={concurrency!r}: give whole numbers")
    rates = _numbers("rate", rate) if rate else [0.0]
    return tuple(Load(int(most), each, requests, seconds, drain) for each in rates for most in many)


def _numbers(name: str, text: str) -> list[float]:
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(0 < number <= BOUNDS[name] for number in found):
        raise ExpertileError(f"{name}={text!r}: give a number above 0, or several with commas between them")
    return found


def _prompts(text: str, api: str):
    """Ids, or None for text."""
    from .prompts import Ids

    if api not in ("completions", "chat"):
        raise ExpertileError(f"api={api!r} is not known: use completions or chat")
    kind, _, size = text.partition(":")
    if kind == "text" and not size:
        return None
    vocabulary = whole_number(size)
    if kind != "ids" or vocabulary is None or not 2 <= vocabulary <= 1 << 31:
        raise ExpertileError(f"prompts={text!r}: give text, or ids:VOCABULARY as in ids:151936")
    if api == "chat":
        raise ExpertileError(f"prompts={text!r}: a chat takes text only; use --api completions")
    return Ids(vocabulary)


def _json(text: str) -> dict:
    return json_file.parsed(text, f"body={shown(text)}")


def _environment(url: str, gpu: str | None, commit: str | None) -> dict[str, str]:
    """The fields that rows share: this machine's where the endpoint is on it, else what was said."""
    local = urlsplit(url).hostname in LOCAL
    if local and gpu is None and importlib.util.find_spec("torch") is not None:
        from ...runtime.device import detect

        return rows.environment(detect().name, commit)
    unknown = dict.fromkeys(("gpu", "driver", "torch", "triton"), "unknown")
    found = {"date": date.today().isoformat(), "commit": commit or rows.commit_of_source(), **unknown}
    return {**found, **({"gpu": gpu} if gpu else {})}
