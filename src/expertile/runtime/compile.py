"""Compile one kernel for sm_90a on any machine, with or without a GPU, and read what came out of it."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

TARGET = GPUTarget("cuda", 90, 32)
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"  # of the wheel

#: Instruction -> the pattern that finds it in PTX.
FEATURES = {
    "wgmma": r"\bwgmma\.mma_async",
    "mma.sync": r"\bmma\.sync",
    "cp.async": r"\bcp\.async\.c[ag]\.",
    "tma_load": r"\bcp\.async\.bulk\.tensor\.\dd\.shared",
    "tma_store": r"\bcp\.async\.bulk\.tensor\.\dd\.global",
    "ldmatrix": r"\bldmatrix",
    "stmatrix": r"\bstmatrix",
    "pdl_wait": r"\bgriddepcontrol\.wait",
    "pdl_launch": r"\bgriddepcontrol\.launch_dependents",
    "setmaxnreg": r"\bsetmaxnreg",
}
_MMA = re.compile(
    r"\b(wgmma)\.mma_async\.sync\.aligned\.(m\d+n\d+k\d+)\.([\w.]+)|\b(mma\.sync)\.aligned\.(m\d+n\d+k\d+)\.([\w.]+)"
)


@dataclass(frozen=True, eq=False)
class Compiled:
    """A kernel compiled for sm_90a.

    ptx, cubin    what the compiler made
    smem_bytes    dynamic shared memory of one block
    warps         in one block, producers included
    """

    name: str
    ptx: str
    cubin: bytes
    smem_bytes: int
    warps: int

    @cached_property
    def mma(self) -> Counter[str]:
        """How often each matrix instruction stands in the PTX: {"wgmma m64n16k32 f32.e4m3.e4m3": 8}."""
        found: Counter[str] = Counter()
        for match in _MMA.finditer(self.ptx):
            kind, shape, types = (part for part in match.groups() if part)
            operands = types.removeprefix("row.col.").split(".")[:3]  # accumulator, left, right
            found[f"{kind} {shape} {'.'.join(operands)}"] += 1
        return found

    @cached_property
    def features(self) -> Counter[str]:
        """How often each of FEATURES stands in the PTX."""
        return Counter({name: len(re.findall(pattern, self.ptx)) for name, pattern in FEATURES.items()})

    @cached_property
    def registers(self) -> int:
        """Registers of one thread."""
        return self._resources["REG"]

    @cached_property
    def stack_bytes(self) -> int:
        """Stack of one thread: spilled registers and arrays with run-time indices live there."""
        return self._resources["STACK"]

    @cached_property
    def spill_bytes(self) -> int:
        """Bytes that one thread stores to and loads from spilled registers, as ptxas reports them."""
        with tempfile.TemporaryDirectory() as folder:
            ptx = Path(folder, "kernel.ptx")
            ptx.write_text(self.ptx)
            said = _tool(get_ptxas(90).path, "-v", "--gpu-name=sm_90a", str(ptx), "-o", os.devnull)
        return sum(int(n) for n in re.findall(r"(\d+) bytes spill (?:stores|loads)", said))

    @cached_property
    def sass(self) -> str:
        """The machine code as text."""
        return self._with_cubin(TOOLS / "nvdisasm", "-c")

    @cached_property
    def _resources(self) -> dict[str, int]:
        said = self._with_cubin(TOOLS / "cuobjdump", "-res-usage")
        return {key: int(value) for key, value in re.findall(r"\b(REG|STACK|SHARED|LOCAL):(\d+)", said)}

    def _with_cubin(self, tool: Path, *options: str) -> str:
        with tempfile.TemporaryDirectory() as folder:
            cubin = Path(folder, "kernel.cubin")
            cubin.write_bytes(self.cubin)
            return _tool(tool, *options, str(cubin))


def _tool(path: str | Path, *arguments: str) -> str:
    done = subprocess.run([path, *arguments], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{path} failed: {(done.stderr or done.stdout).strip()}")
    return done.stdout + done.stderr


def compile_sm90(
    kernel,
    types: Mapping[str, str],
    constants: Mapping[str, object] | None = None,
    divisible_by_16: Iterable[str] | None = None,
    **options,
) -> Compiled:
    """The kernel, Triton or Gluon, compiled for sm_90a as a launch would have it compiled.

    types            argument -> Triton type ("*bf16", "i32", "tensordesc<bf16[128, 64]>"); constants need none
    constants        value of each constexpr argument
    divisible_by_16  arguments whose value or address is a multiple of 16; default: every pointer
    options          num_warps, num_stages, launch_pdl, maxnreg, ...

    Needs kernels that were not made under TRITON_INTERPRET=1.
    """
    constants = dict(constants or {})
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types[name] for name in names}
    if divisible_by_16 is None:
        divisible_by_16 = [name for name, kind in signature.items() if kind.startswith("*")]
    source = _source_class(kernel)(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in divisible_by_16},
    )
    made = triton.compile(source, target=TARGET, options=options)
    return Compiled(
        made.metadata.name, made.asm["ptx"], made.asm["cubin"], made.metadata.shared, made.metadata.num_warps
    )


def compile_specialization(spec) -> Compiled:
    """A kernel's `signature(...)` (kernels.tiles.Specialization) compiled for sm_90a."""
    return compile_sm90(spec.kernel, spec.types, spec.constants, spec.divisible_by_16, **spec.options)


def _source_class(kernel):
    if "gluon" in inspect.getmodule(type(kernel)).__name__:
        from triton.experimental.gluon._runtime import GluonASTSource

        return GluonASTSource
    return ASTSource
