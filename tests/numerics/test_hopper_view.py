"""The order in which weights land for hopper_gemm, followed in torch: Gluon has no interpreter.

What is followed: the boxes that the TMA warp asks for, the halves of the accumulator, and the way back to the order of
w's rows. That a thread's columns are neighbours then is the layout's part, which tests/compile sees as 16-byte stores.
"""

import pytest
import torch

from expertile.kernels.hopper_gemm import _weight_view
from expertile.kernels.tiles import Product
from expertile.plans import GemmConfig
from expertile.problem import ACTIVATIONS

EXPERTS, K = 3, 64
CONFIG = GemmConfig(128, 256, K, 12, 4, specialized=True)


def landed(view, product: Product, expert: int, block: int) -> torch.Tensor:
    """[256] rows of w in the order in which they lie in shared memory, as hopper_roles.load_weights asks for them."""
    boxes, granule = view.block_shape[0], view.block_shape[1]
    rows = boxes * granule * 8
    first = expert * product.w_rows + block * rows
    whole = torch.as_strided(view.base, view.shape, view.strides)
    loads = [(first + half * product.n) // (granule * 8) for half in range(256 // rows)]
    found = [whole[at : at + boxes].reshape(-1, K)[:, 0] for at in loads]
    assert all(len(part) == rows for part in found)
    return torch.cat(found)


def halves(row, interleaved: bool):
    return row.reshape(128, 2).unbind(1) if interleaved else row.reshape(2, 128).unbind(0)


def in_order(row, interleaved: bool):
    if interleaved:
        return row.reshape(4, 8, 4).permute(0, 2, 1).reshape(128)
    return row.reshape(4, 4, 4, 2).permute(0, 2, 1, 3).reshape(128)


@pytest.mark.parametrize(("activation", "interleaved"), [("silu", False), ("silu", True), ("relu2", False)])
def test_every_row_comes_to_its_column(activation, interleaved):
    act = ACTIVATIONS[activation]
    act = type(act)(**{**vars(act), "interleaved": interleaved}) if interleaved else act
    product = Product(256, K, 1, True, False, "fp16", activation=act)
    numbers = torch.arange(EXPERTS * product.w_rows, dtype=torch.float32)  # of all experts' rows in one
    w = numbers[:, None].expand(-1, K).reshape(EXPERTS, product.w_rows, K).contiguous()
    view = _weight_view(w, product, CONFIG)
    columns = product.y_block(CONFIG)
    for expert in range(EXPERTS):
        for block in range(256 // columns):
            parts = halves(landed(view, product, expert, block), interleaved)
            left, right = (in_order(part, interleaved) for part in parts)
            n = block * columns + torch.arange(128)
            if interleaved:
                want = 2 * n, 2 * n + 1
            else:
                want = n, n + (product.n if act.gated else 128)
            assert torch.equal(left, expert * product.w_rows + want[0].float())
            assert torch.equal(right, expert * product.w_rows + want[1].float())
