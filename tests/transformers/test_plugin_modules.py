"""Experts modules by themselves: which gates are known, when weights are described anew, FP8Experts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("transformers", minversion="5.17", reason="needs the extra `transformers`, 5.17")
torch = pytest.importorskip("torch")

from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS, FP8Experts  # noqa: E402
from transformers.integrations.moe import grouped_mm_experts_forward, use_experts_implementation  # noqa: E402
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Experts  # noqa: E402
from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLExperts  # noqa: E402
from transformers.models.mixtral.modeling_mixtral import MixtralExperts  # noqa: E402
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts  # noqa: E402
from transformers.models.openai_privacy_filter import modeling_openai_privacy_filter  # noqa: E402
from transformers.models.step3p7.modeling_step3p7 import Step3p7Experts  # noqa: E402

from expertile import reference  # noqa: E402
from expertile.errors import UnsupportedProblem  # noqa: E402
from expertile.plugins.transformers import experts_forward, register, weights_of  # noqa: E402
from expertile.problem import Quant  # noqa: E402

OpenAIPrivacyFilterExperts = modeling_openai_privacy_filter.OpenAIPrivacyFilterExperts


def token_errors(found, want):
    return (found - want).norm(dim=1) / want.norm(dim=1)


def module_of(experts_class, seed: int = 0, dtype=torch.float32, **config):
    defaults = dict(
        num_experts=4, num_local_experts=4, n_routed_experts=4, hidden_size=64, intermediate_size=48,
        moe_intermediate_size=48, moe_latent_size=None, hidden_act="silu", mlp_hidden_act="relu2", swiglu_limit=None,
        swiglu_alpha=1.702, _experts_implementation="grouped_mm",
    )  # fmt: skip
    module = experts_class(SimpleNamespace(**defaults | config))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return module.to(dtype)


def routed(tokens: int = 9, top_k: int = 2, experts: int = 4, hidden: int = 64, dtype=torch.float32):
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(tokens, hidden, generator=generator).to(dtype)
    ids = torch.rand(tokens, experts, generator=generator).argsort(1)[:, :top_k]
    return x, ids, torch.rand(tokens, top_k, generator=generator).to(dtype)


@pytest.mark.parametrize(
    "experts_class, config, name",
    [
        (MixtralExperts, dict(hidden_act="silu"), "silu"),
        (MixtralExperts, dict(hidden_act="gelu"), "gelu_erf"),
        (MixtralExperts, dict(hidden_act="gelu_pytorch_tanh"), "gelu_tanh"),
        (MixtralExperts, dict(hidden_act="quick_gelu"), None),
        (NemotronHExperts, {}, "relu2"),
        (DeepseekV4Experts, dict(swiglu_limit=10.0), "swiglu_clamp"),
        (DeepseekV4Experts, dict(swiglu_limit=100.0), "silu,limit=100"),
        (MiniMaxM3VLExperts, dict(swiglu_limit=7.0), "swiglu_oai"),
        (OpenAIPrivacyFilterExperts, {}, "swiglu_oai"),
    ],
)
def test_a_gate_is_recognised_by_what_it_computes(experts_class, config, name):
    module = module_of(experts_class, **config)
    if name is None:
        with pytest.raises(UnsupportedProblem, match=f"{experts_class.__name__} computes a gate"):
            weights_of(module)
        return
    assert weights_of(module).activation.name == name
    with torch.no_grad():
        want, found = grouped_mm_experts_forward(module, *routed()), experts_forward(module, *routed())
    assert token_errors(found.double(), want.double()).max() < 1e-5


def test_a_gate_that_is_clamped_after_the_activation_is_refused():
    """Step-3.7 clamps silu(gate), not gate; the attribute is called `limit` all the same."""
    module = module_of(Step3p7Experts)
    module.limit = 7.0
    with pytest.raises(UnsupportedProblem, match=r"Step3p7Experts computes a gate .* limit=\[7.0\]"):
        weights_of(module)


def test_a_changed_gate_is_refused():
    """A subclass that overrides _apply_gate under a known name is not taken for the original."""

    class MixtralExpertsOfMine(MixtralExperts):
        def _apply_gate(self, gate_up):
            gate, up = gate_up.chunk(2, dim=-1)
            return self.act_fn(gate) * (up + 0.5)

    with pytest.raises(UnsupportedProblem, match="MixtralExpertsOfMine"):
        weights_of(module_of(MixtralExpertsOfMine))


def test_ids_of_experts_elsewhere_contribute_nothing():
    """With expert parallelism transformers marks them by id == num_experts."""
    module = module_of(MixtralExperts)
    x, ids, probs = routed()
    ids[0], ids[1, 1] = 4, 4
    with torch.no_grad():
        want, found = (f(module, x, ids, probs) for f in (grouped_mm_experts_forward, experts_forward))
    assert (found[0] == 0).all() and torch.allclose(found, want, atol=1e-5)


@pytest.mark.parametrize("tokens", [0, 1])
def test_few_tokens(tokens):
    module = module_of(MixtralExperts)
    assert experts_forward(module, *routed(tokens)).shape == (tokens, 64)


def test_x_in_another_dtype_than_the_weights():
    """As under autocast: computed in the weights' dtype, given back in x's."""
    module = module_of(MixtralExperts, dtype=torch.bfloat16)
    x, ids, probs = routed()
    with torch.no_grad():
        found = experts_forward(module, x, ids, probs)
        same = experts_forward(module, x.bfloat16(), ids, probs)
    assert found.dtype == torch.float32 and torch.equal(found, same.float())


def test_weights_are_described_once_and_again_when_they_change():
    module = module_of(MixtralExperts)
    first = weights_of(module)
    assert weights_of(module) is first and first.w13.data_ptr() == module.gate_up_proj.data_ptr()
    quantised = weights_of(module, Quant.FP8_CHANNEL)
    assert weights_of(module, Quant.FP8_CHANNEL) is quantised and weights_of(module) is first
    with torch.no_grad():
        module.down_proj.mul_(2)
    again = weights_of(module, Quant.FP8_CHANNEL)
    assert again is not quantised and torch.allclose(again.w2_scale, quantised.w2_scale * 2)
    module.load_state_dict({key: value * 3 for key, value in module.state_dict().items()})
    assert weights_of(module, Quant.FP8_CHANNEL) is not again
    x, ids, probs = routed()
    with torch.no_grad():
        module.gate_up_proj = torch.nn.Parameter(module.gate_up_proj * 0)
        assert (experts_forward(module, x, ids, probs) == 0).all()


def test_transposed_weights_are_not_copied():
    module = module_of(OpenAIPrivacyFilterExperts)
    weights = weights_of(module)
    assert weights.w13.data_ptr() == module.gate_up_proj.data_ptr() and weights.w13.shape == (4, 96, 64)


def fp8_module(block_size, scheme="dynamic", inter: int = 96, gate_scale: float = 1.0, **config):
    """FP8Experts as from_pretrained makes it, with random weights and scales that differ from place to place."""
    experts_class = use_experts_implementation(FP8Experts, experts_interface=ALL_FP8_EXPERTS_FUNCTIONS)
    config = SimpleNamespace(
        hidden_size=192, num_local_experts=4, moe_intermediate_size=inter, hidden_act="silu",
        _experts_implementation="expertile", **config,
    )  # fmt: skip
    module = experts_class(config, block_size=block_size, activation_scheme=scheme)
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.dtype == torch.float8_e4m3fn:
                parameter.copy_((torch.randn(parameter.shape) * 60).to(torch.float8_e4m3fn))
            elif name.endswith("scale_inv"):
                parameter.copy_(2.0 ** torch.randint(-11, -8, parameter.shape))
        if block_size is None:
            module.gate_up_proj_scale_inv[:, 0] = gate_scale * module.gate_up_proj_scale_inv[:, 1]
    return module


def by_hand(module, x, ids, probs, block_size, static=(None, None)):
    """FP8Experts.forward in float64, from its parameters."""
    rows = 128 if block_size else None

    def spread(scale, shape):
        step = [rows or -(-shape[0] // scale.shape[0]), rows or shape[1]]
        return scale.repeat_interleave(step[0], 0)[: shape[0]].repeat_interleave(step[1], 1)[:, : shape[1]].double()

    def linear(values, w, scale, given):
        kind = Quant.FP8_BLOCK if block_size else Quant.FP8_TENSOR
        values = reference.dequantize(*reference.quantize(values, kind, given))
        return values @ (w.double() * spread(scale, w.shape)).T

    out = torch.zeros_like(x, dtype=torch.float64)
    for token in range(len(x)):
        for expert, prob in zip(ids[token].tolist(), probs[token], strict=True):
            up = linear(
                x[token : token + 1], module.gate_up_proj[expert], module.gate_up_proj_scale_inv[expert], static[0]
            )
            h = module._apply_gate(up).to(x.dtype)
            out[token] += (
                prob.double() * linear(h, module.down_proj[expert], module.down_proj_scale_inv[expert], static[1])[0]
            )
    return out


@pytest.mark.parametrize(
    "block_size, gate_scale, quant",
    [((128, 128), 1.0, "fp8_block"), (None, 1.0, "fp8_tensor"), (None, 4.0, "fp8_channel")],
)
@pytest.mark.parametrize("config", [{}, dict(swiglu_alpha=1.702, swiglu_limit=7.0), dict(swiglu_limit=10.0)])
@torch.no_grad()
def test_fp8_experts(block_size, gate_scale, quant, config):
    register()
    module = fp8_module(block_size, gate_scale=gate_scale, **config)
    x, ids, probs = routed(hidden=192, dtype=torch.bfloat16)
    want = by_hand(module, x, ids, probs, block_size)
    found = module(x, ids, probs)
    assert weights_of(module, dtype=torch.bfloat16).quant.value == quant
    assert found.dtype == torch.bfloat16 and token_errors(found.double(), want).max() < 1e-2


@torch.no_grad()
def test_fp8_experts_with_static_activation_scales():
    module = fp8_module(None, "static")
    module.gate_up_proj_activation_scale.fill_(0.01)
    module.down_proj_activation_scale.fill_(0.05)
    x, ids, probs = routed(hidden=192, dtype=torch.bfloat16)
    want = by_hand(module, x, ids, probs, None, (torch.tensor(0.01), torch.tensor(0.05)))
    assert token_errors(experts_forward(module, x, ids, probs).double(), want).max() < 1e-2


def test_fp8_experts_that_cannot_be_served_say_why():
    x, ids, probs = routed(hidden=192, dtype=torch.bfloat16)
    own_scales = fp8_module(None, "static")
    own_scales.gate_up_proj_activation_scale.data[1] = 2.0
    for module, quant, words in (
        (own_scales, Quant.NONE, "gate_up_proj_activation_scale is 1 to 2"),
        (fp8_module((64, 64)), Quant.NONE, r"block_size=\(64, 64\)"),
        (fp8_module((128, 128), "static"), Quant.NONE, "static activation scales with fp8_block"),
        (fp8_module((128, 128)), Quant.FP8_TENSOR, "stored as fp8_block and is not quantised anew"),
        (fp8_module((128, 128), expert_dtype="fp4"), Quant.NONE, "packed 4-bit"),
    ):
        with pytest.raises(UnsupportedProblem, match=words):
            experts_forward(module, x, ids, probs, quant=quant)
