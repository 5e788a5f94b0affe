"""The server as a process of its own, tiny-moe on the CPU; and a model of a few lines for the engine alone."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # serve_process and serve_models
NEEDED = ("torch", "transformers", "fastapi", "uvicorn", "httpx", "openai", "model_hosting_container_standards")
MISSING = [name for name in NEEDED if importlib.util.find_spec(name) is None]
if MISSING:
    collect_ignore_glob = ["test_*.py"]


def pytest_report_header():
    return f"tests/serve: ignored, it needs {', '.join(MISSING)}" if MISSING else None


@pytest.fixture(scope="session")
def server():
    """tiny-moe in fp32 with 4 slots and room for 8 to wait."""
    from serve_process import TINY, Server

    arguments = ["--dtype", "float32", "--max-seqs", "4", "--max-queue", "8", "--prefill-chunk", "64"]
    with Server(str(TINY), *arguments) as started:
        yield started.wait_ready()


@pytest.fixture(scope="session")
def tiny():
    """The same model and tokenizer in transformers, with its own experts: what the server is compared with."""
    from serve_process import TINY
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return AutoModelForCausalLM.from_pretrained(TINY, dtype="float32").eval(), AutoTokenizer.from_pretrained(TINY)
