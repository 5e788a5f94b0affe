"""What a user would run instead: each adapter in its own file, each library imported only when it is used."""

from __future__ import annotations

from pathlib import Path

from ..implementation import Implementation
from .flashinfer import FlashInferCutlass
from .grouped_mm import GroupedMM
from .vllm import VLLMCutlass, VLLMDeepGEMM, VLLMTriton

KINDS = {kind.key: kind for kind in (VLLMTriton, VLLMCutlass, VLLMDeepGEMM, FlashInferCutlass, GroupedMM)}


def peer(key: str, flashinfer_module: Path | None = None) -> Implementation:
    """The peer by that key of KINDS. Making one imports nothing of it."""
    return FlashInferCutlass(flashinfer_module) if key == FlashInferCutlass.key else KINDS[key]()
