"""Which rows go to which expert: the record that the routing kernel fills and the grouped products read."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class Routing:
    """Routed rows sorted by expert, and the tiles that cover them.

    A slot is t * top_k + j, the j-th expert of token t; a row is a place in the sorted order. R = T * top_k.
    gather   [R] int32      row -> slot; rows of skipped slots (id -1, >= E, or not on this rank) do not exist: the
                            first offsets[E] entries are valid, the rest are never read
    offsets  [E + 1] int32  expert -> its first row
    tiles    [max_tiles, 4] int32   tile -> (expert, first row, end row, 0); expert -1 ends the list
    tile_count   [1] int32  tiles before that
    next_tile    [2] int32  zeros: where the persistent blocks of GEMM1, and of GEMM2, take their next tile

    Three tokens, top_k 2, three experts, tiles of two rows:

        ids      [[0, 2], [2, -1], [2, 0]]
        gather   [0, 5, 1, 2, 4, .]          expert 0: slots 0, 5; expert 2: slots 1, 2, 4
        offsets  [0, 2, 2, 5]
        tiles    [0 0 2 0], [2 2 4 0], [2 4 5 0], [-1 . . .]
        tile_count   [3]
    """

    gather: torch.Tensor
    offsets: torch.Tensor
    tiles: torch.Tensor
    tile_count: torch.Tensor
    next_tile: torch.Tensor
    block_m: int
