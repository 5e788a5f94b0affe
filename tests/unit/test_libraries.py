"""Other libraries as candidates: the reasons against them, and that they are chosen by measurement only."""

from dataclasses import replace

import pytest

from expertile.errors import UnsupportedProblem
from expertile.hardware import CPU, H200
from expertile.plans import Backend, Layout, Plan
from expertile.policy import Settings, decide, explain, reasons, table
from expertile.policy.libraries import LIBRARIES, layout_bytes, padded_inter
from expertile.problem import Problem, named_problem

INSTALLED = (("flashinfer-python", "0.6.14"), ("vllm", "0.26.0"))
SIZES = dict(hidden=2048, inter=768, experts=128, top_k=8)
FP8 = dict(quant="fp8_tensor", static_scale=True)


def test_everything_fits_where_it_should():
    fits = {
        Backend.VLLM_TRITON: dict(quant="fp8_block"),
        Backend.VLLM_CUTLASS: FP8,
        Backend.VLLM_DEEPGEMM: dict(quant="fp8_block"),
        Backend.FLASHINFER_CUTLASS: FP8,
    }
    for backend, fields in fits.items():
        assert reasons(backend, Problem(tokens=16, **SIZES, **fields), H200, INSTALLED) == []
    oai = named_problem("gpt-oss-120b", 16)
    assert reasons(Backend.TRITON_KERNELS, oai, H200, INSTALLED) == []


@pytest.mark.parametrize(
    ("backend", "change", "said"),
    [
        ("vllm-triton", dict(dtype="fp32"), "dtype=fp32"),
        ("vllm-triton", dict(activation="swiglu_clamp"), "no activation swiglu_clamp"),
        ("vllm-triton", dict(total_experts=256), "total_experts=256"),
        ("vllm-triton", dict(top_k=1, weight_on_input=True), "weight_on_input"),
        ("vllm-triton", dict(quant="fp8_tensor"), "static activation scales"),
        ("vllm-triton", dict(quant="fp8_block", inter=192), "inter=192 is no multiple of 128"),
        ("vllm-cutlass", {}, "quant=none"),
        ("vllm-cutlass", dict(**FP8, bias=True), "bias"),
        ("vllm-cutlass", dict(**FP8, hidden=2056), "hidden=2056 is no multiple of 16"),
        ("vllm-cutlass", dict(**FP8, activation="relu2"), "no activation relu2"),
        ("vllm-deepgemm", dict(quant="fp8_block", hidden=2112), "hidden=2112 is no multiple of 128"),
        ("vllm-deepgemm", dict(quant="fp8_block", dtype="fp16"), "dtype=fp16"),
        ("flashinfer-cutlass", dict(**FP8, tokens=20000), "tokens=20000 is more than 16384"),
        ("flashinfer-cutlass", dict(quant="fp8_block"), "quant=fp8_block"),
        ("triton-kernels", {}, "no activation silu"),
    ],
)
def test_a_refusal_says_which_value(backend, change, said):
    problem = Problem(**{"tokens": 16, **SIZES, **change})
    (reason,) = reasons(Backend(backend), problem, H200, INSTALLED)
    assert said in reason


def test_what_is_not_installed_or_too_old_is_said_and_a_cpu_is_refused():
    problem = Problem(tokens=16, **SIZES, **FP8)
    assert reasons(Backend.VLLM_TRITON, problem, H200) == ["vllm is not installed"]
    (old,) = reasons(Backend.VLLM_TRITON, problem, H200, (("vllm", "0.9.2"),))
    assert "vllm 0.9.2 is older than 0.26" in old
    assert len(reasons(Backend.FLASHINFER_CUTLASS, problem, H200)) == 2, "it needs vllm beside it"
    assert any("0.0" in reason for reason in reasons(Backend.VLLM_TRITON, problem, CPU, INSTALLED))


def test_a_padded_layout_is_priced_as_it_is_stored():
    relu2 = named_problem("nemotron-3-nano", 16, "fp8_tensor", static_scale=True)
    assert padded_inter(relu2, Layout.UP_FIRST) == 1920 and padded_inter(relu2, Layout.CHECKPOINT) == 1856
    assert layout_bytes(relu2, Layout.UP_FIRST) == 128 * 2 * 1920 * 2688
    gated = Problem(tokens=1, **SIZES, **FP8)
    assert layout_bytes(gated, Layout.UP_FIRST) == 128 * 3 * 768 * 2048
    assert layout_bytes(gated, Layout.CHECKPOINT) == 0
    assert reasons(Backend.FLASHINFER_CUTLASS, relu2, H200, INSTALLED) == [], "its padding makes it fit"


# Choosing


def entry(tokens, time_us, **others):
    tile = [16, 128, 128, 4, 4, True, 1, True]
    found = dict(**SIZES, label="fp8_tensor", gated=True, tokens=tokens, gemm1=tile, gemm2=tile, stream="no")
    times = {name.replace("_", "-"): {"time_us": us, "version": version} for name, (us, version) in others.items()}
    return {**found, "fuse_quant": True, "time_us": time_us, "others": times}


@pytest.fixture
def shipped(monkeypatch):
    def put(*entries):
        monkeypatch.setattr(table, "load", lambda device: {"entries": list(entries)})
        decide.cache_clear()

    yield put
    decide.cache_clear()


def chosen(tokens=16, **fields) -> Plan:
    settings = Settings(**{"others": True, "installed": INSTALLED, **fields})
    return decide(Problem(tokens=tokens, **SIZES, **FP8), H200, None, settings)


def test_another_library_is_taken_where_it_measured_faster_and_only_then(shipped):
    shipped(entry(16, 100.0, vllm_cutlass=(80.0, "0.26.0"), vllm_triton=(99.5, "0.26.0")))
    plan = chosen()
    assert (plan.backend, plan.time_us) == (Backend.VLLM_CUTLASS, 80.0)
    assert plan.source == "measured; vllm 0.26.0 at T=16"
    assert chosen(others=False).backend is Backend.TRITON, "not unasked"
    assert chosen(installed=()).backend is Backend.TRITON
    assert decide(Problem(tokens=16, **SIZES, **FP8), H200).backend is Backend.TRITON
    shipped(entry(16, 100.0, vllm_triton=(99.5, "0.26.0")))
    assert chosen().backend is Backend.TRITON, "half a percent is noise"


def test_times_of_another_version_routing_or_layer_do_not_count(shipped):
    shipped(entry(16, 100.0, vllm_cutlass=(80.0, "0.24.0")))
    plan = chosen()
    assert plan.backend is Backend.TRITON
    (rival,) = (c for c in plan.candidates if c.backend is Backend.VLLM_CUTLASS)
    assert "vllm 0.24.0" in rival.source and "not 0.26.0" in rival.source and rival.source.startswith("model")
    shipped(entry(16, 100.0, vllm_cutlass=(80.0, "0.26.0")))
    assert chosen(routing="hot").backend is Backend.TRITON
    assert (
        decide(
            Problem(tokens=16, **{**SIZES, "hidden": 4096}, **FP8),
            H200,
            None,
            Settings(others=True, installed=INSTALLED),
        ).backend
        is Backend.TRITON
    )


def test_an_estimate_is_never_chosen_however_low(shipped):
    shipped(entry(16, 1e9))
    plan = chosen()
    assert plan.backend is Backend.TRITON
    assert all(c.time_us < plan.time_us for c in plan.candidates if c.backend in LIBRARIES and not c.reasons)


def test_between_two_cells_the_ratio_to_ours_is_what_is_interpolated(shipped):
    version = "0.26.0"
    shipped(entry(16, 100.0, vllm_cutlass=(200.0, version)), entry(64, 120.0, vllm_cutlass=(60.0, version)))
    plan = chosen(tokens=32)
    ours = next(c.time_us for c in plan.candidates if c.backend is Backend.TRITON)
    rival = next(c.time_us for c in plan.candidates if c.backend is Backend.VLLM_CUTLASS)
    assert rival / ours == pytest.approx(1.0), "2 at 16, 1/2 at 64"
    assert chosen(tokens=60).backend is Backend.VLLM_CUTLASS and chosen(tokens=20).backend is Backend.TRITON
    assert chosen(tokens=128).backend is Backend.TRITON, "nothing measured beyond 64"


def test_memory_bounds_and_a_layout_that_was_chosen_restrict_the_choice(shipped):
    shipped(entry(16, 100.0, flashinfer_cutlass=(50.0, "0.6.14"), vllm_cutlass=(80.0, "0.26.0")))
    free = chosen()
    assert free.backend is Backend.FLASHINFER_CUTLASS
    price = next(c for c in free.candidates if c.backend is free.backend)
    assert price.layout is Layout.UP_FIRST and price.layout_bytes == 128 * 3 * 768 * 2048 and price.load_us > 0
    assert "a copy of the weights (up_first): 576.0 MiB" in explain(free)
    assert chosen(spare_bytes=price.layout_bytes - 1).backend is Backend.VLLM_CUTLASS
    assert chosen(spare_bytes=price.layout_bytes).backend is Backend.FLASHINFER_CUTLASS
    assert chosen(scratch_bytes=0).backend is Backend.TRITON
    fixed = chosen(layout=Layout.CHECKPOINT)
    assert fixed.backend is Backend.VLLM_CUTLASS
    said = next(c.reasons for c in fixed.candidates if c.backend is Backend.FLASHINFER_CUTLASS)
    assert said == ("the weights were laid out as checkpoint when they were loaded, it needs up_first",)
    assert said[0] in explain(fixed, full=True)
    loaded = chosen(layout=Layout.UP_FIRST)
    assert loaded.backend is Backend.FLASHINFER_CUTLASS
    assert all("it needs checkpoint" in c.reasons[-1] for c in loaded.candidates if c.backend is not loaded.backend)


def test_a_forced_library_that_cannot_run_is_an_error_with_every_reason():
    problem = Problem(tokens=16, **SIZES, quant="fp8_block")
    with pytest.raises(UnsupportedProblem, match=r"backend=vllm-cutlass cannot.*vllm is not installed.*fp8_block"):
        decide(problem, H200, Backend.VLLM_CUTLASS)
    plan = decide(replace(problem, quant="fp8_channel"), H200, Backend.VLLM_CUTLASS, Settings(installed=INSTALLED))
    assert plan.backend is Backend.VLLM_CUTLASS and plan.source.startswith("forced; model")
    assert Plan.from_json(plan.to_json()) == plan
