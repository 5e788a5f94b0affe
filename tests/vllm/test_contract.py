"""vLLM still is what the plugin takes it for: every claim of contract.py on the real source of each version."""

from __future__ import annotations

import pytest

from .contract import CLAIMS, KERNEL, MOE, QUANT
from .fetch import DONE, FOLDER, VERSIONS
from .source import Tree

FETCHED = sorted(path.parent.name for path in FOLDER.glob(f"*/{DONE}") if path.parent.name[0].isdigit())


@pytest.fixture(scope="session")
def trees():
    return {version: Tree(FOLDER / version, version) for version in FETCHED}


@pytest.mark.parametrize("claim", CLAIMS)
@pytest.mark.parametrize("version", sorted({*VERSIONS, *FETCHED}))
def test_vllm(version, claim, trees):
    if version not in trees:
        pytest.skip(f"needs vLLM {version}'s Python files: python tests/vllm/fetch.py (network)")
    CLAIMS[claim](trees[version])


NEW_ABSTRACT = (
    "@abstractmethod\n    def also(self): ...\n\n    @abstractmethod\n    def finalize_weight_and_reduce_impl("
)
CHANGES = [
    (KERNEL, "a1q_scale: torch.Tensor | None,\n        a2_scale", "a1q_scales: torch.Tensor | None,\n        a2_scale",
     "experts_are_made_and_called_like_this"),
    (MOE + "routed_experts.py", "def _get_quant_method(", "def _choose_quant_method(",
     "the_method_is_chosen_before_sizes_and_weights"),
    (MOE + "oracle/fp8.py", "TRITON = ", "TRITON_V2 = ", "the_triton_backends_convert_nothing"),
    (QUANT + "fp8.py", "self.experts_cls = select", "self.kernel_cls = select", "fp8_checkpoint_method"),
    (QUANT + "modelopt.py", "class ModelOptFp8MoEMethod", "class ModelOptFp8Experts", "modelopt_fp8_method"),
    (MOE + "activation.py", '"relu2_no_mul"', '"relu_squared"', "activations_are_called_what_we_call_them"),
    (MOE + "config.py", "has_bias: bool", "with_bias: bool", "configurations_have_what_we_read"),
    (KERNEL, "def finalize_weight_and_reduce_impl(", NEW_ABSTRACT,
     "we_define_every_abstract_method"),
    ("vllm/envs.py", "in environment_variables.items():", "in hashed_variables.items():",
     "the_compile_cache_hashes_every_variable_that_vllm_knows"),
    (MOE + "prepare_finalize/no_dp_ep.py", "a1 = a1 * topk_weights", "a1q = a1 * topk_weights",
     "router_weights_on_the_input_are_multiplied_in_by_vllm"),
    (MOE + "prepare_finalize/no_dp_ep.py", "            output=output,\n", "            output=None,\n",
     "around_the_experts_alone_nothing_is_done"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "old", "new", "claim"), CHANGES, ids=[change[3] for change in CHANGES])
def test_a_change_of_vllm_fails_by_name(path, old, new, claim):
    version = "0.26.0"
    if version not in FETCHED:
        pytest.skip(f"needs vLLM {version}'s Python files: python tests/vllm/fetch.py (network)")
    with pytest.raises(AssertionError):
        CLAIMS[claim](Tree(FOLDER / version, version, {path: (old, new)}))
