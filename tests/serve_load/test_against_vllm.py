"""The figures are those of `vllm bench serve`: its own request function and its own arithmetic, out of its sources.

The sources are those that tests/vllm/fetch.py gets; skipped by name without them.
"""

import ast
import asyncio
import importlib
import importlib.util
import random
import sys
import types
import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("aiohttp", reason="needs the extra `bench`")
pytest.importorskip("numpy")
import numpy as np
from endpoint import run

from expertile.bench.load.client import Sample
from expertile.bench.load.figures import figures

SOURCES = [Path(__file__).parents[2] / "build" / "vllm" / version for version in ("0.26.0", "0.24.0", "0.33.0")]
FOUND = [each for each in SOURCES if (each / "vllm" / "benchmarks" / "serve.py").is_file()]
pytestmark = pytest.mark.skipif(not FOUND, reason="needs vLLM's sources: python tests/vllm/fetch.py 0.26.0")


def requests_module(root: Path):
    """vllm.benchmarks.lib.endpoint_request_func alone, of which only the OpenAI part is used."""
    for name in ("regex", "tqdm", "tqdm.asyncio"):
        try:
            importlib.import_module(name)
        except ImportError:
            sys.modules[name] = types.ModuleType(name)
            sys.modules[name].tqdm = object
    spec = importlib.util.spec_from_file_location(
        "vllm_requests", root / "vllm" / "benchmarks" / "lib" / "endpoint_request_func.py"
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def arithmetic(root: Path):
    """calculate_metrics of vllm.benchmarks.serve, without what that module imports."""
    tree = ast.parse((root / "vllm" / "benchmarks" / "serve.py").read_text())
    kept = [node for node in tree.body if getattr(node, "name", "") in ("BenchmarkMetrics", "calculate_metrics")]
    for node in kept:
        if isinstance(node, ast.FunctionDef):
            node.returns = None
            for argument in node.args.args:
                argument.annotation = None
    names = {
        "np": np, "dataclass": dataclass, "warnings": warnings, "TERM_PLOTLIB_AVAILABLE": False,
        "MILLISECONDS_TO_SECONDS_CONVERSION": 1000, "TaskType": types.SimpleNamespace(GENERATION=0),
    }  # fmt: skip
    exec(compile(ast.Module(kept, []), "serve.py", "exec"), names)
    return names["calculate_metrics"]


def theirs_of(metrics) -> dict[str, float]:
    found = {"requests_per_s": metrics.request_throughput, "output_tokens_per_s": metrics.output_throughput,
             "tokens_per_s": metrics.total_token_throughput, "goodput_per_s": metrics.request_goodput}  # fmt: skip
    for name in ("ttft", "tpot", "itl", "e2el"):
        found[f"{name}_ms_mean"] = getattr(metrics, f"mean_{name}_ms")
        found |= {f"{name}_ms_p{int(p)}": value for p, value in getattr(metrics, f"percentiles_{name}_ms")}
    return found


@pytest.mark.parametrize("root", FOUND, ids=lambda root: root.name)
def test_the_same_moments_give_the_same_figures(root):
    chance, requests, samples = random.Random(0), requests_module(root), []
    outputs = []
    for number in range(200):
        start, tokens = chance.uniform(0, 50), chance.choice((1, 2, 7, 64))
        first, gaps = chance.uniform(0.01, 2), [chance.uniform(0, 0.2) for _ in range(tokens - 1)]
        last = start + first + sum(gaps)
        failed = "" if number % 9 else "HTTP 500"
        samples.append(Sample(100, start, start + first, last, gaps, tokens, error=failed, cut=False))
        outputs.append(requests.RequestFuncOutput(
            success=not failed, latency=last - start, output_tokens=tokens, ttft=first, itl=gaps, prompt_len=100,
            start_time=start,
        ))  # fmt: skip
    inputs = [types.SimpleNamespace(prompt_len=100) for _ in outputs]
    bounds = {"ttft": 1.0, "tpot": 0.1, "e2el": 4.0}
    in_ms = {name: 1e3 * bound for name, bound in bounds.items()}
    metrics, _ = arithmetic(root)(inputs, outputs, 60.0, None, [50, 90, 99], in_ms)
    ours = figures(samples, 60.0, bounds)
    for name, value in theirs_of(metrics).items():
        assert ours[name] == pytest.approx(value, rel=1e-4, abs=1e-4), name


@pytest.mark.parametrize("api", ["completions", "chat"])
def test_the_same_endpoint_gives_the_same_times(tmp_path, serving, api):
    import aiohttp

    module = requests_module(FOUND[0])
    ask = {"completions": module.async_request_openai_completions, "chat": module.async_request_openai_chat_completions}
    path = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}[api]
    url, _ = serving(first=0.3, gap=0.04, comment=False)

    async def theirs():
        async with aiohttp.ClientSession() as session:
            given = module.RequestFuncInput(
                prompt="word " * 50, api_url=url + path, prompt_len=50, output_len=6, model="small"
            )  # fmt: skip
            waves = [await asyncio.gather(*(ask[api](given, session) for _ in range(4))) for _ in range(2)]
            return [output for wave in waves[1:] for output in wave]  # the first warms up, as ours do

    outputs = asyncio.run(theirs())
    assert all(output.success for output in outputs), outputs[0].error
    options = ("--requests", "8", "--concurrency", "4", "--lengths", "103/6", "--api", api, "--warm-up", "4")
    _, _, (row,) = run(tmp_path, url, *options)
    median = lambda values: float(np.median(list(values))) * 1e3
    assert row["ttft_ms_p50"] == pytest.approx(median(output.ttft for output in outputs), rel=0.03)
    assert row["e2el_ms_p50"] == pytest.approx(median(output.latency for output in outputs), rel=0.03)
    assert row["itl_ms_p50"] == pytest.approx(median(gap for output in outputs for gap in output.itl), rel=0.03)
    assert row["output_tokens"] == 48 == 2 * sum(output.output_tokens for output in outputs)
