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
    path = written(tmp_path, routing="zipf1.2", layout="up_first", spare_bytes=5, tables=["mine.json"])
    found = from_environment({VARIABLE: str(path)})
    assert (found.routing, found.layout, found.spare_bytes) == ("zipf1.2", Layout.UP_FIRST, 5)
    assert found.tables == (str(tmp_path / "mine.json"),), "beside the file"
    with pytest.raises(ShapeError, match=f"{VARIABLE}='fastest'.*triton"):
        from_environment({VARIABLE: "fastest"})


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (dict(speed=1), "'speed' is not known"),
        (dict(backend="cuda"), "backend='cuda'"),
        (dict(routing="random"), "routing='random'"),
        (dict(problems=[dict(problem="nope")]), "problem='nope'"),
        (dict(problems=[dict(quant="fp7")]), "quant='fp7'"),
        (dict(problems=[dict(gemm1=dict(block_m=16))]), "gemm1="),
        (dict(problems=[dict(stream="up")]), "stream='up'"),
        (dict(problems=["qwen3-30b-a3b"]), "is not an object"),
    ],
    ids=str,
)
def test_a_file_that_is_wrong_says_where(tmp_path, data, said):
    with pytest.raises(ShapeError) as caught:
        from_file(written(tmp_path, **data))
    assert said in str(caught.value)


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
