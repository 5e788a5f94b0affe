"""vLLM (0.24 to 0.33): its MoE layers by expertile, once the package is installed beside it.

vLLM calls register() in each of its processes, by the entry point `vllm.general_plugins`. From then on every layer of
routed experts is looked at before its weights are created: what the kernels here can serve is taken, the rest is left
as vLLM chose it, and one line of the log for each group of layers says which and why. docs/vllm.md has the switches.

settings        what the environment says
formats         vLLM's quantisation methods and activations -> ours
gate            whether a layer is taken, and the line about it
experts         vLLM's interface of modular experts over our plans
layer_weights   vLLM's tensors -> Weights, nothing copied
planner         plans and scratch memory of a layer, by number of tokens
loading         a layer's weights are there: check them, compile ahead; else vLLM's own experts take over
sealing         the guard, when vLLM's warm-up is over
"""

from __future__ import annotations

import logging

from ...errors import ExpertileError

log = logging.getLogger("vllm.expertile")  # below "vllm": its handlers, format and level


def register() -> None:
    """Puts our layer in the place of vLLM's RoutedExperts. Idempotent; starts no driver; never raises.

    What goes wrong is a warning in the log, and vLLM stays as it is.
    """
    try:
        from .settings import Settings

        settings = Settings.from_environment()
        if settings.enabled:
            from .routed_experts import install

            install(settings)
    except ExpertileError as error:
        log.warning("expertile stays off, vLLM is as it was: %s", error)
    except Exception:
        log.warning("expertile stays off, vLLM is as it was: loading the plugin failed", exc_info=True)
