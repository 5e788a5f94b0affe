"""Benchmark `policy`: what is compared, what a row says, what is left when time runs out; traces as routing."""

import json

import pytest
import torch
from typer.testing import CliRunner

from expertile.api import settings
from expertile.bench import inputs, rows, trace
from expertile.bench import policy as room
from expertile.bench.runner import Outcome, Setting, State
from expertile.cli_bench import app
from expertile.errors import ExpertileError, ShapeError
from expertile.hardware import CPU, H200
from expertile.plans import Backend
from expertile.policy import table
from expertile.policy.settings import Settings
from expertile.problem import named_problem

SHARED = {
    "date": "2026-12-02", "commit": "c", "gpu": "h200", "driver": "580", "torch": "2.11.0", "triton": "3.6.0"
}  # fmt: skip
SETTING = Setting(torch.device("cpu"), H200, SHARED)
INSTALLED = (("flashinfer-python", "0.6.14"), ("vllm", "0.26.0"))
OTHERS = Settings(others=True, installed=INSTALLED)


def measure_by(times):
    """A runner whose times are a function of the plan; None: it crashes."""

    def measure(request, implementations, setting):
        for each in implementations:
            (tokens,) = request.tokens
            us = times(each.plans[tokens])
            if us is None:
                yield Outcome(each.name, State.CRASHED, message="no good")
            else:
                yield Outcome(each.name, State.MEASURED, row={"time_us": us})

    return measure


def run(times, cells, settings=OTHERS, **fields):
    return list(room.run(cells, SETTING, settings, measure=measure_by(times), **fields))


CELL = room.Cell("2048,1024,64,8", "fp8_tensor", 96, "uniform")


def test_no_problem_and_no_token_count_is_in_a_shipped_table():
    for name, quant in room.PROBLEMS:
        for entry in table.load("h200")["entries"]:
            assert not table.same(entry, named_problem(name, 16, quant))
    measured = {entry["tokens"] for entry in table.load("h200")["entries"]} - {1}
    assert not measured & set(room.TOKENS)


def test_all_candidates_are_measured_the_choice_among_them():
    chosen, plans = room.plans_of(CELL, SETTING, OTHERS)
    names = [plan.name for plan in plans]
    assert chosen.name in names and len(set(names)) == len(names) > 5
    backends = {plan.backend for plan in plans}
    assert {Backend.VLLM_TRITON, Backend.VLLM_CUTLASS, Backend.FLASHINFER_CUTLASS} <= backends
    assert Backend.VLLM_DEEPGEMM not in backends, "no fp8_tensor"
    on_cpu = room.plans_of(CELL, Setting(torch.device("cpu"), CPU, SHARED), Settings())[1]
    assert {plan.backend for plan in on_cpu} == {Backend.TORCH}


def test_a_module_built_beforehand_is_not_called_with_16_bits(tmp_path):
    """A missing symbol ends the whole process, so it cannot be tried."""
    cell = room.Cell("4096,704,128,8", "bf16", 96, "uniform")

    def backends(module, of=cell):
        return {plan.backend for plan in room.plans_of(of, SETTING, OTHERS, module)[1]}

    assert Backend.FLASHINFER_CUTLASS in backends(None)
    assert Backend.FLASHINFER_CUTLASS not in backends(tmp_path / "fused_moe_90.so")
    assert Backend.FLASHINFER_CUTLASS in backends(tmp_path / "fused_moe_90.so", CELL)


def test_regret_is_the_time_over_the_fastest_and_the_list_takes_its_first():
    chosen, plans = room.plans_of(CELL, SETTING, OTHERS)
    fast = next(plan.name for plan in plans if plan.backend is Backend.TRITON and plan.name != chosen.name)
    times = {chosen.name: 110.0, fast: 100.0, "flashinfer-cutlass": 150.0}
    found = run(lambda plan: times.get(plan.name, 200.0), [CELL])
    ours, default = (outcome.row for outcome in found)
    assert (ours["impl"], ours["chosen"], ours["best"], ours["regret"]) == ("expertile", chosen.name, fast, 0.1)
    assert (default["impl"], default["chosen"], default["regret"]) == ("default-list", "flashinfer-cutlass", 0.5)
    assert all(rows.faults(row) == [] for row in (ours, default))
    assert room.regrets([ours, default])["expertile"] == {"cells": 1, "mean": 0.1, "worst": 0.1}


def test_what_cannot_run_is_no_candidate_and_a_choice_that_fails_has_no_row():
    chosen, _ = room.plans_of(CELL, SETTING, OTHERS)
    found = run(lambda plan: None if plan.name == "flashinfer-cutlass" else 100.0, [CELL])
    assert [o.impl for o in found if o.state is State.CRASHED] == ["flashinfer-cutlass"]
    default = next(o.row for o in found if o.impl == "default-list")
    assert default["chosen"] == "vllm-cutlass", "the next of the list"
    failed = run(lambda plan: None if plan.name == chosen.name else 100.0, [CELL])
    assert [(o.impl, o.tokens) for o in failed] == [("expertile", 96)] and failed[0].state is State.CRASHED


def test_time_runs_out_between_cells_and_what_is_done_is_a_sample_of_all():
    todo = room.cells(room.PROBLEMS, room.TOKENS, room.ROUTINGS)
    assert len(set(todo)) == len(todo) == 6 * 13 * 3
    part = todo[:30]
    assert len({cell.problem for cell in part}) == 6 and {cell.routing for cell in part} == set(room.ROUTINGS)
    assert len(run(lambda plan: 100.0, todo[:3], budget_s=0.0)) == 2, "one cell, two rows"
    assert todo == room.cells(room.PROBLEMS, room.TOKENS, room.ROUTINGS)
    assert todo != room.cells(room.PROBLEMS, room.TOKENS, room.ROUTINGS, seed=1)


def test_the_mix_weighs_every_size_by_its_steps():
    def row(impl, tokens, us):
        return dict(bench="policy", impl=impl, problem="p", routing="uniform", tokens=tokens, chosen_us=us, regret=0.0)

    found = [row("expertile", 1, 10.0), row("default-list", 1, 20.0), row("expertile", 64, 30.0)]
    assert room.against_default(found, {1: 3, 64: 1}) == {("p", "uniform"): {1: 2.0}}
    found.append(row("default-list", 64, 30.0))
    ratios = room.against_default(found, {1: 3, 64: 1})[("p", "uniform")]
    assert ratios == {1: 2.0, 64: 1.0, "mix": pytest.approx((3 * 20 + 30) / (3 * 10 + 30))}
    assert room.in_words(found)[-1] == "p uniform, the list's time over the policy's: T=1: 2.000, T=64: 1.000"


def test_the_command_writes_rows_on_a_cpu(tmp_path):
    out = tmp_path / "rows.jsonl"
    words = ["policy", "--problem", "32,16,4,2", "--quant", "bf16", "--tokens", "3", "--routing", "uniform,hot"]
    done = CliRunner().invoke(app, [*words, "--device", "cpu", "--sets", "1", "--replays", "1", "--out", str(out)])
    assert done.exit_code == 0, done.output
    found = rows.read(out)
    assert [(row["chosen"], row["regret"]) for row in found] == [("torch", 0.0)] * 2
    assert "regret 0.00 % in the mean" in done.output
    alone = CliRunner().invoke(app, ["policy", "--problem", "32,16,4,2", "--device", "cpu"])
    assert "--quant" in str(alone.exception)


# Traces


def written(tmp_path, ids, name="trace.json"):
    path = tmp_path / name
    if name.endswith(".pt"):
        torch.save(torch.tensor(ids), path)
    elif name.endswith(".jsonl"):
        path.write_text("\n".join(map(json.dumps, ids)) + "\n")
    else:
        path.write_text(json.dumps({"ids": ids}))
    return path


def test_what_is_no_tensor_is_refused(tmp_path):
    (tmp_path / "junk.pt").write_bytes(b"junk")
    with pytest.raises(ShapeError, match=r"junk\.pt cannot be read"):
        inputs.check_routing(f"trace:{tmp_path / 'junk.pt'}")


@pytest.mark.parametrize("words", [("--against-default", "--quant", "bf16"), ("--budget-seconds", "nan")])
def test_an_option_that_would_mean_nothing_is_refused(words):
    refused = CliRunner().invoke(app, ["policy", *words])
    assert isinstance(refused.exception, ExpertileError) and words[0][2:9] in str(refused.exception).replace("_", "-")


def test_to_judge_rows_measures_nothing_and_takes_no_other_option(tmp_path):
    chosen = room.decide(named_problem("4096,704,128,8", 3072, "bf16"), H200).name
    row = rows.make(
        "policy", SHARED, impl="expertile", problem="4096,704,128,8", quant="bf16", tokens=3072, routing="uniform",
        chosen=chosen, chosen_us=3.0, best="vllm-triton", best_us=2.0, regret=0.5,
        times_us={"vllm-triton": 2.0, chosen: 3.0},
    )  # fmt: skip
    rows.write(path := tmp_path / "policy.jsonl", [row])
    done = CliRunner().invoke(app, ["policy", "--judge", str(path)])
    assert done.exit_code == 0 and "regret 50.00 % in the mean, 50.00 % at worst, 1 cells" in done.stdout
    for option in ("--tokens", "--routing", "--replays", "--seed", "--sets"):
        refused = CliRunner().invoke(app, ["policy", "--judge", str(path), option, "3"])
        assert refused.exit_code != 0 and f"does not use {option}" in str(refused.exception)


def test_rows_are_judged_by_the_settings_of_the_environment(tmp_path, monkeypatch):
    row = rows.make(
        "policy", SHARED, impl="expertile", problem="4096,704,128,8", quant="bf16", tokens=3072, routing="uniform",
        chosen="torch", chosen_us=3.0, best="vllm-triton", best_us=2.0, regret=0.5,
        times_us={"vllm-triton": 2.0, "torch": 3.0},
    )  # fmt: skip
    rows.write(path := tmp_path / "policy.jsonl", [row])
    monkeypatch.setenv("EXPERTILE_POLICY", "torch")
    settings.cache_clear()
    try:
        done = CliRunner().invoke(app, ["policy", "--judge", str(path)])
    finally:
        settings.cache_clear()
    assert "regret 50.00 % in the mean" in done.stdout and "T=3072: torch" in done.stdout


@pytest.mark.parametrize("name", ["trace.json", "trace.jsonl", "trace.pt"])
def test_a_trace_is_replayed_token_by_token(tmp_path, name):
    ids = [[0, 1], [2, 3], [4, 0]]
    path = written(tmp_path, ids, name)
    problem = named_problem("16,16,6,2", 7)
    made = inputs.make_logits(problem, f"trace:{path}", torch.Generator().manual_seed(3))
    chosen = made.topk(2).indices.sort(1).values.tolist()
    wanted = [sorted(row) for row in ids]
    start = wanted.index(chosen[0])
    assert chosen == [wanted[(start + token) % 3] for token in range(7)]
    assert made.isfinite().all()


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        ([[0, 0]], "twice"),
        ([], "cannot be read|shape"),
        ([[0, -1]], "at least 0"),
        ([[0, 1, 2]], "top_k=3"),
        ([[0, 9]], "up to 9"),
        ([[0.5, 1.5]], "ids are integers"),
        ([[False, True]], "ids are integers"),
        ([[0, 10**30]], "cannot be read"),
        ("[" * 3, "cannot be read"),
    ],
)
def test_a_trace_that_does_not_fit_is_refused(tmp_path, ids, said):
    trace.load.cache_clear()
    path = written(tmp_path, ids)
    with pytest.raises(ShapeError, match=said):
        inputs.make_logits(named_problem("16,16,6,2", 4), f"trace:{path}", torch.Generator().manual_seed(0))
