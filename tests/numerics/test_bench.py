"""The benchmarks on the CPU: rows come out whole, a wrong answer gets none, inputs are what their names say."""

import dataclasses
import json
import re
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from expertile import reference
from expertile.bench import check, experts, inputs, layer, rows
from expertile.bench.implementation import Implementation
from expertile.bench.ours import Expertile, changed, parse_override
from expertile.bench.peers import KINDS, peer
from expertile.bench.peers.grouped_mm import route
from expertile.bench.runner import Request, Setting, State
from expertile.cli_bench import PEERS, app, parse_tokens
from expertile.errors import ExpertileError
from expertile.hardware import CPU, H100, H200
from expertile.problem import named_problem
from expertile.router import ROUTERS
from expertile.runtime.device import detect, from_properties
from expertile.runtime.measure import capture, interleave, time_us

PROBLEM = "128,64,8,2"
DEVICE = torch.device("cpu")
SHARED = {"date": "d", "commit": "c", "gpu": "cpu", "driver": "none", "torch": "t", "triton": "none"}
SETTING = Setting(DEVICE, CPU, SHARED)


class Fake(Implementation):
    """The reference, spoilt on the way out."""

    key = "fake"

    def __init__(self, spoil, reasons=()):
        self.spoil = spoil
        self.reasons = list(reasons)

    @property
    def name(self):
        return self.key

    def available(self, device):
        return []

    def fits(self, problem, router):
        return self.reasons

    def prepare(self, made):
        def run(call):
            ids, probs = check.routing(made, call)
            return self.spoil(reference.moe(call.x, made.weights[call.copy], ids, probs).to(call.x.dtype))

        return run


def outcomes(*implementations, bench=experts, **fields):
    fields = dict(problems=(PROBLEM,), quants=("bf16",), tokens=(1, 5), sets=2, replays=2) | fields
    return list(bench.run(Request(bench.BENCH, **fields), implementations, SETTING))


def lost_row(y):
    return torch.cat([y[:-1], torch.zeros_like(y[-1:])])


def unwritten_value(y):
    y[0, 0] = float("nan")
    return y


def crash(y):
    raise RuntimeError("kernel fell over\nwith a long story")


@pytest.mark.parametrize("bench", [experts, layer])
@pytest.mark.parametrize("quant", ["bf16", "fp16", "fp8_tensor", "fp8_channel", "fp8_block"])
def test_every_cell_gives_a_valid_row(bench, quant):
    found = outcomes(Expertile(CPU), bench=bench, quants=(quant,), routings=("uniform", "hot"), tokens=(1, 5))
    assert [outcome.state for outcome in found] == [State.MEASURED] * 4
    for outcome in found:
        assert rows.faults(outcome.row) == []
        assert outcome.row["bench"] == bench.BENCH and outcome.row["quant"] == quant
        assert 0 < outcome.row["p10_us"] <= outcome.row["time_us"] <= outcome.row["p90_us"]
    assert found[0].row["experts_hit"] == 2 and found[0].row["plan"] == "torch"
    assert ("router" in found[0].row) == (bench is layer)


@pytest.mark.parametrize("spoil", [lost_row, unwritten_value, lambda y: y * 1.05, lambda y: y.roll(1, 0)])
def test_a_wrong_answer_gets_no_row(spoil):
    found = outcomes(Expertile(CPU), Fake(spoil), tokens=(5,))
    assert {outcome.impl: outcome.state for outcome in found} == {"expertile": State.MEASURED, "fake": State.WRONG}
    assert "relative error" in found[0].message and found[0].row is None


def test_a_lost_row_is_seen_in_fp8_too():
    assert outcomes(Fake(lost_row), quants=("fp8_block",), tokens=(5,))[0].state is State.WRONG


def test_the_unspoilt_fake_is_measured():
    assert all(outcome.state is State.MEASURED for outcome in outcomes(Fake(lambda y: y)))


def test_a_crash_is_reported_and_costs_the_others_nothing():
    found = outcomes(Fake(crash), Expertile(CPU), tokens=(5,))
    assert [outcome.state for outcome in found] == [State.CRASHED, State.MEASURED]
    assert found[0].message == "RuntimeError: kernel fell over"


def test_an_interrupt_is_not_swallowed():
    def stop(y):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        outcomes(Fake(stop))


def test_what_does_not_fit_is_absent_with_its_reasons():
    found = outcomes(Fake(lambda y: y, reasons=["too small", "too odd"]))
    assert [(outcome.state, outcome.message) for outcome in found] == [(State.ABSENT, "too small; too odd")]


def test_every_peer_answers_without_its_library():
    assert tuple(KINDS) == PEERS
    for key in KINDS:
        each = peer(key)
        assert key in each.name or each.name.startswith(key.split("-")[0])
        assert each.available(DEVICE) or key == "torch-grouped-mm"
        assert isinstance(each.fits(named_problem("nemotron-3-nano", 4, "fp8_block"), ROUTERS["llama4"]), list)


@pytest.mark.parametrize("bench", [experts, layer])
@pytest.mark.parametrize("fields", [{}, dict(bias=True, activation="swiglu_oai"), dict(activation="relu2")])
def test_torch_grouped_mm_computes_the_layer(bench, fields):
    problem = named_problem(PROBLEM, 5, "bf16", **fields)
    router = None if bench is experts else layer.router_of(PROBLEM)
    made = inputs.Inputs(problem, (inputs.make_weights(problem, DEVICE, 0),), router)
    run = peer("torch-grouped-mm").prepare(made)
    for call in inputs.make_calls(problem, "uniform", made, 2, 0):
        every = torch.arange(5)
        errors = check.row_errors(run(call), check.expected(made, call, every))
        assert check.red(errors, check.bar(made.weights[0])) is None


@pytest.mark.parametrize("name", [name for name, router in ROUTERS.items() if router.groups == 1])
def test_torch_peer_routes_as_the_reference(name):
    logits = torch.randn(9, 16, generator=torch.Generator().manual_seed(0))
    bias = torch.linspace(-0.1, 0.1, 16)
    ids, probs = route(logits, ROUTERS[name], 3, bias)
    want_ids, want_probs = reference.route(logits, ROUTERS[name], 3, bias=bias)
    assert torch.equal(ids.long(), want_ids)
    torch.testing.assert_close(probs.double(), want_probs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("quant", ["fp8_tensor", "fp8_channel", "fp8_block"])
def test_the_judge_does_not_quantise_activations(quant):
    problem = named_problem(PROBLEM, 6, quant, static_scale=quant == "fp8_tensor")
    made = inputs.Inputs(problem, (inputs.make_weights(problem, DEVICE, 0),))
    (call,) = inputs.make_calls(problem, "uniform", made, 1, 0)
    every = torch.arange(6)
    rounded = reference.moe(call.x, made.weights[0], call.ids, call.probs)
    error = check.row_errors(rounded, check.expected(made, call, every))
    assert error.min() > 0.01 and check.red(error, check.FP8_BAR) is None


@pytest.mark.parametrize("routing", ["uniform", "zipf1.2", "hot"])
@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_ids_of_a_token_are_distinct(routing, top_k):
    problem = named_problem(f"8,8,16,{top_k}", 200)
    made = inputs.Inputs(problem, (inputs.make_weights(problem, DEVICE, 0),))
    for call in inputs.make_calls(problem, routing, made, 2, 3):
        assert all(len(set(row)) == top_k for row in call.ids.tolist())
        assert torch.allclose(call.probs.sum(1), torch.ones(200))


def busiest(routing, top_k, tokens=400):
    logits = inputs.make_logits(named_problem(f"8,8,16,{top_k}", tokens), routing, torch.Generator().manual_seed(1))
    return logits.topk(top_k).indices.flatten().bincount(minlength=16).max().item() / (tokens * top_k)


def test_hot_gives_half_of_all_slots_or_one_of_every_token():
    assert busiest("hot", 1) == 0.5 and busiest("hot", 2) == 0.5
    assert busiest("hot", 4) == 0.25


def test_skew_grows_from_uniform_over_zipf_to_hot():
    assert busiest("uniform", 1) < 0.12 < 0.2 < busiest("zipf1.2", 1) < 0.5


def test_calls_differ_and_repeat_by_seed():
    problem = named_problem(PROBLEM, 4)
    made = inputs.Inputs(problem, tuple(inputs.make_weights(problem, DEVICE, seed) for seed in range(2)))
    first, again, other = (inputs.make_calls(problem, "uniform", made, 3, seed) for seed in (0, 0, 1))
    assert torch.equal(first[0].x, again[0].x) and not torch.equal(first[0].x, other[0].x)
    assert not torch.equal(first[0].x, first[1].x) and not torch.equal(first[0].logits, first[1].logits)
    assert [call.copy for call in first] == [0, 1, 0]


def test_small_layers_get_copies_of_their_weights_and_large_ones_do_not():
    assert inputs.copies(named_problem("64,32,8,2", 1), H200, 8) == 8
    assert inputs.copies(named_problem("qwen3-30b-a3b", 1, "fp8_tensor"), H200, 8) == 1


def test_static_scales_saturate_nothing():
    problem = named_problem("256,64,4,2", 64, "fp8_tensor", static_scale=True)
    weights = inputs.make_weights(problem, DEVICE, 0)
    made = inputs.Inputs(problem, (weights,))
    (call,) = inputs.make_calls(problem, "uniform", made, 1, 0)
    gate_up = torch.einsum("th,enh->ten", call.x.double(), reference.dequantize_weights(weights)[0])
    h = reference.activate(gate_up.flatten(0, 1), weights.activation)
    assert call.x.abs().max() < inputs.X_REACH and 1.0 < h.abs().max() < inputs.H_REACH


def test_sample_holds_the_ends_and_no_row_twice():
    for tokens in (1, 2, 63, 64, 65, 4096):
        found = check.sample(tokens, 64).tolist()
        assert found == sorted(set(found)) and found[0] == 0 and found[-1] == tokens - 1
        assert len(found) == min(tokens, 64)


def test_override_replaces_parts_of_the_plan():
    made = inputs.Inputs(named_problem(PROBLEM, 4), (inputs.make_weights(named_problem(PROBLEM, 4), DEVICE, 0),))
    base = Expertile(H200, backend="triton").plan(made, 4)
    variant, changes = parse_override('x={"gemm1": {"block_n": 64, "stages": 2}, "pdl": false}')
    plan = changed(base, changes)
    assert variant == "x" and plan.source == "forced" and plan.gemm2 == base.gemm2
    assert plan.gemm1 == dataclasses.replace(base.gemm1, block_n=64, stages=2)
    for bad in ("{", "[1]", '{"device": "h100"}'):
        with pytest.raises(ExpertileError, match="plan override"):
            parse_override(bad)
    for bad in ({"gemm1": {"rows": 1}}, {"backend": "cublas"}, {"gemm2": 5}):
        with pytest.raises(ExpertileError, match="plan override"):
            changed(base, bad)


def test_alternating_replays_take_turns():
    order = []
    timings = interleave({"a": [lambda: order.append("a")], "b": [lambda: order.append("b")] * 2}, 2, 1, cuda=False)
    assert order == list("abbabbabb")
    assert all(timing.p10 <= timing.median <= timing.p90 for timing in timings.values())


def test_time_is_that_of_one_call():
    calls = [lambda: sum(range(20000))] * 4
    one, four = time_us(calls[:1], 9, cuda=False), time_us(calls, 9, cuda=False)
    assert 0.3 < four.median / one.median < 3
    with pytest.raises(ValueError, match="nothing to time"):
        capture([])


def properties(name="NVIDIA H200", major=9, minor=0, sms=132, **more):
    return SimpleNamespace(
        name=name, major=major, minor=minor, multi_processor_count=sms, shared_memory_per_block=49152,
        shared_memory_per_block_optin=232448, L2_cache_size=60 << 20, **more,
    )  # fmt: skip


def test_known_cards_are_recognised_whole_only():
    assert from_properties(properties()) is H200
    assert from_properties(properties("NVIDIA H100 80GB HBM3")) is H100
    assert detect("cpu") is CPU
    for other in (properties("NVIDIA H200 MIG 3g.71gb", sms=60), properties("NVIDIA H100 PCIe", sms=114)):
        found = from_properties(other)
        assert found not in (H200, H100) and found.is_hopper and found.sms == other.multi_processor_count
        assert 0 < found.flops_per_s_16 < H200.flops_per_s_16 and found.flops_per_s_8 == 2 * found.flops_per_s_16


def test_an_unknown_card_gets_the_driver_s_figures():
    found = from_properties(
        properties("NVIDIA A100-SXM4-80GB", 8, 0, 108, memory_clock_rate=1593000, memory_bus_width=5120)
    )
    assert found.name == "nvidia a100-sxm4-80gb" and found.capability == (8, 0) and found.l2_bytes == 60 << 20
    assert 1.2e12 < found.hbm_bytes_per_s < 2.04e12 and found.flops_per_s_8 == found.flops_per_s_16


def test_tokens_are_lists_and_ranges_of_powers_of_two():
    assert parse_tokens("1,8, 64") == (1, 8, 64)
    assert parse_tokens("1-4096") == tuple(1 << bit for bit in range(13))
    assert parse_tokens("3-9,7") == (4, 8, 7)
    for bad in ("", "0", "1,", "x", "-4", "5-7", "1.5", str(1 << 40), "\u00b2", "1-\u00b2", "9" * 5000):
        with pytest.raises(ExpertileError, match="tokens="):
            parse_tokens(bad)


def run_cli(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


def test_command_line_measures_and_reports(tmp_path):
    out = tmp_path / "rows.jsonl"
    done = run_cli(
        "experts", "--problem", PROBLEM, "--quant", "bf16,fp8_block", "--tokens", "1,2", "--sets", 2, "--replays", 2,
        "--impl", "all,expertile:reference", "--device", "cpu", "--out", out, "--commit", "abc",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert re.search(r"vllm-\S*triton absent: .*needs a GPU", " ".join(done.output.split()))
    found = rows.read(out)
    assert len(found) == 2 * 2 * 2 + 2 and {row["commit"] for row in found} == {"abc"}
    assert {row["impl"] for row in found} == {"expertile", "expertile:reference", "torch-grouped-mm"}
    told = run_cli("report", out)
    assert told.exit_code == 0 and "best peer" in " ".join(told.output.split())


def test_plot_is_a_png(tmp_path):
    pytest.importorskip("matplotlib", reason="needs matplotlib (extra `bench`)")
    out = tmp_path / "rows.jsonl"
    rows.write(out, [outcome.row for outcome in outcomes(Expertile(CPU))])
    assert run_cli("report", out, "--plot", tmp_path / "p.png").exit_code == 0
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "words",
    [
        ("--problem", "1,2,3"),
        ("--problem", "\u00b2,32,8,2"),
        ("--quant", "int4"),
        ("--tokens", "none"),
        ("--routing", "trace:x"),
        ("--impl", "cublas"),
        ("--router", "softmax"),
        ("--plan-override", "{"),
        ("--plan-override", "[" * 100_000),
        ("--plan-override", '{"fuse_quant": "no"}'),
        ("--plan-override", '{"gemm1": {"block_m": "x"}}'),
        ("--plan-override", '{"stream": 1}'),
        ("--impl", "expertile:"),
        ("--seed", str(1 << 64)),
        ("--replays", "0"),
        ("--sets", "0"),
        ("--device", "tpu"),
    ],
)
def test_a_bad_value_is_one_clear_error(words):
    failed = run_cli("experts", *words)
    assert failed.exit_code != 0 and isinstance(failed.exception, ExpertileError)
    said = str(failed.exception)
    assert words[1] in said or words[0].strip("-").replace("-", " ") in said
    assert "\n" not in str(failed.exception)


def test_the_least_layer_has_a_row_and_the_largest_is_refused(tmp_path):
    words = ("--tokens", 1, "--sets", 1, "--replays", 1, "--impl", "expertile", "--device", "cpu")
    out = tmp_path / "rows.jsonl"
    assert run_cli("experts", "--problem", "1,1,1,1", *words, "--out", out).exit_code == 0 and rows.read(out)
    failed = run_cli("experts", "--problem", "16777216,16777216,65536,1", *words, "--out", out)
    assert isinstance(failed.exception, ExpertileError) and "weights cannot be made here" in str(failed.exception)


def test_ours_wrong_is_a_failing_exit(tmp_path, monkeypatch):
    monkeypatch.setattr(check, "FP8_BAR", check.Bar(rms=1e-6, row=1e-6))
    out = tmp_path / "rows.jsonl"
    words = ("--problem", PROBLEM, "--quant", "fp8_block", "--tokens", "1", "--sets", 1, "--replays", 1)
    done = run_cli("experts", *words, "--impl", "expertile", "--device", "cpu", "--out", out)
    assert done.exit_code == 1 and "expertile" in done.output and not out.exists()


def test_report_of_other_rows_is_no_crash(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"bench": "speed"}))
    assert isinstance(run_cli("report", path).exception, ExpertileError)


def test_report_names_the_benches_that_have_no_table(tmp_path):
    rows.write(path := tmp_path / "rows.jsonl", [outcome.row for outcome in outcomes(Expertile(CPU))])
    shared = {name: rows.read(path)[0][name] for name in ("date", "commit", "gpu", "driver", "torch", "triton", "impl")}
    cold = shared | dict(problem=PROBLEM, quant="bf16", what="all", first_ms=1.0, steady_ms=1.0, compiles=1)
    rows.write(other := tmp_path / "cold.jsonl", [cold | {"bench": "cold"}])
    assert "no table is made of rows of cold, only of experts" in str(run_cli("report", other).exception)
    told = run_cli("report", path, other)
    assert told.exit_code == 0 and "rows of cold" in told.stderr and "best peer" in " ".join(told.stdout.split())


@pytest.mark.parametrize("quant", ["bf16", "fp8_tensor"])
@pytest.mark.parametrize("activation, padded", [("silu", 80), ("relu2", 128)])
def test_flashinfer_layout_is_the_same_layer(quant, activation, padded):
    from expertile.runtime.backends.flashinfer import up_first

    problem = named_problem("32,72,3,2", 4, quant, activation=activation)
    weights = inputs.make_weights(problem, DEVICE, 0)
    w13, w2 = up_first(weights)
    gated = weights.activation.gated
    assert w13.shape == (3, padded * (2 if gated else 1), 32) and w2.shape == (3, 32, padded)
    first = w13.float().unflatten(1, (-1, padded))
    want = weights.w13.float().unflatten(1, (-1, 72)).flip(1)
    assert torch.equal(first[:, :, :72], want) and not first[:, :, 72:].any()
    assert torch.equal(w2.float()[:, :, :72], weights.w2.float()) and not w2.float()[:, :, 72:].any()


@pytest.mark.gpu
def test_a_graph_holds_all_calls_and_alternates():
    count = torch.zeros(2, device="cuda")
    work = {"a": [lambda: count[:1].add_(1)] * 3, "b": [lambda: count[1:].add_(1)] * 3}
    timings = interleave(work, replays=5, warmup=2)
    # once each before capture, 2 to warm up, 5 timed; "b", the last, also goes ahead untimed 5 times
    assert count.tolist() == [3.0 * (1 + 2 + 5), 3.0 * (1 + 2 + 5 + 5)]
    assert all(0 < timing.p10 <= timing.median < 1000 for timing in timings.values())


@pytest.mark.gpu
@pytest.mark.parametrize("bench", [experts, layer])
@pytest.mark.parametrize("quant", ["bf16", "fp8_tensor", "fp8_channel", "fp8_block"])
def test_every_cell_gives_a_valid_row_on_a_gpu(bench, quant):
    setting = Setting(torch.device("cuda"), detect(), rows.environment("h200"))
    request = Request(bench.BENCH, ("256,128,16,4",), (quant,), (1, 40), sets=3, replays=3)
    found = list(bench.run(request, [Expertile(setting.hardware)], setting))
    assert [(outcome.state, outcome.message) for outcome in found] == [(State.MEASURED, "")] * 2
    assert all(rows.faults(outcome.row) == [] and "triton" in outcome.row["plan"] for outcome in found)
