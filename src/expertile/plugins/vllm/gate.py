"""Which layers are taken: every reason against it, before weights are created, and one line of the log a group."""

from __future__ import annotations

import re

import vllm.envs as envs
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe import modular_kernel as mk
from vllm.platforms import current_platform

from ...errors import ExpertileError
from ...hardware import H200
from ...plans import Backend
from ...policy import reasons
from ...problem import Activation, Problem, Quant
from . import log
from .experts import ExpertileExperts
from .formats import Declined, Format, activation_of, format_of
from .loading import most_tokens, take_over
from .sealing import Seal
from .settings import OFF, Settings

#: vLLM's load formats that bring a checkpoint's weights, for this engine's own layers to lay out. With others (0.33's
#: ipc_cache, modelexpress, those that plugins register) they may come processed for the backend that stock chose: fp8
#: gate and up rows in the other order, which nothing shows.
CHECKPOINTS = (
    "auto", "hf", "bitsandbytes", "dummy", "fastsafetensors", "instanttensor", "mistral", "npcache", "pt",
    "runai_streamer", "runai_streamer_sharded", "safetensors", "sharded_state", "tensorizer",
)  # fmt: skip
#: vLLM's own variables that name a backend for its fp8 layers. DeepGEMM's are both on where they are not set.
DEEP_GEMM, MARLIN = ("VLLM_USE_DEEP_GEMM", "VLLM_MOE_USE_DEEP_GEMM"), "VLLM_TEST_FORCE_FP8_MARLIN"


class Gatekeeper:
    """Looks at each layer of a process, takes what it can and says so once a group of like layers."""

    def __init__(self, settings: Settings):
        self.settings, self.seal = settings, Seal(settings.guard)
        self.said: set[tuple[str, str]] = set()

    def consider(self, layer, method, config, prefix: str) -> None:
        """Takes the layer, or leaves it as it is. Never raises."""
        try:
            found = self._format(layer, method, config, prefix)
            instead_of = getattr(method, found.backend).value
            take_over(method, found, self.seal)
            self._say(config, prefix, "takes", f": {describe(found, config)} (vLLM would take {instead_of})")
        except Declined as reason:
            self._say(config, prefix, "leaves", f" to vLLM: {reason}")
        except Exception:
            log.warning("expertile leaves %s to vLLM: looking at it failed", prefix, exc_info=True)

    def _format(self, layer, method, config, prefix: str) -> Format:
        """The layer's Format, or Declined with every reason against taking it."""
        against = machine_reasons() + engine_reasons(config)
        try:
            found = format_of(method, config.in_dtype)
            against += layer_reasons(found, layer, method, config)
            if part := self.settings.named(found.label, prefix):
                against.append(f"{OFF} names {part}")
        except ExpertileError as reason:
            against.append(str(reason))
        if against:
            raise Declined("; ".join(against))
        return found

    def _say(self, config, prefix: str, verb: str, rest: str) -> None:
        """Once for all layers whose names differ in numbers only, by one of the ranks."""
        group = re.sub(r"\d+", "*", prefix)
        if (group, rest) not in self.said:
            self.said.add((group, rest))
            ranks = config.moe_parallel_config
            first = not (ranks.tp_rank or ranks.ep_rank or ranks.dp_rank or ranks.pcp_rank)
            (log.info if first else log.debug)("expertile %s %s%s", verb, group, rest)


def describe(found: Format, config) -> str:
    sizes = f"{config.num_local_experts} experts of {config.hidden_dim}x{config.intermediate_size_per_partition}"
    return f"{found.label}, {sizes}, top {config.experts_per_token}, {config.activation.value}"


def machine_reasons() -> list[str]:
    if not (current_platform.is_cuda() and current_platform.is_device_capability(90)):
        return ["needs a Hopper GPU (compute capability 9.0)"]
    return []


def engine_reasons(config) -> list[str]:
    """Why the way this engine is set up keeps its layers with vLLM."""
    found, parallel = [], config.moe_parallel_config
    if config.moe_backend != "auto":
        found.append(f"moe_backend={config.moe_backend} was asked for")
    if config.is_lora_enabled:
        found.append("LoRA adapters are enabled")
    if parallel.use_batched_activation_format:
        found.append(f"all2all_backend={parallel.all2all_backend} batches tokens by expert")
    elif not ExpertileExperts._supports_parallel_config(parallel):
        found.append(f"all2all_backend={parallel.all2all_backend} is not supported, allgather_reducescatter is")
    engine = get_current_vllm_config()
    offload = getattr(engine, "offload_config", None)
    if offload is not None and (offload.uva.cpu_offload_gb > 0 or offload.prefetch.offload_group_size > 0):
        found.append("weights are offloaded to the CPU")
    return found + loading_reasons(engine)


def loading_reasons(engine) -> list[str]:
    """Why weights that come as this VllmConfig says may not lie as our layers read them."""
    speculative = getattr(engine, "speculative_config", None)
    loads = {
        "load_format": getattr(engine, "load_config", None),
        "draft_load_config.load_format": getattr(speculative, "draft_load_config", None),
    }
    return [
        f"{name}={load.load_format} may bring weights as another process laid them out"
        for name, load in loads.items()
        if load is not None and load.load_format not in CHECKPOINTS
    ]


def layer_reasons(found: Format, layer, method, config) -> list[str]:
    """Why this layer, whose Format we have, cannot be computed here."""
    if found.quant is Quant.NONE and layer.params_dtype != config.in_dtype:
        return [f"weights are {layer.params_dtype}, activations {config.in_dtype}"]
    if found.quant is not Quant.NONE and (asked := asked_for()):
        return [f"{asked}=1 was asked for"]
    if getattr(method, "weight_scale_refine", None) is not None:
        return ["tensor parallelism cuts through scale blocks"]
    activation = activation_of(config.activation.value, *swiglu_constants(config))
    if not activation.gated and _makes_room_for_two(method, config):
        return [f"{type(method).__name__} of this vLLM makes room for a gate that {config.activation.value} has not"]
    against = reasons(Backend.TRITON, problem_of(found, activation, config), H200)
    if not against:
        supported, why = ExpertileExperts.is_supported_config(
            ExpertileExperts, config, *quant_keys(found), mk.FusedMoEActivationFormat.Standard
        )
        against = [] if supported else [f"vLLM: {why}"]
    return against


def asked_for() -> str | None:
    """The variable by which a backend for fp8 layers was asked for, as vLLM reads them: one of DeepGEMM's is set, and
    neither says no; or Marlin's is on."""
    given = [name for name in DEEP_GEMM if envs.is_set(name)]
    if given and all(getattr(envs, name) for name in DEEP_GEMM):
        return given[0]
    return MARLIN if getattr(envs, MARLIN, False) else None  # which 0.33 does not know any more


def _makes_room_for_two(method, config) -> bool:
    """Whether vLLM's method creates gate and up rows even where there is no gate (fp8 before 0.28)."""
    return type(method).__name__.startswith("Fp8") and not hasattr(config, "w13_num_shards")


def swiglu_constants(config) -> tuple:
    return config.swiglu_limit, config.swiglu_alpha, config.swiglu_beta


def problem_of(found: Format, activation: Activation, config) -> Problem:
    """The layer's Problem for as many tokens as a step may have; ShapeError when its numbers do not fit together."""
    return Problem(
        tokens=most_tokens(config),
        hidden=config.hidden_dim,
        inter=config.intermediate_size_per_partition,
        experts=config.num_local_experts,
        top_k=config.experts_per_token,
        dtype=found.dtype,
        quant=found.quant,
        activation=activation,
        static_scale=found.static_scale,
        bias=config.has_bias,
        total_experts=config.num_experts,
    )


def quant_keys(found: Format):
    """vLLM's keys for how weights and activations are quantised."""
    from vllm.model_executor.layers.quantization.utils import quant_utils as keys

    if found.quant is Quant.NONE:
        return None, None
    if found.quant is Quant.FP8_BLOCK:
        return keys.kFp8Static128BlockSym, keys.kFp8Dynamic128Sym
    if found.quant is Quant.FP8_CHANNEL:
        return keys.kFp8StaticChannelSym, keys.kFp8DynamicTokenSym
    return keys.kFp8StaticTensorSym, keys.kFp8StaticTensorSym if found.static_scale else keys.kFp8DynamicTensorSym
