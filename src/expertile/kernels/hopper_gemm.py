"""Grouped product for thick tiles: persistent and warp-specialised (Gluon), 128 rows by 256 weight rows.

    y[r] = epilogue(x[row(r)] @ w[e(r)].T)

What grouped_gemm computes, for experts with many rows. A block stays on its SM and takes tile after tile from a counter
that all blocks share. Its warps have roles (hopper_roles.py): one asks for weights by TMA, two gather rows of x by
cp.async (in GEMM2 h is in routed order and comes by TMA as well), and two warpgroups multiply 64 rows each, so that
one's epilogue hides under the other's products. A ring of shared buffers with two mbarriers a stage is all they share.

Weights land in shared memory in another row order than they have: of every 32 rows, row 8l + 2g + c is put at
8g + 2l + c (a rank-5 TMA view, no rewrite). WGMMA's accumulator then gives a thread eight neighbouring columns of y,
which it stores as one piece: the epilogue needs no shared memory.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..errors import ShapeError
from ..plans import SPECIALIZED_STAGES, GemmConfig
from ..problem import BLOCK, Quant
from ..routing import Routing
from .hopper_roles import SLOTS, gather_rows, load_weights, multiply
from .tiles import (
    Product,
    Specialization,
    aligned_rows,
    gdc_launch_dependents,
    gdc_wait,
    gemm_specialization,
    launch,
    launch_options,
)

GATHER_WARPS = 2


@gluon.jit(do_not_specialize_on_alignment=["next_ptr"])
def _hopper_gemm_kernel(
    x_ptr,  # [X, K]
    a_desc,  # x by TMA where rows need no gathering, else None
    w_desc,  # see _weight_view
    y_ptr,  # [R, N]
    gather_ptr,  # [R]
    tiles_ptr,  # [max_tiles, 4]
    count_ptr,  # [1], row tiles
    next_ptr,  # [1], zero: tiles that were taken beyond the first of each block
    x_scale_ptr,  # [1], [X] or [X, K / 128]
    w_scale_ptr,  # [E], [E, rows] or [E, rows / 128, K / 128]
    y_scale_ptr,  # [1] or [R, N / 128]
    bias_ptr,  # [E, N or 2N]
    probs_ptr,  # [R]
    stride_xm,
    N: gl.constexpr,
    K: gl.constexpr,
    TOP_K: gl.constexpr,
    GATHER: gl.constexpr,
    SCATTER: gl.constexpr,
    GATE: gl.constexpr,
    GATED: gl.constexpr,
    INTERLEAVED: gl.constexpr,
    ALPHA: gl.constexpr,
    BETA: gl.constexpr,
    LIMIT: gl.constexpr,
    QUANT: gl.constexpr,
    STATIC_SCALE: gl.constexpr,
    SPLIT_SCALE: gl.constexpr,
    OUT_QUANT: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP_M: gl.constexpr,
    GATHER_WARPS: gl.constexpr,
    MULTIPLY_REGISTERS: gl.constexpr,
    LOAD_REGISTERS: gl.constexpr,
    PDL: gl.constexpr,
):
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    gl.static_assert(BLOCK_M == 128 and BLOCK_N == 256)
    N_BLOCKS: gl.constexpr = (N + (127 if GATED else 255)) // (128 if GATED else 256)
    item = w_desc.dtype
    w_box: gl.constexpr = w_desc.block_type.shape
    BOXES: gl.constexpr = 256 // (w_box[1] * 8)
    A_LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, item.primitive_bitwidth, 2)
    a_bufs = gl.allocate_shared_memory(item, [STAGES, BLOCK_M, BLOCK_K], A_LAYOUT)
    w_bufs = gl.allocate_shared_memory(item, [STAGES, BOXES, w_box[1], w_box[2], w_box[3], BLOCK_K], w_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(ready.index(s), count=2 if GATHER else 1)
        mbarrier.init(empty.index(s), count=2)
    steps = gl.allocate_shared_memory(gl.int32, [4 * SLOTS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    told = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    heard = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for n in gl.static_range(SLOTS):
        mbarrier.init(told.index(n), count=1)
        mbarrier.init(heard.index(n), count=3 if GATHER else 2)
    W_BYTES: gl.constexpr = BLOCK_N * BLOCK_K * item.primitive_bitwidth // 8
    A_BYTES: gl.constexpr = 64 * BLOCK_K * item.primitive_bitwidth // 8
    HALVES: gl.constexpr = 2 if GATED else 1
    if GATHER:
        gl.warp_specialize([
            (multiply, (
                0, y_ptr, gather_ptr, x_scale_ptr, w_scale_ptr, y_scale_ptr, bias_ptr, probs_ptr, w_bufs, a_bufs,
                ready, empty, steps, told, heard, N, K, TOP_K, GATHER, SCATTER, GATE, GATED, INTERLEAVED, ALPHA,
                BETA, LIMIT, QUANT, STATIC_SCALE, SPLIT_SCALE, OUT_QUANT, BLOCK_K, STAGES,
            )),
            (multiply, (
                1, y_ptr, gather_ptr, x_scale_ptr, w_scale_ptr, y_scale_ptr, bias_ptr, probs_ptr, w_bufs, a_bufs,
                ready, empty, steps, told, heard, N, K, TOP_K, GATHER, SCATTER, GATE, GATED, INTERLEAVED, ALPHA,
                BETA, LIMIT, QUANT, STATIC_SCALE, SPLIT_SCALE, OUT_QUANT, BLOCK_K, STAGES,
            )),
            (gather_rows, (
                x_ptr, stride_xm, gather_ptr, a_bufs, ready, empty, steps, told, heard, K, TOP_K, BLOCK_K, STAGES,
                GATHER_WARPS,
            )),
            (load_weights, (
                w_desc, a_desc, tiles_ptr, count_ptr, next_ptr, w_bufs, a_bufs, ready, empty, steps, told, heard, N,
                K, N_BLOCKS, HALVES, GATHER, BLOCK_K, W_BYTES, A_BYTES, STAGES, GROUP_M,
            )),
        ], [4, GATHER_WARPS, 1], [MULTIPLY_REGISTERS, LOAD_REGISTERS, LOAD_REGISTERS])  # fmt: skip
    else:
        gl.warp_specialize([
            (multiply, (
                0, y_ptr, gather_ptr, x_scale_ptr, w_scale_ptr, y_scale_ptr, bias_ptr, probs_ptr, w_bufs, a_bufs,
                ready, empty, steps, told, heard, N, K, TOP_K, GATHER, SCATTER, GATE, GATED, INTERLEAVED, ALPHA,
                BETA, LIMIT, QUANT, STATIC_SCALE, SPLIT_SCALE, OUT_QUANT, BLOCK_K, STAGES,
            )),
            (multiply, (
                1, y_ptr, gather_ptr, x_scale_ptr, w_scale_ptr, y_scale_ptr, bias_ptr, probs_ptr, w_bufs, a_bufs,
                ready, empty, steps, told, heard, N, K, TOP_K, GATHER, SCATTER, GATE, GATED, INTERLEAVED, ALPHA,
                BETA, LIMIT, QUANT, STATIC_SCALE, SPLIT_SCALE, OUT_QUANT, BLOCK_K, STAGES,
            )),
            (load_weights, (
                w_desc, a_desc, tiles_ptr, count_ptr, next_ptr, w_bufs, a_bufs, ready, empty, steps, told, heard, N,
                K, N_BLOCKS, HALVES, GATHER, BLOCK_K, W_BYTES, A_BYTES, STAGES, GROUP_M,
            )),
        ], [4, 1], [MULTIPLY_REGISTERS, LOAD_REGISTERS])  # fmt: skip


OPTIONAL = ("x_scale", "w_scale", "y_scale", "bias", "probs")
REGISTERS = 168  # a thread, before the roles trade theirs: 12 warps have 65536 between them

#: (gathering, fp8_block) -> registers of the second multiplying warpgroup, and of the loading warps; the first
#: multiplying one has what is left of three times 168. ptxas spills at other splits: tests/compile asks it.
ROLE_REGISTERS = {
    (True, False): (224, 48),
    (True, True): (216, 72),
    (False, False): (232, 40),
    (False, True): (224, 64),
}


def _swizzled(block: list[int], item_bytes: int):
    return gl.NVMMASharedLayout(128, 8 * item_bytes, len(block))


def _weight_box(product: Product, config: GemmConfig) -> list[int]:
    """Rows of one TMA load as [boxes, 2g, 8l, c] of w's row order (see above), by block_k."""
    interleaved = product.gated and product.activation.interleaved
    return [4 if product.gated else 8, 8 if interleaved else 4, 4, 2, config.block_k]


def _weight_view(w, product: Product, config: GemmConfig) -> TensorDescriptor:
    """w [E, rows, K] as a rank-5 TMA view whose box lands in the order that WGMMA's accumulator wants."""
    if not w.is_contiguous():
        raise ShapeError(f"w {tuple(w.shape)} has strides {w.stride()}: its TMA view needs contiguous weights")
    k = w.shape[2]
    box = _weight_box(product, config)
    unit = box[1] * 8  # rows that are reordered among themselves
    shape = [w.shape[0] * w.shape[1] // unit, box[1], 4, 2, k]
    strides = [unit * k, 2 * k, 2 * box[1] * k, k, 1]
    return TensorDescriptor(w, shape, strides, box, _swizzled(box, w.element_size()))


def _row_view(x, config: GemmConfig) -> TensorDescriptor:
    box = [64, config.block_k]
    return TensorDescriptor(x, list(x.shape), [x.stride(0), 1], box, _swizzled(box, x.element_size()))


def hopper_gemm(
    x, w, routing: Routing, config: GemmConfig, product: Product, y, *, programs: int, pdl=False, launch=launch,
    **tensors,
):  # fmt: skip
    """y[r] = epilogue(x[row(r)] @ w[e(r)].T) for every routed row r, by `programs` persistent blocks, one an SM.

    Shapes    x [X, K] | w [E, product.w_rows, K] contiguous -> y [R, product.n] contiguous
    Dtypes    bf16, fp16, or e4m3 with scales (product.quant); fp32 accumulation, one rounding at the store
    Tensors   x_scale, w_scale, y_scale, bias, probs as the product needs them
    Needs     routing.next_tile zero, as route_rows leaves it (it is used up); a tile of 128 x 256 x 128 bytes; rows
              of w a multiple of 16 bytes; product.n a multiple of 32; with fp8_block, gate and up rows in scale
              blocks of their own
    Raises    ShapeError when Needs does not hold
    """
    product.check(config, routing.block_m)
    _check(x, w, product, config)
    x = aligned_rows(x)
    blocks = -(-product.n // product.y_block(config))
    next_tile = routing.next_tile[0 if product.gather else 1 :]  # GEMM1 and GEMM2 have a counter each
    rows = (x, None) if product.gather else (None, _row_view(x, config))
    launch(
        _hopper_gemm_kernel, (min(programs, routing.tiles.shape[0] * blocks),),
        *rows, _weight_view(w, product, config), y, routing.gather, routing.tiles, routing.tile_count, next_tile,
        *(tensors.get(name) for name in OPTIONAL), x.stride(0), **_constants(product, config, pdl), **_options(pdl),
    )  # fmt: skip
    return y


def _check(x, w, product: Product, config: GemmConfig) -> None:
    item = w.element_size()
    if (config.block_m, config.block_n, config.block_k * item) != (128, 256, 128):
        raise ShapeError(f"{config.name}: the tile is 128 rows by 256 rows of w by 128 bytes")
    if config.stages < SPECIALIZED_STAGES:
        raise ShapeError(f"stages={config.stages}: with fewer than {SPECIALIZED_STAGES} the roles of a block hang")
    if product.n % 32 or product.k * item % 16:
        raise ShapeError(f"n={product.n} must be a multiple of 32, rows of k={product.k} of 16 bytes")
    span = x.shape[0] * x.stride(0) * item
    if product.gather and span >= 2**35:
        raise ShapeError(f"x {tuple(x.shape)} spans {span} bytes, fewer than 2^35 can be gathered")
    apart = product.split_scale or not product.gated or product.n % BLOCK == 0
    if product.quant is Quant.FP8_BLOCK and (not apart or (product.gated and product.activation.interleaved)):
        raise ShapeError(f"n={product.n}: gate and up rows lie in one scale block of {BLOCK}")


def _constants(product: Product, config: GemmConfig, pdl: bool) -> dict:
    multiply, load = ROLE_REGISTERS[product.gather, product.quant is Quant.FP8_BLOCK]
    roles = dict(GATHER_WARPS=GATHER_WARPS, MULTIPLY_REGISTERS=multiply, LOAD_REGISTERS=load)
    found = product.constants(config, pdl) | roles
    return {name: value for name, value in found.items() if name in _hopper_gemm_kernel.arg_names}


def _options(pdl: bool) -> dict:
    return launch_options(pdl, num_warps=4, maxnreg=REGISTERS)


def signature(config: GemmConfig, product: Product, pdl: bool = True) -> Specialization:
    """What hopper_gemm asks the compiler for with this tile and product."""
    found = gemm_specialization(_hopper_gemm_kernel, product, config, pdl)
    item = found.types["w_ptr"].removeprefix("*")
    item_bytes = 1 if item == "fp8e4nv" else 2
    constants = _constants(product, config, pdl) | {k: None for k, v in found.constants.items() if v is None}
    constants |= {"a_desc": None} if product.gather else {"x_ptr": None}

    def descriptor(box):
        return f"tensordesc<{item}[{', '.join(map(str, box))}],{_swizzled(box, item_bytes)!r}>"

    types = found.types | dict(count_ptr="*i32", next_ptr="*i32", w_desc=descriptor(_weight_box(product, config)))
    types["a_desc"] = descriptor([64, config.block_k])
    types |= dict.fromkeys(constants, "constexpr")
    types = {name: types[name] for name in _hopper_gemm_kernel.arg_names}
    constants = {name: value for name, value in constants.items() if name in types}
    aligned = tuple(
        name for name, kind in types.items() if name != "next_ptr" and (kind.startswith("*") or name == "stride_xm")
    )
    return Specialization(_hopper_gemm_kernel, types, constants, aligned, _options(pdl))
