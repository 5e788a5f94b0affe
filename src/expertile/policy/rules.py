"""Why a backend, or a tile, cannot run a problem: lists of reasons, empty when it can. Nothing is caught here."""

from __future__ import annotations

from ..hardware import Hardware
from ..plans import RING_STAGES, RING_TOKENS, RING_WARPS, SPECIALIZED_STAGES, Backend, GemmConfig, ring_smem_bytes
from ..problem import BLOCK, DType, Problem, Quant
from .libraries import LIBRARIES, Installed, library_reasons
from .model import smem_bytes

MAX_EXPERTS = 2047  # the routing kernel keeps one counter an expert in registers
MAX_ROWS = 2**31 - 2**20  # routed rows are numbered in int32
WARPS = (1, 2, 4, 8, 16, 32)  # a block has 1024 threads at most


def reasons(backend: Backend, problem: Problem, hardware: Hardware, installed: Installed = ()) -> list[str]:
    """Why this backend cannot run this problem on this device; other libraries only if `installed` names them."""
    if backend in LIBRARIES:
        return library_reasons(backend, problem, hardware, installed)
    return RULES[backend](problem, hardware)


def _reference(problem: Problem, hardware: Hardware) -> list[str]:
    return []


def _torch(problem: Problem, hardware: Hardware) -> list[str]:
    return []


def _triton(problem: Problem, hardware: Hardware) -> list[str]:
    found = []
    if not hardware.is_hopper:
        major, minor = hardware.capability
        found.append(f"needs compute capability 9.0 (Hopper), {hardware.name} has {major}.{minor}")
    if problem.dtype is DType.FP32:
        found.append("dtype=fp32: WGMMA would round the products to tf32; use bf16 or fp16")
    if problem.experts > MAX_EXPERTS:
        found.append(f"experts={problem.experts} is more than the {MAX_EXPERTS} that routing counts")
    if problem.rows > MAX_ROWS:
        found.append(f"tokens={problem.tokens} x top_k={problem.top_k} is more than {MAX_ROWS} routed rows")
    return found


#: The rules of what is ours; those of other libraries are data (libraries.py).
RULES = {Backend.REFERENCE: _reference, Backend.TORCH: _torch, Backend.TRITON: _triton}


def tile_reasons(config: GemmConfig, problem: Problem, hardware: Hardware) -> list[str]:
    """Why this tile cannot serve the problem's products on this device."""
    found = []
    for name in ("block_m", "block_n", "block_k"):
        value = getattr(config, name)
        if value < 16 or value & (value - 1):
            found.append(f"{name}={value}: a power of two of at least 16 is needed")
    if not config.specialized and config.warps not in WARPS:
        found.append(f"warps={config.warps}: use one of {_listed(WARPS)}")
    need = smem_bytes(config, problem)
    if need > hardware.smem_bytes:
        found.append(f"needs {need} bytes of shared memory, {hardware.name} has {hardware.smem_bytes}")
    if problem.quant is Quant.FP8_BLOCK and config.block_k > BLOCK:
        found.append(f"block_k={config.block_k} spans two scale blocks of {BLOCK}")
    if config.tma:
        found += _tma_reasons(config, problem)
    if config.specialized:
        found += _specialized_reasons(config, problem)
    if problem.quant is not Quant.NONE and config.block_k < 32:
        found.append(f"block_k={config.block_k}: an e4m3 WGMMA takes 32")
    return found


def _tma_reasons(config: GemmConfig, problem: Problem) -> list[str]:
    found = []
    item = problem.dtype.bytes if problem.quant is Quant.NONE else 1
    if not config.swap:
        found.append("tma: only the swapped product reads its weights by TMA")
    if problem.activation.interleaved:
        found.append("tma: gate and up rows alternate, a box holds neighbours")
    for name in ("hidden", "inter"):
        if getattr(problem, name) * item % 16:
            found.append(f"tma: rows of {name}={getattr(problem, name)} are no multiple of 16 bytes")
    if problem.activation.gated and config.block_n < 128:
        found.append(f"tma: block_n={config.block_n} leaves fewer than 64 gate rows, WGMMA's least")
    return found


def _specialized_reasons(config: GemmConfig, problem: Problem) -> list[str]:
    item, act = problem.dtype.bytes if problem.quant is Quant.NONE else 1, problem.activation
    found = []
    if (config.block_m, config.block_n, config.block_k * item, config.swap) != (128, 256, 128, False):
        found.append(f"specialized: {config.block_m}x{config.block_n}x{config.block_k} is not 128 x 256 x 128 bytes")
    if config.stages < SPECIALIZED_STAGES:
        found.append(f"specialized: stages={config.stages}, with fewer than {SPECIALIZED_STAGES} its roles hang")
    if config.warps != 12:
        found.append(f"specialized: warps={config.warps}, its roles have 12")
    for name in ("hidden", "inter"):  # 32 rows of w are reordered among themselves; TMA's 16 bytes follow
        if getattr(problem, name) % 32:
            found.append(f"specialized: {name}={getattr(problem, name)} is no multiple of 32")
    size = problem.tokens * problem.hidden * item
    if size >= GATHERED_BYTES:
        found.append(f"specialized: x has {size} bytes, fewer than {GATHERED_BYTES} can be gathered")
    if problem.quant is Quant.FP8_BLOCK and act.gated and act.interleaved:
        found.append("specialized: gate and up rows alternate within a scale block")
    if problem.quant is Quant.FP8_BLOCK and act.gated and problem.inter % BLOCK:
        found.append(f"specialized: inter={problem.inter} puts gate and up rows in one scale block of {BLOCK}")
    return found


def _listed(values: tuple[int, ...]) -> str:
    return ", ".join(map(str, values))


GATHERED_BYTES = 2**35  # rows of x are found by 32-bit numbers of 16-byte pieces
STREAM_BYTES = 131072  # weights that one block of stream_down holds in registers


def stream_reasons(problem: Problem) -> list[str]:
    """Why a problem cannot be streamed: stream_down keeps a row of w2 for each of a token's experts in registers."""
    item = problem.dtype.bytes if problem.quant is Quant.NONE else 1
    need = item * (1 << (problem.inter - 1).bit_length()) * (1 << (problem.top_k - 1).bit_length())
    if need > STREAM_BYTES:
        return [
            f"inter={problem.inter} x top_k={problem.top_k} needs {need} bytes of registers, {STREAM_BYTES} are planned"
        ]
    return []


def stream_tile_reasons(config: GemmConfig) -> list[str]:
    """Why no streaming kernel could be compiled with this tile: block_n, block_k and warps are what counts of it."""
    values = {"block_n": config.block_n, "block_k": config.block_k}
    found = [f"stream: {name}={value} is no power of two" for name, value in values.items() if value & (value - 1)]
    return found + ([] if config.warps in WARPS else [f"stream: warps={config.warps}: use one of {_listed(WARPS)}"])


RING_CHOICES = 16  # of a token, held in registers
RING_BLOCK_TOKENS = 32  # with fp8_block's scales the sums of more tokens exceed the registers


def ring_reasons(config: GemmConfig, problem: Problem, hardware: Hardware) -> list[str]:
    """Why both products cannot run in one launch with this tile (kernels/decode_experts.py)."""
    item, act = problem.dtype.bytes if problem.quant is Quant.NONE else 1, problem.activation
    block = problem.quant is Quant.FP8_BLOCK
    found = []
    most = min(config.block_m, RING_BLOCK_TOKENS if block else RING_TOKENS)
    if problem.tokens > most:
        found.append(f"ring: tokens={problem.tokens}, a tile of {config.block_m} holds {most} in {problem.label}")
    if config.block_m not in (8, 16, 32, 64) or config.block_n not in (128, 256) or config.block_k * item != 128:
        found.append(f"ring: {config.block_m}x{config.block_n}x{config.block_k} is not 8-64 x 128|256 x 128 bytes")
    if block and config.block_n != 2 * BLOCK:
        found.append(f"ring: block_n={config.block_n}, h is quantised in blocks of {BLOCK} columns: 256 is needed")
    if config.stages < RING_STAGES:
        found.append(f"ring: stages={config.stages}, with fewer than {RING_STAGES} its roles hang")
    if config.warps != RING_WARPS:
        found.append(f"ring: warps={config.warps}, its roles have {RING_WARPS}")
    need = ring_smem_bytes(config)
    if need > hardware.smem_bytes:
        found.append(f"ring: needs {need} bytes of shared memory, {hardware.name} has {hardware.smem_bytes}")
    for name in ("hidden", "inter"):
        if getattr(problem, name) * item % 16:
            found.append(f"ring: rows of {name}={getattr(problem, name)} are no multiple of 16 bytes")
    if problem.top_k > RING_CHOICES:
        found.append(f"ring: top_k={problem.top_k} is more than {RING_CHOICES}")
    if problem.weight_on_input:
        found.append("ring: slots of one expert share h, the router's weight cannot go into it")
    if act.gated and act.interleaved:
        found.append("ring: gate and up rows alternate, a box holds neighbours")
    if block and act.gated and problem.inter % BLOCK:
        found.append(f"ring: inter={problem.inter} puts gate and up rows in one scale block of {BLOCK}")
    return found
