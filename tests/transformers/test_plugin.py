"""Tiny random models: the logits and the text of transformers' own experts, from ours."""

from __future__ import annotations

import copy

import pytest

transformers = pytest.importorskip("transformers", minversion="5.17", reason="needs the extra `transformers`, 5.17")
torch = pytest.importorskip("torch")

from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS  # noqa: E402
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS  # noqa: E402

from expertile.errors import ShapeError, UnsupportedProblem  # noqa: E402
from expertile.plugins.transformers import NAMES, register, use  # noqa: E402
from expertile.problem import Quant  # noqa: E402

SIZES = dict(
    vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=128, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
MLA = dict(q_lora_rank=32, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16)


def qwen3_moe():
    return transformers.Qwen3MoeConfig(**SIZES, moe_intermediate_size=48, num_experts=8, num_experts_per_tok=2)


def mixtral():
    return transformers.MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2)


def olmoe():
    return transformers.OlmoeConfig(**SIZES, num_experts=8, num_experts_per_tok=2)


def deepseek_v3():
    sizes = {key: value for key, value in SIZES.items() if key != "head_dim"}
    return transformers.DeepseekV3Config(
        **sizes, **MLA, moe_intermediate_size=48, n_routed_experts=16, num_experts_per_tok=4, n_group=4, topk_group=2,
        first_k_dense_replace=1, n_shared_experts=1,
    )  # fmt: skip


def gpt_oss():
    return transformers.GptOssConfig(
        **SIZES, num_local_experts=8, num_experts_per_tok=2, layer_types=["full_attention"] * 2
    )


def llama4():
    return transformers.Llama4TextConfig(
        **SIZES, intermediate_size_mlp=96, num_local_experts=4, num_experts_per_tok=1, interleave_moe_layer_step=1,
        attn_temperature_tuning=False,
    )  # fmt: skip


MODELS = {f.__name__: f for f in (qwen3_moe, mixtral, olmoe, deepseek_v3, gpt_oss, llama4)}


def make_model(name: str):
    torch.manual_seed(0)
    make = transformers.Llama4ForCausalLM if name == "llama4" else transformers.AutoModelForCausalLM.from_config
    model = make(MODELS[name]()).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.1)
    return model


@pytest.fixture(scope="module", params=MODELS)
def stock(request):
    return make_model(request.param)


@pytest.fixture
def ours(stock):
    return use(copy.deepcopy(stock))


def prompt():
    return torch.randint(3, 128, (2, 17), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def logits_of(model):
    return model(prompt()).logits.flatten(0, 1).double()


def token_errors(found, want):
    return (found - want).norm(dim=1) / want.norm(dim=1)


def test_the_same_logits_in_fp32(stock, ours):
    assert token_errors(logits_of(ours), logits_of(stock)).max() < 1e-5


def test_the_same_text(stock, ours):
    options = dict(max_new_tokens=12, do_sample=False)
    assert torch.equal(ours.generate(prompt(), **options), stock.generate(prompt(), **options))


def test_in_bf16_no_further_from_fp32_than_stock(stock, ours):
    """Over most tokens: where two router logits are close, either may send a token elsewhere."""
    rounded = copy.deepcopy(stock).bfloat16()
    want = logits_of(copy.deepcopy(rounded).float())
    found = logits_of(ours.bfloat16())
    bar = 1.5 * token_errors(logits_of(rounded), want).median() + 1e-4
    assert token_errors(found, want).median() <= bar


@pytest.mark.parametrize("quant", ["fp8_tensor", "fp8_channel", "fp8_block"])
def test_experts_quantised_on_first_use(stock, quant):
    model = use(copy.deepcopy(stock), quant)
    error = token_errors(logits_of(model), logits_of(stock)).median()
    assert 1e-4 < error < 0.1
    described = [
        value for module in model.modules() for value in module.__dict__.get("_expertile_weights", {}).values()
    ]
    assert described and all(weights.quant.value == quant for _, weights in described)


def test_a_gradient_is_refused_and_not_left_out(ours):
    logits = ours(prompt()).logits
    with pytest.raises(UnsupportedProblem, match="no backward pass"):
        logits.sum().backward()


def test_a_router_that_is_trained_alone_is_refused_its_gradient_too(ours):
    """Its weight reaches the loss through the experts' output alone: it would stand still, unnoticed."""
    routers = [part for part, _ in ours.named_parameters() if ".router." in part or ".gate.weight" in part]
    assert routers
    for part, parameter in ours.named_parameters():
        parameter.requires_grad_(part in routers)
    logits = ours(prompt()).logits
    with pytest.raises(UnsupportedProblem, match="no backward pass"):
        logits.sum().backward()


def test_llama4_reports_its_router_logits_as_before():
    """They come from inside the block whose forward is replaced."""
    stock = make_model("llama4")
    a, b = (
        model.model(prompt(), output_router_logits=True).router_logits for model in (stock, use(copy.deepcopy(stock)))
    )
    assert len(a) == len(b) == 2
    assert all(torch.allclose(x[-1], y[-1], atol=1e-5) for x, y in zip(a, b, strict=True))


def test_register_is_idempotent_and_known_to_both_interfaces():
    register()
    register()
    for name in NAMES:
        assert name in ALL_EXPERTS_FUNCTIONS and name in ALL_FP8_EXPERTS_FUNCTIONS
    assert set(NAMES) == {"expertile", *(f"expertile_{q.value}" for q in Quant if q is not Quant.NONE)}
    assert ALL_EXPERTS_FUNCTIONS["grouped_mm"] is not ALL_FP8_EXPERTS_FUNCTIONS["grouped_mm"]  # stock ones are left


def test_the_name_is_taken_by_from_config():
    register()
    model = transformers.AutoModelForCausalLM.from_config(mixtral(), experts_implementation="expertile")
    assert model.config._experts_implementation == "expertile"
    assert logits_of(model.eval()).isfinite().all()


def test_what_cannot_be_switched_is_refused():
    dense = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    with pytest.raises(UnsupportedProblem, match="LlamaForCausalLM has no experts"):
        use(dense)
    with pytest.raises(ShapeError, match="quant='int4' is not known"):
        use(dense, "int4")
    config = llama4()
    config.num_experts_per_tok = 2
    with pytest.raises(UnsupportedProblem, match="top_k=2"):
        use(transformers.Llama4ForCausalLM(config))
