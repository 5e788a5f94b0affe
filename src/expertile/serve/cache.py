"""Keys and values of all sequences: a row for each, the rows in use next to one another so that a step copies none."""

from __future__ import annotations

import torch
from transformers import Cache, DynamicLayer


class SlotCache(Cache):
    """A transformers Cache whose batch is a range of rows, each with a length of its own.

    keys, values   for each layer [rows, heads, capacity, head dim], made when the layer first writes

    Before each forward pass `begin` says which rows and positions it is about. What lies in a row behind the positions
    written so far is never seen: the mask has it out.
    """

    def __init__(self, rows: int, capacity: int):
        super().__init__(layer_class_to_replicate=DynamicLayer)
        self.rows, self.capacity = rows, capacity
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []

    def begin(self, first: int, positions: torch.Tensor, longest: int) -> None:
        """The next pass is about rows first ... first + n - 1; positions [n, q] are written, `longest` are read."""
        self._span = slice(first, first + positions.shape[0])
        self._at = torch.arange(first, self._span.stop, device=positions.device)[:, None], positions
        self._longest = longest

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        """key_states, value_states [n, heads, q, dim] -> the rows' keys and values [n, heads, longest, dim]."""
        if layer_idx == len(self.keys):
            for stored, new in ((self.keys, key_states), (self.values, value_states)):
                stored.append(new.new_zeros(self.rows, new.shape[1], self.capacity, new.shape[3]))
        rows, positions = self._at
        found = []
        for stored, new in ((self.keys[layer_idx], key_states), (self.values[layer_idx], value_states)):
            stored[rows, :, positions] = new.transpose(1, 2)
            found.append(stored[self._span, :, : self._longest])
        return tuple(found)

    @torch.inference_mode()
    def move(self, source: int, target: int, length: int) -> None:
        """Row `source`, of which `length` positions count, becomes row `target`."""
        for stored in (*self.keys, *self.values):
            stored[target, :, :length] = stored[source, :, :length]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._longest

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self._longest, 0


def causal_mask(positions: torch.Tensor, longest: int, dtype: torch.dtype, window: int | None = None) -> torch.Tensor:
    """[n, 1, q, longest], 0 where the token at positions [n, q] sees a key, else the least number of dtype."""
    keys = torch.arange(longest, device=positions.device)
    ahead = keys > positions[:, None, :, None]
    if window is not None:
        ahead |= keys <= positions[:, None, :, None] - window
    return torch.zeros(ahead.shape, dtype=dtype, device=positions.device).masked_fill_(ahead, torch.finfo(dtype).min)
