"""Small kernels, one for each way in which a launch can ask for another variant."""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@triton.jit
def plus(x_ptr, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(x_ptr + i, tl.load(x_ptr + i, mask=i < n) + 1, mask=i < n)


@triton.jit(do_not_specialize=["n"])
def plus_unspecialized(x_ptr, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(x_ptr + i, tl.load(x_ptr + i, mask=i < n) + 1, mask=i < n)


@triton.jit(do_not_specialize_on_alignment=["n", "x_ptr"])
def plus_unaligned(x_ptr, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(x_ptr + i, tl.load(x_ptr + i, mask=i < n) + 1, mask=i < n)


@triton.jit
def plus_typed(x_ptr, n: tl.int64, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(x_ptr + i, tl.load(x_ptr + i, mask=i < n) + 1, mask=i < n)


@triton.jit
def affine(x_ptr, bias_ptr, scale, sizes, DTYPE: tl.constexpr, KIND: tl.constexpr = "plain"):
    i = tl.arange(0, 16)
    x = tl.load(x_ptr + i) * scale + sizes[0] + sizes[1]
    if bias_ptr is not None:
        x += tl.load(bias_ptr + i)
    tl.store(x_ptr + i, x.to(DTYPE))


@triton.jit
def twice(x):
    return x + x


@triton.jit
def thrice(x):
    return x + x + x


@triton.jit
def apply(x_ptr, F: tl.constexpr):
    i = tl.arange(0, 16)
    tl.store(x_ptr + i, F(tl.load(x_ptr + i)))


@gluon.jit
def gluon_plus(x_ptr, n, LAYOUT: gl.constexpr):
    i = gl.arange(0, 128, layout=LAYOUT)
    gl.store(x_ptr + i, gl.load(x_ptr + i, mask=i < n) + 1, mask=i < n)


@triton.jit
def broken(x_ptr, n):
    tl.static_assert(False, "does not compile")


def layout(warps: int = 4):
    return gl.BlockedLayout([1], [32], [warps], [0])


configs = [triton.Config({"BLOCK": block}, num_warps=1) for block in (16, 32, 64)]
tuned = triton.autotune(configs=configs, key=["n"])(plus_unspecialized)


@triton.jit
def copy_tile(x_desc, y_ptr):
    rows, columns = tl.arange(0, 16)[:, None], tl.arange(0, 64)[None, :]
    tl.store(y_ptr + rows * 64 + columns, x_desc.load([0, 0]))
