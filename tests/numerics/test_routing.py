"""From ids to routed rows: offsets, the stable order within an expert, and tiles that cover every row once."""

import pytest
import torch

from expertile.kernels.routing import route_rows
from expertile.plans import ROUTE_BLOCK, GemmConfig, route_programs
from expertile.routing import Routing

from .kernel_inputs import DEVICE, Case, Poisoned, make_layer, make_plan, torch_routing

UNWRITTEN = 0x7F  # bytes; as int32 far from -1, which ends the list of tiles


def route(layer, block_m: int) -> Routing:
    """The kernel's answer in memory that shows what it left out and what it wrote too much."""
    rows, experts = layer.ids.numel(), layer.weights.experts
    tiles = make_plan(layer, GemmConfig(block_m, 64, 64, 4, 3)).max_tiles
    shapes = dict(gather=(rows, 1), offsets=(experts + 1, 1), tiles=(tiles, 4), tile_count=(1, 1))
    shapes |= dict(next_tile=(2, 1), counts=(route_programs(rows), experts))
    memory = {name: Poisoned(shape, torch.int32, UNWRITTEN) for name, shape in shapes.items()}
    flat = {name: memory[name].tensor.view(-1) for name in ("gather", "offsets", "tile_count", "next_tile")}
    routing = Routing(tiles=memory["tiles"].tensor, block_m=block_m, **flat)
    route_rows(layer.ids, experts, routing, memory["counts"].tensor, layer.expert_map)
    for buffer in memory.values():
        buffer.check()
    return routing


def check(layer, block_m: int):
    want = torch_routing(layer.local, layer.weights.experts, block_m, spare=0)
    found = route(layer, block_m)
    rows, tiles = int(want.offsets[-1]), want.tiles.shape[0]
    assert torch.equal(found.offsets, want.offsets)
    assert torch.equal(found.gather[:rows], want.gather[:rows]), "order within an expert is by slot"
    assert torch.equal(found.tiles[:tiles, :3], want.tiles[:, :3])
    assert (found.tiles[tiles:, 0] == -1).all(), "the list of tiles does not end"
    assert found.tile_count.tolist() == [tiles] and found.next_tile.tolist() == [0, 0]


def sizes(**fields) -> Case:
    return Case(**{"hidden": 16, "inter": 16, **fields})


@pytest.mark.parametrize("block_m", [16, 64])
@pytest.mark.parametrize(
    "case",
    [
        sizes(tokens=1, top_k=1),
        sizes(tokens=1, top_k=4),
        sizes(tokens=37, ids="one"),
        sizes(tokens=37, ids="none"),
        sizes(tokens=37, ids="bad"),
        sizes(tokens=37, ids="bad", mapped=True, id_dtype=torch.int64),
        sizes(tokens=37, mapped=True),
        sizes(tokens=37, id_dtype=torch.int64),
        sizes(tokens=257, ids="twice"),
        sizes(tokens=40, experts=1, top_k=1),
        sizes(tokens=29, experts=60, top_k=7),
        sizes(tokens=33, experts=384, top_k=8),
        sizes(tokens=128, experts=7, top_k=2),  # 256 rows: a block exactly full
    ],
    ids=str,
)
def test_rows_are_sorted_by_expert_and_tiles_cover_them(case, block_m):
    """Cases 6, 7 and 23: ids that name no expert, an expert twice in a token's top-k, int64."""
    check(make_layer(case), block_m)


@pytest.mark.parametrize(
    ("rows", "ids"),
    [(ROUTE_BLOCK, "bad"), (ROUTE_BLOCK + 1, "one"), (ROUTE_BLOCK + 1, "bad"), (2 * ROUTE_BLOCK + 5, "uniform")],
)
def test_many_programs_agree_on_the_order(rows, ids):
    check(make_layer(sizes(tokens=rows, experts=5, top_k=1, ids=ids)), 32)


def test_many_programs_and_many_experts():
    check(make_layer(sizes(tokens=300, experts=384, top_k=8, ids="bad")), 16)


def test_more_programs_than_one_pass_over_their_counts():
    """route_rows sums the counts of CHUNK programs at a time; 1025 experts leave room for 4."""
    check(make_layer(sizes(tokens=4 * ROUTE_BLOCK + 1, experts=1025, top_k=1)), 16)


def test_an_id_that_names_no_expert_reads_nothing():
    """Case 6: id 2^30 lies 4 GiB behind the map; were it loaded, this process would end here."""
    layer = make_layer(sizes(tokens=3, mapped=True))
    layer.ids.fill_(2**30)
    check(layer, 16)


def test_the_routing_docstring_example():
    ids = torch.tensor([[0, 2], [2, -1], [2, 0]], dtype=torch.int32, device=DEVICE)
    found = torch_routing(ids, 3, 2, spare=1)
    assert found.gather[:5].tolist() == [0, 5, 1, 2, 4] and found.offsets.tolist() == [0, 2, 2, 5]
    assert found.tiles[:, :3].tolist()[:3] == [[0, 0, 2], [2, 2, 4], [2, 4, 5]] and found.tiles[3, 0] == -1
