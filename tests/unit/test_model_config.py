"""What is read of a model's config.json, and what is refused: as vLLM and transformers read the same keys."""

import doctest
import json

import pytest

from expertile.errors import ShapeError
from expertile.policy import model_config, model_quant
from expertile.problem import named_problem


@pytest.mark.parametrize(
    ("config", "ranks", "want"),
    [
        (dict(hidden_size=2048, moe_intermediate_size=768, intermediate_size=6144, num_experts=128,
              num_experts_per_tok=8, hidden_act="silu", torch_dtype="bfloat16"), 1, ("2048,768,128,8", "bf16")),
        (dict(hidden_size=7168, moe_intermediate_size=2048, n_routed_experts=256, num_experts_per_tok=8,
              quantization_config=dict(quant_method="fp8", weight_block_size=[128, 128])), 8,
         ("7168,256,256,8", "fp8_block")),
        (dict(hidden_size=2688, moe_intermediate_size=1856, n_routed_experts=128, num_experts_per_tok=6,
              mlp_hidden_act="relu2", quantization_config=dict(quant_method="modelopt", quant_algo="FP8")), 1,
         ("2688,1856,128,6,relu2", "fp8_tensor")),
        (dict(model_type="gpt_oss", hidden_size=2880, intermediate_size=2880, num_local_experts=128,
              num_experts_per_tok=4), 1, ("2880,2880,128,4,swiglu_oai/interleaved,bias", "bf16")),
        (dict(text_config=dict(hidden_size=64, intermediate_size=32, num_local_experts=4, num_experts_per_tok=1,
                               dtype="float16")), 2, ("64,16,4,1", "fp16")),
        (dict(hidden_size=64, moe_intermediate_size=32, num_experts=4, num_experts_per_tok=1,
              quantization_config=dict(quant_method="compressed-tensors", config_groups=dict(group_0=dict(
                  weights=dict(type="float", num_bits=8, strategy="channel"))))), 1, ("64,32,4,1", "fp8_channel")),
    ],
)  # fmt: skip
def test_a_models_config_gives_layer_and_format(tmp_path, config, ranks, want):
    (tmp_path / "config.json").write_text(json.dumps(config))
    for path in (tmp_path, tmp_path / "config.json"):
        layer = model_config.read(path, ranks)
        assert (layer.problem, layer.quant) == want
    named_problem(layer.problem, 1, layer.quant)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (dict(num_experts=None), "num_local_experts"),
        (dict(moe_intermediate_size=30), "30"),
        (dict(hidden_act="tanh"), "'tanh'"),
        (dict(quantization_config=dict(quant_method="awq")), "awq"),
        (dict(num_experts="4"), "num_experts='4' is no integer"),
        (dict(num_experts=True), "num_experts=True"),
        (dict(moe_intermediate_size=0), "moe_intermediate_size=0"),
        (dict(moe_intermediate_size=[32, 32]), "moe_intermediate_size="),
        (dict(hidden_size=64.0), "hidden_size=64.0"),
        (dict(hidden_act=["silu"]), "activation .'silu'. is not known"),
        (dict(text_config=[1]), "text_config=.* is not an object"),
        (dict(quantization_config="fp8"), "quantization_config='fp8' is not an object"),
        (dict(quantization_config=dict(weight_block_size=128)), "weight_block_size=128"),
        (dict(quantization_config=dict(quant_method="compressed-tensors", config_groups=[1])), "config_groups="),
        (dict(quantization_config=dict(quant_method="compressed-tensors", config_groups=dict(a=1))), "a=1"),
        (dict(quantization_config=dict(quant_method="compressed-tensors", config_groups=dict(a={}))), "None None None"),
        (dict(quantization_config=dict(quant_method="fp8", weight_block_size=[64, 64])), "64"),
    ],
    ids=str,
)
def test_a_config_that_does_not_say_is_refused_with_what_is_missing(tmp_path, change, said):
    config = dict(hidden_size=64, moe_intermediate_size=32, num_experts=4, num_experts_per_tok=1)
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(ShapeError, match=said):
        model_config.read(tmp_path, 4)


@pytest.mark.parametrize(
    "text", ["[]", "null", "1", "", "{", "[" * 100_000, '{"a": 1, "a": 2}'], ids=lambda text: text[:9]
)
def test_a_config_that_is_no_object_is_refused(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ShapeError, match=r"config\.json"):
        model_config.read(tmp_path)


@pytest.mark.parametrize("ranks", [0, -1])
def test_no_rank_at_all_is_refused(tmp_path, ranks):
    with pytest.raises(ShapeError, match=f"tensor_parallel={ranks}: give at least 1"):
        model_config.read(tmp_path, ranks)


SMALL = dict(hidden_size=64, moe_intermediate_size=32, num_experts=4, num_experts_per_tok=1, num_hidden_layers=3)
BLOCKS = dict(quant_method="fp8", weight_block_size=[128, 128])
MODELOPT = dict(quant_method="modelopt", quant_algo="FP8")
ROOT = "model.layers.{}.mlp.experts"


def compressed(strategy="channel", targets=("Linear",), **weights):
    group = dict(targets=list(targets), weights=dict(type="float", num_bits=8, strategy=strategy, **weights))
    return dict(quant_method="compressed-tensors", config_groups=dict(group_0=group))


def layer(tmp_path, quant=None, **change):
    (tmp_path / "config.json").write_text(json.dumps({**SMALL, **change}))
    found = model_config.read(tmp_path, quant=quant)
    named_problem(found.problem, 1, found.quant)
    return found.problem.removeprefix("64,32,4,1"), found.quant


@pytest.mark.parametrize("module", [model_config, model_quant])
def test_docstring_examples(module):
    assert doctest.testmod(module).failed == 0


@pytest.mark.parametrize(
    ("change", "want"),
    [
        (dict(swiglu_limit=10.0), ",swiglu_clamp"),
        (dict(swiglu_limit=7), ",silu,limit=7"),
        (dict(swiglu_limit=None), ""),
        (dict(model_type="deepseek_v4"), ",swiglu_clamp"),
        (dict(model_type="deepseek_v4", swiglu_limit=None), ""),
        (dict(model_type="minimax_m3_vl_text", hidden_act="swigluoai"), ",swiglu_oai"),
        (dict(swiglu_limit=7.0, swiglu_alpha=1.702), ",swiglu_oai"),
        (dict(swiglu_limits=[0.0, None, 0]), ""),
        (dict(model_type="openai_privacy_filter"), ",swiglu_oai,bias"),
        (dict(model_type="nemotron_h"), ",relu2"),
        (dict(model_type="nemotron_h", mlp_hidden_act="silu"), ",silu/no-gate"),
    ],
    ids=str,
)
def test_the_activation_is_what_the_models_code_computes(tmp_path, change, want):
    assert layer(tmp_path, **change)[0] == want


def test_the_experts_of_a_latent_moe_see_the_latent_size(tmp_path):
    assert layer(tmp_path, moe_latent_size=16)[0] == "16,32,4,1"
    assert layer(tmp_path, moe_latent_size=None)[0] == ""


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (dict(swiglu_limit=0), "swiglu_limit=0 is no number above 0: give --problem"),
        (dict(swiglu_limit="10"), "swiglu_limit='10'"),
        (dict(swiglu_limit=True), "swiglu_limit=True"),
        (dict(swiglu_limit=10.0, mlp_hidden_act="relu2"), "mlp_hidden_act='relu2', swiglu_limit=10.0.*--problem"),
        (dict(swiglu_limit=7.0, swiglu_alpha=1.5, hidden_act="gelu"), "swiglu_alpha=1.5.*--problem"),
        (dict(swiglu_alpha=1.702), "swiglu_alpha=1.702 without swiglu_limit"),
        (dict(swiglu_limits=[0.0, 7.0]), r"swiglu_limits=\[0.0, 7.0\].*--problem"),
        (dict(hidden_act="swigluoai"), "hidden_act='swigluoai'.*--problem"),
        (dict(moe_latent_size=0), "moe_latent_size=0"),
        (dict(block_configs=[{"moe_intermediate_size": 8}]), "block_configs=.*layers differ"),
    ],
    ids=str,
)
def test_an_activation_or_size_that_no_layer_here_has_is_refused(tmp_path, change, said):
    with pytest.raises(ShapeError, match=said):
        layer(tmp_path, **change)


@pytest.mark.parametrize(
    ("change", "want"),
    [
        (dict(quantization_config=compressed("block", block_structure=[128, 128])), "fp8_block"),
        (dict(quantization_config=compressed("block", block_structure="128x128")), "fp8_block"),
        (dict(compression_config={**compressed(), "quant_method": None} | {"quant_method": "compressed-tensors"}),
         "fp8_channel"),
        (dict(text_config={**SMALL, "quantization_config": BLOCKS}), "fp8_block"),
        (dict(quantization_config=dict(producer={}, quantization=dict(quant_algo="FP8", exclude_modules=["lm_head"]))),
         "fp8_tensor"),
        (dict(expert_dtype="fp8", quantization_config=BLOCKS, model_type="deepseek_v4"), "fp8_block"),
        (dict(model_type="deepseek_v4", dtype="bfloat16"), "bf16"),
        (dict(torch_dtype="float16", text_config=SMALL), "fp16"),
        (dict(dtype="torch.bfloat16"), "bf16"),
        (dict(torch_dtype=None), "bf16"),
    ],
    ids=str,
)  # fmt: skip
def test_the_format_is_found_where_it_stands(tmp_path, change, want):
    assert layer(tmp_path, **change)[1] == want


def test_modelopts_older_file_beside_the_config_counts(tmp_path):
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(dict(quantization=dict(quant_algo="FP8"))))
    assert layer(tmp_path)[1] == "fp8_tensor"
    assert layer(tmp_path, quantization_config=BLOCKS)[1] == "fp8_block"
    (tmp_path / "hf_quant_config.json").write_text("{")
    with pytest.raises(ShapeError, match=r"hf_quant_config\.json is not JSON"):
        layer(tmp_path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (dict(expert_dtype="fp4", quantization_config=BLOCKS), "expert_dtype='fp4'"),
        (dict(quantization_config={**BLOCKS, "expert_dtype": "fp4"}), "expert_dtype='fp4'"),
        (dict(model_type="deepseek_v4", quantization_config=BLOCKS), "no expert_dtype"),
        (dict(expert_dtype="fp8"), "expert_dtype='fp8'"),
        (dict(quantization_config={**BLOCKS, "moe_quant_algo": "NVFP4"}), "moe_quant_algo='NVFP4'"),
        (dict(quantization_config={**BLOCKS, "store_dtype": "mxfp4"}), "store_dtype='mxfp4'"),
        (dict(quantization_config={**BLOCKS, "fmt": "e5m2"}), "quantization_config.fmt='e5m2'"),
        (dict(quantization_config={**BLOCKS, "quant_method": "mxfp8"}), "quant_method='mxfp8'"),
        (dict(quantization_config=dict(quant_method="modelopt")), "quant_method='modelopt'"),
        (dict(quantization_config={**MODELOPT, "quant_algo": "MIXED_PRECISION"}), "quant_algo='MIXED_PRECISION'"),
        (dict(quantization_config=compressed("block", block_structure=[64, 128])), r"block_structure=\[64, 128\]"),
        (dict(quantization_config=compressed("block")), "block_structure=None"),
        (dict(quantization_config=dict(quant_method="compressed-tensors", config_groups=dict(a=dict(
            weights=dict(type="float", num_bits=8, strategy="channel"), input_activations=None)))),
         "input_activations=None"),
        (dict(quantization_config=dict(quant_method="compressed-tensors")), "'no kind'"),
        (dict(quantization_config={**BLOCKS, "ignored_layers": "experts"}), "ignored_layers='experts' is no list"),
        (dict(quantization_config={**BLOCKS, "ignored_layers": [1]}), r"ignored_layers=\[1\]"),
        (dict(quantization_config={**compressed(), "ignore": ["re:*experts"]}), "'re:.experts' is no regular"),
        (dict(quantization_config={**BLOCKS, "modules_to_not_convert": [ROOT.format(1)]}),
         "modules_to_not_convert leaves the experts of 1 of 3 layers .layer 1, not layer 0. unquantised"),
        (dict(quantization_config=compressed(targets=[r"re:.*layers\.0\..*experts.*"])), "targets=.*1 of 3 layers"),
        (dict(torch_dtype="float32"), "torch_dtype='float32'"),
        (dict(dtype="float8_e4m3fn"), "dtype='float8_e4m3fn' is none of"),
        (dict(dtype=16), "dtype=16"),
    ],
    ids=str,
)  # fmt: skip
def test_a_format_that_is_none_here_is_refused_unless_one_is_given(tmp_path, change, said):
    with pytest.raises(ShapeError, match=f"{said}.*give the format with --quant"):
        layer(tmp_path, **change)
    assert layer(tmp_path, quant="fp8_block", **change)[1] == "fp8_block"


EVERY = [ROOT.format(index) for index in range(3)]


@pytest.mark.parametrize(
    ("config", "names"),
    [
        (compressed(), ["lm_head", r"re:.*mlp\.experts.*"]),
        (compressed(), [r"re:.*\.experts\.[0-9]+\.(gate|up|down)_proj$"]),
        (compressed(), [f"{each}.{expert}.{part}" for each in EVERY for expert in range(4)
                        for part in ("gate_proj", "up_proj", "down_proj")]),
        (compressed(targets=["re:.*self_attn.*"]), []),
        (BLOCKS, EVERY),
        (BLOCKS, ["experts"]),
        (BLOCKS, ["mlp.experts"]),
        (BLOCKS, [r"model\.layers\.\d+\.mlp\.experts"]),
        (MODELOPT, ["*.experts.*"]),
        (MODELOPT, ["*mlp.experts*"]),
        (MODELOPT, ["backbone.layers.*.mixer.experts*"]),
        (MODELOPT, [f"{each}*" for each in EVERY]),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("key", ["ignore", "modules_to_not_convert", "ignored_layers", "exclude_modules"])
def test_experts_that_quantisation_leaves_out_are_as_the_dtype_says(tmp_path, config, names, key):
    assert layer(tmp_path, quantization_config={**config, key: names}, dtype="float16")[1] == "fp16"


@pytest.mark.parametrize(
    "names",
    [
        [],
        ["lm_head", "gate", "mlp.gate", "model.layers.0.mlp.gate", "model.layers.0.mlp", "re:.*gate_proj"],
        ["model.layers.0.mlp.shared_experts", "shared_experts", "model.layers.1.mlp.shared_experts.up_proj"],
        ["re:.*mlp.gate$", "re:.*shared_expert.*", r"re:.*mlp\.(?!experts).*", "re:.*gate.*", "re:.*self_attn.*"],
        [r"re:model\.layers\.0\..*", "*shared_experts*", "model.layers.0.*", "vision_tower*", "*self_attn*"],
        ["mtp.layers.0.mlp.experts", "model.layers.3.mlp.experts"],
    ],
    ids=str,
)
def test_other_modules_that_are_left_out_change_nothing(tmp_path, names):
    config = compressed()
    assert layer(tmp_path, quantization_config={**config, "ignore": names})[1] == "fp8_channel"
    assert layer(tmp_path, quantization_config={**MODELOPT, "ignore": names})[1] == "fp8_tensor"


def test_the_first_layers_of_a_model_may_have_no_experts(tmp_path):
    config = dict(quantization_config={**BLOCKS, "modules_to_not_convert": EVERY[1:]}, dtype="bfloat16")
    assert layer(tmp_path, first_k_dense_replace=1, **config)[1] == "bf16"


def test_the_group_that_names_the_experts_comes_before_the_one_of_all_linear_layers(tmp_path):
    config = compressed("tensor")
    config["config_groups"]["group_1"] = compressed("channel", ["re:.*experts.*"])["config_groups"]["group_0"]
    assert layer(tmp_path, quantization_config=config)[1] == "fp8_channel"
    config["config_groups"]["group_1"]["targets"] = ["re:.*self_attn.*"]
    assert layer(tmp_path, quantization_config=config)[1] == "fp8_tensor"


def test_many_names_of_experts_are_read_in_no_time(tmp_path):
    names = [f"model.layers.{index}.mlp.experts.{expert}.up_proj" for index in range(60) for expert in range(256)]
    patterns = [rf"re:.*layers\.{index}\.self_attn\..*" for index in range(500)]
    config = {**compressed(), "ignore": [*patterns, *names]}
    assert layer(tmp_path, num_hidden_layers=60, quantization_config=config)[1] == "bf16"
