"""Who rotates back and quantises: ours, ours without one of its properties, vLLM's kernel, and a copy of as many bytes.

expertile              as it is called
expertile:unaligned    strides of o passed as they are, not specialised: the compiler knows no alignment
expertile:specialised  every argument specialised, as @triton.jit does by default
expertile:1x1 ...      programs of so many tokens by so many warps
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch

from ..errors import ExpertileError
from ..kernels import inv_rope_quant
from ..reference_rope import BLOCK, HEAD_DIM, ROPE_DIM
from . import rows
from .peers.vllm import missing, vllm_session
from .specialised import specialised
from .table import is_ours

OURS, UNALIGNED, SPECIALISED = "expertile", "expertile:unaligned", "expertile:specialised"
TILES = {f"expertile:{tile}x{warps}": (tile, warps) for tile, warps in ((1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4))}
VLLM, COPY = "vllm-triton", "torch-copy"
USUAL = (OURS, VLLM, COPY)
IMPLEMENTATIONS = (*USUAL, UNALIGNED, SPECIALISED, *TILES)


@dataclass(frozen=True, eq=False)
class Call:
    """o [T, heads, 512] bf16, positions [T] int64, cos_sin [max_pos, 64] fp32."""

    o: torch.Tensor
    positions: torch.Tensor
    cos_sin: torch.Tensor
    groups: int


@dataclass(frozen=True, eq=False)
class Contender:
    """One way to do it.

    load     imports what it needs; gives run(call) -> (q [T, groups, D], scales [T, groups, D / 128])
    kernel   gives, once it is loaded, the Triton kernel whose compilations are counted; the copy has none
    checked  False for the copy, which computes nothing
    session  a context that all calls want around them
    """

    name: str
    reasons: Sequence[str]
    load: Callable[[], Callable[[Call], Any]]
    kernel: Callable[[], Any] | None = None
    checked: bool = True
    session: Callable[[], AbstractContextManager[Any]] = nullcontext


def contenders(device: torch.device, names: Sequence[str] = USUAL) -> list[Contender]:
    """Those named; what is not on this machine has its reasons."""
    here = [] if device.type == "cuda" else ["needs a GPU"]
    vllm = rows.version("vllm")
    theirs = f"vllm-{vllm}-triton" if vllm else VLLM
    plain = inv_rope_quant._inv_rope_quant_kernel
    known = {
        OURS: Contender(OURS, here, _load_ours, lambda: plain),
        UNALIGNED: Contender(UNALIGNED, here, lambda: _launching(unit=1), lambda: plain),
        SPECIALISED: Contender(SPECIALISED, here, lambda: _launching(kernel=_specialised()), _specialised),
        VLLM: Contender(theirs, missing(device), _load_vllm, _vllm_kernel, session=vllm_session),
        COPY: Contender(COPY, [], _load_copy, checked=False),
    }
    for name, (tile, warps) in TILES.items():
        known[name] = Contender(name, here, partial(_launching, tile=tile, warps=warps), lambda: plain)
    for name in names:
        if name not in known:
            raise ExpertileError(f"impl={name!r} is not known: use some of {', '.join(IMPLEMENTATIONS)}, or all")
    return [known[name] for name in names]


def plan(name: str) -> str:
    """`plan` of its rows: what a program takes, and its warps; empty for what is not ours.

    >>> plan("expertile"), plan("expertile:4x1"), plan("torch-copy")
    ('4x512 w4', '4x512 w1', '')
    """
    tile, warps = TILES.get(name, (inv_rope_quant.TOKENS, inv_rope_quant.WARPS))
    return f"{tile}x{HEAD_DIM} w{warps}" if is_ours(name) else ""


def bytes_moved(tokens: int, heads: int) -> int:
    """o read, q and scales written, and of each token its position and its cos and sin, once."""
    return tokens * (heads * (HEAD_DIM * 3 + HEAD_DIM // BLOCK * 4) + 8 + ROPE_DIM * 4)


def _load_ours():
    return lambda call: inv_rope_quant.fused_inv_rope_fp8_quant(call.o, call.positions, call.cos_sin, call.groups)


def _launching(**options):
    """Ours by another kernel or in other units, with the same memory."""

    def run(call: Call):
        tokens, heads, _ = call.o.shape
        width = heads // call.groups * HEAD_DIM
        q = torch.empty(call.groups, tokens, width, dtype=torch.float8_e4m3fn, device=call.o.device)
        scales = torch.empty(call.groups, width // BLOCK, -(-tokens // 4) * 4, device=call.o.device)
        inv_rope_quant.launch(call.o, call.positions, call.cos_sin, q, scales, **options)
        return q.transpose(0, 1), scales[:, :, :tokens].permute(2, 0, 1)

    return run


@cache
def _specialised():
    return specialised(inv_rope_quant._inv_rope_quant_kernel)


def _load_vllm():
    from vllm.models.deepseek_v4.common.ops.fused_inv_rope_fp8_quant import fused_inv_rope_fp8_quant

    return lambda call: fused_inv_rope_fp8_quant(
        call.o, call.positions, call.cos_sin, n_groups=call.groups, heads_per_group=call.o.shape[1] // call.groups
    )


def _vllm_kernel():
    from vllm.models.deepseek_v4.common.ops import fused_inv_rope_fp8_quant  # the package gives the function this name

    return fused_inv_rope_fp8_quant.__globals__["_fused_inv_rope_fp8_quant_per_head"]


def _load_copy():
    """Reads half and writes half of the bytes that the kernel moves: its time is what copy bandwidth allows."""
    return lambda call: call.o.view(torch.uint8).view(-1)[: bytes_moved(*call.o.shape[:2]) // 2 // 16 * 16].clone()


__all__ = ["Call", "Contender", "bytes_moved", "contenders", "plan"]
