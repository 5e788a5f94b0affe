"""vLLM's and SGLang's files for their own Triton MoE kernel: names, keys, and the space of its parameters. Plain data.

Names and keys are those of vLLM 0.26 (get_config_file_name, get_moe_configs) and of SGLang (fused_moe_triton_config):
one file for E, N = inter of a rank, device and format, in it tokens -> parameters. K and top-k are not in the names, so
a file serves every model of the same E and N. vLLM looks in VLLM_TUNED_CONFIG_FOLDER, SGLang in SGLANG_MOE_CONFIG_DIR
below configs/triton_<version>.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from ..errors import ShapeError
from ..hardware import Hardware
from ..problem import BLOCK, Problem, Quant

ENGINES = ("vllm", "sglang")
KEYS = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "GROUP_SIZE_M", "num_warps", "num_stages")
Config = dict[str, int]


def file_name(engine: str, problem: Problem, device_name: str) -> str:
    """The file's name for this layer.

    device_name   as the driver says it: "NVIDIA H200"

    >>> from expertile.problem import named_problem
    >>> file_name("vllm", named_problem("qwen3-30b-a3b", 1, "fp8_block"), "NVIDIA H200")
    'E=128,N=768,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128,128].json'
    """
    _known(engine)
    device = "_".join(device_name.replace("/", " ").split()) if engine == "vllm" else device_name.replace(" ", "_")
    if engine == "vllm" and "H200" in device.split("_"):
        device = "NVIDIA_H200"
    parts = [f"E={problem.experts}", f"N={problem.inter}", f"device_name={device}"]
    if problem.quant is not Quant.NONE:
        parts.append("dtype=fp8_w8a8")
    if problem.quant is Quant.FP8_BLOCK:
        parts.append(f"block_shape=[{BLOCK},{BLOCK}]" if engine == "vllm" else f"block_shape=[{BLOCK}, {BLOCK}]")
    if problem.quant is Quant.FP8_CHANNEL and engine == "sglang":
        parts.append("per_channel_quant=True")
    return ",".join(parts) + ".json"


def file_path(engine: str, folder: Path, problem: Problem, device_name: str, triton: str) -> Path:
    """Where the engine looks for it when its variable names `folder`."""
    inside = Path() if engine == "vllm" else Path("configs") / f"triton_{triton.replace('.', '_')}"
    return folder / inside / file_name(engine, problem, device_name)


def text(engine: str, configs: Mapping[int, Mapping[str, int]], triton: str) -> str:
    """The file's content. vLLM's says which Triton it was tuned with; SGLang takes every key for a token count."""
    _known(engine)
    body: dict = {"triton_version": triton} if engine == "vllm" else {}
    for tokens in sorted(configs):
        body[str(tokens)] = {name: configs[tokens][name] for name in KEYS}
    return json.dumps(body, indent=4) + "\n"


def variable(engine: str) -> str:
    """The environment variable that names the folder."""
    _known(engine)
    return "VLLM_TUNED_CONFIG_FOLDER" if engine == "vllm" else "SGLANG_MOE_CONFIG_DIR"


def _known(engine: str) -> None:
    if engine not in ENGINES:
        raise ShapeError(f"export={engine!r} is not known: use {' or '.join(ENGINES)}")


def runs(config: Mapping[str, int], problem: Problem, hardware: Hardware) -> bool:
    """Whether the kernel can be launched so: shared memory, registers of the accumulator, whole scale blocks."""
    m, n, k = (config[name] for name in KEYS[:3])
    item = problem.dtype.bytes if problem.quant is Quant.NONE else 1
    if config["num_stages"] * (m + n) * k * item > hardware.smem_bytes:
        return False
    if m * n / (32 * config["num_warps"]) > 128 or (config["num_warps"] == 8 and m * n < 4096):
        return False
    return problem.quant is not Quant.FP8_BLOCK or (n <= BLOCK and k <= BLOCK)


def tiles(problem: Problem, hardware: Hardware) -> list[Config]:
    """First round: token tiles about as thick as an expert's rows, and weight tiles; the rest as usual."""
    rows = max(problem.rows_per_expert, 1.0)
    found = []
    for m in (16, 32, 64, 128):
        if m / 16 <= rows and m <= max(16, 8 * rows):
            for n in (32, 64, 128, 256):
                found += [_config(m, n, k, 4 if m * n <= 8192 else 8, 3) for k in (64, 128)]
    return [config for config in found if runs(config, problem, hardware)]


def neighbours(config: Mapping[str, int], problem: Problem, hardware: Hardware) -> list[Config]:
    """Second round: one parameter of a good one changed."""
    changes = (
        [("num_stages", value) for value in (2, 3, 4, 5)]
        + [("num_warps", value) for value in (4, 8)]
        + [("BLOCK_SIZE_K", value) for value in (64, 128, 256)]
        + [("GROUP_SIZE_M", value) for value in ((1, 8, 32) if problem.rows_per_expert > 16 else (1,))]
    )
    found = [{**config, name: value} for name, value in changes if config[name] != value]
    return [each for each in found if runs(each, problem, hardware)]


def _config(m: int, n: int, k: int, warps: int, stages: int) -> Config:
    return dict(zip(KEYS, (m, n, k, 1, warps, stages), strict=True))
