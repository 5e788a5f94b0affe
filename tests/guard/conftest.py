"""Real Triton, real hooks and a real compiler, on a driver that launches nothing: see guard_driver."""

from __future__ import annotations

import gc
import importlib.util
import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # guard_driver and guard_kernels
if importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
    collect_ignore_glob = ["test_*.py"]  # nothing is compiled there, so there is nothing to guard


@pytest.fixture(autouse=True)
def driver(monkeypatch, tmp_path):
    """A fresh driver, an empty cache on disk, kernels that were never compiled; afterwards nothing is left sealed."""
    import guard_driver
    import guard_kernels
    import triton

    from expertile.guard.intercept import INTERCEPTION

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    before = triton.runtime.driver._active
    made = guard_driver.activate()
    _forget(guard_kernels)
    yield made
    _forget(guard_kernels)
    gc.collect()  # Triton 3.8's kernels ask the driver that loaded them to unload them
    if before is not None:
        triton.runtime.driver.set_active(before)
    left = INTERCEPTION.guards
    for guard in left:
        guard.unseal()
    assert not left, "a guard is still sealed"
    assert not INTERCEPTION._wrapped, "Triton's functions were not put back"


def _forget(module) -> None:
    for kernel in vars(module).values():
        getattr(kernel, "device_caches", {}).clear()
    module.tuned.cache.clear()


@pytest.fixture
def x():
    import torch

    return torch.zeros(256, dtype=torch.int32)
