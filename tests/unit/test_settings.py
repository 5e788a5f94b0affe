"""Overrides: by call, by process, by a file of problems; what cannot run is an error."""

import json
from dataclasses import replace

import pytest

from expertile.errors import ShapeError, UnsupportedProblem
from expertile.hardware import CPU, H200
from expertile.plans import Backend, Layout, Stream
from expertile.policy import Settings, decide
from expertile.policy.settings import VARIABLE, from_environment, from_file
from expertile.problem import named_problem

TILE = dict(block_m=32, block_n=128, block_k=64, warps=4, stages=3, swap=True)


def problem(tokens=64, quant="bf16"):
    return named_problem("qwen3-30b-a3b", tokens, quant)


def written(tmp_path, **data):
    path = tmp_path / "policy.json"
    path.write_text(json.dumps(data))
    return path


def test_a_process_forces_a_backend_and_a_call_comes_before_it():
    settings = from_environment({VARIABLE: "torch"})
    assert decide(problem(), H200, None, settings).backend is Backend.TORCH
    assert decide(problem(), H200, Backend.TRITON, settings).backend is Backend.TRITON
    with pytest.raises(UnsupportedProblem, match=r"backend=triton cannot.*Hopper"):
        decide(problem(), CPU, None, from_environment({VARIABLE: "triton"}))


def test_the_variable_takes_nothing_a_backend_others_or_a_file(tmp_path):
    installed = (("vllm", "0.26.0"),)
    assert from_environment({}, installed) == Settings(installed=installed)
    assert from_environment({VARIABLE: " others "}, installed).others
    (tmp_path / "mine.json").write_text('{"entries": []}')
    path = written(tmp_path, routing="zipf1.2", layout="up_first", spare_bytes=5, tables=["mine.json"])
    found = from_environment({VARIABLE: str(path)})
    assert (found.routing, found.layout, found.spare_bytes) == ("zipf1.2", Layout.UP_FIRST, 5)
    assert found.tables == (str(tmp_path / "mine.json"),), "beside the file"
    with pytest.raises(ShapeError, match=f"{VARIABLE}='fastest'.*triton"):
        from_environment({VARIABLE: "fastest"})


def problems(**entry):
    return dict(problems=[entry])


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (dict(speed=1), "speed=1: 'speed' is not known, use some of backend"),
        (dict(installed=[]), "'installed' is not known"),
        (dict(backend="cuda"), "backend='cuda': use one of reference, torch"),
        (dict(backend=["torch"]), "backend=['torch']"),
        (dict(others="no"), "others='no': give true or false"),
        (dict(others=1), "others=1: give true or false"),
        (dict(others=None), "others=None: give true or false"),
        (dict(routing="random"), "routing='random': is not known: use uniform"),
        (dict(routing=1.2), "routing=1.2: give a text such as uniform"),
        (dict(routing="zipf\u0661"), "routing="),
        (dict(layout="sideways"), "layout='sideways': use one of checkpoint"),
        (dict(spare_bytes=-1), "spare_bytes=-1: give an integer from 0"),
        (dict(spare_bytes=True), "spare_bytes=True"),
        (dict(scratch_bytes=2e9), "scratch_bytes=2000000000.0"),
        (dict(scratch_bytes=10**400), "give an integer from 0"),
        (dict(tables="mine.json"), "tables='mine.json': give a list of files"),
        (dict(tables=[1]), "tables[0]=1: give a file"),
        (dict(tables=["nowhere.json"]), "nowhere.json cannot be read"),
        (dict(tables=["zero\0.json"]), "zero"),
        (dict(problems={}), "problems={}: give a list of objects"),
        (dict(problems=None), "problems=None: give a list of objects"),
        (dict(problems=["qwen3-30b-a3b"]), "problems[0]='qwen3-30b-a3b' is not an object"),
        (dict(problems=[{}, dict(tile=1)]), "problems[1].tile=1: 'tile' is not known"),
        (problems(problem="nope"), "problems[0].problem='nope': is neither H,I,E,k"),
        (problems(problem=7), "problem=7: give a known layer"),
        (problems(problem="64,32,8,2,relu2"), "give H,I,E,k alone"),
        (problems(problem="\u00b2,32,8,2"), "is neither H,I,E,k"),
        (problems(quant="fp7"), "quant='fp7': is not known"),
        (problems(quant=None), "quant=None: give a text"),
        (problems(activation="swish"), "activation='swish': use one of silu"),
        (problems(activation=["silu"]), "activation=['silu']"),
        (problems(tokens=[64, 1]), "tokens=[64, 1]: give [least, most]"),
        (problems(tokens=64), "tokens=64: give [least, most]"),
        (problems(tokens=[1]), "tokens=[1]"),
        (problems(tokens=[1, "64"]), "tokens=[1, '64']"),
        (problems(tokens=[1.5, 64]), "tokens=[1.5, 64]"),
        (problems(tokens=[False, True]), "tokens=[False, True]"),
        (problems(tokens=[0, 10**400]), "give [least, most]"),
        (problems(backend="torch", gemm1=TILE), "only triton takes it, not backend='torch'"),
        (problems(backend="vllm-triton", fuse_quant=True), "only triton takes it"),
        (dict(backend="torch", **problems(gemm1=TILE)), "only triton takes it"),
        (problems(stream="up"), "stream='up': use one of no, down"),
        (problems(stream=None), "stream=None"),
        (problems(fuse_quant="false", gemm1=TILE), "fuse_quant='false': give true or false"),
        (problems(fuse_quant=False), "give gemm1 too"),
        (problems(gemm2=TILE), "give gemm1 too"),
        (problems(gemm1=dict(block_m=16)), "gemm1={'block_m': 16}: give block_n, block_k, warps, stages too"),
        (problems(gemm1=[16, 64, 64, 4, 3]), "gemm1=[16, 64, 64, 4, 3] is not an object"),
        (problems(gemm1={**TILE, "block_m": "32"}), "problems[0].gemm1.block_m='32': give an integer from 1"),
        (problems(gemm1={**TILE, "warps": True}), "gemm1.warps=True"),
        (problems(gemm1={**TILE, "stages": 10**400}), "gemm1.stages="),
        (problems(gemm1={**TILE, "swap": "no"}), "gemm1.swap='no': give true or false"),
        (problems(gemm1={**TILE, "speed": 1}), "gemm1.speed=1: 'speed' is not known"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_file_that_is_wrong_says_where(tmp_path, data, said):
    path = written(tmp_path, **data)
    with pytest.raises(ShapeError) as caught:
        from_file(path)
    assert said in str(caught.value) and str(caught.value).startswith(f"{path}: ")
    assert len(str(caught.value)) < 600 and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is not JSON"),
        (b"{", "is not JSON"),
        (b"[]", "is not an object"),
        (b"null", "is not an object"),
        (b'"torch"', "is not an object"),
        (b'{"routing": "\xff"}', "is not UTF-8"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"spare_bytes": NaN}', "NaN"),
        (b'{"spare_bytes": -Infinity}', "-Infinity"),
        (b'{"spare_bytes": 1e999}', "spare_bytes=inf"),
        (b'{"spare_bytes": 1' + b"0" * 5000 + b"}", "is not JSON"),
        (b'{"others": true, "others": false}', "'others' is there twice"),
        (b'{"problems": [{"tokens": [1, 2], "tokens": [1, 3]}]}', "'tokens' is there twice"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_file_that_holds_no_settings_is_refused(tmp_path, content, said):
    path = tmp_path / "policy.json"
    path.write_bytes(content)
    with pytest.raises(ShapeError) as caught:
        from_environment({VARIABLE: str(path)})
    assert said in str(caught.value) and str(path) in str(caught.value)


def test_what_is_no_file_or_is_far_too_large_is_refused(tmp_path):
    folder, large = tmp_path / "folder.json", tmp_path / "large.json"
    folder.mkdir()
    with large.open("wb") as file:
        file.truncate(100_000_000)
    for path, said in ((folder, "directory"), (large, "more than 32 MiB"), (tmp_path / "none.json", "No such file")):
        with pytest.raises(ShapeError, match=f"{path.name}.*{said}"):
            from_environment({VARIABLE: str(path)})


def test_null_is_what_is_left_out_where_nothing_is_a_setting(tmp_path):
    assert from_file(written(tmp_path, backend=None, layout=None, spare_bytes=None, scratch_bytes=None)) == Settings()


@pytest.mark.parametrize("name", ["swiglu_oai/interleaved", "relu2", "silu,limit=7", "silu/no-gate"])
def test_an_activation_is_named_as_a_plan_shows_it(tmp_path, name):
    assert from_file(written(tmp_path, **problems(activation=name))).told[0].activation == name


def test_a_file_forces_by_problem_and_leaves_the_others_alone(tmp_path):
    told = dict(problem="qwen3-30b-a3b", quant="bf16", tokens=[32, 64], backend="torch")
    settings = from_file(written(tmp_path, problems=[told]))
    backends = {tokens: decide(problem(tokens), H200, None, settings).backend for tokens in (31, 32, 64, 65)}
    assert backends == {31: Backend.TRITON, 32: Backend.TORCH, 64: Backend.TORCH, 65: Backend.TRITON}
    assert decide(problem(64, "fp8_block"), H200, None, settings).backend is Backend.TRITON
    assert decide(problem(64), H200, Backend.TRITON, settings).backend is Backend.TRITON, "a call comes first"
    assert decide(replace(problem(64), hidden=4096), H200, None, settings).backend is Backend.TRITON


def test_a_file_gives_tiles_and_those_that_cannot_run_are_an_error(tmp_path):
    settings = from_file(written(tmp_path, problems=[dict(problem="qwen3-30b-a3b", gemm1=TILE)]))
    plan = decide(problem(), H200, None, settings)
    assert plan.gemm1 == plan.gemm2 and plan.gemm1.block_m == 32 and "file of problems" in plan.source
    wide = from_file(written(tmp_path, problems=[dict(gemm1={**TILE, "stages": 40})]))
    with pytest.raises(UnsupportedProblem, match=r"T=64.*bytes of shared memory"):
        decide(problem(), H200, None, wide)
    odd = from_file(written(tmp_path, problems=[dict(gemm1={**TILE, "warps": 3})]))
    with pytest.raises(UnsupportedProblem, match="warps=3: use one of 1, 2, 4"):
        decide(problem(), H200, None, odd)
    odd = from_file(written(tmp_path, problems=[dict(stream="both", gemm1={**TILE, "block_n": 48})]))
    with pytest.raises(UnsupportedProblem, match="block_n=48 is no power of two"):
        decide(problem(1), H200, None, odd)
    streamed = from_file(written(tmp_path, problems=[dict(stream="both")]))
    assert decide(problem(4), H200, None, streamed).stream is Stream.BOTH
    with pytest.raises(UnsupportedProblem, match="registers"):
        decide(named_problem("4096,7168,64,16", 4), H200, None, streamed)


def test_a_table_of_ones_own_comes_before_the_shipped_one(tmp_path):
    tile = [16, 64, 64, 4, 3, True, 1, False]
    entry = dict(
        hidden=2048, inter=768, experts=128, top_k=8, label="bf16", gated=True, activation="silu", tokens=64,
        routing="hot", gemm1=tile, gemm2=tile, stream="no", fuse_quant=False, time_us=123.0, run=0,
    )  # fmt: skip
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"device": {"name": "h200"}, "runs": [{}], "entries": [entry]}))
    settings = Settings(tables=(str(path),), routing="hot")
    plan = decide(problem(), H200, None, settings)
    assert (plan.time_us, plan.gemm1.block_n) == (123.0, 64) and plan.source.startswith("measured")
    assert decide(problem(), H200, None, replace(settings, routing="uniform")).gemm1.block_n != 64
    other = tmp_path / "other.json"
    other.write_text(json.dumps({"device": {"name": "h100"}, "entries": [entry]}))
    assert decide(problem(), H200, None, Settings(tables=(str(other),), routing="hot")).time_us != 123.0
    with pytest.raises(ShapeError, match=r"nowhere.json"):
        decide(problem(), H200, None, Settings(tables=("nowhere.json",)))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (dict(tokens=0), "entries[0].tokens=0"),
        (dict(time_us="fast"), "entries[0].time_us='fast'"),
        (dict(gemm1=[16, 64]), "entries[0].gemm1=[16, 64]"),
        (dict(gemm2=[16, 64, 64, "4", 3]), "entries[0].gemm2.warps='4'"),
        (dict(stream="up"), "entries[0].stream='up'"),
        (dict(fuse_quant=0), "entries[0].fuse_quant=0"),
        (dict(others={"cublas": {"time_us": 1.0, "version": "1"}}), "'cublas' is not known"),
        (dict(others={"vllm-triton": {"time_us": 1.0}}), "give time_us and version"),
        (dict(others=[]), "others=[] is not an object"),
        (dict(speed=1), "'speed' is not known"),
    ],
    ids=str,
)
def test_a_table_that_is_wrong_says_where(tmp_path, change, said):
    tile = [16, 64, 64, 4, 3, True, 1, False]
    entry = dict(
        hidden=2048, inter=768, experts=128, top_k=8, label="bf16", gated=True, tokens=64, gemm1=tile, gemm2=tile,
        stream="no", fuse_quant=False, time_us=123.0,
    )  # fmt: skip
    table = tmp_path / "mine.json"
    table.write_text(json.dumps({"entries": [entry | change]}))
    with pytest.raises(ShapeError) as caught:
        from_file(written(tmp_path, tables=["mine.json"]))
    assert said in str(caught.value) and "mine.json" in str(caught.value)
    for entries in ({}, [1], [{}]):
        other = tmp_path / f"{len(str(entries))}.json"
        other.write_text(json.dumps({"entries": entries}))
        with pytest.raises(ShapeError, match=other.name):
            from_file(written(tmp_path, tables=[other.name]))
