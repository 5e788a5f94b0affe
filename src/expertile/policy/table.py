"""What was measured: for each device a JSON file of winners, looked up by problem and nearest in log(tokens).

One entry: {"hidden", "inter", "experts", "top_k", "label", "gated", "tokens", "gemm1": [fields of GemmConfig in order],
"gemm2": [...], "stream", "fuse_quant", "time_us"}; beside the entries what they were measured with.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files

from ..plans import GemmConfig, Stream
from ..problem import Problem


@dataclass(frozen=True)
class Entry:
    tokens: int
    gemm1: GemmConfig
    gemm2: GemmConfig
    stream: Stream
    fuse_quant: bool
    time_us: float
    exact: bool  # measured for these sizes; else for another problem with nearly as many rows an expert

    @property
    def source(self) -> str:
        return f"T={self.tokens}" if self.exact else f"another problem at T={self.tokens}"


@lru_cache(maxsize=8)
def load(device: str) -> dict:
    """The shipped table of that device; an empty one where none was measured."""
    path = files("expertile.policy") / "tables" / f"{device}.json"
    return json.loads(path.read_text()) if path.is_file() else {"entries": []}


def key(problem: Problem) -> tuple:
    return (problem.hidden, problem.inter, problem.experts, problem.top_k, problem.label, problem.activation.gated)


def nearest(problem: Problem, device: str) -> Entry | None:
    """The entry for these sizes nearest in log T; else, of the same quant, nearest in rows an expert; else None."""
    if problem.tokens == 0:
        return None
    same, similar = [], []
    for entry in load(device)["entries"]:
        if entry["label"] != problem.label or entry["gated"] != problem.activation.gated:
            continue
        sizes = tuple(entry[name] for name in ("hidden", "inter", "experts", "top_k"))
        if sizes == key(problem)[:4] and problem.total_experts == problem.experts:
            same.append((abs(math.log(entry["tokens"] / problem.tokens)), entry))
        rows = entry["tokens"] * entry["top_k"] / entry["experts"]
        similar.append((abs(math.log(rows / problem.rows_per_expert)), entry))
    found = same or similar
    if not found:
        return None
    _, entry = min(found, key=lambda pair: pair[0])
    return Entry(
        entry["tokens"],
        GemmConfig(*entry["gemm1"]),
        GemmConfig(*entry["gemm2"]),
        Stream(entry["stream"]),
        entry["fuse_quant"],
        entry["time_us"],
        bool(same),
    )
