"""Recorded routing: the experts that a model's tokens visited, replayed by a benchmark.

A trace is a file of one layer's ids, [N, top_k]: JSON ({"ids": [[...], ...]}), JSON lines (a list a token), or a tensor
that torch.save wrote (.pt).
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path

import torch

from ..errors import ShapeError
from ..problem import Problem

PREFIX = "trace:"
ABOVE = 1e3  # what puts a recorded expert's logit above all others


@lru_cache(maxsize=8)
def load(path: str) -> torch.Tensor:
    """ids [N, top_k] int64; ShapeError where the file is not such a trace."""
    try:
        ids = _read(Path(path))
    except Exception as error:  # torch.load raises what it likes, pickle's errors and struct's among it
        raise ShapeError(f"{PREFIX}{path} cannot be read as ids [N, top_k]: {error}") from None
    if ids.ndim != 2 or not ids.numel() or ids.min() < 0:
        raise ShapeError(f"{PREFIX}{path} has shape {tuple(ids.shape)}: ids [N, top_k] of at least 0 are needed")
    if ids.is_floating_point() or ids.dtype == torch.bool:
        raise ShapeError(f"{PREFIX}{path} holds {ids.dtype}: ids are integers")
    if (ids.sort(1).values.diff(dim=1) == 0).any():
        raise ShapeError(f"{PREFIX}{path}: a token visits one expert twice")
    return ids.long()


def _read(path: Path) -> torch.Tensor:
    if path.suffix == ".pt":
        return torch.load(path, map_location="cpu", weights_only=True)
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".jsonl":
        return torch.tensor([json.loads(line) for line in text.splitlines() if line.strip()])
    return torch.tensor(json.loads(text)["ids"])


def logits(problem: Problem, routing: str, noise: torch.Tensor, start: int) -> torch.Tensor:
    """fp32 [T, E]: the noise, with the experts of T consecutive recorded tokens above it. Traces repeat from their end.

    start   any number: which of the recorded tokens comes first
    """
    ids = load(routing.removeprefix(PREFIX))
    if ids.shape[1] != problem.top_k or ids.max() >= problem.experts:
        raise ShapeError(
            f"{routing} has top_k={ids.shape[1]} and experts up to {int(ids.max())}, "
            f"the problem has top_k={problem.top_k} of {problem.experts}"
        )
    rows = (start + torch.arange(problem.tokens)) % len(ids)
    chosen = ids[rows].to(noise.device)
    return noise.scatter_add(1, chosen, torch.full(chosen.shape, ABOVE, device=noise.device))
