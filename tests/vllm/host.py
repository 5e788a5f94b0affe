"""vLLM's own Python code in this process, on a machine without a GPU and without vLLM's compiled parts.

What is not vLLM's is faked, and only that: the platform (a Hopper whose tensors are on the CPU), the compiled
operators that the MoE layers touch (by what they compute, in torch), and packages whose names are only imported. A
process can hold one version; EXPERTILE_TEST_VLLM names it (default 0.26.0).
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types

import torch

from .fetch import DONE, FOLDER, PACKAGES

VERSION = os.environ.get("EXPERTILE_TEST_VLLM", "0.26.0")
STUBBED = ("vllm.vllm_flash_attn", "vllm._C", "vllm._C_stable_libtorch", "vllm._moe_C", "xgrammar", "flashinfer")
FP8 = torch.float8_e4m3fn


def why_not() -> str:
    """Why vLLM cannot be imported here; nothing when it can."""
    for needed in (FOLDER / VERSION, PACKAGES):
        if not (needed / DONE).exists():
            return f"needs vLLM {VERSION}'s Python files: python tests/vllm/fetch.py (network)"
    if importlib.util.find_spec("transformers") is None:
        return "needs the extra `transformers`"
    if "vllm" in sys.modules and not _LIBRARY:
        return "another vLLM is imported already"
    return ""


def start() -> None:
    """Puts vLLM on the path, with the fakes in place, once; nothing of vLLM may be imported before."""
    if _LIBRARY:
        return
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    sys.path.insert(0, str(FOLDER / VERSION))
    sys.path.append(str(PACKAGES))  # what the environment has comes first
    sys.meta_path.insert(0, _Stubs())
    _define_operators()
    import vllm.platforms
    from vllm.platforms.interface import DeviceCapability, Platform, PlatformEnum

    class Hopper(Platform):
        _enum, device_name, device_type, dispatch_key = PlatformEnum.CUDA, "fake Hopper", "cpu", "CPU"
        capability = DeviceCapability(9, 0)

        @classmethod
        def get_device_capability(cls, device_id=0):
            return cls.capability

        @classmethod
        def get_device_name(cls, device_id=0):
            return cls.device_name

        @classmethod
        def supports_fp8(cls):
            return True

        @classmethod
        def get_device_total_memory(cls, device_id=0):
            return 141 << 30

    vllm.platforms._current_platform = Hopper()


class _Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Modules below STUBBED: every name in them is a class whose instances can do nothing."""

    def find_spec(self, name, path=None, target=None):
        if any(name == stub or name.startswith(stub + ".") for stub in STUBBED):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return _Stub(spec.name)

    def exec_module(self, module):
        pass


class _Stub(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)

        return type(name, (), {"__init__": lambda self, *arguments, **options: None, "__module__": self.__name__})


OPERATORS = {
    "cutlass_scaled_mm_supports_fp8(int capability) -> bool": lambda capability: True,
    "cutlass_scaled_mm_supports_block_fp8(int capability) -> bool": lambda capability: True,
    "cutlass_group_gemm_supported(int capability) -> bool": lambda capability: True,
    "static_scaled_fp8_quant(Tensor(a!) out, Tensor x, Tensor scale, int[]? group=None) -> ()": (
        lambda out, x, scale, group=None: _store(out, x.float() / scale)
    ),
    "dynamic_scaled_fp8_quant(Tensor(a!) out, Tensor x, Tensor(b!) scale) -> ()": (
        lambda out, x, scale: _store(out, x.float() / scale.fill_(x.abs().max().float() / 448.0))
    ),
    "dynamic_per_token_scaled_fp8_quant(Tensor(a!) out, Tensor x, Tensor(b!) scale, Tensor? bound=None) -> ()": (
        lambda out, x, scale, bound=None: _store(
            out, x.float() / scale.copy_(x.abs().amax(1, keepdim=True).float() / 448.0)
        )
    ),
}
_LIBRARY = []


def _define_operators() -> None:
    library = torch.library.Library("_C", "DEF")
    for schema, function in OPERATORS.items():
        library.define(schema)
        library.impl(schema.split("(")[0], function, "CompositeExplicitAutograd")
    _LIBRARY.append(library)  # the operators live as long as it does


def _store(out, values) -> None:
    out.copy_(values.clamp(-448.0, 448.0).to(FP8))
