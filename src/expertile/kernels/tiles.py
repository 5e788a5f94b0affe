"""What the grouped products share: their description, the row order that pairs gate with up, activation and scales.

Gate and up rows of w13 meet in one tile in granules of eight, (8 gate, 8 up, 8 gate, ...). In WGMMA's accumulator a
thread then holds both halves of its h values, so the product of the two never leaves registers, and the weights stay as
the checkpoint has them: only the addresses are permuted.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import triton
import triton.language as tl

from ..errors import ShapeError
from ..plans import GemmConfig
from ..problem import BLOCK, Activation, Quant

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # Triton built without CUDA
    gdc_launch_dependents = gdc_wait = None

FP8_MAX = 448.0
TYPES = {"bf16": "bf16", "fp16": "fp16", "fp32": "fp32", "fp8": "fp8e4nv"}  # our names -> Triton's


@dataclass(frozen=True)
class Product:
    """What one grouped product computes, besides its tiles: y[r] = epilogue(x[row(r)] @ w[e(r)].T).

    n, k        columns of y (after the activation) and the contracted dimension
    gather      row(r) = gather[r] // top_k (x by token); else x is already in routed order
    scatter     y is written at slot gather[r]; else at row r
    activation  applied in the epilogue; w then has 2n rows if it is gated
    quant       of x and w; static_scale: x has one scale, given ahead
    out_quant   y is written as e4m3: "static" with one given scale, "block" with a scale per 128 values, "" not
    weight_on_input   the accumulator is multiplied by the router's weight (x @ w is linear in x)
    """

    n: int
    k: int
    top_k: int
    gather: bool
    scatter: bool
    dtype: str
    activation: Activation | None = None
    quant: Quant = Quant.NONE
    static_scale: bool = False
    split_scale: bool = False
    out_quant: str = ""
    bias: bool = False
    weight_on_input: bool = False

    @property
    def gated(self) -> bool:
        return self.activation is not None and self.activation.gated

    @property
    def w_rows(self) -> int:
        return self.n * (2 if self.gated else 1)

    def y_block(self, config: GemmConfig) -> int:
        """Columns of y that one tile of config.block_n weight rows gives."""
        return config.block_n // (2 if self.gated else 1)

    def constants(self, config: GemmConfig, pdl: bool) -> dict:
        """The constexpr arguments of a grouped product's kernel."""
        act = self.activation
        return dict(
            N=self.n,
            K=self.k,
            TOP_K=self.top_k,
            GATHER=self.gather,
            SCATTER=self.scatter,
            GATE=act.gate.value if act else "",
            GATED=self.gated,
            INTERLEAVED=bool(act and act.interleaved),
            ALPHA=act.alpha if act else 1.0,
            BETA=act.beta if act else 0.0,
            LIMIT=act.limit if act else None,
            QUANT=self.quant.value,
            STATIC_SCALE=self.static_scale,
            SPLIT_SCALE=self.split_scale,
            OUT_QUANT=self.out_quant,
            BLOCK_M=config.block_m,
            BLOCK_N=config.block_n,
            BLOCK_K=config.block_k,
            STAGES=config.stages,
            SWAP=config.swap,
            GROUP_M=config.group_m,
            PDL=pdl,
        )

    def check(self, config: GemmConfig, block_m: int) -> None:
        """Raises ShapeError when the tile cannot serve this product, or rows were tiled for another block_m."""
        if config.block_m != block_m:
            raise ShapeError(f"block_m={config.block_m}, but the rows were routed into tiles of {block_m}")
        for name in ("block_m", "block_n", "block_k"):
            value = getattr(config, name)
            if value & (value - 1) or value < 16:
                raise ShapeError(f"{name}={value}: tiles are powers of two, at least 16")
        if self.quant is Quant.FP8_BLOCK and config.block_k > BLOCK:
            raise ShapeError(f"block_k={config.block_k} spans two scale blocks: fp8_block needs at most {BLOCK}")
        if self.out_quant == "block" and self.y_block(config) % BLOCK:
            raise ShapeError(
                f"block_n={config.block_n} gives {self.y_block(config)} columns of h: quantising them in the epilogue "
                f"needs a multiple of {BLOCK}"
            )


@dataclass(frozen=True)
class Specialization:
    """One compilation of one kernel: what a launch would ask the compiler for. Read by warm-up, guard and compile
    tests.
    """

    kernel: object
    types: dict[str, str]  # argument -> Triton type, "constexpr" included
    constants: dict[str, object]
    divisible_by_16: tuple[str, ...]
    options: dict[str, object] = field(default_factory=dict)


def aligned_rows(x):
    """x, or a copy of it where its rows do not begin at multiples of 16 bytes, as TMA and cp.async read them."""
    if x.data_ptr() % 16 or x.stride(0) * x.element_size() % 16:
        return x.clone(memory_format=torch.contiguous_format)
    return x


def launch(kernel, grid: tuple, *arguments, **others):
    """How launchers start their kernel, unless they are told another way (runtime/launches.py records)."""
    return kernel[grid](*arguments, **others)


def launch_options(pdl: bool, **options) -> dict:
    """Options of a launch in the order that Triton's key has them, programmatic dependent launch last."""
    return options | ({"launch_pdl": True} if pdl else {})


def scale_mode(quant: Quant, static: bool) -> str:
    """How a row of activations is scaled to e4m3: a scale given ahead, one a row, or one a block of 128."""
    return "static" if static else "block" if quant is Quant.FP8_BLOCK else "row"


def gemm_specialization(kernel, product: Product, config: GemmConfig, pdl: bool) -> Specialization:
    """The Specialization of a grouped product's kernel for sizes whose rows are 16-byte aligned."""
    dtype = TYPES[product.dtype]
    operand = dtype if product.quant is Quant.NONE else "fp8e4nv"
    types = dict(
        x_ptr=f"*{operand}",
        w_ptr=f"*{operand}",
        y_ptr=f"*{dtype}" if not product.out_quant else "*fp8e4nv",
        gather_ptr="*i32",
        tiles_ptr="*i32",
        x_scale_ptr="*fp32",
        w_scale_ptr="*fp32",
        y_scale_ptr="*fp32",
        bias_ptr=f"*{dtype}",
        probs_ptr="*fp32",
        stride_xm="i32",
        stride_we="i32",
        stride_wn="i32",
    )
    constants = product.constants(config, pdl)
    absent = {
        "x_scale_ptr": product.quant is Quant.NONE,
        "w_scale_ptr": product.quant is Quant.NONE,
        "y_scale_ptr": not product.out_quant,
        "bias_ptr": not product.bias,
        "probs_ptr": not product.weight_on_input,
    }
    constants.update({name: None for name, missing in absent.items() if missing})
    types.update(dict.fromkeys(constants, "constexpr"))
    divisible = tuple(name for name, kind in types.items() if kind.startswith("*") or name.startswith("stride"))
    options = launch_options(pdl, num_warps=config.warps, num_stages=config.stages)
    return Specialization(kernel, types, constants, divisible, options)


@triton.jit
def local_experts(ids_ptr, map_ptr, slot, slots, total, EXPERTS: tl.constexpr):
    """The expert on this rank of each slot; EXPERTS where the slot is skipped."""
    expert = tl.load(ids_ptr + slot, mask=slot < slots, other=-1)
    valid = (expert >= 0) & (expert < total)
    if map_ptr is not None:
        expert = tl.load(map_ptr + expert, mask=valid, other=-1)
        valid = (expert >= 0) & (expert < EXPERTS)
    return tl.where(valid, expert, EXPERTS).to(tl.int32)


@triton.jit
def tile_weight_rows(block, N: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK_N: tl.constexpr):
    """Rows of w that tile `block` multiplies, clamped into the matrix, and for each whether it is an up row."""
    r = tl.arange(0, BLOCK_N)
    if GATED:
        column = tl.minimum(block * (BLOCK_N // 2) + (r // 16) * 8 + r % 8, N - 1)
        up = (r // 8) % 2
        row = column * 2 + up if INTERLEAVED else column + up * N
    else:
        row = tl.minimum(block * BLOCK_N + r, N - 1)
        up = r * 0
    return row, up


@triton.jit
def scale_block_row(
    e, row, up, N: tl.constexpr, GATED: tl.constexpr, SPLIT_SCALE: tl.constexpr, INTERLEAVED: tl.constexpr = False
):
    """The row of w's 128x128 scale table, all experts' rows in one, for each weight row."""
    if SPLIT_SCALE:
        half: tl.constexpr = (N + 127) // 128
        column = row // 2 if INTERLEAVED else row - up * N
        found = e * (2 * half) + column // 128 + up * half
    else:
        W_ROWS: tl.constexpr = 2 * N if GATED else N
        found = e * ((W_ROWS + 127) // 128) + row // 128
    return found


@triton.jit
def clamped(value, LIMIT: tl.constexpr):
    """value within -LIMIT and LIMIT; NaN stays NaN, which a plain minimum would turn into LIMIT."""
    return tl.minimum(tl.maximum(value, -LIMIT, tl.PropagateNan.ALL), LIMIT, tl.PropagateNan.ALL)


@triton.jit
def gate_value(g, GATE: tl.constexpr, ALPHA: tl.constexpr):
    """f(g) of problem.Gate, in fp32."""
    if GATE == "silu":
        value = g / (1.0 + tl.exp2(-1.4426950408889634 * ALPHA * g))
    elif GATE == "gelu_tanh":
        z = 1.5957691216057308 * (g + 0.044715 * g * g * g)  # 2 * sqrt(2 / pi) * (...): tanh by the sigmoid
        value = g / (1.0 + tl.exp2(-1.4426950408889634 * z))
    elif GATE == "gelu_erf":
        value = 0.5 * g * (1.0 + tl.erf(g * 0.7071067811865476))
    else:
        tl.static_assert(GATE == "relu2", "unknown gate")
        positive = tl.maximum(g, 0.0, tl.PropagateNan.ALL)
        value = positive * positive
    return value


@triton.jit
def gated_value(g, u, GATE: tl.constexpr, ALPHA: tl.constexpr, BETA: tl.constexpr, LIMIT: tl.constexpr):
    """f(min(g, limit)) * (clamp(u, -limit, limit) + beta), in fp32."""
    if LIMIT is not None:
        g = tl.minimum(g, LIMIT, tl.PropagateNan.ALL)
        u = clamped(u, LIMIT)
    return gate_value(g, GATE, ALPHA) * (u + BETA)


@triton.jit
def to_fp8(value, scale):
    return clamped(value / scale, 448.0).to(tl.float8e4nv)


@triton.jit
def quantize_rows(
    x_ptr, q_ptr, scale_ptr, row, inside, stride_xm,
    WIDTH: tl.constexpr, MODE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows `row` [ROWS] int64 of x [rows, WIDTH] to e4m3; MODE static reads the scale, row and block write it."""
    n = tl.arange(0, BLOCK)
    keep = inside[:, None] & (n < WIDTH)[None, :]
    x = tl.load(x_ptr + row[:, None] * stride_xm + n[None, :], mask=keep, other=0.0).to(tl.float32)
    if MODE == "static":
        q = to_fp8(x, tl.load(scale_ptr))
    elif MODE == "row":
        scale = tl.maximum(tl.max(tl.abs(x), 1), 1e-10) / 448.0
        tl.store(scale_ptr + row, scale, mask=inside)
        q = to_fp8(x, scale[:, None])
    else:
        GROUPS: tl.constexpr = BLOCK // 128
        ALL_GROUPS: tl.constexpr = (WIDTH + 127) // 128
        group = tl.arange(0, GROUPS)
        x = tl.reshape(x, (ROWS, GROUPS, 128))
        scale = tl.maximum(tl.max(tl.abs(x), 2), 1e-10) / 448.0
        fits = inside[:, None] & (group < ALL_GROUPS)[None, :]
        tl.store(scale_ptr + row[:, None] * ALL_GROUPS + group[None, :], scale, mask=fits)
        q = tl.reshape(to_fp8(x, scale[:, :, None]), (ROWS, BLOCK))
    tl.store(q_ptr + row[:, None] * WIDTH + n[None, :], q, mask=keep)


@triton.jit
def dequantized(
    acc, slot, x_row, e, row, x_scale_ptr, w_scale_ptr, bias_ptr, probs_ptr,
    W_ROWS: tl.constexpr, QUANT: tl.constexpr, STATIC_SCALE: tl.constexpr,
):  # fmt: skip
    """acc [M, N] times the scales that do not vary along K and the router's weight on the input, plus the bias."""
    if QUANT == "fp8_tensor":
        acc *= tl.load(w_scale_ptr + e)
    if QUANT == "fp8_channel":
        acc *= tl.load(w_scale_ptr + e * W_ROWS + row)[None, :]
    if STATIC_SCALE:
        acc *= tl.load(x_scale_ptr)
    elif QUANT == "fp8_tensor" or QUANT == "fp8_channel":
        acc *= tl.load(x_scale_ptr + x_row)[:, None]
    if probs_ptr is not None:
        acc *= tl.load(probs_ptr + slot).to(tl.float32)[:, None]
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + e * W_ROWS + row).to(tl.float32)[None, :]
    return acc


@triton.jit
def write_tile(
    y,  # [BLOCK_M, Y_BLOCK] fp32
    y_row,  # [BLOCK_M]
    inside,  # [BLOCK_M]
    block,
    y_ptr,
    y_scale_ptr,
    N: tl.constexpr,
    OUT_QUANT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    Y_BLOCK: tl.constexpr,
):
    """Stores a tile of y, quantised if OUT_QUANT says so."""
    n = block * Y_BLOCK + tl.arange(0, Y_BLOCK)
    y_row = y_row.to(tl.int64)
    keep = inside[:, None] & (n < N)[None, :]
    y_tile = y_ptr + y_row[:, None] * N + n[None, :]
    if OUT_QUANT == "":
        tl.store(y_tile, y.to(y_ptr.dtype.element_ty), mask=keep)
    elif OUT_QUANT == "static":
        tl.store(y_tile, to_fp8(y, tl.load(y_scale_ptr)), mask=keep)
    else:
        GROUPS: tl.constexpr = Y_BLOCK // 128
        ALL_GROUPS: tl.constexpr = (N + 127) // 128
        y = tl.reshape(tl.where((n < N)[None, :], y, 0.0), (BLOCK_M, GROUPS, 128))
        scale = tl.maximum(tl.max(tl.abs(y), 2), 1e-10) / 448.0
        group = block * GROUPS + tl.arange(0, GROUPS)
        fits = inside[:, None] & (group < ALL_GROUPS)[None, :]
        tl.store(y_scale_ptr + y_row[:, None] * ALL_GROUPS + group[None, :], scale, mask=fits)
        tl.store(y_tile, tl.reshape(to_fp8(y, scale[:, :, None]), (BLOCK_M, Y_BLOCK)), mask=keep)
