"""The benchmark of an engine: real processes and pipes around an engine that is a fake."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from expertile.bench import rows, serve, serve_commands, serve_models, serve_same
from expertile.bench.serve import Arm, Load, parse_arm
from expertile.bench.serve_table import medians, serve_table
from expertile.errors import ExpertileError

FAKE = '''
"""An engine that makes a token of every request a step, after a pause; with a layer of ours when the plugin is on."""
import os, time
from types import SimpleNamespace
__version__ = "0.26.0+fake"
class SamplingParams:
    def __init__(self, **given): self.__dict__.update(given)
class Core:
    model_config = SimpleNamespace(get_vocab_size=lambda: 1000)
    def __init__(self, pause): self.pause, self.requests, self.most = pause, {}, 0
    def add_request(self, name, prompt, params): self.requests[name] = [params.max_tokens]
    def step(self):
        time.sleep(self.pause)
        self.most = max(self.most, len(self.requests))
        found = []
        for name in list(self.requests):
            self.requests[name][0] -= 1
            last = not self.requests[name][0]
            if last: del self.requests[name]
            found.append(SimpleNamespace(request_id=name, outputs=[SimpleNamespace(token_ids=[7])], finished=last))
        return found
class LLM:
    def __init__(self, model, pause=0.002, fail=None, **rest):
        print("the engine says hello")
        if fail == "start": raise ValueError("no such model")
        if fail == "die": os._exit(3)
        self.llm_engine = Core(pause)
    def apply_model(self, function):
        home = "expertile.plugins" if os.environ["EXPERTILE_VLLM"] == "1" else "vllm.experts"
        experts = type("Experts", (), {"__module__": home})()
        one, two = (SimpleNamespace(quant_method=SimpleNamespace(moe_kernel=SimpleNamespace(fused_experts=experts)))
                    for _ in range(2))
        return [function(SimpleNamespace(modules=lambda: [SimpleNamespace(), one, one, two]))]
'''
SHARED = dict(date="2026-12-02", commit="x", gpu="h200", driver="1", torch="2", triton="3", problem="p", quant="bf16")


@pytest.fixture
def fake_vllm(tmp_path, monkeypatch):
    package = tmp_path / "path" / "vllm"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(FAKE)
    (package / "sampling_params.py").write_text("class RequestOutputKind: DELTA = 1")
    monkeypatch.syspath_prepend(str(package.parent))
    return tmp_path


@pytest.fixture
def engines(fake_vllm):
    arms = [parse_arm("stock"), parse_arm('ours={"pause": 0.001}')]
    processes = serve.start(arms, {"model": "x"}, {}, fake_vllm / "logs", one_by_one=False)
    yield processes
    serve.stop(processes)
    assert not any(process.process.is_alive() for process in processes)


def test_engines_are_measured_in_turn_and_make_rows(engines):
    loads = [Load(2, 8, 5, 6), Load(1, 8, 1, 3)]
    found = list(serve.measure(engines, loads, 2, SHARED))
    assert [(impl, load.batch, run) for impl, load, run, _ in found] == [
        ("vllm-0.26.0", 2, 0), ("expertile", 2, 0), ("vllm-0.26.0", 1, 0), ("expertile", 1, 0),
        ("expertile", 2, 1), ("vllm-0.26.0", 2, 1), ("expertile", 1, 1), ("vllm-0.26.0", 1, 1),
    ]  # fmt: skip
    for *_, row in found:
        rows.check(row)
        assert row["engine"] == "vllm-0.26.0" and row["requests"] in (3, 6)
    stock = next(row for impl, load, _, row in found if impl != "expertile" and load.batch == 2)
    assert stock["ttft_ms_p50"] >= 2.0 and stock["tpot_ms_p50"] >= 2.0  # a step takes 2 ms at least
    assert 0 < stock["output_tokens_per_s"] <= 2 / 0.002  # two at a time, a token a step
    single = next(row for impl, load, _, row in found if impl != "expertile" and load.batch == 1)
    assert single["tpot_ms_p50"] == 0
    table = serve_table([row for *_, row in found])
    assert table.row_count == 4
    figures = medians([row for *_, row in found])[(2, 8, 5)]
    assert figures["expertile"]["output_tokens_per_s"] > figures["vllm-0.26.0"]["output_tokens_per_s"]


def test_arrivals_of_a_poisson_process_are_waited_for(engines):
    load = Load(0, 8, 2, 40, rate=400.0, lengths=((4, 1), (8, 3)))
    start = time.perf_counter()
    found = engines[0].ask("serve", load, 3)
    assert found["seconds"] <= time.perf_counter() - start and 0.03 < found["seconds"] < 2.0  # 40 at 400 a second
    assert found["ttft_ms_p99"] >= found["ttft_ms_p50"] >= 2.0


def test_the_engines_words_go_to_its_log(engines):
    assert all("the engine says hello" in process.log.read_text() for process in engines)
    with engines[0].log.open("a") as log:
        log.write(
            "WARNING Triton kernel JIT compilation during inference: _combine_kernel. This causes a latency spike;\n"
        )
    assert engines[0].late_compilations() == ["_combine_kernel"] and engines[1].late_compilations() == []


def test_an_arm_that_is_not_what_it_says_is_refused(fake_vllm):
    stock_with_ours = Arm("stock", environment={"EXPERTILE_VLLM": "1"})
    with pytest.raises(ExpertileError, match="stock: 2 of 2 layers are expertile's"):
        serve.start([stock_with_ours], {"model": "x"}, {}, fake_vllm / "logs", False)
    ours_without = Arm("ours", "off", environment={"EXPERTILE_VLLM": "0"})
    with pytest.raises(ExpertileError, match="ours-off: 0 of 2 layers are expertile's"):
        serve.start([ours_without], {"model": "x"}, {}, fake_vllm / "logs", False)


@pytest.mark.parametrize(("fail", "words"), [("start", "no such model"), ("die", "the engine died; the end of")])
def test_an_engine_that_does_not_come_up_is_told_with_its_last_words(fake_vllm, fail, words):
    arms = [parse_arm("stock"), parse_arm(json.dumps({"fail": fail}).join(["ours=", ""]))]
    with pytest.raises(ExpertileError, match=words):
        serve.start(arms, {"model": "x"}, {}, fake_vllm / "logs", False)


def test_an_error_in_an_answer_is_told(engines):
    with pytest.raises(ExpertileError, match=r"(?s)ours: .*no_such_verb"):
        engines[1].ask("no_such_verb")


def test_arms():
    assert parse_arm("stock").impl("0.26.0") == "vllm-0.26.0"
    assert parse_arm("ours").environment == {"EXPERTILE_VLLM": "1"}
    triton = parse_arm('stock-triton={"moe_backend": "triton", "env": {"A": "b"}}')
    assert triton.impl("0.26.0") == "vllm-0.26.0-triton" and triton.arguments == {"moe_backend": "triton"}
    assert triton.environment == {"EXPERTILE_VLLM": "0", "A": "b"}
    assert parse_arm("ours-x").impl("0.26.0") == "expertile:x"
    for wrong in ("theirs", "ours=[]", "ours={", "", 'ours={"env": 1}', 'ours={"env": {"A": 1}}'):
        with pytest.raises(ExpertileError, match="arm "):
            parse_arm(wrong)


def test_loads():
    loads = serve_commands._loads("1,64", "16", 5.0, 100)
    assert [(load.batch, load.input, load.output, load.requests) for load in loads[:3]] == [
        (16, 2048, 1, 16), (1, 128, 128, 2), (64, 128, 128, 64),
    ]  # fmt: skip
    assert loads[3].rate == 5.0 and loads[3].requests == 100 and max(given for given, _ in loads[3].lengths) == 3500
    for batches in ("0", "200", "x", "\u00b2"):
        with pytest.raises(ExpertileError, match="numbers from 1 to 128"):
            serve_commands._loads(batches, "", 0.0, 0)
    with pytest.raises(ExpertileError, match="nothing to serve"):
        serve_commands._loads("", "", 0.0, 0)


def test_verdicts():
    near = serve_same.Difference(same=9, prompts=10, agreed=0.95, largest=0.01)
    far = serve_same.Difference(same=2, prompts=10, agreed=0.5, largest=2.0)
    assert serve_same.Verdict(near, near, near, 3.0, 3.002, 0.02, 0.021).faults == []
    assert serve_same.Verdict(near, far, far, 3.0, 3.0, 0.02, 0.02).faults == []
    assert "continuations agree over 0.50" in serve_same.Verdict(near, near, far, 3.0, 3.0, 0.02, 0.02).faults[0]
    assert "+0.133%" in serve_same.Verdict(near, near, near, 3.0, 3.004, 0.02, 0.02).faults[0]
    assert "0.03 apart" in serve_same.Verdict(near, near, near, 3.0, 3.0, 0.02, 0.03).faults[0]
    assert serve_same.apart([[-1.0, -2.0], [-3.0]], [[-1.0, -2.0], [-3.3]]) == 0.173205
    assert serve_same.loss([[-1.0, -2.0], [-3.0]]) == 2.0


def test_a_config_is_written_as_asked(tmp_path):
    folder = serve_models.write_config(tmp_path / "m", "qwen3-30b-a3b", "fp8_block", layers=2)
    config = json.loads((folder / "config.json").read_text())
    assert config["num_hidden_layers"] == 2 and config["quantization_config"]["weight_block_size"] == [128, 128]
    again = serve_models.write_config(tmp_path / "again", str(folder), "as-is")
    assert json.loads((again / "config.json").read_text()) == config
    plain = serve_models.write_config(tmp_path / "plain", str(folder), "bf16")
    assert "quantization_config" not in json.loads((plain / "config.json").read_text())
    with pytest.raises(ExpertileError, match="neither a folder"):
        serve_models.write_config(tmp_path, "nope", "bf16")
    with pytest.raises(ExpertileError, match="quant='int4'"):
        serve_models.write_config(tmp_path, "qwen3-30b-a3b", "int4")


@pytest.mark.parametrize("quant", ["fp8_tensor", "fp8_channel", "fp8_block"])
def test_a_checkpoint_is_quantised(tmp_path, quant):
    safetensors = pytest.importorskip("safetensors.torch", reason="needs safetensors")
    from expertile.problem import BLOCK

    source = Path(__file__).parents[2] / "models" / "tiny-moe"
    folder = serve_models.quantized_copy(source, tmp_path / "copy", quant)
    found, stored = ({} for _ in range(2))
    for where, into in ((source, found), (folder, stored)):
        for file in where.glob("*.safetensors"):
            into.update(safetensors.load_file(file))
    experts = [name for name in found if ".mlp.experts." in name]
    assert len(experts) == 6 * 16 * 3 and set(found) < set(stored)
    for name in experts[::7]:
        value, base = stored[name].float(), name.removesuffix("weight")
        scale = stored[base + ("weight_scale_inv" if quant == "fp8_block" else "weight_scale")]
        if quant == "fp8_block":
            scale = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[: value.shape[0], : value.shape[1]]
        want = found[name].float()
        assert ((value * scale - want).norm() / want.norm()) < 0.04
        assert (base + "input_scale" in stored) == (quant == "fp8_tensor")
    untouched = [name for name in found if name not in experts]
    assert all(stored[name].equal(found[name]) for name in untouched)
