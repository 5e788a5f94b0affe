"""What is measured for a table, what becomes of it, and what survives a kill. Measuring itself needs a GPU."""

import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from expertile import cli
from expertile.bench.fixed import Fixed
from expertile.bench.runner import Outcome, Setting, State
from expertile.errors import ExpertileError, ShapeError, UnsupportedProblem
from expertile.hardware import CPU, H200
from expertile.plans import Backend, Stream
from expertile.policy import decide, table, unable
from expertile.policy.candidates import candidates
from expertile.policy.rules import stream_reasons, tile_reasons
from expertile.policy.settings import Settings
from expertile.problem import LAYERS, named_problem
from expertile.tune import Machine, Task, command, export, peers, search, supervise, tables, tune
from expertile.tune.journal import Journal

QUANTS = ("bf16", "fp8_tensor", "fp8_channel", "fp8_block")
SETTING = Setting(torch.device("cpu"), H200, {"date": "2026-12-02", "gpu": "h200", "driver": "580"})
MACHINE = Machine({"name": "h200", "sms": 132, "memory_gib": 141}, {"torch": "2.11.0", "triton": "3.6.0"})
TASK = Task("64,64,8,2", "bf16", (4, 512))


@pytest.mark.parametrize("quant", QUANTS)
@pytest.mark.parametrize("name", LAYERS)
def test_candidates_can_run_and_are_different(name, quant):
    for tokens in (1, 2, 8, 64, 300, 4096):
        problem = named_problem(name, tokens, quant)
        for routing in ("uniform", "zipf1.2", "hot"):
            plans = candidates(problem, H200, routing)
            assert 2 <= len(plans) <= 30 and len({plan.name for plan in plans}) == len(plans)
            for plan in plans:
                assert plan.routing == routing
                assert not unable(plan, H200)
                if plan.stream in (Stream.DOWN, Stream.BOTH):
                    assert not stream_reasons(problem)
                if plan.stream in (Stream.DOWN, Stream.NO):
                    assert not tile_reasons(plan.gemm1, problem, H200)
                if plan.stream is Stream.NO:
                    assert plan.gemm1.block_m == plan.gemm2.block_m and not tile_reasons(plan.gemm2, problem, H200)


@pytest.mark.parametrize("tokens", [1, 8, 512, 4096])
def test_the_first_candidate_is_what_is_chosen_without_a_table(tokens):
    problem = named_problem("96,160,8,2", tokens, "fp16")  # no table has fp16
    first, chosen = candidates(problem, H200)[0], decide(problem, H200, Backend.TRITON)
    assert (first.stream, first.gemm1, first.gemm2) == (chosen.stream, chosen.gemm1, chosen.gemm2)


@pytest.mark.parametrize("quant", QUANTS)
def test_what_the_shipped_table_holds_can_run(quant):
    for name in LAYERS:
        for tokens in (1, 3, 40, 700, 5000):
            plan = decide(named_problem(name, tokens, quant), H200)
            assert replace(plan, candidates=()).workspace_bytes > 0
            assert plan.time_us > plan.floor_us


# Which entry wins


def timed(plans, slow=50.0, **fast):
    lines = {plan.name: dict(time_us=slow, p10_us=slow, p90_us=slow) for plan in plans}
    for place, value in fast.items():
        us, spread = value if isinstance(value, tuple) else (value, 0.0)
        lines[plans[int(place[1:])].name] = dict(time_us=us, p10_us=us - spread, p90_us=us + spread)
    return lines


def test_the_fastest_wins_but_not_by_noise():
    plans = candidates(named_problem("64,64,8,2", 512, "bf16"), H200)
    assert tables.winner(plans, timed(plans, _0=10.05, _1=10.0)) is plans[0], "half a percent"
    assert tables.winner(plans, timed(plans, _0=10.5, _1=10.0)) is plans[1]
    assert tables.winner(plans, timed(plans, _0=(10.3, 0.0), _1=(10.0, 0.4))) is plans[0], "its times spread by 4 %"
    assert tables.winner(plans, timed(plans, _0=(10.7, 3.0), _1=(10.0, 3.0))) is plans[1], "5 % are no noise"
    assert tables.winner(plans, {}) is None


def test_of_two_runs_that_differ_by_noise_the_earlier_winner_stays():
    plans = candidates(named_problem("64,64,8,2", 512, "bf16"), H200)
    lines = timed(plans, _0=10.08, _1=10.05, _2=10.0)
    assert tables.winner(plans, lines, incumbent=plans[1].name) is plans[1]
    assert tables.winner(plans, timed(plans, _1=11.0, _2=10.0), incumbent=plans[1].name) is plans[2]
    without = {name: line for name, line in lines.items() if name != plans[1].name}
    assert tables.winner(plans, without, incumbent=plans[1].name) is plans[0], "it crashed: the plan without a table"


def test_other_libraries_times_stand_beside_ours_and_never_win_an_entry():
    plans = candidates(named_problem("64,64,8,2", 512, "bf16"), H200)
    lines = timed(plans, _0=10.0) | {"vllm-triton": dict(time_us=5.0)}
    best = tables.winner(plans, lines)
    entry = tables.entry(best, lines, {"vllm-triton": "0.26.0"})
    assert best is plans[0] and entry["others"] == {"vllm-triton": {"time_us": 5.0, "version": "0.26.0"}}
    assert "others" not in tables.entry(best, lines, {})


def test_a_table_is_added_to_and_read_back(tmp_path):
    path = tmp_path / "h200.json"
    plan = candidates(named_problem("64,64,8,2", 4, "bf16"), H200)[0]
    first = tables.entry(plan, timed([plan], _0=3.0), {})
    run = {"date": "2026-12-02", "triton": "3.6.0"}
    tables.write(path, [first], run, MACHINE.device)
    tables.write(path, [{**first, "time_us": 2.0}, {**first, "tokens": 8}, {**first, "routing": "hot"}], run)
    tables.write(path, [{**first, "tokens": 8, "time_us": 9.0}], {**run, "triton": "3.7.1"})
    found = json.loads(path.read_text())
    cells = [(e["tokens"], e["routing"], e["time_us"], e["run"]) for e in found["entries"]]
    assert cells == [(4, "hot", 3.0, 0), (4, "uniform", 2.0, 0), (8, "uniform", 9.0, 1)]
    assert found["device"] == MACHINE.device and [r["triton"] for r in found["runs"]] == ["3.6.0", "3.7.1"]
    settings = Settings(tables=(str(path),))
    planned = decide(named_problem("64,64,8,2", 4, "bf16"), H200, None, settings)
    assert planned.time_us == 2.0 and (planned.gemm1, planned.stream) == (plan.gemm1, plan.stream)
    with pytest.raises(ExpertileError, match="nothing was measured"):
        tables.write(tmp_path / "none.json", [], {})
    with pytest.raises(ShapeError, match="sms=132, this is 114"):
        tables.write(path, [first], run, {**MACHINE.device, "sms": 114})


def test_entries_of_the_older_form_are_replaced_not_doubled(tmp_path):
    path = tmp_path / "old.json"
    plan = candidates(named_problem("64,64,8,2", 4, "bf16"), H200)[0]
    new = tables.entry(plan, timed([plan], _0=3.0), {})
    old = {name: value for name, value in new.items() if name not in ("activation", "routing", "run")}
    path.write_text(json.dumps({"measured_with": {"gpu": "h200"}, "entries": [old, {**old, "tokens": 8}]}))
    tables.write(path, [new], {"date": "2026-12-03"}, MACHINE.device)
    found = tables.read(path)
    assert sorted((e["tokens"], e.get("run", 0)) for e in found["entries"]) == [(4, 1), (8, 0)]
    assert found["runs"][0] == {"gpu": "h200"}


# Measuring, killed and gone on with


class Measure:
    """Stands in for the runner: times by the number of tiles, some plans crash, some end the process."""

    def __init__(self, crash=(), wrong=(), kill=None, lose=None):
        self.crash, self.wrong, self.kill, self.lose, self.calls = crash, wrong, kill, lose, []

    def __call__(self, request, implementations, setting):
        for each in implementations:
            (tokens,) = request.tokens
            plan = each.plans[tokens]
            self.calls.append((tokens, request.routings[0], plan.name))
            each.began(tokens)
            if plan.name == self.kill:
                raise KeyboardInterrupt
            if plan.name == self.lose:
                raise ExpertileError(f"{each.name} left the GPU unusable")
            each.ran(tokens)
            state = State.CRASHED if plan.name in self.crash else State.WRONG if plan.name in self.wrong else None
            if state:
                yield Outcome(each.name, state, tokens=tokens, message="no good")
            else:
                us = 10.0 + len(plan.name)
                row = dict(time_us=us, p10_us=us, p90_us=us, err=0.001)
                yield Outcome(each.name, State.MEASURED, tokens=tokens, row=row)


def names(tokens, routing="uniform"):
    return [plan.name for plan in candidates(TASK.problem_at(tokens), H200, routing)]


def test_cells_are_measured_once_and_a_second_run_measures_nothing(tmp_path):
    out, measure, events = tmp_path / "t.json", Measure(), []
    first = tune(TASK, SETTING, MACHINE, out, measure=measure, report=events.append)
    assert [e["tokens"] for e in first] == [4, 512] == [e["tokens"] for e in tables.read(out)["entries"]]
    assert [event for event in events if "total" in event or "done" in event] == [
        {"total": 2},
        {"done": 1},
        {"done": 2},
    ]
    assert [name for tokens, _, name in measure.calls if tokens == 512] == names(512)
    again = Measure()
    assert tune(TASK, SETTING, MACHINE, out, measure=again) == first and not again.calls
    newer = Machine(MACHINE.device, {**MACHINE.versions, "triton": "3.7.1"})
    tune(TASK, SETTING, newer, out, measure=again)
    assert again.calls, "another Triton: measured anew"


def test_crashed_and_wrong_plans_are_written_down_and_left_out(tmp_path):
    out = tmp_path / "t.json"
    crash, wrong = names(512)[0], names(512)[1]
    entries = tune(TASK, SETTING, MACHINE, out, measure=Measure(crash=[crash], wrong=[wrong]))
    assert len(entries) == 2
    journal = Journal.open(search.journal_path(out))
    cell = search.key(TASK, MACHINE, 512, "uniform")
    states = {line["plan"]: line["state"] for line in journal.of(cell) if line["state"] in ("crashed", "wrong")}
    assert states == {crash: "crashed", wrong: "wrong"} and set(journal.skipped(cell)) == {crash, wrong}
    assert not {crash, wrong} & set(journal.measured(cell))


def test_a_killed_run_goes_on_where_it_was_and_gives_up_on_what_kills_it_twice(tmp_path):
    out, killer = tmp_path / "t.json", names(512)[2]
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            tune(TASK, SETTING, MACHINE, out, measure=Measure(kill=killer))
    assert [e["tokens"] for e in tables.read(out)["entries"]] == [4]
    path = search.journal_path(out)
    path.write_text(path.read_text() + '{"cell": {"tok')  # the end of a process in the middle of a line
    measure = Measure(kill=killer)
    entries = tune(TASK, SETTING, MACHINE, out, measure=measure)
    assert [e["tokens"] for e in entries] == [4, 512]
    assert {tokens for tokens, _, _ in measure.calls} == {512} and killer not in {name for *_, name in measure.calls}
    assert "ended 2 times" in Journal.open(path).skipped(search.key(TASK, MACHINE, 512, "uniform"))[killer]


def test_a_lost_gpu_is_the_fault_of_the_plan_that_ran_and_another_process_goes_on(tmp_path):
    out, culprit = tmp_path / "t.json", names(4)[1]
    with pytest.raises(search.GpuLost, match="unusable"):
        tune(TASK, SETTING, MACHINE, out, measure=Measure(lose=culprit))
    assert len(tune(TASK, SETTING, MACHINE, out, measure=Measure(lose=culprit))) == 2


def test_whom_the_runner_names_is_blamed_though_its_first_call_ended(tmp_path):
    def lost_in_capture(request, implementations, setting):
        for each in implementations:
            each.began(4)
            each.ran(4)
        yield from ()
        raise ExpertileError(f"{implementations[2].name} left the GPU unusable")

    out = tmp_path / "t.json"
    with pytest.raises(search.GpuLost, match="unusable"):
        tune(TASK, SETTING, MACHINE, out, measure=lost_in_capture)
    skipped = Journal.open(search.journal_path(out)).skipped(search.key(TASK, MACHINE, 4, "uniform"))
    assert list(skipped) == [names(4)[2]]


def test_routings_are_cells_of_their_own_and_are_found_by_their_name(tmp_path):
    out = tmp_path / "t.json"
    task = replace(TASK, routings=("uniform", "hot"), tokens=(64,))
    assert [e["routing"] for e in tune(task, SETTING, MACHINE, out, measure=Measure())] == ["uniform", "hot"]
    table.load_file.cache_clear()
    hot = decide(task.problem_at(64), H200, None, Settings(routing="hot", tables=(str(out),)))
    assert hot.source.startswith("measured") and hot.routing == "hot"


def test_no_cell_is_begun_after_the_budget(tmp_path):
    task = replace(TASK, budget_s=0.0)
    assert tune(task, SETTING, MACHINE, tmp_path / "t.json", measure=Measure()) == []


def test_installed_libraries_are_measured_when_asked_for(tmp_path):
    machine = Machine(MACHINE.device, {**MACHINE.versions, "vllm": "0.26.0"})
    task = Task("128,128,8,2", "fp8_block", (64,), others=True)
    measure = Measure()
    (entry,) = tune(task, SETTING, machine, tmp_path / "t.json", measure=measure)
    asked = {name for *_, name in measure.calls}
    assert {"vllm-triton", "vllm-deepgemm"} <= asked and "vllm-cutlass" not in asked, "it takes no block scales"
    assert entry["others"]["vllm-triton"]["version"] == "0.26.0"
    none = Measure()
    tune(replace(task, others=False), SETTING, machine, tmp_path / "u.json", measure=none)
    assert "vllm-triton" not in {name for *_, name in none.calls}


def test_a_wrong_task_is_refused():
    with pytest.raises(UnsupportedProblem, match="Hopper"):
        tune(TASK, replace(SETTING, hardware=CPU), MACHINE, None)
    for change in (dict(tokens=(0,)), dict(tokens=()), dict(routings=("random",)), dict(quant="fp7")):
        with pytest.raises(ShapeError):
            replace(TASK, **change)


# The process around it

WORKER = """
import json, os, pathlib, signal, sys
state, journal = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
count = len(state.read_text()) if state.exists() else 0
state.write_text("x" * (count + 1))
end = sys.argv[3].split(",")[count]
print(json.dumps({"start": count}), flush=True)
print("not an event", flush=True)
if end != "idle":
    journal.write_text("line" * (count + 1))
if end in ("kill", "idle"):
    os.kill(os.getpid(), signal.SIGKILL)
sys.exit(int(end))
"""


def worker(tmp_path, ends):
    journal = tmp_path / "journal"
    command = [sys.executable, "-c", WORKER, str(tmp_path / "state"), str(journal), ends]
    events = []
    return supervise.supervise(command, journal, events.append), events


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no SIGKILL here")
def test_a_worker_that_dies_is_started_again_as_long_as_it_gets_further(tmp_path, capfd):
    starts, events = worker(tmp_path, f"kill,{supervise.AGAIN},0")
    assert starts == 3 and events == [{"start": 0}, {"start": 1}, {"start": 2}]
    assert capfd.readouterr().out.count("not an event") == 3


@pytest.mark.parametrize(("ends", "said"), [("idle", "before it measured"), ("1", "exit code 1")])
def test_one_that_gets_nowhere_is_an_error(tmp_path, ends, said):
    with pytest.raises(ExpertileError, match=said):
        worker(tmp_path, ends)


def test_one_that_refuses_its_input_is_not_started_again(tmp_path):
    assert worker(tmp_path, "2")[0] == supervise.REFUSED


# Peers' times out of rows


def test_peers_times_are_taken_as_multiples_of_ours_under_the_same_plan():
    plan = candidates(named_problem("64,64,8,2", 4, "bf16"), H200)[0]
    kept = {"device": {}, "runs": [{}], "entries": [tables.entry(plan, timed([plan], _0=3.0), {})]}
    common = dict(bench="experts", problem="64,64,8,2", quant="bf16", routing="uniform", gpu="h200")
    rows = [
        {**common, "impl": "expertile", "tokens": 4, "time_us": 6.0, "plan": plan.name},
        {**common, "impl": "vllm-0.26.0-triton", "tokens": 4, "time_us": 9.0},
        {**common, "impl": "flashinfer-0.6.14-cutlass", "tokens": 8, "time_us": 9.0},
        {**common, "impl": "torch-grouped-mm", "tokens": 4, "time_us": 9.0},
        {**common, "impl": "vllm-0.26.0-triton", "tokens": 4, "time_us": 1.0, "routing": "hot"},
    ]
    assert peers.add(kept, rows) == 1
    assert kept["entries"][0]["others"] == {"vllm-triton": {"time_us": 4.5, "version": "0.26.0"}}
    rows[0]["plan"] = "triton[another]"
    assert peers.add(kept, rows) == 1
    assert kept["entries"][0]["others"] == {"vllm-triton": {"time_us": 9.0, "version": "0.26.0"}}, "as it is"


@pytest.mark.skipif("TRITON_INTERPRET" not in os.environ, reason="the interpreter needs no GPU")
def test_from_weights_to_a_table_in_the_interpreter(tmp_path, monkeypatch):
    """The real runner, checks included, without the launch attribute that the interpreter has not."""
    setting = Setting(torch.device("cpu"), H200, {**SETTING.shared, "commit": "c", "torch": "2", "triton": "3.6.0"})
    monkeypatch.setattr(search, "candidates", lambda *args: candidates(*args)[:2])
    task = Task("32,16,4,2", "fp16", (1,), ("hot",), replays=1)
    out = tmp_path / "t.json"
    planned = Fixed.plan
    monkeypatch.setattr(Fixed, "plan", lambda self, *args: replace(planned(self, *args), pdl=False))
    entries = tune(task, setting, MACHINE, out)
    assert [(e["tokens"], e["routing"], e["stream"]) for e in entries] == [(1, "hot", "both")]
    lines = Journal.open(search.journal_path(out)).lines
    assert {line["state"] for line in lines} >= {"trying", "ran", "measured", "done"}
    assert all(line["err"] < 0.02 for line in lines if line["state"] == "measured")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--quant", "bf16"), "--problem and --model"),
        (("--problem", "64,64,8,2"), "--quant"),
        (("--problem", "64,64,8,2", "--quant", "bf16", "--routing", "random"), "random"),
        (("--problem", "64,64,8,2", "--quant", "bf16", "--export", "tgi"), "Hopper|tgi"),
        (("--problem", "64,64,8,2", "--quant", "bf16", "--replays", "0"), "replays=0"),
        (("--problem", "64,64,8,2", "--quant", "bf16", "--budget-seconds", "nan"), "budget_seconds=nan"),
        (("--problem", "64,64,8,2", "--quant", "bf16", "--tensor-parallel", "0"), "tensor_parallel=0"),
        (
            ("--problem", "64,64,8,2", "--quant", "bf16", "--tensor-parallel", "2"),
            "tensor_parallel=2 goes with --model",
        ),
        (("--model", "nowhere"), "nowhere"),
        (("--model", "nowhere", "--tensor-parallel", "-1"), "tensor_parallel=-1"),
        (("--peers-from", "nowhere.jsonl"), "nowhere.jsonl"),
        (("--peers-from", os.devnull), "t.json.*is not there"),
        (("--peers-from", "r", "--tokens", "1", "--problem", "64,64,8,2"), "does not use --tokens, --problem"),
    ],
    ids=str,
)
def test_options_that_are_wrong_are_refused(tmp_path, words, said):
    failed = CliRunner().invoke(cli.app, ["tune", "--out", str(tmp_path / "t.json"), *words])
    assert isinstance(failed.exception, ExpertileError) and re.search(said, str(failed.exception))


def test_a_format_that_is_given_comes_before_the_configs(tmp_path):
    config = dict(hidden_size=64, moe_intermediate_size=32, num_experts=4, num_experts_per_tok=1)
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "awq"}}))

    def task(quant):
        return command.task(None, tmp_path, 2, quant, (1,), "uniform", False, 1, None, None)

    with pytest.raises(ShapeError, match=r"'awq'.*--quant"):
        task(None)
    assert (task("fp8_block").problem, task("fp8_block").quant) == ("64,16,4,1", "fp8_block")


def unwritable(tmp_path):
    """Places where no file can be written, by whoever runs this."""
    (tmp_path / "file").write_text("kept")
    return tmp_path, tmp_path / "file" / "t.json", tmp_path / ("x" * 300)


def test_a_place_that_cannot_be_written_is_refused_before_anything_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "supervise", lambda *args: pytest.fail("it would measure"))
    monkeypatch.setattr(command, "_device_name", lambda setting: "NVIDIA H200")
    monkeypatch.setattr(export, "search", lambda *args: pytest.fail("it would measure"))
    for out in unwritable(tmp_path):
        with pytest.raises(ExpertileError, match="out="):
            command.supervised(["true"], out)
    for out in unwritable(tmp_path)[1:]:
        with pytest.raises(ExpertileError, match="out="):
            command.export("vllm", TASK, SETTING, out)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_table_or_journal_that_is_none_is_refused_before_anything_is_measured(tmp_path):
    out = tmp_path / "t.json"
    for text, said in (
        ("[]", "not an object"),
        ('{"entries": [{"tokens": 1}]}', "has no"),
        ("{}", "no list of entries"),
    ):
        out.write_text(text)
        with pytest.raises(ShapeError, match=said):
            tune(TASK, SETTING, MACHINE, out, measure=lambda *args: pytest.fail("it would measure"))
    out.write_text('{"device": {"name": "h100"}, "entries": []}')
    with pytest.raises(ShapeError, match="measured on name='h100'"):
        tune(TASK, SETTING, MACHINE, out, measure=lambda *args: pytest.fail("it would measure"))
    out.unlink()
    for text in ("[]\n", "no JSON\nhalf", '{"cell": {}, "state": "ran"}\n'):
        search.journal_path(out).write_text(text)
        with pytest.raises(ShapeError, match=r"t\.json\.journal:1"):
            tune(TASK, SETTING, MACHINE, out, measure=lambda *args: pytest.fail("it would measure"))
        assert search.journal_path(out).read_text() == text


@pytest.mark.skipif(torch.cuda.is_available(), reason="it would measure")
def test_what_the_measuring_process_refuses_is_said_once(tmp_path):
    words = ("tune", "--out", str(tmp_path / "t.json"), "--problem", "64,64,8,2", "--quant", "bf16")
    done = subprocess.run([sys.executable, "-m", "expertile.cli", *words], capture_output=True, text=True)
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("expertile: ") and "Hopper" in line


def test_the_command_puts_peers_times_into_a_table(tmp_path):
    out, rows = tmp_path / "t.json", tmp_path / "rows.jsonl"
    plan = candidates(named_problem("64,64,8,2", 4, "bf16"), H200)[0]
    tables.write(out, [tables.entry(plan, timed([plan], _0=3.0), {})], {"date": "d"})
    row = dict(
        date="2026-12-02", commit="c", gpu="h200", driver="580", torch="2", triton="3", bench="experts",
        impl="vllm-0.26.0-triton", problem="64,64,8,2", quant="bf16", tokens=4, routing="uniform", experts_hit=5.0,
        time_us=9.0, floor_us=1.0, err=0.004, plan="",
    )  # fmt: skip
    rows.write_text(json.dumps(row) + "\n")
    done = CliRunner().invoke(cli.app, ["tune", "--out", str(out), "--peers-from", str(rows)])
    assert done.exit_code == 0 and "1 times of other libraries" in done.output
    assert tables.read(out)["entries"][0]["others"]["vllm-triton"]["time_us"] == 9.0
