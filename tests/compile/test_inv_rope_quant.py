"""The inverse-RoPE kernel, as launches ask for it: one variant for all numbers of tokens, wide accesses, no spills."""

import re
from types import SimpleNamespace

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.jit import JITFunction, create_function_from_signature

from expertile.kernels import inv_rope_quant
from expertile.kernels.inv_rope_quant import fused_inv_rope_fp8_quant, signature
from expertile.runtime.compile import compile_specialization

BACKEND = CUDABackend(GPUTarget("cuda", 90, 32))
MOST = 131_072
LAYERS = [(64, 8), (8, 1), (128, 16), (6, 2)]
EACH = pytest.mark.parametrize(("heads", "groups"), LAYERS, ids=str)


def empty(*shape, dtype):
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.fixture
def launches(monkeypatch):
    """What each launch asks for, by Triton's own binder, recorded instead of made; on tensors without memory."""
    made = []
    kernel = inv_rope_quant._inv_rope_quant_kernel
    bind = create_function_from_signature(kernel.signature, kernel.params, BACKEND)

    def record(self, *arguments, grid, warmup, **keywords):
        assert self is kernel and not warmup
        bound, asked, options = bind(*arguments, **keywords)
        made.append(
            SimpleNamespace(asked=dict(zip(bound, asked, strict=True)), values=bound, options=options, grid=grid)
        )

    monkeypatch.setattr(JITFunction, "run", record)
    monkeypatch.setattr(inv_rope_quant, "_check_device", lambda o: None)
    return made


def key(launch) -> str:
    """Everything that Triton keys its variants by."""
    return repr((launch.asked, sorted(launch.options.items())))


def test_every_number_of_tokens_asks_for_the_same_variant(launches):
    """All of them, with o as attention leaves it (heads padded to 64): strides that follow T are no arguments."""
    whole = empty(MOST, 64, 512, dtype=torch.bfloat16)
    positions, cos_sin = empty(MOST, dtype=torch.int64), empty(4096, 64, dtype=torch.float32)
    seen = {}
    for tokens in range(1, MOST + 1):
        fused_inv_rope_fp8_quant(whole[:tokens, :8], positions[:tokens], cos_sin, 1)
        (launch,) = launches
        seen.setdefault(key(launch), tokens)
        assert launch.grid == (-(-tokens // 4) * 8,)
        launches.clear()
    assert len(seen) == 1, seen


@EACH
@pytest.mark.parametrize("tokens", [1, 2, 15, 16, 17, 4095, 4096, 65_536, MOST])
def test_the_signature_says_what_a_launch_asks_for(launches, heads, groups, tokens):
    """Also for o that lies heads first, whose stride between heads follows T, and for positions at an odd address."""
    for o in (
        empty(tokens, heads, 512, dtype=torch.bfloat16),
        empty(heads, tokens, 512, dtype=torch.bfloat16).transpose(0, 1),
    ):
        for positions in (empty(tokens, dtype=torch.int64), empty(tokens + 1, dtype=torch.int64)[1:]):
            fused_inv_rope_fp8_quant(o, positions, empty(8, 64, dtype=torch.float32), groups)
    assert len(launches) == 4 and len({key(launch) for launch in launches}) == 1
    said = signature(heads, groups, pdl=False)
    assert said.options == launches[0].options
    for name, (kind, value) in launches[0].asked.items():
        assert said.types[name] == kind
        if kind == "constexpr":
            assert said.constants[name] == value
        else:
            assert (value == "D") == (name in said.divisible_by_16), name


def test_an_argument_that_is_specialised_would_be_seen(launches, monkeypatch):
    """The other direction: with the tokens specialised the same loop finds several variants."""
    kernel = inv_rope_quant._inv_rope_quant_kernel
    loose = JITFunction(kernel.fn)
    assert [p.name for p in loose.params if p.do_not_specialize] == []
    bind = create_function_from_signature(loose.signature, loose.params, BACKEND)
    found = set()
    for tokens in (1, 2, 16):
        fused_inv_rope_fp8_quant(
            empty(tokens, 8, 512, dtype=torch.bfloat16), empty(tokens, dtype=torch.int64),
            empty(8, 64, dtype=torch.float32), 1,
        )  # fmt: skip
        found.add(repr(bind(**launches[-1].values)[1]))
    assert len(found) == 3


@EACH
@pytest.mark.parametrize("positions", ["i32", "i64"])
def test_it_reads_and_writes_16_bytes_at_a_time_and_spills_nothing(heads, groups, positions):
    made = compile_specialization(signature(heads, groups, positions))
    assert ".target sm_90a" in made.ptx
    assert made.spill_bytes == 0 and made.stack_bytes == 0
    assert made.registers <= 40  # 48 warps of a multiprocessor or more, each with 1 KiB on their way
    loads = re.findall(r"\bLDG\.E(\.[\w.]+)?", made.sass)
    stores = re.findall(r"\bSTG\.E(\.[\w.]+)?", made.sass)
    # Of a lane: 16 values of x, a pair of the rotated part, its cos and sin; and its token's position.
    assert sorted(loads) == sorted([".128"] * 2 + ["", "", "", ".64" if positions == "i64" else ""])
    # 16 values, the rotated pair, one scale.
    assert sorted(stores) == sorted([".128", ".U16", ""])
    assert made.features["pdl_wait"] == made.features["pdl_launch"] == 1


def test_without_units_the_compiler_knows_no_alignment():
    """What the units are for: a stride that is not specialised, passed as it is, leaves loads of 2 bytes."""
    sass = compile_specialization(signature(64, 8, unit=1)).sass
    assert len(re.findall(r"\bLDG\.E\.U16", sass)) == 2 * 8 + 2 and "LDG.E.128" not in sass


def test_what_waits_for_the_position_comes_after_the_loads_that_do_not():
    """Instructions are issued in order: cos and sin ahead of x would hold x back for the latency of one load."""
    sass = compile_specialization(signature(64, 8)).sass
    order = re.findall(r"\b(LDG\.E(?:\.\d+)?|BAR\.SYNC)", sass)
    before, after = order[: order.index("BAR.SYNC")], order[order.index("BAR.SYNC") :]
    assert before.count("LDG.E.128") == 2 and after.count("LDG.E") == 2
