"""Benchmark rows: each bench demands its fields, a bad row is never written, a bad file names its line."""

import json
import subprocess
import sys

import pytest

from expertile.bench import rows
from expertile.errors import ExpertileError

SHARED = {
    "date": "2026-12-02",
    "commit": "abc",
    "gpu": "h200",
    "driver": "580",
    "torch": "2.11.0",
    "triton": "3.6.0",
}
WHAT = {"impl": "expertile", "problem": "64,32,8,2", "quant": "bf16"}
GOOD = {
    rows.TEXT: "x",
    rows.MAYBE_EMPTY: "",
    rows.COUNT: 3,
    rows.POSITIVE: 1.5,
    rows.NUMBER: 0.0,
}


def made(bench):
    return rows.make(bench, SHARED, **WHAT, **{name: GOOD[kind] for name, kind in rows.BENCHES[bench].items()})


@pytest.mark.parametrize("bench", rows.BENCHES)
def test_a_row_with_all_fields_is_good_and_without_any_one_is_not(bench):
    row = made(bench)
    assert rows.faults(row) == []
    for name in row:
        if name == "bench" or name in rows.OPTIONAL:
            continue
        less = {key: value for key, value in row.items() if key != name}
        assert rows.faults(less) == [f"{name} is missing"]


def test_the_fields_of_a_layer_row_are_those_of_the_protocol():
    assert set(made("experts")) == {
        *("date", "commit", "gpu", "driver", "torch", "triton", "bench", "impl", "problem", "quant"),
        *("tokens", "routing", "experts_hit", "time_us", "floor_us", "err", "plan"),
    }
    assert rows.BENCHES["layer"] == rows.BENCHES["experts"]


@pytest.mark.parametrize(
    "name, value",
    [
        ("time_us", 0.0),
        ("time_us", float("nan")),
        ("time_us", float("inf")),
        ("time_us", "12"),
        ("err", -0.1),
        ("tokens", 1.0),
        ("tokens", True),
        ("tokens", -1),
        ("commit", ""),
        ("plan", None),
        ("colour", "red"),
    ],
)
def test_a_wrong_value_is_named(name, value):
    found = rows.faults({**made("experts"), name: value})
    assert len(found) == 1 and found[0].startswith(name)


def test_an_unknown_bench_lists_the_known():
    assert "experts" in rows.faults({**made("experts"), "bench": "speed"})[0]


def test_make_refuses_a_row_with_a_field_missing():
    with pytest.raises(ExpertileError, match="time_us is missing"):
        rows.make("experts", SHARED, **WHAT, tokens=1, routing="uniform", experts_hit=1, floor_us=1.0, err=0.0, plan="")


def test_write_appends_and_read_gives_the_same_rows(tmp_path):
    path = tmp_path / "new" / "rows.jsonl"
    assert rows.write(path, [made("experts")]) == 1
    assert rows.write(path, [made("cold"), made("serve")]) == 2
    assert rows.read(path) == [made("experts"), made("cold"), made("serve")]


def test_write_is_all_or_nothing(tmp_path):
    path = tmp_path / "rows.jsonl"
    bad = {**made("experts"), "time_us": 0}
    with pytest.raises(ExpertileError, match="time_us=0"):
        rows.write(path, [made("experts"), bad])
    assert not path.exists()


@pytest.mark.parametrize(
    "line",
    ["{", "[]", '{"bench": [1]}', "[" * 100_000, "1" * 5000, json.dumps({"bench": "experts"})],
    ids=lambda line: line[:9],
)
def test_read_names_the_bad_line(tmp_path, line):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(made("experts")) + "\n\n" + line + "\n")
    with pytest.raises(ExpertileError, match=r"rows\.jsonl:3: "):
        rows.read(path)


def test_read_of_a_missing_file_is_one_clear_error(tmp_path):
    with pytest.raises(ExpertileError, match=r"none\.jsonl"):
        rows.read(tmp_path / "none.jsonl")


def test_default_path_holds_no_blank_or_slash():
    path = rows.default_path({**SHARED, "gpu": "nvidia a100-sxm4 80gb/2"}, "experts")
    assert path.name == "2026-12-02-nvidia-a100-sxm4-80gb-2-experts.jsonl"


def test_table_compares_ours_with_the_fastest_peer():
    from expertile.bench import table

    def row(impl, tokens, time_us):
        return {**made("experts"), "impl": impl, "tokens": tokens, "time_us": time_us}

    found = [row("slow", 1, 40.0), row("expertile", 1, 10.0), row("fast", 1, 20.0), row("expertile:x", 1, 5.0)]
    found += [row("expertile", 8, 10.0), row("slow", 8, 80.0)]
    lines = table.by_tokens(found)
    assert table.implementations(found) == ["expertile", "expertile:x", "slow", "fast"]
    assert table.best_peer(lines[1])["impl"] == "fast"
    assert [table.speedup(line) for line in lines.values()] == [2.0, 8.0]
    assert table.geometric_mean([2.0, 8.0]) == pytest.approx(4.0)
    assert table.speedup({"slow": row("slow", 1, 1.0)}) is None and table.speedup({"expertile": found[1]}) is None


def test_rows_and_tables_need_no_torch():
    code = "import sys; from expertile.bench import floor, rows, table; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
