"""The policy: what it decides, on any device, in milliseconds; the bounds that kernels rely on; the shipped tables."""

import ast
import json
import math
import timeit
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import expertile.runtime
from expertile import policy
from expertile.errors import UnsupportedProblem
from expertile.hardware import CPU, DEVICES, H100, H200
from expertile.plans import ALIGN, Backend, GemmConfig, Plan, Stream
from expertile.policy import Settings, decide, device, explain, table
from expertile.policy.libraries import LIBRARIES
from expertile.policy.model import expected_tiles, floor_us, smem_bytes
from expertile.policy.rules import MAX_EXPERTS, RULES, ring_reasons, stream_reasons, tile_reasons
from expertile.policy.tiles import SPECIALIZED, STREAM_ROWS, choose_tiles, fused_quant
from expertile.problem import ACTIVATIONS, LAYERS, Problem, Quant, named_problem

QWEN = dict(hidden=2048, inter=768, experts=128, top_k=8)


@st.composite
def problems(draw, most_tokens=20_000):
    experts = draw(st.sampled_from([1, 2, 8, 60, 128, 384, 512, 2047, 2048]))
    top_k = draw(st.integers(1, min(experts, 16)))
    quant = draw(st.sampled_from(Quant))
    activation = ACTIVATIONS[draw(st.sampled_from(list(ACTIVATIONS)))]
    return Problem(
        tokens=draw(st.one_of(st.integers(0, 64), st.integers(0, most_tokens))),
        hidden=draw(st.sampled_from([64, 176, 704, 2048, 2688, 2880, 7168])),
        inter=draw(st.sampled_from([8, 24, 192, 320, 768, 1856, 2880, 7168])),
        experts=experts,
        top_k=top_k,
        dtype=draw(st.sampled_from(["bf16", "fp16", "fp32"])),
        quant=quant,
        activation=replace(activation, interleaved=activation.gated and draw(st.booleans())),
        static_scale=quant is Quant.FP8_TENSOR and draw(st.booleans()),
        bias=draw(st.booleans()),
        weight_on_input=top_k == 1 and draw(st.booleans()),
        total_experts=experts * draw(st.sampled_from([1, 1, 4])),
    )


def grouped_tiles(plan) -> tuple[GemmConfig, ...]:
    tiles = {Stream.NO: (plan.gemm1, plan.gemm2), Stream.DOWN: (plan.gemm1,), Stream.BOTH: (), Stream.RING: ()}
    return tiles[plan.stream]


devices = st.sampled_from(
    [H200, H100, CPU, replace(H200, smem_bytes=100_000), replace(H200, name="b200", capability=(10, 0))]
)


def test_every_backend_has_a_rule_and_a_runner():
    """RUNNERS is read from the source: importing it would need torch."""
    source = Path(expertile.runtime.__file__).with_name("execute.py").read_text()
    (runners,) = (
        node.value
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign) and node.targets[0].id == "RUNNERS"
    )
    assert [key.attr for key in runners.keys] == [backend.name for backend in Backend]
    assert [*RULES, *LIBRARIES] == list(Backend)


@settings(max_examples=300, deadline=None)
@given(problem=problems(), hardware=devices)
def test_what_is_decided_can_run_and_goes_into_a_graph_where_that_can_be(problem, hardware):
    plan = decide(problem, hardware)
    assert (plan.problem, plan.device) == (problem, hardware.name)
    assert [candidate.backend for candidate in plan.candidates] == list(Backend)
    able = {c.backend: c.time_us for c in plan.candidates if not c.reasons and c.backend is not Backend.REFERENCE}
    assert plan.backend is (Backend.TRITON if Backend.TRITON in able else Backend.TORCH)
    assert plan.time_us == able[plan.backend]
    if plan.backend is Backend.TRITON:
        assert hardware.is_hopper
        assert plan.stream in (Stream.NO, Stream.RING) or not stream_reasons(problem)
        assert plan.stream is not Stream.NO or plan.gemm1.block_m == plan.gemm2.block_m, (
            "one list of row tiles serves both"
        )
        for tile in grouped_tiles(plan):
            assert not tile_reasons(tile, problem, hardware)
            assert smem_bytes(tile, problem) <= hardware.smem_bytes
        assert not plan.fuse_quant or fused_quant(problem, plan.gemm1)
    assert decide(problem, hardware) == plan


@settings(max_examples=200, deadline=None)
@given(problem=problems(), hardware=devices)
def test_a_plan_survives_json(problem, hardware):
    plan = decide(problem, hardware)
    assert Plan.from_json(plan.to_json()) == plan
    assert json.loads(plan.to_json())["problem"]["quant"] == problem.quant.value


@settings(max_examples=200, deadline=None)
@given(problem=problems(), hardware=devices)
def test_explain_names_every_backend_and_every_reason(problem, hardware):
    plan = decide(problem, hardware)
    text = explain(plan)
    for candidate in plan.candidates:
        if candidate.backend in LIBRARIES:
            assert f" {candidate.backend.value}: " not in text, "not installed: only the full text names it"
        else:
            assert candidate.backend.value in text
            assert all(reason in text for reason in candidate.reasons)
    full = explain(plan, full=True)
    assert all(candidate.backend.value in full for candidate in plan.candidates)
    assert all(reason in full for candidate in plan.candidates for reason in candidate.reasons)
    assert f"-> {plan.backend.value}" in text and hardware.name in text and f"T={problem.tokens}" in text


@pytest.mark.parametrize(
    ("change", "hardware", "said"),
    [
        ({}, CPU, ["compute capability 9.0", "cpu has 0.0"]),
        ({}, replace(H200, name="b200", capability=(10, 0)), ["b200 has 10.0"]),
        (dict(dtype="fp32"), H200, ["fp32", "tf32"]),
        (dict(experts=MAX_EXPERTS + 1), H200, [str(MAX_EXPERTS + 1), str(MAX_EXPERTS)]),
        (dict(tokens=2**28), H200, ["tokens=268435456", "top_k=8"]),
        (dict(dtype="fp32", tokens=2**28), CPU, ["0.0", "tf32", "268435456"]),
    ],
    ids=str,
)
def test_a_forced_backend_that_cannot_run_says_why(change, hardware, said):
    problem = Problem(**{"tokens": 16, **QWEN, **change})
    with pytest.raises(UnsupportedProblem, match="backend=triton") as caught:
        decide(problem, hardware, Backend.TRITON)
    assert all(word in str(caught.value) for word in said)
    assert decide(problem, hardware).backend is Backend.TORCH


@pytest.mark.parametrize("backend", RULES)
def test_a_forced_backend_is_taken_although_another_is_faster(backend):
    plan = decide(Problem(tokens=16, **QWEN), H200, backend)
    assert plan.backend is backend and plan.source.startswith("forced")
    assert (plan.gemm1 is None) == (backend is not Backend.TRITON)


def test_the_oracle_is_never_chosen_unasked():
    for name in LAYERS:
        for tokens in (0, 1, 4096):
            for hardware in DEVICES.values():
                assert decide(named_problem(name, tokens), hardware).backend is not Backend.REFERENCE


def test_a_tile_with_too_much_shared_memory_is_refused_and_the_next_best_taken():
    """Case 25: tiles tuned on a GPU with more shared memory than this one; the refusal has both byte counts."""
    problem = Problem(tokens=4096, **QWEN)
    tuned = decide(problem, H200).gemm1
    need = smem_bytes(tuned, problem)
    small = replace(H200, smem_bytes=need - 1)
    (reason,) = tile_reasons(tuned, problem, small)
    assert str(need) in reason and str(need - 1) in reason
    taken = decide(problem, small)
    assert taken.backend is Backend.TRITON and taken.gemm1 != tuned
    assert max(smem_bytes(tile, problem) for tile in (taken.gemm1, taken.gemm2)) < need


@pytest.mark.parametrize(
    ("tile", "sizes", "said"),
    [
        (dict(warps=8), {}, "warps=8"),
        (dict(block_n=128), {}, "128x128x128 is not"),
        ({}, dict(inter=176, quant="fp8_tensor"), "inter=176 is no multiple of 32"),
        ({}, dict(inter=192), "inter=192 puts gate and up rows in one scale block"),
        ({}, dict(tokens=2**20, hidden=2**15), "can be gathered"),
    ],
    ids=str,
)
def test_a_specialized_tile_that_does_not_fit_is_refused_with_the_value(tile, sizes, said):
    usual = dict(tokens=4096, hidden=2048, inter=768, experts=128, top_k=8, quant="fp8_block")
    assert not tile_reasons(SPECIALIZED[128], Problem(**usual), H200)
    (reason,) = tile_reasons(replace(SPECIALIZED[128], **tile), Problem(**(usual | sizes)), H200)
    assert said in reason


def test_where_no_tile_fits_another_backend_is_taken():
    """Case 25, to its end."""
    problem, tiny = Problem(tokens=4096, **QWEN), replace(H200, smem_bytes=10_000)
    plan = decide(problem, tiny)
    assert plan.backend is Backend.TORCH
    (reasons,) = (c.reasons for c in plan.candidates if c.backend is Backend.TRITON)
    need = min(smem_bytes(tile, problem) for tile in choose_tiles(problem, tiny))
    assert all("10000" in reason for reason in reasons) and str(need) in " ".join(reasons)
    with pytest.raises(UnsupportedProblem, match="10000"):
        decide(problem, tiny, Backend.TRITON)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("label", ["bf16", "fp8_tensor", "fp8_channel", "fp8_block"])
def test_every_known_layer_runs_on_our_kernels_at_any_batch(name, label):
    for tokens in [*range(1, 65), 127, 256, 1000, 4096, 16384, 100_000]:
        assert decide(named_problem(name, tokens, label), H200).backend is Backend.TRITON


def test_thin_experts_get_thin_swapped_tiles_and_thick_ones_wide_tiles():
    rows = [decide(Problem(tokens=tokens, **{**QWEN, "hidden": 2304}), H200).gemm1 for tokens in (32, 256, 8192)]
    assert [tile.block_m for tile in rows] == sorted(tile.block_m for tile in rows)
    assert rows[0].swap and rows[0].block_m == 16
    assert not rows[-1].swap and rows[-1].block_m == 128


@pytest.mark.parametrize("inter", [256, 2048, 7168])
def test_a_streamed_block_holds_no_more_weights_than_registers(inter):
    """Not even when the table's nearest problem was streamed with many columns of a much shorter row."""
    for label in ("bf16", "fp8_tensor", "fp8_block"):
        for tokens in range(1, 10):
            problem = named_problem(f"7168,{inter},256,8", tokens, label)
            plan = decide(problem, H200)
            if plan.stream in (Stream.BOTH, Stream.DOWN):
                item = 2 if label == "bf16" else 1
                row = item * max(128, 1 << (inter - 1).bit_length()) * 8
                assert plan.gemm2.block_n * row <= max(65536 // item, row) and row <= 131072
                assert (
                    plan.gemm2.block_n == 1 or plan.gemm2.block_n * row <= 32 * plan.gemm2.warps * 256
                )  # 64 registers


def test_only_a_handful_of_rows_is_streamed_where_nothing_was_measured():
    for tokens in (1, 2, 10, 11, 100):
        problem = Problem(tokens=tokens, hidden=1000, inter=64, experts=2000, top_k=1, quant="fp8_block")
        assert (decide(problem, H200).stream is Stream.BOTH) == (tokens <= STREAM_ROWS)


def test_rows_that_meet_at_one_expert_are_not_streamed():
    """Streaming reads an expert's weights once for each of its rows."""
    problem = Problem(tokens=6, hidden=5120, inter=1000, experts=128, top_k=1, quant="fp8_tensor", static_scale=True)
    streams = {routing: decide(problem, H200, None, Settings(routing=routing)).stream for routing in ("uniform", "hot")}
    assert streams == {"uniform": Stream.BOTH, "hot": Stream.NO}
    few_here = replace(problem, tokens=1, top_k=8, experts=16, total_experts=128)  # one row of the eight
    assert decide(few_here, H200).stream is Stream.BOTH


def test_some_tens_of_rows_go_in_one_launch_where_nothing_was_measured():
    sizes = dict(inter=1280, experts=96, top_k=8)

    def rings(**fields):
        plans = {tokens: decide(Problem(tokens=tokens, **sizes, **fields), H200) for tokens in (2, 3, 8, 16, 24, 25)}
        return {tokens for tokens, plan in plans.items() if plan.stream is Stream.RING and "one launch" in plan.source}

    assert rings(hidden=1024, quant="fp8_channel") == rings(hidden=4096) == {3, 8, 16, 24}
    assert rings(hidden=4096, quant="fp8_block") == {8, 16} and rings(hidden=2048, quant="fp8_block") == set()
    there = Problem(tokens=3, hidden=4096, total_experts=96, **sizes | {"experts": 12})
    assert decide(there, H200).stream is not Stream.RING  # 3 rows of the 24 are here


def test_skewed_routing_asks_for_the_tiles_of_thicker_experts():
    problem = Problem(tokens=192, hidden=4096, inter=3200, experts=16, top_k=2)
    thin, thick = (decide(problem, H200, None, Settings(routing=routing)) for routing in ("uniform", "hot"))
    assert thick.gemm1.specialized and not thin.gemm1.specialized


def test_a_decision_is_looked_up_on_the_hot_path(monkeypatch):
    problem = Problem(tokens=33, **QWEN)
    plan = decide(problem, H200)
    monkeypatch.setattr(policy, "_look", None)  # deciding again would call it
    assert decide(Problem(tokens=33, **QWEN), H200) is plan
    best = min(timeit.repeat(lambda: decide(problem, H200), number=100, repeat=50)) / 100
    assert best < 20e-6, "the fastest of fifty: what else the machine does hardly counts"


# Bounds that kernels and memory rely on


@settings(max_examples=300, deadline=None)
@given(data=st.data(), block_m=st.sampled_from([16, 32, 64, 128]), experts=st.integers(1, 40))
def test_no_histogram_needs_more_tiles_than_the_plan_has(data, block_m, experts):
    counts = data.draw(st.lists(st.integers(0, 300), min_size=experts, max_size=experts))
    skipped = data.draw(st.integers(0, 20))
    tile = GemmConfig(block_m, 64, 64, 4, 3)
    problem = Problem(tokens=sum(counts) + skipped, hidden=64, inter=64, experts=experts, top_k=1)
    plan = Plan(problem, "h200", Backend.TRITON, tile, tile)
    assert sum(math.ceil(count / block_m) for count in counts) <= plan.max_tiles


@given(rows=st.integers(0, 3000), block_m=st.sampled_from([16, 32, 64, 128]), experts=st.integers(1, 300))
def test_and_some_histogram_needs_as_many(rows, block_m, experts):
    """One row each, and all that are left on one expert: a tighter bound would be wrong."""
    tile = GemmConfig(block_m, 64, 64, 4, 3)
    problem = Problem(tokens=rows, hidden=64, inter=64, experts=experts, top_k=1)
    counts = [1] * min(experts, rows)
    if counts:
        counts[0] += rows - len(counts)
    plan = Plan(problem, "h200", Backend.TRITON, tile, tile)
    assert sum(math.ceil(count / block_m) for count in counts) == plan.max_tiles


@settings(max_examples=200, deadline=None)
@given(problem=problems())
def test_the_workspace_holds_every_buffer_aligned(problem):
    plan = decide(problem, H200)
    names = [buffer.name for buffer in plan.buffers]
    assert len(set(names)) == len(names)
    assert sum(buffer.bytes for buffer in plan.buffers) <= plan.workspace_bytes
    assert plan.workspace_bytes <= sum(buffer.bytes + ALIGN for buffer in plan.buffers)
    assert plan.workspace_bytes % ALIGN == 0
    if plan.backend is Backend.TRITON:
        h = {"h", "h_q"} & set(names)
        ring = plan.stream is Stream.RING  # its h has a row for every expert and token
        rows = problem.experts * plan.gemm1.block_m if ring else problem.rows
        assert h and all(math.prod(b.shape) == rows * problem.inter for b in plan.buffers if b.name in h)
        if problem.quant is not Quant.NONE and plan.stream is Stream.NO:
            assert {"x_q", "h_q"} <= set(names) and ("h" in names) != plan.fuse_quant
            assert ("x_scale" in names) != problem.static_scale


@settings(max_examples=100, deadline=None)
@given(
    tokens=st.integers(0, 3000),
    experts=st.integers(1, 64),
    block_m=st.sampled_from([16, 32, 64, 128]),
    share=st.sampled_from([1, 4]),
    data=st.data(),
)
def test_expected_tiles_agree_with_the_sum_over_all_counts(tokens, experts, block_m, share, data):
    """By brute force over the binomial distribution. Where a normal one stands in for it, within 4 %."""
    top_k = data.draw(st.integers(1, experts))
    problem = Problem(tokens=tokens, hidden=64, inter=64, experts=experts, top_k=top_k, total_experts=experts * share)
    p = top_k / (experts * share)

    def chance(count):
        if p == 1:
            return float(count == tokens)
        ways = math.lgamma(tokens + 1) - math.lgamma(count + 1) - math.lgamma(tokens - count + 1)
        return math.exp(ways + count * math.log(p) + (tokens - count) * math.log1p(-p))

    exact = experts * sum(chance(count) * math.ceil(count / block_m) for count in range(tokens + 1))
    assert expected_tiles(problem, block_m) == pytest.approx(exact, rel=1e-6 if tokens * p <= 30 else 0.04)


@settings(max_examples=200, deadline=None)
@given(problem=problems())
def test_the_floor_reads_no_expert_that_cannot_be_hit(problem):
    assert 0 <= problem.experts_hit <= min(problem.experts, problem.rows) * (1 + 1e-9)
    assert floor_us(problem, H200) >= 0
    assert floor_us(problem.with_tokens(problem.tokens + 1), H200) >= floor_us(problem, H200) * (1 - 1e-9)


# The tables


def entry(tokens, block_n=128, **change):
    tile = [16, block_n, 64, 4, 4, True, 1, False]
    sizes = dict(**QWEN, label="bf16", gated=True, tokens=tokens)
    return {**sizes, "gemm1": tile, "gemm2": tile, "stream": "no", "fuse_quant": False, "time_us": 1.0, **change}


@pytest.fixture
def shipped(monkeypatch):
    """Puts entries in the place of the H200's table."""

    def put(*entries):
        monkeypatch.setattr(table, "load", lambda device: {"entries": list(entries) if device == "h200" else []})

    return put


def test_the_nearest_entry_is_the_nearest_in_log_tokens(shipped):
    shipped(entry(16), entry(64), entry(1024))
    found = {tokens: table.nearest(Problem(tokens=tokens, **QWEN), "h200") for tokens in (1, 31, 33, 255, 257, 10**6)}
    assert {tokens: e.tokens for tokens, e in found.items()} == {1: 16, 31: 16, 33: 64, 255: 64, 257: 1024, 10**6: 1024}
    assert all(e.exact for e in found.values())


def test_only_the_same_sizes_quant_and_gate_count_as_the_same(shipped):
    """A file without K, or a quant that is not compared, mixes up problems (case 31)."""
    shipped(entry(16))
    same = Problem(tokens=16, **QWEN)
    assert table.nearest(same, "h200").exact
    for change in (dict(hidden=4096), dict(inter=512), dict(experts=64), dict(top_k=4), dict(total_experts=256)):
        assert not table.nearest(replace(same, **{"total_experts": None, **change}), "h200").exact
    for change in (dict(quant="fp8_block"), dict(dtype="fp16"), dict(activation="relu2")):
        assert table.nearest(replace(same, **change), "h200") is None
    assert table.nearest(same, "h100") is None
    assert table.nearest(same.with_tokens(0), "h200") is None


def test_another_problem_counts_by_its_rows_an_expert(shipped):
    shipped(entry(16, 64), entry(1024, 256))
    few, many = (Problem(tokens=tokens, hidden=4096, inter=512, experts=8, top_k=2) for tokens in (4, 256))
    assert (table.nearest(few, "h200").gemm1.block_n, table.nearest(many, "h200").gemm1.block_n) == (64, 256)


def test_what_was_measured_is_what_is_said(shipped):
    shipped(entry(16, time_us=123.0))
    measured, near = (decide.__wrapped__(Problem(tokens=tokens, **QWEN), H200, Backend.TRITON) for tokens in (16, 17))
    assert measured.time_us == 123.0 and "measured;" in measured.source
    assert near.gemm1 == measured.gemm1 and "model;" in near.source and "T=16" in near.source


def test_where_the_nearest_entry_cannot_run_the_next_is_taken(shipped):
    """As with tiles that hold a number of tokens: those of T=16 are no help at T=20, those of T=32 are."""
    small = [16, 128, 64, 12, 6, True, 1, True]
    shipped(entry(16, gemm1=small, gemm2=small, stream="ring"), entry(32, time_us=2.0))
    plans = {tokens: decide.__wrapped__(Problem(tokens=tokens, **QWEN), H200) for tokens in (16, 20)}
    assert {tokens: plan.stream for tokens, plan in plans.items()} == {16: Stream.RING, 20: Stream.NO}
    assert "measured for T=32" in plans[20].source and plans[20].source.startswith("measured")


def test_an_entry_that_does_not_fit_is_passed_over(shipped):
    """Its time with it: 1 us belongs to the tiles that were measured."""
    shipped(entry(16, gemm1=[16, 128, 64, 4, 40, True, 1, False]))
    plan = decide.__wrapped__(Problem(tokens=16, **QWEN), H200)
    assert plan.gemm1.stages < 40 and plan.time_us > 1.0 and "measured" not in plan.source


def shipped_tables():
    folder = files("expertile.policy") / "tables"
    return sorted(path.name for path in folder.iterdir() if path.name.endswith(".json"))


@pytest.mark.parametrize("name", shipped_tables())
def test_every_entry_of_a_shipped_table_is_one_that_can_be_used(name):
    hardware = DEVICES[name.removesuffix(".json")]
    seen = set()
    for e in table.load(hardware.name)["entries"]:
        problem = named_problem(
            "{hidden},{inter},{experts},{top_k}".format(**e),
            e["tokens"],
            e["label"],
            activation="silu" if e["gated"] else "relu2",
        )
        routing = e.get("routing", "uniform")
        found = table.nearest(problem, hardware.name, routing)
        assert found.exact and found.tokens == e["tokens"]
        assert e["time_us"] > 0.8 * floor_us(problem, hardware, routing), "faster than memory: measured wrongly"
        key = tuple(e[field] for field in ("hidden", "inter", "experts", "top_k", "label", "gated", "tokens")) + (
            routing,
        )
        assert key not in seen, "two entries for one problem"
        seen.add(key)
        plan = decide(problem, hardware, Backend.TRITON, Settings(routing=routing))
        assert (plan.gemm1, plan.gemm2, plan.stream) == (found.gemm1, found.gemm2, found.stream), "refused"
        assert plan.time_us == e["time_us"] and plan.source.startswith("forced; measured")


def test_an_unknown_device_is_refused_with_the_known_ones():
    with pytest.raises(UnsupportedProblem, match="h200"):
        device("h300")
    assert device("h100") is H100


@pytest.mark.parametrize("stages, told", [(2, True), (3, False)])
def test_too_few_stages_for_a_block_whose_warps_wait_for_each_other_are_refused(stages, told):
    tile = replace(SPECIALIZED[64], stages=stages)
    found = tile_reasons(tile, named_problem("qwen3-30b-a3b", 4096, "bf16"), H200)
    assert any(f"stages={stages}" in reason for reason in found) is told
    ring = GemmConfig(16, 128, 64, 12, stages - 1, True, 1, True)
    found = ring_reasons(ring, named_problem("qwen3-30b-a3b", 16, "bf16"), H200)
    assert any(f"stages={stages - 1}" in reason for reason in found) is told
