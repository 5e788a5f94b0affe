"""The guard on a real driver: what is warmed or unpacked is really launched without compiling. In processes of their
own, with empty caches: kernels that other tests have compiled would hide what is missing.
"""

import json
import os
import subprocess
import sys

import pytest
import torch
import triton
import triton.language as tl

from expertile import guard
from expertile.errors import Recompiled
from expertile.runtime.device import detect

PRELUDE = """
import json, sys
import torch, expertile
from expertile import guard
from expertile.guard.cache import pack, try_unpack
from expertile.runtime.device import detect
from expertile.runtime.triton_experts import specializations
from expertile.warming import turning_points

HIDDEN, INTER, EXPERTS, TOP_K = 2048, 768, 128, 8
STATIC = dict(x_scale=8 / 448, h_scale=64 / 448)
QUANTS = {"none": {}, "fp8_tensor": STATIC, "fp8_tensor dynamic": {}, "fp8_channel": {}, "fp8_block": {}}

def layer(name):
    w13 = torch.randn(EXPERTS, 2 * INTER, HIDDEN, device="cuda", dtype=torch.bfloat16) * HIDDEN**-0.5
    w2 = torch.randn(EXPERTS, HIDDEN, INTER, device="cuda", dtype=torch.bfloat16) * INTER**-0.5
    return expertile.prepare(w13, w2, quant=name.split()[0], **QUANTS[name])

def call(weights, tokens):
    x = torch.randn(tokens, HIDDEN, device="cuda", dtype=torch.bfloat16)
    probs, ids = torch.randn(tokens, EXPERTS, device="cuda").softmax(-1).topk(TOP_K)
    return expertile.moe(x, weights, ids.int(), probs.contiguous())

def variants(weights, most):
    problem = weights.problem(1, TOP_K)
    for tokens in turning_points(problem, detect(), most, weights.split_scale):
        yield from specializations(expertile.plan(problem.with_tokens(tokens), detect()), weights.split_scale)

def say(sealed):
    torch.cuda.synchronize()
    print(json.dumps([event.to_dict() for event in sealed.events]))
"""


def events_of(code: str, tmp_path, *arguments: str, **environment: str) -> list[dict]:
    """What the process said last, after it ran with caches of its own."""
    folders = {"TRITON_CACHE_DIR": str(tmp_path / "triton"), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + code, *arguments], capture_output=True, text=True, timeout=900,
        env={**os.environ, **folders, **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


QUANTS = ("none", "fp8_tensor", "fp8_tensor dynamic", "fp8_channel", "fp8_block")


@pytest.mark.parametrize("quant", QUANTS)
def test_after_expertile_warm_no_number_of_tokens_compiles(quant, tmp_path):
    code = """
weights = layer(sys.argv[1])
assert expertile.warm(weights, TOP_K, 512)
with guard.seal("error") as sealed:
    for tokens in range(1, 513):
        call(weights, tokens)
say(sealed)
"""
    assert events_of(code, tmp_path, quant) == []


@pytest.mark.parametrize("quant", QUANTS)
def test_after_guard_warm_from_signatures_alone_no_number_of_tokens_compiles_or_loads(quant, tmp_path):
    code = """
weights = layer(sys.argv[1])
warmed = guard.warm(variants(weights, 512))
assert warmed.compiled, warmed
with guard.seal("error") as sealed:
    for tokens in range(1, 513):
        call(weights, tokens)
say(sealed)
"""
    assert events_of(code, tmp_path, quant) == []


@triton.jit
def _double_kernel(x_ptr, num_tokens, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + i, tl.load(x_ptr + i, mask=i < num_tokens) * 2, mask=i < num_tokens)


def double(x, tokens):
    _double_kernel[(triton.cdiv(tokens, 128),)](x, tokens, 128)


def test_a_kernel_that_specialises_on_its_tokens_raises_naming_them(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))  # what is on disk would be loaded instead
    x = torch.ones(1024, device="cuda")
    double(x, 1000)
    for tokens, kind in ((1008, "divisible_by_16"), (1, "equal_1")):
        with guard.seal("error"), pytest.raises(Recompiled, match=rf"num_tokens={tokens}: .*") as caught:
            double(x, tokens)
        (difference,) = caught.value.event.differences
        assert (difference.argument, difference.kind, difference.value) == ("num_tokens", kind, str(tokens))
        assert "test_guard.py" in caught.value.event.site and "double" in caught.value.event.site
    with guard.seal("error") as sealed, pytest.raises(Recompiled, match="x_ptr=float32"):
        double(x[1:], 1000)
    torch.cuda.synchronize()
    assert x[:1000].eq(2).all() and x[1000:].eq(1).all(), "what was refused must not have been launched"
    assert sealed.lost_ms == 0
    with guard.seal("count") as sealed:
        double(x, 1008)
    torch.cuda.synchronize()
    assert [event.kind for event in sealed.events][:1] == ["compile"] and sealed.events[0].ms > 0
    assert x[:1000].eq(4).all() and x[1000:1008].eq(2).all()


def test_unpacked_in_a_new_process_nothing_is_compiled(tmp_path):
    file = str(tmp_path / "layer.cache")
    fill = """
weights = layer("fp8_block")
with guard.seal("count") as sealed:
    for tokens in (1, 4, 16, 64, 256):
        call(weights, tokens)
pack(sys.argv[1])
say(sealed)
"""
    start = """
reason = try_unpack(sys.argv[1])
weights = layer("fp8_block")
with guard.seal(sys.argv[2]) as sealed:
    for tokens in (1, 4, 16, 64, 256):
        call(weights, tokens)
assert (reason is None) == (sys.argv[2] == "error"), reason
say(sealed)
"""
    compiled = [event for event in events_of(fill, tmp_path / "a", file) if event["kind"] == "compile"]
    loaded = events_of(start, tmp_path / "b", file, "error")
    assert len(compiled) > 4 and {event["kind"] for event in loaded} == {"load"}
    assert {event["kernel"] for event in loaded} == {event["kernel"] for event in compiled}
    with open(file, "r+b") as damaged:
        damaged.truncate(os.path.getsize(file) - 1000)
    again = events_of(start, tmp_path / "c", file, "count")
    assert sum(event["kind"] == "compile" for event in again) == len(compiled), "serving goes on by compiling"


def test_a_cache_packed_on_a_machine_without_a_gpu_is_found_here(tmp_path):
    device = detect().name
    if device not in ("h200", "h100"):
        pytest.skip(f"plans can be packed ahead for h200 and h100, this is {device}")
    file = str(tmp_path / "layer.cache")
    command = [
        "cache",
        "pack",
        file,
        "--problem",
        "qwen3-30b-a3b",
        "--quant",
        "bf16",
        "--max-tokens",
        "64",
        "--device",
        device,
    ]
    done = subprocess.run(
        [sys.executable, "-m", "expertile.cli", *command], capture_output=True, text=True, timeout=600,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    code = """
assert try_unpack(sys.argv[1]) is None
weights = layer("none")
with guard.seal("count") as sealed:
    for tokens in range(1, 65):
        call(weights, tokens)
say(sealed)
"""
    kinds = [event["kind"] for event in events_of(code, tmp_path, file)]
    assert "load" in kinds and "compile" not in kinds
    assert set(kinds) <= {
        "load",
        "launcher",
    }  # Triton 3.6 has a C launcher for each signature, which needs the GPU's driver


def test_what_inductor_compiles_in_this_process_is_seen(tmp_path):
    code = """
@torch.compile
def gelu(x):
    return torch.nn.functional.gelu(x) + x

with guard.seal("count") as sealed:
    gelu(torch.randn(4096, device="cuda"))
say(sealed)
"""
    found = events_of(code, tmp_path, TORCHINDUCTOR_COMPILE_THREADS="1")
    names = [event["kernel"].rpartition(".")[2] for event in found if event["kind"] == "compile"]
    assert names and all(name.startswith("triton_") for name in names)


def test_a_graph_is_replayed_under_a_sealed_guard():
    x = torch.ones(1024, device="cuda")
    double(x, 1000)
    torch.cuda.synchronize()
    with guard.seal("error") as sealed:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            double(x, 1000)
        before = x.clone()
        graph.replay()
        torch.cuda.synchronize()
    assert not sealed.events and x[:1000].eq(before[:1000] * 2).all()
