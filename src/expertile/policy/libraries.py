"""Other libraries' experts: what they can compute, how they want the weights, what memory they take. No library is
imported here: which are installed comes in as data, as (package, version).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..hardware import Hardware
from ..plans import Backend, Layout
from ..problem import BLOCK, DType, Problem, Quant

Installed = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Library:
    """One backend of another library.

    packages     what has to be installed, each with its least version; the first one's version is that of its times
    quants, dtypes, activations, bias    what it takes; activations by Activation.name
    static       fp8_tensor: it needs static activation scales
    multiple     hidden and inter (as they are, or as `layout` pads them) must be multiples of it
    most_tokens  a call's tokens at most, and why
    scratch      problem -> bytes that a call takes beside x and its result
    """

    packages: tuple[tuple[str, str], ...]
    quants: tuple[Quant, ...]
    activations: tuple[str, ...]
    scratch: Callable[[Problem], float]
    dtypes: tuple[DType, ...] = (DType.BF16, DType.FP16)
    bias: bool = False
    static: bool = True
    multiple: int = 1
    most_tokens: tuple[int, str] | None = None
    layout: Layout = Layout.CHECKPOINT

    @property
    def package(self) -> str:
        return self.packages[0][0]


VLLM = ("vllm", "0.26")
GATED = ("silu", "gelu_erf", "gelu_tanh", "swiglu_oai/interleaved")


def _both(problem: Problem, rows: float) -> float:
    """Two buffers of 16 bits that GEMM1's and GEMM2's inputs and results take in turn."""
    return 2.0 * rows * (max(problem.w13_rows, problem.hidden) + max(problem.inter, problem.hidden))


def _vllm_triton(problem: Problem) -> float:
    rows, quantised = problem.rows, problem.quant is not Quant.NONE
    copies = problem.tokens * problem.hidden + rows * problem.inter if quantised else 0
    return 2.0 * rows * (max(problem.w13_rows, problem.hidden) + problem.inter) + copies


def _deepgemm(problem: Problem) -> float:
    return _both(problem, problem.rows + problem.experts * (BLOCK - 1))  # an expert's rows are padded to 128


def _flashinfer(problem: Problem) -> float:
    item = 2 if problem.quant is Quant.NONE else 1
    return problem.rows * (item * (problem.hidden + problem.inter) + 2.0 * (problem.w13_rows + problem.hidden))


LIBRARIES: Mapping[Backend, Library] = {
    Backend.VLLM_TRITON: Library((VLLM,), tuple(Quant), (*GATED, "relu2"), _vllm_triton, bias=True),
    Backend.VLLM_CUTLASS: Library(
        (VLLM,),
        (Quant.FP8_TENSOR, Quant.FP8_CHANNEL),
        GATED,
        lambda problem: _both(problem, problem.rows),
        multiple=16,
    ),
    Backend.VLLM_DEEPGEMM: Library(
        (VLLM,), (Quant.FP8_BLOCK,), ("silu",), _deepgemm, dtypes=(DType.BF16,), multiple=BLOCK
    ),
    Backend.FLASHINFER_CUTLASS: Library(
        (("flashinfer-python", "0.6"), VLLM),  # x is quantised by vLLM's kernel: FlashInfer has none for it
        (Quant.NONE, Quant.FP8_TENSOR),
        ("silu", "relu2"),
        _flashinfer,
        multiple=16,
        most_tokens=(16384, "calls with more were reported to crash"),
        layout=Layout.UP_FIRST,
    ),
    Backend.TRITON_KERNELS: Library(
        (VLLM,),  # which brings it along
        (Quant.NONE,),
        ("swiglu_oai/interleaved",),
        lambda problem: 2.0 * problem.rows * problem.inter,
        dtypes=(DType.BF16,),
        bias=True,
    ),
}


def padded_inter(problem: Problem, layout: Layout) -> int:
    """inter as that layout stores it."""
    if layout is Layout.CHECKPOINT:
        return problem.inter
    step = 16 if problem.activation.gated else BLOCK
    return -(-problem.inter // step) * step


def layout_bytes(problem: Problem, layout: Layout) -> int:
    """Bytes of the layer's weights in a layout that is not the checkpoint's: a copy of them; 0 for the checkpoint's."""
    if layout is Layout.CHECKPOINT:
        return 0
    item = problem.dtype.bytes if problem.quant is Quant.NONE else 1
    rows = padded_inter(problem, layout) * (3 if problem.activation.gated else 2)
    return problem.experts * rows * problem.hidden * item


def library_reasons(backend: Backend, problem: Problem, hardware: Hardware, installed: Installed = ()) -> list[str]:
    """Why that library's experts cannot compute this problem here, each reason with the value that it refuses."""
    library = LIBRARIES[backend]
    return (
        package_reasons(library, installed)
        + _device_reasons(hardware)
        + _value_reasons(library, problem)
        + _size_reasons(library, problem)
    )


def package_reasons(library: Library, installed: Installed) -> list[str]:
    found, have = [], dict(installed)
    for package, least in library.packages:
        if package not in have:
            found.append(f"{package} is not installed")
        elif _numbers(have[package]) < _numbers(least):
            found.append(f"{package} {have[package]} is older than {least}, whose calls are known")
    return found


def _numbers(version: str) -> tuple[int, ...]:
    """
    >>> _numbers("0.26.0rc1+cu130") < _numbers("0.27"), _numbers("0.9") < _numbers("0.26")
    (True, True)
    """
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0])[:3])


def _device_reasons(hardware: Hardware) -> list[str]:
    if hardware.is_hopper:
        return []
    major, minor = hardware.capability
    return [f"is called on compute capability 9.0 (Hopper) only, {hardware.name} has {major}.{minor}"]


def _value_reasons(library: Library, problem: Problem) -> list[str]:
    found = []
    if problem.quant not in library.quants:
        found.append(f"does not take quant={problem.quant.value}")
    if problem.dtype not in library.dtypes:
        found.append(f"does not take dtype={problem.dtype.value}")
    if problem.activation.name not in library.activations:
        found.append(f"has no activation {problem.activation.name}")
    if problem.bias and not library.bias:
        found.append("adds no bias")
    if problem.quant is Quant.FP8_TENSOR and library.static and not problem.static_scale:
        found.append("fp8_tensor without static activation scales is not called here")
    if problem.weight_on_input:
        found.append("weight_on_input is not called here")
    if problem.total_experts != problem.experts:
        found.append(
            f"total_experts={problem.total_experts} of which {problem.experts} are here: no expert map is given"
        )
    return found


def _size_reasons(library: Library, problem: Problem) -> list[str]:
    found = []
    step = BLOCK if problem.quant is Quant.FP8_BLOCK else library.multiple
    for name, value in (("hidden", problem.hidden), ("inter", padded_inter(problem, library.layout))):
        if value % step:
            found.append(f"{name}={value} is no multiple of {step}")
    if library.most_tokens and problem.tokens > library.most_tokens[0]:
        most, why = library.most_tokens
        found.append(f"tokens={problem.tokens} is more than {most}: {why}")
    return found
