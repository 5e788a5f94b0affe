"""Activations to e4m3: one scale for all (given), one a row, or one per row and 128 values.

scale = max(absmax, 1e-10) / 448          q = round(clamp(x / scale, -448, 448))
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..problem import Quant
from .tiles import (
    TYPES,
    Specialization,
    gdc_launch_dependents,
    gdc_wait,
    launch,
    launch_options,
    quantize_rows,
    scale_mode,
)


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["rows_ptr"])
def _quantize_kernel(
    x_ptr,  # [rows, WIDTH]
    q_ptr,  # [rows, WIDTH]
    scale_ptr,  # [1], [rows] or [rows, WIDTH / 128]
    rows_ptr,  # [1] rows that exist, or None for all
    stride_xm,
    rows,
    WIDTH: tl.constexpr,
    MODE: tl.constexpr,  # static, row or block
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    if rows_ptr is not None:
        rows = tl.load(rows_ptr)
        if tl.program_id(0) * ROWS >= rows:
            return
    quantize_rows(x_ptr, q_ptr, scale_ptr, row, row < rows, stride_xm, WIDTH, MODE, ROWS, BLOCK)


PROGRAM_VALUES = 4096  # a program takes as many rows as make this many values


def _constants(width: int, quant: Quant, static: bool, pdl: bool) -> dict:
    block = max(128, triton.next_power_of_2(width))
    return dict(WIDTH=width, MODE=scale_mode(quant, static), ROWS=max(1, PROGRAM_VALUES // block), BLOCK=block, PDL=pdl)


def _options(width: int, pdl: bool) -> dict:
    return launch_options(pdl, num_warps=4 if width <= 4096 else 8)


def quantize(x, q, scale, quant: Quant, *, static=False, rows=None, pdl=False, launch=launch):
    """q = x in e4m3 with `scale`: read when static, else written.

    Shapes    x [R, W], W contiguous -> q [R, W], scale [1] | [R] | [R, ceil(W / 128)]
    Dtypes    x bf16, fp16 or fp32; q e4m3; scale fp32
    Rows      rows: int32 on the device, only that many rows exist (the rest is neither read nor written)
    """
    count, width = x.shape
    constants = _constants(width, quant, static, pdl)
    launch(
        _quantize_kernel, (-(-count // constants["ROWS"]),),
        x, q, scale, rows, x.stride(0), count, **constants, **_options(width, pdl),
    )  # fmt: skip
    return q, scale


def signature(width: int, quant: Quant, dtype="bf16", static=False, counted=False, pdl=True) -> Specialization:
    """What quantize asks the compiler for."""
    constants = _constants(width, quant, static, pdl) | ({} if counted else {"rows_ptr": None})
    types = dict(
        x_ptr=f"*{TYPES[dtype]}", q_ptr="*fp8e4nv", scale_ptr="*fp32", rows_ptr="*i32", stride_xm="i32", rows="i32"
    )
    types = {name: kind for name, kind in types.items() if name not in constants} | dict.fromkeys(
        constants, "constexpr"
    )
    pointers = (name for name, kind in types.items() if kind.startswith("*") and name != "rows_ptr")
    aligned = (*pointers, "stride_xm")
    return Specialization(_quantize_kernel, types, constants, aligned, _options(width, pdl))
