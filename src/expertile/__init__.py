"""expertile: Mixture-of-Experts kernels for NVIDIA Hopper, put under the engine you already run.

Importing it starts no driver and imports no torch: the names below are loaded when they are first used.
"""

from importlib import import_module

__version__ = "0.1.0"

_HOME = {
    "prepare": "api",
    "moe": "api",
    "route": "api",
    "plan": "api",
    "warm": "warming",
    "explain": "api",
    "fused_inv_rope_fp8_quant": "kernels.inv_rope_quant",
    "Problem": "problem",
    "Activation": "problem",
    "Router": "router",
    "Plan": "plans",
    "Hardware": "hardware",
    "H200": "hardware",
    "H100": "hardware",
    "Weights": "weights",
    "Workspace": "runtime.workspace",
    "ExpertileError": "errors",
    "Recompiled": "errors",
    "ShapeError": "errors",
    "UnsupportedProblem": "errors",
}

__all__ = sorted(_HOME)


def __getattr__(name):
    if name == "guard":  # a room with names of its own
        return import_module("expertile.guard")
    if name not in _HOME:
        raise AttributeError(f"module 'expertile' has no attribute {name!r}")
    return getattr(import_module(f"expertile.{_HOME[name]}"), name)


def __dir__():
    return sorted([*globals(), *__all__])
