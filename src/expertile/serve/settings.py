"""What the command line asks for, checked."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from ..errors import ExpertileError

DTYPES = ("auto", "bfloat16", "float16", "float32")
QUANTS = ("none", "fp8_tensor", "fp8_channel", "fp8_block")
GUARDS = ("off", "count", "warn", "error")
MOST_SEQS = 256  # a step draws one token after the other on the CPU: 5 ms each of 152 000, so 1.4 s for that many
LARGEST_CONTEXT = 8192  # tokens, unless --max-len says otherwise: every slot of the cache has room for that many


@dataclass(frozen=True)
class Settings:
    """How the embedded engine serves a model.

    max_seqs       sequences that are computed at once; each has a slot of max_len tokens in the cache
    max_queue      sequences that may wait for a slot; more are answered with 429
    max_len        prompt and answer together, in tokens; default: the model's context, at most LARGEST_CONTEXT
    prefill_chunk  tokens of prompts that a step takes in, between two tokens of the others
    body_bytes     largest body of a request
    drain_seconds  after SIGTERM, for the requests under way
    guard          what a compilation after readiness does: a mode of expertile.guard, or off
    """

    model: Path
    host: str = "127.0.0.1"
    port: int = 8000
    name: str = ""
    api_key: str | None = field(default=None, repr=False)
    dtype: str = "auto"
    quant: str = "none"
    max_seqs: int = 32
    max_queue: int = 256
    max_len: int | None = None
    prefill_chunk: int = 512
    body_bytes: int = 6_000_000
    drain_seconds: int = 25
    guard: str = "warn"
    trust_remote_code: bool = False
    sagemaker: bool = False
    json_logs: bool = False

    def __post_init__(self):
        for name, known in (("dtype", DTYPES), ("quant", QUANTS), ("guard", GUARDS)):
            if getattr(self, name) not in known:
                raise ExpertileError(f"{name}={getattr(self, name)!r} is not known: use one of {', '.join(known)}")
        least = dict(max_seqs=1, max_queue=0, max_len=2, prefill_chunk=1, body_bytes=1, drain_seconds=0, port=0)
        for name, lowest in least.items():
            value = getattr(self, name)
            if value is not None and value < lowest:
                raise ExpertileError(f"{name}={value}: give at least {lowest}")
        if self.port > 65535:
            raise ExpertileError(f"port={self.port}: give at most 65535")
        if self.max_seqs > MOST_SEQS:
            raise ExpertileError(
                f"max_seqs={self.max_seqs}: the embedded engine takes at most {MOST_SEQS}; others wait"
            )
        key = self.api_key
        if key is not None and not (key and key.isascii() and key == key.strip()):
            raise ExpertileError("the API key must be ASCII text, not empty, with no space around it")
        if not (self.model / "config.json").is_file():
            raise ExpertileError(f"no model in {self.model}: config.json is not there; give the folder of a model")
        if not self.name:
            object.__setattr__(self, "name", self.model.resolve().name)
