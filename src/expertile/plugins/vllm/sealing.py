"""expertile's guard, sealed when vLLM's warm-up is over, if EXPERTILE_VLLM_GUARD asks for it.

vLLM has no hook behind CUDA-graph capture. It says that warming is over by starting its own monitor of compilations
(since 0.25), or else by locking its workspace. The next call that is not a replay sees it.
"""

from __future__ import annotations

from ...errors import ExpertileError
from . import log
from .settings import GUARD


class Seal:
    """Once pending and vLLM is warm, `check` seals. All layers of a process share one."""

    def __init__(self, mode: str):
        self.mode, self.pending = mode, mode != "off"

    def check(self) -> None:
        if self.pending and warm_up_is_over():
            self.pending = False
            seal(self.mode)


def warm_up_is_over() -> bool:
    """Whether vLLM has compiled and captured all that it means to."""
    try:
        from vllm.utils import jit_monitor
    except ImportError:
        from vllm.v1.worker.workspace import current_workspace_manager

        return current_workspace_manager().is_locked()
    return jit_monitor.is_active()


def seal(mode: str) -> None:
    """Seals the guard, or says why it cannot: the engine goes on."""
    from ...guard import seal as seal_guard

    try:
        seal_guard(mode)
    except ExpertileError as error:
        log.warning("%s=%s, but compilations are not watched: %s", GUARD, mode, error)
        return
    log.info("expertile's guard is sealed, mode %s", mode)
