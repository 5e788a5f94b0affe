"""What `expertile audit` advises about alignment is what the compiler does: a copy whose stride comes in five ways."""

import re

import pytest
import triton
import triton.language as tl

from expertile.runtime.compile import compile_sm90


@triton.jit
def _copy_kernel(x_ptr, y_ptr, stride, WAY: tl.constexpr):
    if WAY == "hint on the argument":
        stride = tl.multiple_of(stride, 16)
    if WAY == "hint on a 64-bit copy":
        stride = tl.multiple_of(stride.to(tl.int64), 16)
    if WAY == "in units":
        stride = stride * 8
    n = tl.program_id(0) * stride + tl.arange(0, 1024)
    tl.store(y_ptr + n, tl.load(x_ptr + n))


@pytest.mark.parametrize(
    ("way", "specialised", "width"),
    [
        ("as it is", True, "128"),
        ("as it is", False, "U16"),
        ("hint on the argument", False, "U16"),
        ("hint on a 64-bit copy", False, "128"),
        ("in units", False, "128"),
    ],
)
def test_a_stride_that_is_not_specialised_needs_its_alignment_said_in_a_way_that_counts(way, specialised, width):
    types = dict(x_ptr="*bf16", y_ptr="*bf16", stride="i32")
    aligned = ["x_ptr", "y_ptr", *(["stride"] if specialised else [])]
    sass = compile_sm90(_copy_kernel, types, dict(WAY=way), aligned, num_warps=4).sass
    assert set(re.findall(r"\b(?:LDG|STG)\.E\.?(\w*)", sass)) == {width}
