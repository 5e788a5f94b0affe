"""The part of the demo that only a Hopper GPU has: kernels checked, then timed."""

from expertile import demo
from expertile.runtime.device import detect


def test_every_quant_and_number_of_tokens_is_measured():
    cells = list(demo.measured_cells(detect()))
    assert [(cell[0], cell[1]) for cell in cells] == [
        (quant, str(tokens)) for quant in ("bf16", "fp8_tensor", "fp8_block") for tokens in demo.TOKENS
    ]
    for _, _, time_us, floor_us, ratio, _, plan in cells:
        assert float(time_us) > float(floor_us) * 0.9 and float(ratio) > 0
        assert plan.startswith("triton")
