"""How it will be computed: backend, tile configurations and buffers, as plain data with a JSON round trip."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from math import prod

from .errors import ShapeError, check_count
from .hardware import H200
from .problem import BLOCK, Activation, DType, Problem, Quant

ITEM_BYTES = {"i32": 4, "fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
MOST_OF_A_TILE = 65536  # no tile comes near: shared memory ends long before
ALIGN = 256  # bytes: every buffer of a workspace starts on such a boundary


class Backend(str, Enum):
    REFERENCE = "reference"  # float64, any device, the oracle
    TORCH = "torch"  # torch's own matrix products, any device
    TRITON = "triton"  # our kernels
    VLLM_TRITON = "vllm-triton"  # the others are other libraries' kernels, called by runtime/backends
    VLLM_CUTLASS = "vllm-cutlass"
    VLLM_DEEPGEMM = "vllm-deepgemm"
    FLASHINFER_CUTLASS = "flashinfer-cutlass"
    TRITON_KERNELS = "triton-kernels"

    @property
    def captures(self) -> bool:
        """Whether a call can be captured in a CUDA graph: it asks nothing of the host."""
        return self not in (Backend.REFERENCE, Backend.TORCH)


class Layout(str, Enum):
    """How the weights lie in memory."""

    CHECKPOINT = "checkpoint"  # as Weights describes them
    UP_FIRST = "up_first"  # up rows before gate rows, inter padded: FlashInfer's


class Stream(str, Enum):
    """Which products a plan streams instead of grouping rows by expert (kernels/stream.py), for a handful of tokens."""

    NO = "no"
    DOWN = "down"  # GEMM2: no combine after it
    BOTH = "both"  # no routing before it either
    RING = "ring"  # both products in one launch (kernels/decode_experts.py): every token meets every expert that is hit


@dataclass(frozen=True)
class GemmConfig:
    """Tile of one grouped product, in elements.

    block_m   routed rows (tokens)      block_n   weight rows      block_k   the contracted dimension
    swap      weight rows on the 64-row side of WGMMA, tokens on its narrow side: acc [block_n, block_m]
    group_m   row tiles that share one sweep over the weight rows (plain product only), for L2
    tma       weights by TMA (swapped product only)
    specialized   a persistent block on every SM whose warps load or multiply (kernels/hopper_gemm.py): 128 x 256 only
    """

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int
    swap: bool = False
    group_m: int = 1
    tma: bool = False
    specialized: bool = False

    def __post_init__(self):
        for name in ("block_m", "block_n", "block_k", "warps", "stages", "group_m"):
            check_count(getattr(self, name), name, 1, MOST_OF_A_TILE)
        for name in ("swap", "tma", "specialized"):
            if not isinstance(getattr(self, name), bool):
                raise ShapeError(f"{name}={getattr(self, name)!r}: give true or false")

    @property
    def name(self) -> str:
        if self.specialized:
            return f"specialized {self.block_m}x{self.block_n}x{self.block_k} g{self.group_m} s{self.stages}"
        kind = ("swap-tma" if self.tma else "swap") if self.swap else f"plain g{self.group_m}"
        return f"{kind} {self.block_m}x{self.block_n}x{self.block_k} w{self.warps} s{self.stages}"


@dataclass(frozen=True)
class Buffer:
    name: str
    shape: tuple[int, ...]
    item: str  # key of ITEM_BYTES

    @property
    def bytes(self) -> int:
        return prod(self.shape) * ITEM_BYTES[self.item]


@dataclass(frozen=True)
class Candidate:
    """A backend that was looked at: its price, or the reasons why it cannot run.

    source   where time_us comes from
    layout, layout_bytes, load_us   how it wants the weights; what a copy of theirs takes, once, where that is another
    scratch_bytes   memory of one call beside its result, as far as it is known
    """

    backend: Backend
    reasons: tuple[str, ...] = ()
    time_us: float | None = None
    source: str = ""
    layout: Layout = Layout.CHECKPOINT
    layout_bytes: int = 0
    load_us: float = 0.0
    scratch_bytes: int = 0


@dataclass(frozen=True)
class Plan:
    """The decision for one Problem on one device.

    gemm1, gemm2    tiles (TRITON only); they share block_m, so one list of row tiles serves both
    stream          products that stream weights; of their tiles only block_n, block_k (GEMM1) and warps count
    fuse_quant      GEMM1's epilogue writes h already quantised
    pdl             kernels are chained by programmatic dependent launch
    sms             multiprocessors of the device: as many blocks as a specialised product has
    source          "measured: ..." or "model: ..." or "forced"
    candidates      every backend that was looked at
    routing         how tokens are assumed to spread over the experts (policy/histogram.py)
    """

    problem: Problem
    device: str
    backend: Backend
    gemm1: GemmConfig | None = None
    gemm2: GemmConfig | None = None
    stream: Stream = Stream.NO
    fuse_quant: bool = False
    pdl: bool = False
    time_us: float | None = None
    floor_us: float | None = None
    source: str = ""
    candidates: tuple[Candidate, ...] = ()
    sms: int = H200.sms
    routing: str = "uniform"

    @property
    def name(self) -> str:
        """Short form, as a benchmark row's `plan`."""
        if self.backend is not Backend.TRITON:
            return self.backend.value
        flags = ("+fuse_quant" if self.fuse_quant else "") + ("+pdl" if self.pdl else "")
        up, down = self.gemm1, self.gemm2
        streamed_up, streamed_down = (
            f"stream {up.block_n}x{up.block_k} w{up.warps}",
            f"stream {down.block_n} w{down.warps}",
        )
        names = {
            Stream.NO: (up.name, down.name),
            Stream.DOWN: (up.name, streamed_down),
            Stream.BOTH: (streamed_up, streamed_down),
            Stream.RING: (f"ring {up.block_m}x{up.block_n}x{up.block_k} s{up.stages}", "the same"),
        }[self.stream]
        return f"triton[{names[0]} | {names[1]}]{flags}"

    @property
    def max_tiles(self) -> int:
        """Upper bound of the row tiles: every expert hit may leave one tile partly empty."""
        rows, block = self.problem.rows, self.gemm1.block_m
        hit = min(self.problem.experts, rows)
        return hit + max(rows - hit, 0) // block

    @cached_property
    def buffers(self) -> tuple[Buffer, ...]:
        """Scratch memory of one call, in order. Nothing in it outlives the call; layers may share it."""
        if self.backend is not Backend.TRITON:
            return ()
        p, item = self.problem, self.problem.dtype.value
        streamed_h = Buffer("h", (p.rows, p.inter), "fp8" if p.static_scale else item)
        if self.stream is Stream.BOTH:
            return (streamed_h,)
        if self.stream is Stream.RING:
            return self._ring_buffers()
        found = [
            Buffer("gather", (p.rows,), "i32"),
            Buffer("offsets", (p.experts + 1,), "i32"),
            Buffer("tiles", (self.max_tiles, 4), "i32"),
            Buffer("tile_count", (1,), "i32"),
            Buffer("next_tile", (2,), "i32"),
            Buffer("counts", (route_programs(p.rows), p.experts), "i32"),
        ]
        if p.quant is Quant.NONE:
            found += [Buffer("h", (p.rows, p.inter), item)]
            if self.stream is Stream.DOWN:
                return tuple(found)
        else:
            found += [Buffer("x_q", (p.tokens, p.hidden), "fp8")]
            found += scale_buffers("x_scale", p.tokens, p.hidden, p)
            if self.stream is Stream.DOWN:
                return (*found, streamed_h)
            found += [Buffer("h_q", (p.rows, p.inter), "fp8")]
            found += scale_buffers("h_scale", p.rows, p.inter, p)
            if not self.fuse_quant:
                found += [Buffer("h", (p.rows, p.inter), item)]
        return (*found, Buffer("y", (p.rows, p.hidden), item))

    def _ring_buffers(self) -> tuple[Buffer, ...]:
        p, item, rows = self.problem, self.problem.dtype.value, self.problem.experts * self.gemm1.block_m
        found = [Buffer("hit", (1 + p.experts,), "i32"), Buffer("counters", (1 + p.experts,), "i32")]
        if p.quant is not Quant.NONE:
            found += [Buffer("x_q", (p.tokens, p.hidden), "fp8"), *scale_buffers("x_scale", p.tokens, p.hidden, p)]
            found += [Buffer("h_q", (rows, p.inter), "fp8"), *scale_buffers("h_scale", rows, p.inter, p)]
        if p.quant is Quant.NONE or not (p.static_scale or p.quant is Quant.FP8_BLOCK):
            found += [Buffer("h", (rows, p.inter), item)]
        return (*found, Buffer("y", (p.rows, p.hidden), item))

    @cached_property
    def workspace_bytes(self) -> int:
        return sum(-(-buffer.bytes // ALIGN) * ALIGN for buffer in self.buffers)

    @cached_property
    def able_on(self) -> set:
        """Devices on which a plan that a caller brought was found able to run: looked at once, not on every call."""
        return set()

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), default=lambda value: value.value)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        data = json.loads(text)
        data["problem"]["activation"] = Activation(**data["problem"]["activation"])
        data["problem"] = Problem(**data["problem"])
        data["backend"], data["stream"] = Backend(data["backend"]), Stream(data["stream"])
        for name in ("gemm1", "gemm2"):
            data[name] = GemmConfig(**data[name]) if data[name] else None
        data["candidates"] = tuple(
            Candidate(Backend(c.pop("backend")), tuple(c.pop("reasons")), layout=Layout(c.pop("layout")), **c)
            for c in data["candidates"]
        )
        return cls(**data)


ROUTE_BLOCK = 256  # routed rows that one program of the routing kernel places
SCAN_ROWS = 2048  # up to here every such program counts all ids itself; beyond, a launch of its own does


RING_TOKENS = 64  # up to here a plan can have Stream.RING
RING_WARPS = 12  # two warpgroups that multiply, one whose warps load
#: Stages with which the roles of a block do not wait for each other: one is free again a step after it was read; rows
#: that are gathered are handed over a step later still.
RING_STAGES, SPECIALIZED_STAGES = 2, 3


def ring_smem_bytes(config: GemmConfig) -> int:
    """Shared memory of a ring's block, from above: the stages, tiles that are turned for the store, barriers."""
    turned = min(config.block_n * config.block_m, 8192) * 2  # by each multiplying warpgroup
    return config.stages * 128 * (config.block_n + config.block_m) + turned + 1024


def route_programs(rows: int) -> int:
    return max(1, -(-rows // ROUTE_BLOCK))


def scale_buffers(name: str, rows: int, width: int, problem: Problem) -> list[Buffer]:
    """The buffer that holds the activation scales of [rows, width]; none when they are given ahead."""
    if problem.static_scale:
        return []
    groups = -(-width // BLOCK) if problem.quant is Quant.FP8_BLOCK else 1
    return [Buffer(name, (rows, groups), "fp32")]


__all__ = [
    "ALIGN",
    "Backend",
    "Buffer",
    "Candidate",
    "DType",
    "GemmConfig",
    "Layout",
    "Plan",
    "ROUTE_BLOCK",
    "SCAN_ROWS",
    "route_programs",
]
