"""The plugin's switches: environment variables, read once, at the edge."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from ...errors import ShapeError
from ...policy.settings import VARIABLE as POLICY
from ...policy.settings import from_environment as policy_from_environment

SWITCH, OFF, GUARD = "EXPERTILE_VLLM", "EXPERTILE_VLLM_OFF", "EXPERTILE_VLLM_GUARD"
VARIABLES = (SWITCH, OFF, GUARD, POLICY)
LABELS = ("bf16", "fp16", "fp8_tensor", "fp8_channel", "fp8_block")
GUARD_MODES = ("off", "count", "warn", "error")


def _switched_off(text: str) -> str:
    """A format in small letters, or a part of a layer's name. A number within a word (int4, e4m3) is no such part."""
    if text.lower() in LABELS:
        return text.lower()
    words = text.split(".")
    if text.lower().startswith(("fp", "bf")) or not all(re.fullmatch(r"[A-Za-z_]+|[0-9]+", word) for word in words):
        raise ShapeError(f"{OFF} names {text!r}: formats are {', '.join(LABELS)}, parts of names are like layers.3")
    return text


@dataclass(frozen=True)
class Settings:
    """What the environment asks for.

    enabled   EXPERTILE_VLLM: 1 (default) or 0
    off       EXPERTILE_VLLM_OFF: formats (LABELS) and parts of layer names that vLLM keeps, with commas between them
    guard     EXPERTILE_VLLM_GUARD: off (default), or a mode of expertile.guard for what compiles after the warm-up

    >>> Settings(off=("fp8_block", "layers.3")).named("bf16", "model.layers.3.mlp.experts")
    'layers.3'
    >>> Settings(off=("layers.3",)).named("bf16", "model.layers.31.mlp.experts")
    """

    enabled: bool = True
    off: tuple[str, ...] = ()
    guard: str = "off"

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Settings:
        """ShapeError names the variable that has no valid value."""
        switch, guard = environment.get(SWITCH, "1").strip(), environment.get(GUARD, "off").strip()
        if switch not in ("0", "1"):
            raise ShapeError(f"{SWITCH}={switch!r}: use 1 or 0")
        if guard not in GUARD_MODES:
            raise ShapeError(f"{GUARD}={guard!r}: use one of {', '.join(GUARD_MODES)}")
        off = tuple(_switched_off(part.strip()) for part in environment.get(OFF, "").split(",") if part.strip())
        policy_from_environment(environment)  # what is wrong with it is found here, not in the middle of a layer
        return cls(switch == "1", off, guard)

    def named(self, label: str, layer: str) -> str | None:
        """The entry of `off` that keeps a layer of this format with vLLM, or None. Whole parts of names count."""
        for part in self.off:
            if part == label or re.search(rf"(^|\.){re.escape(part)}(\.|$)", layer):
                return part
        return None
