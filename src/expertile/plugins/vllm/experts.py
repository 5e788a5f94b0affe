"""vLLM's interface of modular experts, over our plans: x and the router's choice in, the weighted sum out.

x comes as it is (expects_unquantized_inputs): the launch that sorts the routed rows quantises it. Scratch memory is
vLLM's second workspace; the first shares memory with the output in some versions and is not asked for.

Around them vLLM prepares tokens for other ranks, lends a piece of its workspace for the result and copies that to the
layer's output. Where there are no other ranks nothing of it is needed: `call_experts_alone` writes the output at once.
"""

from __future__ import annotations

import torch
import vllm.envs as envs
from vllm.model_executor.layers.fused_moe import modular_kernel as mk
from vllm.model_executor.layers.fused_moe.prepare_finalize.no_dp_ep import MoEPrepareAndFinalizeNoDPEPModular
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP
from vllm.model_executor.layers.quantization.utils import quant_utils as keys
from vllm.platforms import current_platform
from vllm.v1.worker.workspace import current_workspace_manager

from ...errors import ShapeError, UnsupportedProblem
from ...plans import ALIGN
from ...problem import Activation, Problem
from ...runtime.device import detect
from ...runtime.execute import run
from ...runtime.workspace import Workspace
from ...weights import NAMES, Weights
from .formats import ACTIVATIONS, UNINTERLEAVED, activation_of
from .layer_weights import quant_of, weights_of
from .planner import Planner, planner
from .sealing import Seal

SCHEMES = (
    (None, None),
    (keys.kFp8StaticTensorSym, keys.kFp8StaticTensorSym),
    (keys.kFp8StaticTensorSym, keys.kFp8DynamicTensorSym),
    (keys.kFp8StaticTensorSym, keys.kFp8DynamicTokenSym),
    (keys.kFp8StaticChannelSym, keys.kFp8DynamicTokenSym),
    (keys.kFp8Static128BlockSym, keys.kFp8Dynamic128Sym),
)


class ExpertileExperts(mk.FusedMoEExpertsModular):
    """One layer's experts.

    weights   what the last call read; a call with other tensors describes them anew (`prepare`)
    seal      looked at in every call; none in experts that Elastic EP makes
    """

    def __init__(self, moe_config, quant_config, max_num_tokens=None, num_dispatchers=None):
        super().__init__(moe_config, quant_config, max_num_tokens, num_dispatchers)
        self.weights: Weights | None = None
        self.seal: Seal | None = None
        self._planners: dict[tuple[int, int], Planner] = {}

    @staticmethod
    def activation_format():
        return mk.FusedMoEActivationFormat.Standard

    @property
    def expects_unquantized_inputs(self) -> bool:
        return True

    @staticmethod
    def _supports_current_device() -> bool:
        return current_platform.is_cuda() and current_platform.is_device_capability(90)

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return True

    @staticmethod
    def _supports_quant_scheme(weight_key, activation_key) -> bool:
        return (weight_key, activation_key) in SCHEMES

    @staticmethod
    def _supports_activation(activation) -> bool:
        return activation.value in ACTIVATIONS or activation.value == UNINTERLEAVED

    @staticmethod
    def _supports_parallel_config(moe_parallel_config) -> bool:
        """Tokens come by all-gather or not at all: other ways quantise or sort them before we see them."""
        p = moe_parallel_config
        if getattr(p, "use_passthrough_all2all", False):
            return False
        return p.use_ag_rs_all2all_kernels or not p.use_all2all_kernels

    @staticmethod
    def _supports_routing_method(routing_method, weight_key, activation_key) -> bool:
        return True  # vLLM routes

    @staticmethod
    def _supports_router_logits_dtype(router_logits_dtype, routing_method) -> bool:
        return True

    @staticmethod
    def _supports_hash_routing() -> bool:
        return False

    @staticmethod
    def _supports_shape(hidden_dim: int) -> bool:
        return True

    @staticmethod
    def _supports_batch_invariance() -> bool:
        return False  # tiles, and so the order of additions, change with the number of tokens

    @staticmethod
    def supports_lora() -> bool:
        return False

    def finalize_weight_and_reduce_impl(self):
        return TopKWeightAndReduceNoOP()

    def prepare(self, w13, w2) -> Weights:
        """The layer's Weights, described now. ShapeError names what does not fit."""
        c = self.moe_config
        weights = weights_of(w13, w2, self.quant_config, self._activation(), c.in_dtype)
        found = weights.problem(1, c.experts_per_token, total_experts=c.num_experts)
        said = self.problem(c.experts_per_token, c.num_experts)
        if found != said:
            raise ShapeError(
                f"weights are {found.experts} experts of {found.hidden}x{found.inter}, vLLM's configuration says "
                f"{said.experts} of {said.hidden}x{said.inter}: {found} is not {said}"
            )
        self.weights = weights
        return weights

    def _activation(self) -> Activation:
        c = self.moe_config
        return activation_of(c.activation.value, c.swiglu_limit, c.swiglu_alpha, c.swiglu_beta)

    def problem(self, top_k: int, total_experts: int) -> Problem:
        """This layer's, of one token, out of vLLM's configurations.

        Not out of the weights: Elastic EP makes new experts, whose workspace is asked for before they are called.
        """
        c, quant = self.moe_config, self.quant_config
        return Problem(
            tokens=1,
            hidden=c.hidden_dim,
            inter=c.intermediate_size_per_partition,
            experts=c.num_local_experts,
            top_k=top_k,
            dtype=NAMES[c.in_dtype],
            quant=quant_of(quant),
            activation=self._activation(),
            static_scale=quant.a1_scale is not None,
            bias=quant.w1_bias is not None,
            total_experts=total_experts,
        )

    def planner(self, top_k: int, total_experts: int) -> Planner:
        """What this layer's calls need."""
        key = (top_k, total_experts)
        if key not in self._planners:
            self._planners[key] = planner(self.problem(top_k, total_experts), detect(self.moe_config.device))
        return self._planners[key]

    def workspace_shapes(
        self, M, N, K, topk, global_num_experts, local_num_experts, expert_tokens_meta, activation
    ):  # fmt: skip
        """Nothing in the first, ours is the second."""
        memory = self.memory_bytes(M, topk, global_num_experts)
        return (0,), (-(-memory // self.moe_config.in_dtype.itemsize),), (M, K)

    def memory_bytes(self, tokens: int, top_k: int, total_experts: int) -> int:
        """A plan's buffers, then room for ids and weights in our dtypes."""
        return self.planner(top_k, total_experts).bytes(tokens) + 2 * _room(tokens, top_k)

    def apply(
        self, output, hidden_states, w1, w2, topk_weights, topk_ids, activation, global_num_experts, expert_map,
        a1q_scale, a2_scale, workspace13, workspace2, expert_tokens_meta, apply_router_weight_on_input,
    ) -> None:  # fmt: skip
        """output[t] = sum over j of topk_weights[t, j] * experts[topk_ids[t, j]](hidden_states[t]).

        Router weights on the input have been multiplied in by vLLM's prepare step: here they are ones.
        """
        self.write(
            output, hidden_states, w1, w2, topk_weights, topk_ids, global_num_experts, expert_map,
            workspace2.view(torch.uint8), a1q_scale, apply_router_weight_on_input,
        )  # fmt: skip

    def write(
        self, output, x, w1, w2, topk_weights, topk_ids, global_num_experts, expert_map, memory, a1q_scale=None,
        weights_are_ones=False,
    ) -> None:  # fmt: skip
        """`apply` with `memory` uint8 of memory_bytes."""
        if a1q_scale is not None or x.dtype != self.moe_config.in_dtype or not x.is_contiguous():
            scaled = "" if a1q_scale is None else " and a scale"
            raise UnsupportedProblem(
                f"hidden_states came as {x.dtype} with strides {x.stride()}{scaled}: expertile needs contiguous "
                f"{self.moe_config.in_dtype} and quantises them itself"
            )
        weights = self.weights
        if weights is None or weights.w13 is not w1 or weights.w2 is not w2:
            weights = self.prepare(w1, w2)
        if self.seal is not None:
            self.seal.check()
        tokens, top_k = topk_ids.shape
        plans = self.planner(top_k, global_num_experts)
        room = _room(tokens, top_k)
        spare_ids, spare_probs = memory[-2 * room : -room], memory[-room:]
        ids = _as(topk_ids, torch.int32, spare_ids)
        if weights_are_ones:
            probs = _view(spare_probs, topk_weights.shape, torch.float32).fill_(1.0)
        else:
            probs = _as(topk_weights, torch.float32, spare_probs)
        run(
            plans.plan(tokens), x, weights, ids, probs, output, expert_map=expert_map,
            workspace=Workspace(memory, plans.calls),
        )  # fmt: skip


def call_experts_alone(kernel) -> None:
    """Takes out what vLLM's modular kernel does around the experts, in Python and for every layer, if it is nothing.

    It is where no other rank takes part; but for router weights on the input, and padding that is to be skipped. Once a
    kernel: vLLM keeps that of 16-bit layers when weights are updated.
    """
    if "apply" in vars(kernel.impl):
        return
    skips = "VLLM_MOE_SKIP_PADDING" in mk.FusedMoEKernelModularImpl._prepare.__code__.co_names  # else the router does
    if type(kernel.prepare_finalize) is not MoEPrepareAndFinalizeNoDPEPModular or (
        skips and envs.VLLM_MOE_SKIP_PADDING
    ):
        return
    experts, around = kernel.fused_experts, kernel.impl.apply

    def apply(
        hidden_states, w1, w2, topk_ids, topk_weights, *, global_num_experts=-1, expert_map=None,
        apply_router_weight_on_input=False, **others,
    ):  # fmt: skip
        tokens, top_k = topk_ids.shape
        if apply_router_weight_on_input or not tokens:
            return around(
                hidden_states, w1, w2, topk_ids, topk_weights, global_num_experts=global_num_experts,
                expert_map=expert_map, apply_router_weight_on_input=apply_router_weight_on_input, **others,
            )  # fmt: skip
        total = w1.shape[0] if global_num_experts == -1 else global_num_experts
        output = torch.empty_like(hidden_states)
        need = experts.memory_bytes(tokens, top_k, total)
        (memory,) = current_workspace_manager().get_simultaneous(((need,), torch.uint8))
        experts.write(output, hidden_states, w1, w2, topk_weights, topk_ids, total, expert_map, memory)
        return output

    kernel.impl.apply = apply


def _room(tokens: int, top_k: int) -> int:
    """Bytes for one number of four bytes a slot, aligned."""
    return -(-4 * tokens * top_k // ALIGN) * ALIGN


def _view(memory, shape, dtype: torch.dtype):
    count = 1
    for size in shape:
        count *= size
    return memory[: count * dtype.itemsize].view(dtype).view(shape)


def _as(tensor, dtype: torch.dtype, memory):
    """The tensor as kernels were compiled for it: of that dtype, contiguous, on 16 bytes. Copied only if it is not."""
    if tensor.dtype == dtype and tensor.is_contiguous() and tensor.data_ptr() % 16 == 0:
        return tensor
    return _view(memory, tensor.shape, dtype).copy_(tensor)
