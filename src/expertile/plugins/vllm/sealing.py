"""expertile's guard, sealed when vLLM's warm-up is over, if EXPERTILE_VLLM_GUARD asks for it.

vLLM has no hook behind CUDA-graph capture. It says that warming is over by starting its own monitor of compilations
(since 0.25), or else by locking its workspace. The next call that is not a replay sees it.
"""

from __future__ import annotations

from functools import lru_cache

from . import log
from .settings import GUARD, Settings


class Seal:
    """Once pending and vLLM is warm, `check` seals."""

    def __init__(self, mode: str):
        self.mode, self.pending = mode, mode != "off"

    def check(self) -> None:
        if self.pending and warm_up_is_over():
            self.pending = False
            seal(self.mode)


@lru_cache(maxsize=1)
def process_seal() -> Seal:
    """The one of this process."""
    return Seal(Settings.from_environment().guard)


def warm_up_is_over() -> bool:
    """Whether vLLM has compiled and captured all that it means to."""
    try:
        from vllm.utils import jit_monitor
    except ImportError:
        from vllm.v1.worker.workspace import current_workspace_manager

        return current_workspace_manager().is_locked()
    return jit_monitor.is_active()


def seal(mode: str) -> None:
    try:
        from expertile import guard
    except ImportError:
        log.warning("%s=%s: this expertile has no guard, compilations are not watched", GUARD, mode)
        return
    guard.seal(mode)
    log.info("expertile's guard is sealed: a compilation from here on is %s", "an error" if mode == "error" else "told")
