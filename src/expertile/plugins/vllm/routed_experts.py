"""The hook: vLLM's container of routed experts, replaced by a subclass that looks at its quantisation method.

vLLM instantiates what is registered for a layer's class name (PluggableLayer.register_oot). _get_quant_method runs
before weights are created, so a method's backend can still be changed there.
"""

from __future__ import annotations

import os

import vllm.envs as envs
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

from ... import __version__
from . import log
from .gate import Gatekeeper
from .settings import VARIABLES, Settings


def install(settings: Settings) -> None:
    """Registers the subclass, unless it is there already or another plugin has the place."""
    there = op_registry_oot.get(RoutedExperts.__name__)
    if there is not None:
        if not getattr(there, "of_expertile", False):
            log.warning("expertile stays off: another plugin (%s) has replaced RoutedExperts", there.__module__)
        return
    gatekeeper = Gatekeeper(settings)

    class ExpertileRoutedExperts(RoutedExperts):
        of_expertile = True

        def _get_quant_method(self, prefix, quant_config, moe_config):
            method = super()._get_quant_method(prefix, quant_config, moe_config)
            gatekeeper.consider(self, method, moe_config, prefix)
            return method

    mark_compilations(settings)
    RoutedExperts.register_oot(ExpertileRoutedExperts)


def mark_compilations(settings: Settings) -> None:
    """Makes our presence and switches part of the key of vLLM's torch.compile cache.

    A layer's padding depends on its backend and is compiled in. vLLM hashes every variable it knows, and gives those to
    Ray's workers on other machines too.
    """
    for name in VARIABLES:
        envs.environment_variables[name] = lambda name=name: os.environ.get(name)
    fingerprint = f"{__version__} off={','.join(settings.off)}"
    envs.environment_variables["EXPERTILE_VLLM_FINGERPRINT"] = lambda: fingerprint
