"""The floor: bytes of the experts hit, input and output over the memory rate, or the products over the matrix rate."""

import pytest

from expertile.bench.floor import bytes_moved, expert_elements, floor_us
from expertile.hardware import H200
from expertile.problem import named_problem

# problem, quant, tokens, experts hit, floor in microseconds as measured with on 2026-12-02
RECORDED = [
    ("qwen3-30b-a3b", "bf16", 1, 8, 17.2),
    ("qwen3-30b-a3b", "fp8_tensor", 1, 8, 8.6),
    ("nemotron-3-nano", "fp8_tensor", 1, 6, 13.6),  # no gate
    ("deepseek-v3-tp8", "fp8_block", 1, 8, 10.0),
    ("mixtral-8x7b-tp2", "fp8_tensor", 1, 2, 40.0),
    ("qwen3-30b-a3b", "bf16", 512, 128, 275.5),
    ("qwen3-30b-a3b", "bf16", 4096, 128, 403.7),  # the products, not the bytes
    ("mixtral-8x7b-tp2", "fp8_tensor", 4096, 8, 1038.2),
]


@pytest.mark.parametrize("name, quant, tokens, hit, us", RECORDED)
def test_floor_is_the_recorded_one(name, quant, tokens, hit, us):
    assert floor_us(named_problem(name, tokens, quant), hit, H200) == pytest.approx(us, abs=0.06)


def test_bytes_by_hand():
    problem = named_problem("64,32,8,2", tokens=4)
    assert expert_elements(problem) == 64 * 64 + 64 * 32
    assert bytes_moved(problem, 3) == 3 * 6144 * 2 + 2 * 4 * 64 * 2
    half = named_problem("64,32,8,2", tokens=4, quant="fp8_block")
    assert bytes_moved(half, 3) == 3 * 6144 + 2 * 4 * 64 * 2


def test_more_experts_hit_is_never_cheaper():
    problem = named_problem("qwen3-30b-a3b", tokens=16)
    floors = [floor_us(problem, hit, H200) for hit in range(1, 129)]
    assert floors == sorted(floors) and floors[0] < floors[-1]
