"""Decode tiles run on WGMMA because their operands are swapped: the compiler says so, for sm_90a, without a GPU."""

import pytest

from expertile.evidence import swap_evidence
from expertile.hardware import H200
from expertile.runtime.compile import compile_sm90


@pytest.fixture(scope="module")
def rows():
    """(label, swapped) -> the compilations"""
    found: dict = {}
    for row in swap_evidence():
        found.setdefault((row.label, row.config.swap), []).append(row.compiled)
    return found


SHAPES = [("bf16", "m64n16k16 f32.bf16.bf16"), ("fp8_tensor", "m64n16k32 f32.e4m3.e4m3")]


@pytest.mark.parametrize(("label", "shape"), SHAPES)
def test_swapped_the_tile_is_wgmma_in_the_weights_own_dtype(rows, label, shape):
    for compiled in rows[label, True]:
        assert set(compiled.mma) == {f"wgmma {shape}"}


@pytest.mark.parametrize(("label", "dtype"), [("bf16", "bf16"), ("fp8_tensor", "f16")])
def test_not_swapped_it_falls_back_to_mma_sync_and_fp8_is_widened(rows, label, dtype):
    (compiled,) = rows[label, False]
    assert set(compiled.mma) == {f"mma.sync m16n8k16 f32.{dtype}.{dtype}"}


@pytest.mark.parametrize(("label", "instruction"), [("bf16", "HGMMA"), ("fp8_tensor", "QGMMA")])
def test_the_machine_code_agrees_with_the_ptx(rows, label, instruction):
    assert all(instruction in compiled.sass for compiled in rows[label, True])
    assert not any("GMMA" in compiled.sass for compiled in rows[label, False])


def test_no_registers_are_spilled_and_shared_memory_fits(rows):
    for compiled in (compiled for found in rows.values() for compiled in found):
        assert compiled.spill_bytes == compiled.stack_bytes == 0
        assert 0 < compiled.registers <= 255
        assert 0 < compiled.smem_bytes <= H200.smem_bytes


def test_a_spill_is_seen():
    """The reader of spills is held against a kernel that must spill: 128 sums a thread in 32 registers."""
    import triton
    import triton.language as tl

    @triton.jit
    def spilling(x_ptr, n, BLOCK: tl.constexpr):
        place = tl.arange(0, BLOCK)
        total = tl.load(x_ptr + place)
        for i in range(n):
            total = total * total + tl.load(x_ptr + i)
        tl.store(x_ptr + place, total)

    compiled = compile_sm90(spilling, {"x_ptr": "*fp32", "n": "i32"}, {"BLOCK": 4096}, num_warps=1, maxnreg=32)
    assert compiled.spill_bytes > 0


def test_gluon_kernels_compile_too():
    gluon = pytest.importorskip("triton.experimental.gluon")
    gl = gluon.language

    @gluon.jit
    def add_one(x_ptr, n, BLOCK: gl.constexpr):
        place = gl.arange(0, BLOCK, layout=gl.BlockedLayout([1], [32], [4], [0]))
        inside = place < n
        gl.store(x_ptr + place, gl.load(x_ptr + place, mask=inside) + 1.0, mask=inside)

    compiled = compile_sm90(add_one, {"x_ptr": "*fp32", "n": "i32"}, {"BLOCK": 128}, num_warps=4)
    assert compiled.registers > 0 and not compiled.mma and ".target sm_90a" in compiled.ptx
