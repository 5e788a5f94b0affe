"""The engines' files for their own Triton kernel: names, content, and the search for what is in them."""

import json

import pytest
import torch

from expertile.bench.runner import Outcome, Setting, State
from expertile.errors import ExpertileError, ShapeError
from expertile.hardware import H200
from expertile.problem import LAYERS, named_problem
from expertile.tune import Task, engine_files, export
from expertile.tune.engine_files import KEYS

SETTING = Setting(torch.device("cpu"), H200, {})
STOCK = dict(zip(KEYS, (64, 64, 32, 8, 4, 3), strict=True))


@pytest.mark.parametrize(
    ("engine", "layer", "quant", "want"),
    [
        ("vllm", "qwen3-30b-a3b", "bf16", "E=128,N=768,device_name=NVIDIA_H200.json"),
        ("vllm", "nemotron-3-nano", "fp8_tensor", "E=128,N=1856,device_name=NVIDIA_H200,dtype=fp8_w8a8.json"),
        ("vllm", "qwen3-30b-a3b", "fp8_channel", "E=128,N=768,device_name=NVIDIA_H200,dtype=fp8_w8a8.json"),
        ("vllm", "deepseek-v3-tp8", "fp8_block",
         "E=256,N=256,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128,128].json"),
        ("sglang", "deepseek-v3-tp8", "fp8_block",
         "E=256,N=256,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128, 128].json"),
        ("sglang", "qwen3-30b-a3b", "fp8_channel",
         "E=128,N=768,device_name=NVIDIA_H200,dtype=fp8_w8a8,per_channel_quant=True.json"),
    ],
)  # fmt: skip
def test_files_are_named_as_the_engines_look_for_them(engine, layer, quant, want):
    assert engine_files.file_name(engine, named_problem(layer, 1, quant), "NVIDIA H200") == want


def test_vllm_takes_every_h200_for_one_and_other_devices_by_their_name():
    problem = named_problem("qwen3-30b-a3b", 1)
    assert "device_name=NVIDIA_H200." in engine_files.file_name("vllm", problem, "NVIDIA H200 NVL")
    assert "device_name=NVIDIA_H100_80GB_HBM3." in engine_files.file_name("vllm", problem, "NVIDIA H100 80GB HBM3")
    with pytest.raises(ShapeError, match="vllm or sglang"):
        engine_files.file_name("tgi", problem, "NVIDIA H200")


def test_their_content_has_the_keys_that_the_engines_read():
    configs = {64: STOCK, 1: {**STOCK, "SPLIT_K": 1}}
    vllm = json.loads(engine_files.text("vllm", configs, "3.6.0"))
    assert vllm.pop("triton_version") == "3.6.0" and list(vllm) == ["1", "64"] and list(vllm["1"]) == list(KEYS)
    assert {int(key) for key in json.loads(engine_files.text("sglang", configs, "3.6.0"))} == {1, 64}


@pytest.mark.parametrize("quant", ["bf16", "fp8_tensor", "fp8_block"])
@pytest.mark.parametrize("name", LAYERS)
def test_the_space_holds_what_can_be_launched_and_is_small(name, quant):
    for tokens in (1, 64, 1024, 16384):
        problem = named_problem(name, tokens, quant)
        tiles = engine_files.tiles(problem, H200)
        assert 4 <= len(tiles) <= 40
        for config in [*tiles, *engine_files.neighbours(tiles[0], problem, H200)]:
            assert list(config) == list(KEYS) and engine_files.runs(config, problem, H200)
            item = 2 if quant == "bf16" else 1
            need = (
                config["num_stages"] * (config["BLOCK_SIZE_M"] + config["BLOCK_SIZE_N"]) * config["BLOCK_SIZE_K"] * item
            )
            assert need <= H200.smem_bytes
            assert quant != "fp8_block" or max(config["BLOCK_SIZE_N"], config["BLOCK_SIZE_K"]) <= 128


def measure_by(times, crash=lambda config: False):
    def measure(request, contenders, setting):
        assert contenders[0].config is None, "what vLLM does by itself is always measured"
        for each in contenders:
            if each.config is not None and crash(each.config):
                yield Outcome(each.name, State.CRASHED, message="out of resources")
            else:
                yield Outcome(each.name, State.MEASURED, row={"time_us": times(each.config)})

    return measure


TASK = Task("qwen3-30b-a3b", "bf16", (64, 1024))


def search(times, **fields):
    return export.search(
        TASK, SETTING, measure=measure_by(times, **fields), stock=lambda problem: dict(STOCK, SPLIT_K=1)
    )


def test_the_fastest_found_in_two_rounds_is_written(tmp_path):
    def times(config):
        if config is None:
            return 100.0
        return 50.0 + abs(config["BLOCK_SIZE_N"] - 64) + 10 * abs(config["num_stages"] - 4)

    events = []
    found = export.search(TASK, SETTING, events.append, measure=measure_by(times), stock=lambda p: STOCK)
    assert all(each["time_us"] == 50.0 and each["config"]["num_stages"] == 4 for each in found.values())
    assert events == [{"total": 2}, {"done": 1}, {"done": 2}]
    path = export.write("sglang", tmp_path, TASK.problem_at(64), "NVIDIA H200", "3.6.0", found)
    assert path.relative_to(tmp_path).parts[:2] == ("configs", "triton_3_6_0")
    assert json.loads(path.read_text())["1024"]["BLOCK_SIZE_N"] == 64
    assert export.write("vllm", tmp_path, TASK.problem_at(64), "NVIDIA H200", "3.6.0", found).parent == tmp_path


def test_where_nothing_beats_it_vllms_own_stays():
    found = search(lambda config: 100.0 if config is None else 99.5)
    assert all(each["config"] == STOCK and each["time_us"] == each["stock_us"] == 100.0 for each in found.values())


def test_what_crashes_is_passed_over_and_nothing_at_all_is_no_file(tmp_path):
    found = search(lambda config: 100.0 if config is None else 50.0, crash=lambda config: config["BLOCK_SIZE_N"] != 64)
    assert all(each["config"]["BLOCK_SIZE_N"] == 64 for each in found.values())
    assert search(lambda config: 100.0, crash=lambda config: True) == {}
    with pytest.raises(ExpertileError, match="no file"):
        export.write("vllm", tmp_path, TASK.problem_at(64), "NVIDIA H200", "3.6.0", {})


def test_without_vllm_it_says_so():
    def absent(request, contenders, setting):
        yield Outcome(contenders[0].name, State.ABSENT, message="vllm is not installed")

    with pytest.raises(ExpertileError, match="vllm is not installed"):
        export.search(TASK, SETTING, measure=absent)
