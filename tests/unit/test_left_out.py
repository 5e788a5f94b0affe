"""How well measured tiles carry over: each layer of a shipped table left out in turn, and cells between two others."""

import json
import math
from importlib.resources import files
from pathlib import Path

import pytest

from expertile.hardware import H200
from expertile.plans import Backend, GemmConfig, Plan, Stream
from expertile.policy import table
from expertile.policy.left_out import judged, kind_of, left_out, measured_times, problem_of, summary
from expertile.policy.model import floor_us, plan_us

ROWS = Path(__file__).parents[2] / "benchmarks" / "results"


@pytest.fixture(scope="module")
def entries():
    return json.loads((files("expertile.policy") / "tables" / "h200.json").read_text())["entries"]


@pytest.fixture(scope="module")
def rows():
    found = [json.loads(line) for path in sorted(ROWS.glob("*-h200-*.jsonl")) for line in path.open()]
    if not found:
        pytest.skip("no benchmark rows beside an installed wheel")
    return found


def test_neighbours_by_size_predict_winners_better_than_fixed_tiles_and_than_rows_alone(entries):
    found = summary(left_out(entries, H200))
    right = {way: each["right"] / each["cells"] for way, each in found.items()}
    assert found["sizes"]["cells"] == found["fixed"]["cells"] >= 70
    assert right["sizes"] >= max(right["fixed"], right["rows"]), found
    assert right["sizes"] > 0.85, found


def test_and_lose_less_time(entries, rows):
    found = summary(left_out(entries, H200, measured_times(entries, rows)))
    assert found["sizes"]["timed"] >= 50, "of that kind something was measured in so many cells"
    regret = {way: each["mean_regret"] for way, each in found.items()}
    assert regret["sizes"] <= min(regret["fixed"], regret["rows"]), found
    assert regret["sizes"] < 0.01, found


def test_the_choice_loses_little_where_every_candidate_was_measured(rows):
    """Layers that no table has. The rules were made with these cells in view: others may do worse."""
    found = judged(rows)
    regrets = [regret for _, _, regret in found if regret is not None]
    assert len(regrets) >= 50 and len(regrets) >= 0.95 * len(found)
    assert sum(regrets) / len(regrets) <= 0.01 and max(regrets) <= 0.08


def test_what_is_no_candidate_any_more_does_not_count_against_the_choice():
    row = dict(
        bench="policy", impl="expertile", gpu="h200", problem="4096,704,128,8", tokens=3072, quant="bf16",
        routing="uniform",
    )  # fmt: skip
    (_, chosen, none) = judged([{**row, "times_us": {"triton[gone | gone]": 1.0}}])[0]
    (_, _, regret) = judged([{**row, "times_us": {"triton[gone | gone]": 1.0, chosen: 2.0, "vllm-triton": 1.6}}])[0]
    assert none is None and regret == pytest.approx(0.25)
    assert judged([row, {**row, "impl": "default-list", "times_us": {chosen: 1.0}}]) == []


def test_a_time_between_two_cells_is_nearer_than_the_models(entries):
    """Every other cell of the table left out: cells that are a factor of four apart instead of two."""
    between, model = [], []
    for entry in entries:
        problem = problem_of(entry)
        same = sorted(e["tokens"] for e in entries if table.same(e, problem) and e.get("routing") in (None, "uniform"))
        place = same.index(entry["tokens"])
        if not 0 < place < len(same) - 1:
            continue
        ends = [next(e for e in entries if table.same(e, problem) and e["tokens"] == same[place + s]) for s in (-1, 1)]
        ratios = [end["time_us"] / floor_us(problem_of(end), H200) for end in ends]
        guess = floor_us(problem, H200) * table.between(entry["tokens"], ends[0]["tokens"], ends[1]["tokens"], *ratios)
        tiles = GemmConfig(*entry["gemm1"]), GemmConfig(*entry["gemm2"])
        plan = Plan(problem, "h200", Backend.TRITON, *tiles, stream=Stream(entry["stream"]), pdl=True)
        between.append(math.log(guess / entry["time_us"]))
        model.append(math.log(plan_us(plan, H200) / entry["time_us"]))
    assert len(between) >= 80
    spread = [math.sqrt(sum(x * x for x in values) / len(values)) for values in (between, model)]
    assert spread[0] < spread[1] and spread[0] < 0.1, spread


def test_of_the_fields_of_a_row_only_kind_and_token_tile_count(entries):
    row = dict(
        bench="experts", routing="uniform", problem="qwen3-30b-a3b", quant="bf16", tokens=16, time_us=1.0,
        plan="triton[swap-tma 16x128x128 w4 s3 | swap 16x128x64 w4 s3]+pdl",
    )  # fmt: skip
    ((cell, times),) = measured_times([], [row]).items()
    assert cell[:4] == (2048, 768, 128, 8) and times == {("swap", 16): 1.0}
    plain = {**row, "plan": "triton[plain g8 64x128x64 w4 s4 | plain g8 64x128x64 w4 s4]+pdl"}
    assert list(measured_times([], [plain]).values()) == [{("plain", 64): 1.0}]
    skipped = [{**row, "plan": "torch"}, {**row, "routing": "hot"}, {**row, "plan": row["plan"][:-4]}]
    assert measured_times([], [*skipped, {**row, "plan": "triton[stream 16x1024 w8 | stream 2 w4]+pdl"}]) == {}
    assert kind_of(GemmConfig(128, 256, 64, 12, 4, specialized=True)) == ("specialized", 128)
