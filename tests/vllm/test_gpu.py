"""A real vLLM on a Hopper GPU. Each engine is a process of its own: the benchmark's."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
KERNELS = r"(route|grouped_gemm|swapped_gemm|stream_up|stream_down|combine|quantize|router)_kernel"
LOADED = """
import json, torch
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm.model_executor.custom_op import op_registry_oot
print(json.dumps([getattr(op_registry_oot.get("RoutedExperts"), "of_expertile", False), torch.cuda.is_initialized()]))
"""

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM"),
    pytest.mark.skipif(
        not any(e.name == "expertile" for e in importlib.metadata.entry_points(group="vllm.general_plugins")),
        reason="needs expertile installed, so that vLLM finds its entry point (docs/vllm.md)",
    ),
]


def run(*command: str, **environment: str) -> str:
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, timeout=1200
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.parametrize(
    ("environment", "there"), [({}, True), ({"EXPERTILE_VLLM": "0"}, False), ({"VLLM_PLUGINS": "other"}, False)]
)
def test_vllm_finds_the_plugin_and_it_starts_no_driver(environment, there):
    said = run(sys.executable, "-c", LOADED, **environment).splitlines()[-1]
    assert json.loads(said) == [there, False]


def test_a_trained_models_answers_are_stocks(tmp_path):
    """Every format; CUDA graphs and torch.compile as vLLM has them; none of our kernels compiles after the warm-up."""
    out = run(sys.executable, "-m", "expertile.cli", "bench", "vllm-same", "--logs", str(tmp_path))
    assert "NOT THE SAME" not in out and out.count("loss") == 4, out
    assert not re.search(rf"during inference: \\S*{KERNELS}", (tmp_path / "ours.log").read_text())
