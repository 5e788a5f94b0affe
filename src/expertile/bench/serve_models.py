"""Models for the benchmark of an engine: whole architectures at full size as config.json, weights random; and small
real checkpoints quantised by us, so that every format meets trained weights.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from ..errors import ExpertileError
from ..policy import json_file
from ..problem import BLOCK, Quant

QWEN3 = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048, "head_dim": 128,
    "hidden_act": "silu", "intermediate_size": 6144, "moe_intermediate_size": 768, "num_attention_heads": 32,
    "num_key_value_heads": 4, "num_hidden_layers": 48, "num_experts": 128, "num_experts_per_tok": 8,
    "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "vocab_size": 151936,
    "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "rope_scaling": None,
    "attention_bias": False, "tie_word_embeddings": False, "use_sliding_window": False, "bos_token_id": 151643,
    "eos_token_id": 151645, "torch_dtype": "bfloat16",
}  # fmt: skip
NEMOTRON3 = {
    "architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h", "hidden_size": 2688,
    "intermediate_size": 1856, "num_hidden_layers": 52,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", "num_attention_heads": 32,
    "num_key_value_heads": 2, "head_dim": 128, "mlp_hidden_act": "relu2", "mamba_num_heads": 64, "mamba_head_dim": 64,
    "ssm_state_size": 128, "n_groups": 8, "mamba_n_groups": 8, "conv_kernel": 4, "mamba_d_conv": 4, "chunk_size": 128,
    "mamba_chunk_size": 128, "expand": 2, "mamba_expand": 2, "mamba_hidden_act": "silu", "use_conv_bias": True,
    "mamba_proj_bias": False, "use_bias": False, "mlp_bias": False, "attention_bias": False,
    "layer_norm_epsilon": 1e-5, "norm_eps": 1e-5, "n_routed_experts": 128, "num_experts_per_tok": 6,
    "n_shared_experts": 1, "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712, "n_group": 1,
    "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5, "max_position_embeddings": 262144,
    "rope_theta": 10000, "residual_in_fp32": False, "tie_word_embeddings": False, "vocab_size": 131072,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "mamba_ssm_cache_dtype": "float32",
    "torch_dtype": "bfloat16",
}  # fmt: skip
MODELS = {"qwen3-30b-a3b": QWEN3, "nemotron-3-nano": NEMOTRON3}
X_SCALE, H_SCALE = 0.1, 0.1  # of static checkpoints: |x| and |h| up to 44.8; e4m3 keeps its precision far below


def quantization(config: dict, quant: str, experts_only: bool = False) -> dict | None:
    """quantization_config of a model for one of our quants; what vLLM's readers of it take.

    experts_only   attention and everything else stay in 16 bit
    """
    if quant == "bf16":
        return None
    layers = range(config["num_hidden_layers"])
    parts = ("mlp.gate", *(("self_attn",) if experts_only else ()))
    linear = [f"model.layers.{n}.self_attn.{p}_proj" for n in layers for p in "qkvo"] if experts_only else []
    kept = ["lm_head", *(f"model.layers.{n}.mlp.gate" for n in layers), *linear]
    if config["model_type"] == "nemotron_h":
        if quant != "fp8_tensor":
            raise ExpertileError(f"nemotron-3-nano with quant={quant!r}: use bf16 or fp8_tensor")
        producer = {"name": "modelopt", "version": "0.29.0"}
        return {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": None, "producer": producer,
                "ignore": ["lm_head", "*conv1d*", "*gate"]}  # fmt: skip
    if quant == "fp8_tensor":
        return {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": kept}
    if quant == "fp8_block":
        return {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3",
                "weight_block_size": [BLOCK, BLOCK], "modules_to_not_convert": kept}  # fmt: skip
    if quant == "fp8_channel":
        shared = {"num_bits": 8, "type": "float", "symmetric": True}
        group = {"targets": ["Linear"], "weights": {**shared, "strategy": "channel", "dynamic": False},
                 "input_activations": {**shared, "strategy": "token", "dynamic": True}}  # fmt: skip
        ignore = ["lm_head", *(f"re:.*{part.replace('.', '[.]')}.*" for part in parts)]
        return {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": group},
                "ignore": ignore}  # fmt: skip
    raise ExpertileError(f"quant={quant!r} is not known here: use bf16, fp8_tensor, fp8_channel or fp8_block")


def write_config(folder: Path, model: str, quant: str, layers: int | None = None) -> Path:
    """A folder with the config.json of that model, for `load_format="dummy"`.

    model     a key of MODELS, or a folder whose config.json is taken
    layers    as many layers only, for a quick look
    """
    if model in MODELS:
        config = dict(MODELS[model])
    elif (Path(model) / "config.json").is_file():
        config = json_file.read(Path(model) / "config.json", "model config")
        for name, kind in (("num_hidden_layers", int), ("model_type", str)):
            if not isinstance(config.get(name), kind):
                raise ExpertileError(f"{model}/config.json: {name}={config.get(name)!r}, a model of vLLM's has one")
    else:
        raise ExpertileError(f"model={model!r} is neither a folder with config.json nor one of {', '.join(MODELS)}")
    if layers is not None:
        config["num_hidden_layers"] = layers
        if "hybrid_override_pattern" in config:
            config["hybrid_override_pattern"] = config["hybrid_override_pattern"][:layers]
    if quant != "as-is":
        config.pop("quantization_config", None)
        if made := quantization(config, quant):
            config["quantization_config"] = made
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return folder


def quantized_copy(source: Path, folder: Path, quant: str) -> Path:
    """A checkpoint of the Qwen3-MoE kind with its experts quantised, everything else as it was."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, folder, dirs_exist_ok=True)
    if quant == "bf16":
        return folder
    for file in sorted(folder.glob("*.safetensors")):
        tensors = {}
        for name, tensor in load_file(file).items():
            tensors |= _quantized(name, tensor, quant) if ".mlp.experts." in name else {name: tensor}
        save_file(tensors, file)
    (folder / "model.safetensors.index.json").unlink(
        missing_ok=True
    )  # it names no scales; the files speak for themselves
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = quantization(config, quant, experts_only=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return folder


def _quantized(name: str, weight, quant: str) -> dict:
    import torch

    from ..quantization import quantize_weight

    q, scale = quantize_weight(weight[None], Quant(quant))
    base = name.removesuffix("weight")
    if quant == "fp8_block":
        return {name: q[0], base + "weight_scale_inv": scale[0]}
    if quant == "fp8_channel":
        return {name: q[0], base + "weight_scale": scale[0][:, None].contiguous()}
    given = H_SCALE if "down_proj" in name else X_SCALE
    return {name: q[0], base + "weight_scale": scale[0].reshape(()), base + "input_scale": torch.tensor(given)}
