"""What is read of a config.json beside what transformers makes of it: the experts' sizes, what their code computes."""

from importlib import import_module

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from expertile import reference  # noqa: E402
from expertile.policy import model_config  # noqa: E402
from expertile.problem import named_problem  # noqa: E402

SIZES = dict(
    hidden_size=48, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, num_experts_per_tok=2,
    moe_intermediate_size=24, intermediate_size=24,
)  # fmt: skip
MODELS = {
    "deepseek_v4": ("DeepseekV4Config", "DeepseekV4Experts", dict(n_routed_experts=4, swiglu_limit=3.0)),
    "hy_v4": ("HYV4Config", "HYV4Experts", dict(n_routed_experts=4)),
    "glm5_next": ("Glm5NextTextConfig", "Glm5NextTextExperts", dict(n_routed_experts=4)),
    "minimax_m3_vl": ("MiniMaxM3VLTextConfig", "MiniMaxM3VLExperts", dict(num_local_experts=4)),
    "openai_privacy_filter": ("OpenAIPrivacyFilterConfig", "OpenAIPrivacyFilterExperts", dict(num_local_experts=4)),
    "gpt_oss": ("GptOssConfig", "GptOssExperts", dict(num_local_experts=4)),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeExperts", dict(num_experts=4)),
    "nemotron_h": ("NemotronHConfig", "NemotronHExperts", dict(n_routed_experts=4, moe_latent_size=16)),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_layer_is_read_as_transformers_computes_it(tmp_path, name):
    folder = f"transformers.models.{name}"
    kind, experts, sizes = MODELS[name]
    configuration = import_module(f"{folder}.configuration_{name}")
    modeling = import_module(f"{folder}.modeling_{name}")
    if not hasattr(configuration, kind):
        pytest.skip(f"this transformers has no {kind}")
    config = getattr(configuration, kind)(**{**SIZES, **sizes})
    config.save_pretrained(tmp_path)
    problem = named_problem(model_config.read(tmp_path).problem, 1)
    made = getattr(modeling, experts)(config)
    shapes = {key: tuple(value.shape) for key, value in made.named_parameters()}
    up = "gate_up_proj" if problem.activation.gated else "up_proj"
    transposed = made.is_transposed
    w13, w2 = (shapes[key][:0:-1] if transposed else shapes[key][1:] for key in (up, "down_proj"))
    assert (shapes[up][0], *w13) == (problem.experts, problem.w13_rows, problem.hidden)
    assert w2 == (problem.hidden, problem.inter)
    assert problem.bias == (f"{up}_bias" in shapes)
    assert problem.top_k == config.num_experts_per_tok
    gate_up = torch.linspace(-20, 20, 5 * problem.w13_rows, dtype=torch.float64).reshape(5, -1)
    gate_up = gate_up[:, torch.randperm(problem.w13_rows, generator=torch.Generator().manual_seed(0))]
    want = made._apply_gate(gate_up) if problem.activation.gated else made.act_fn(gate_up)
    torch.testing.assert_close(reference.activate(gate_up, problem.activation), want)
