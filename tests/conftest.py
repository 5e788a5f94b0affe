"""Which folder runs where. A test that cannot run here is skipped by name, with the reason.

unit          nothing but Python
numerics      kernels against the oracle: on a GPU as they are, else in Triton's interpreter (TRITON_INTERPRET=1)
compile       kernels compiled for sm_90a, no GPU
guard         Triton, no GPU: launches go to a driver made for the tests
transformers  needs the extra `transformers`
vllm          vLLM's Python files, see tests/vllm/fetch.py; skipped by name without them
serve         needs the extra `serve`: real servers and their clients
serve_load    needs the extra `bench`: loads on an endpoint with known delays
sagemaker     needs the extra `sagemaker` and moto
readme        needs torch
gpu           needs a Hopper GPU, like every test with the marker `gpu`

TRITON_INTERPRET=1 must be set before the first @triton.jit and replaces Triton's own library too: numerics without a
GPU therefore has a pytest process of its own, as `make test` does it.

Hypothesis tries the same examples each time, so that a change is judged by what it changed. To look further:
`pytest --hypothesis-profile=explore tests/serve/test_schema.py`.
"""

from __future__ import annotations

import importlib.util
import os
from functools import lru_cache
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("repeatable", derandomize=True)
settings.register_profile("explore", derandomize=False, max_examples=3000)
settings.load_profile("repeatable")

HERE = Path(__file__).parent
INTERPRETER = os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")


def pytest_collection_modifyitems(items):
    for item in items:
        reason = why_not(item)
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))


def why_not(item) -> str:
    """Why this test cannot run in this process on this machine; nothing when it can."""
    folder = item.path.relative_to(HERE).parts[0] if HERE in item.path.parents else ""
    if folder == "gpu" or item.get_closest_marker("gpu"):
        if INTERPRETER:
            return "needs a Hopper GPU and the compiled kernels: TRITON_INTERPRET is set"
        return "" if hopper() else "needs a Hopper GPU (compute capability 9.0)"
    if folder == "numerics" and not INTERPRETER and not hopper():
        return "needs a Hopper GPU, or TRITON_INTERPRET=1 (as in `make numerics`)"
    if folder in ("compile", "guard"):
        if INTERPRETER:
            return "TRITON_INTERPRET is set: Triton's own library is interpreted and cannot be compiled"
        if importlib.util.find_spec("triton") is None:
            return "needs Triton (Linux only)"
    if folder == "transformers" and importlib.util.find_spec("transformers") is None:
        return "needs the extra `transformers`"
    return ""


@lru_cache
def hopper() -> bool:
    """Whether torch sees a GPU of compute capability 9.0."""
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


@pytest.fixture(scope="session")
def device() -> str:
    """Where tests of numerics put their tensors: the GPU, or the CPU for the interpreter."""
    return "cuda" if hopper() and not INTERPRETER else "cpu"
