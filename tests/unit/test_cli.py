"""The command line as a user meets it: what it prints, and how it says no."""

import json
import os
import subprocess
import sys

import pytest

from expertile import __version__


def expertile(*arguments: str):
    return subprocess.run([sys.executable, "-m", "expertile.cli", *arguments], capture_output=True, text=True)


def test_explain_prints_a_plan_for_each_number_of_tokens():
    done = expertile("explain", "--problem", "qwen3-30b-a3b", "--quant", "fp8_block", "--tokens", "1,4096")
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.strip().split("\n\n")
    assert first.startswith("T=1 H=2048 I=768 E=128 top-k=8 fp8_block") and "on h200" in first
    assert second.startswith("T=4096")
    assert "-> triton" in first and "torch" in first and "floor" in first


def test_explain_takes_sizes_and_gives_json():
    done = expertile("explain", "--problem", "64,32,8,2", "--tokens", "4", "--device", "h100", "--json")
    plan = json.loads(done.stdout)
    assert (plan["problem"]["hidden"], plan["device"]) == (64, "h100")


def test_explain_takes_a_models_config(tmp_path):
    config = dict(
        hidden_size=4096, moe_intermediate_size=2048, n_routed_experts=256, num_experts_per_tok=6, swiglu_limit=10.0,
        quantization_config=dict(quant_method="fp8", weight_block_size=[128, 128]),
    )  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    for path in (tmp_path, tmp_path / "config.json"):
        done = expertile("explain", "--model", str(path), "--tensor-parallel", "4", "--tokens", "16")
        assert done.stdout.startswith("T=16 H=4096 I=512 E=256 top-k=6 fp8_block swiglu_clamp on h200"), done.stderr
    done = expertile("explain", "--model", str(tmp_path), "--quant", "bf16", "--tokens", "16")
    assert done.stdout.startswith("T=16 H=4096 I=2048 E=256 top-k=6 bf16 swiglu_clamp on h200")
    (tmp_path / "config.json").write_text(json.dumps({**config, "expert_dtype": "fp4"}))
    done = expertile("explain", "--model", str(tmp_path))
    assert done.returncode == 2 and "expert_dtype='fp4'" in done.stderr and "--quant" in done.stderr


def test_a_forced_backend_is_the_one_explained():
    assert "-> reference" in expertile("explain", "--tokens", "4", "--backend", "reference").stdout


def test_in_full_it_has_every_library_the_row_and_what_would_change_it():
    words = ("explain", "--problem", "qwen3-30b-a3b", "--quant", "fp8_block", "--tokens", "16", "--full")
    done = expertile(*words, "--libraries", "vllm=0.26.0", "--routing", "zipf1.2")
    assert done.returncode == 0, done.stderr
    for word in ("vllm-triton", "flashinfer-python is not installed", "table: T=16", "what would change it", "zipf1.2"):
        assert word in done.stdout
    found = json.loads(expertile(*words, "--json").stdout)
    assert found["table_row"].startswith("T=16") and found["would_change"]


def test_the_process_and_a_file_override_the_policy(tmp_path):
    path = tmp_path / "policy.json"
    path.write_text(json.dumps({"problems": [{"problem": "64,32,8,2", "backend": "torch"}]}))
    words = ("explain", "--tokens", "4", "--problem", "64,32,8,2")
    assert "-> torch" in expertile(*words, "--policy", str(path)).stdout
    assert "-> triton" in expertile(*words).stdout
    forced = subprocess.run(
        [sys.executable, "-m", "expertile.cli", *words, "--device", "cpu"],
        capture_output=True, text=True, env=os.environ | {"EXPERTILE_POLICY": "triton"},
    )  # fmt: skip
    assert forced.returncode == 2 and "backend=triton cannot" in forced.stderr


def test_a_routing_that_is_given_comes_before_the_files(tmp_path):
    path = tmp_path / "policy.json"
    path.write_text(json.dumps({"routing": "zipf1.2"}))
    words = ("explain", "--tokens", "16", "--policy", str(path))
    assert "(zipf1.2 routing)" in expertile(*words).stdout
    assert "(uniform routing)" in expertile(*words, "--routing", "uniform").stdout


def test_the_header_says_what_the_times_do_not_tell_apart():
    words = ("explain", "--tokens", "16", "--problem", "64,32,8,2,bias", "--quant", "fp8_tensor")
    assert "fp8_tensor dynamic scales silu bias on h200" in expertile(*words).stdout
    assert "fp8_tensor static scales silu bias on h200" in expertile(*words, "--static-scale").stdout
    assert "(trace:t.json, priced as uniform)" in expertile(*words, "--routing", "trace:t.json").stdout


def test_in_full_it_looks_beyond_what_the_file_can_run(tmp_path):
    ring = dict(block_m=16, block_n=128, block_k=64, warps=12, stages=6, swap=True, tma=True)
    path = tmp_path / "policy.json"
    path.write_text(json.dumps({"problems": [{"stream": "ring", "gemm1": ring}]}))
    done = expertile("explain", "--tokens", "16", "--full", "--policy", str(path))
    assert "more tokens: from T=17 on nothing: what the settings force cannot run there" in done.stdout, done.stderr
    most = expertile("explain", "--tokens", str(1 << 40), "--full")
    assert most.returncode == 0, most.stderr


def test_a_wrong_file_ends_a_benchmark_before_it_measures(tmp_path):
    pytest.importorskip("torch")
    (tmp_path / "policy.json").write_text("[]")
    words = ("--problem", "64,32,8,2", "--device", "cpu", "--out", str(tmp_path / "rows.jsonl"))
    for what in ("experts", "layer", "cold"):
        done = subprocess.run(
            [sys.executable, "-m", "expertile.cli", "bench", what, *words],
            capture_output=True, text=True, env=os.environ | {"EXPERTILE_POLICY": str(tmp_path / "policy.json")},
        )  # fmt: skip
        assert done.returncode == 2 and "policy.json is not an object" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("explain", "--tokens", "-1"), "-1"),
        (("explain", "--tokens", "many"), "many"),
        (("explain", "--tokens", "\u00b2"), "tokens="),
        (("explain", "--tokens", "\uff11\uff16"), "tokens="),
        (("explain", "--tokens", "9" * 5000), "tokens="),
        (("explain", "--tokens", "9" * 18), "tokens="),
        (("explain", "--problem", "\u00b2,32,8,2"), "problem="),
        (("explain", "--problem", "64,64,1000000000,1", "--routing", "zipf1.2"), "experts="),
        (("explain", "--routing", "zipf400"), "zipf400"),
        (("explain", "--routing", "trace:"), "trace:"),
        (("explain", "--quant", "fp7"), "fp7"),
        (("explain", "--problem", "nope"), "nope"),
        (("explain", "--problem", ""), "problem=''"),
        (("explain", "--quant", ""), "quant=''"),
        (("explain", "--model", "nowhere"), "nowhere is not there: give a model's config.json"),
        (("explain", "--model", "nowhere", "--problem", "64,32,8,2"), "one of --problem and --model"),
        (("explain", "--model", "nowhere", "--tensor-parallel", "0"), "tensor_parallel=0"),
        (("explain", "--tensor-parallel", "2"), "goes with --model"),
        (("explain", "--device", "b200"), "b200"),
        (("explain", "--backend", "cuda"), "cuda"),
        (("explain", "--backend", "triton", "--device", "cpu"), "Hopper"),
        (("demo", "--model", "nowhere"), "nowhere"),
        (("bench", "report", "nowhere"), "nowhere cannot be read: No such file"),
        (("tune", "--out", "t", "--problem", "64,32,8,2", "--quant", "fp32"), "quant='fp32' has no kernels"),
        (("tune", "--out", "t", "--problem", "64,32,8,2", "--quant", "bf16", "--export", "tgi"), "export='tgi'"),
        (("bench", "layer", "--device", "cpu", "--router", "nope"), "router='nope'"),
        (("explain", "--routing", "random"), "random"),
        (("explain", "--libraries", "vllm"), "vllm"),
        (("explain", "--libraries", ","), "libraries="),
        (("explain", "--libraries", "vllm="), "package=version"),
        (("explain", "--libraries", "vllm=\u00b2"), "package=version"),
        (("explain", "--libraries", "nonsense=1"), "nonsense is not known"),
        (("explain", "--libraries", "vllm=0.26.0,vllm=0.27.0"), "each package once"),
        (("audit", ""), "path '' is empty"),
        (("watch", "--ready-after", "nan", "--", "true"), "ready_after=nan"),
        (("explain", "--layout", "sideways"), "sideways"),
        (("explain", "--policy", "fastest"), "fastest"),
        (("explain", "--backend", "vllm-triton", "--tokens", "4"), "vllm is not installed"),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, tuple) else "",
)
def test_bad_input_is_one_line_on_stderr_and_exit_code_2(arguments, word):
    done = expertile(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("expertile: ") and word in line


@pytest.mark.parametrize("text", ["{}", "{"])
def test_a_model_that_is_none_is_one_line_for_the_demo(tmp_path, text):
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(text)
    done = expertile("demo", "--model", str(tmp_path))
    assert done.returncode == 2 and "expertile: no eval.txt in" in done.stderr
    (tmp_path / "eval.txt").write_text("x")
    done = expertile("demo", "--model", str(tmp_path))
    assert done.returncode == 2 and "cannot be loaded: " in done.stderr.splitlines()[-1] and done.stdout == ""


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is always full")
def test_a_full_disk_is_one_line_and_exit_code_2():
    with open("/dev/full", "w") as full:
        words = [sys.executable, "-m", "expertile.cli", "explain", "--tokens", "1"]
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (2, "expertile: [Errno 28] No space left on device\n")


def test_an_unknown_command_is_refused():
    done = expertile("explian")
    assert done.returncode == 2 and "explian" in done.stderr


def test_help_names_every_command():
    text = expertile("--help").stdout
    assert all(
        f"\n  {command} " in text
        for command in ("explain", "demo", "bench", "tune", "watch", "audit", "cache", "version")
    )


@pytest.mark.parametrize("words", [(), ("bench",), ("cache",), ("sagemaker",)], ids=str)
def test_no_commands_line_in_help_is_cut(words):
    if words == ("bench",):
        pytest.importorskip("torch")
    environment = os.environ | {"COLUMNS": "80", "TERMINAL_WIDTH": "80"}
    command = [sys.executable, "-m", "expertile.cli", *words, "--help"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    listed = done.stdout.partition("Commands:")[2]
    assert listed.strip() and "..." not in listed


def test_the_version_alone():
    done = expertile("--version")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"expertile {__version__}\n"


def test_version_names_what_a_report_needs():
    text = expertile("version").stdout
    assert [line.split()[0] for line in text.splitlines()] == [
        "expertile",
        "python",
        "torch",
        "triton",
        "transformers",
        "vllm",
        "device",
    ]
