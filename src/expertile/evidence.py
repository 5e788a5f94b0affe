"""What the compiler makes of a decode tile with and without swapped operands: for sm_90a, on any machine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from .hardware import H200
from .kernels import grouped_gemm, swapped_gemm
from .kernels.tiles import Product
from .plans import GemmConfig
from .policy.tiles import choose_tiles
from .problem import Problem, named_problem
from .runtime.compile import Compiled, compile_specialization

LAYER, TOKENS = "qwen3-30b-a3b", 16


@dataclass(frozen=True, eq=False)
class SwapRow:
    """One compilation of the evidence. label: of the problem, as in a benchmark row."""

    label: str
    config: GemmConfig
    compiled: Compiled

    @property
    def instructions(self) -> str:
        """The matrix instructions of one step over block_k: "8 x wgmma m64n16k32 f32.e4m3.e4m3"."""
        return ", ".join(f"{count} x {name}" for name, count in self.compiled.mma.items()) or "none"


def gate_up(problem: Problem) -> Product:
    """GEMM1 of that problem, h written in its own dtype."""
    return Product(
        n=problem.inter,
        k=problem.hidden,
        top_k=problem.top_k,
        gather=True,
        scatter=False,
        dtype=problem.dtype.value,
        activation=problem.activation,
        quant=problem.quant,
        bias=problem.bias,
    )


def swap_evidence(labels: tuple[str, ...] = ("bf16", "fp8_tensor")) -> Iterator[SwapRow]:
    """GEMM1's tile for TOKENS tokens of LAYER, rows grouped by expert: as it is, without TMA, then not swapped."""
    for label in labels:
        problem = named_problem(LAYER, TOKENS, label)
        tile, _ = choose_tiles(problem, H200)
        for config in dict.fromkeys((tile, replace(tile, tma=False), replace(tile, swap=False, tma=False))):
            kernel = swapped_gemm if config.tma else grouped_gemm
            yield SwapRow(label, config, compile_specialization(kernel.signature(config, gate_up(problem))))
