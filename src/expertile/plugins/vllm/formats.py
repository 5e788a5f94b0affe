"""vLLM's quantisation methods and activations in our terms, or why there are none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ...errors import UnsupportedProblem
from ...problem import BLOCK, Activation, DType, Gate, Quant
from ...weights import NAMES


class Declined(UnsupportedProblem):
    """vLLM keeps this layer; the message is the reason."""


@dataclass(frozen=True)
class Format:
    """How a layer's experts are stored.

    static_scale    activations have scales of the checkpoint
    backend         the attribute of vLLM's method that names its backend
    """

    quant: Quant
    dtype: DType
    static_scale: bool = False
    backend: str = "fp8_backend"

    @property
    def label(self) -> str:
        return self.dtype.value if self.quant is Quant.NONE else self.quant.value


def format_of(method, dtype: torch.dtype) -> Format:
    """The Format that a quantisation method of vLLM will give its layer. Declined says why there is none.

    dtype     of the layer's input
    """
    name = type(method).__name__
    if name not in METHODS or not type(method).__module__.startswith("vllm.model_executor.layers."):
        raise Declined(f"{name} is not a format that expertile has")
    if dtype not in (torch.bfloat16, torch.float16):
        raise Declined(f"activations are {dtype}, needs bfloat16 or float16")
    return METHODS[name](method, NAMES[dtype])


def _unquantized(method, dtype: DType) -> Format:
    return Format(Quant.NONE, dtype, backend="unquantized_backend")


def _checkpoint(method, dtype: DType) -> Format:
    """Checkpoints that vLLM calls fp8: blocks, or a scale an expert."""
    if method.block_quant:
        return _in_blocks(getattr(method, "moe_block_shape", None) or method.weight_block_size, dtype)
    return Format(Quant.FP8_TENSOR, dtype, static_scale=method.quant_config.activation_scheme == "static")


def _modelopt(method, dtype: DType) -> Format:
    return Format(Quant.FP8_TENSOR, dtype, static_scale=True)


def _compressed_tensors(method, dtype: DType) -> Format:
    if method.weight_block_size is not None:
        return _in_blocks(method.weight_block_size, dtype)
    per_row = method.weight_quant.strategy == "channel"
    return Format(Quant.FP8_CHANNEL if per_row else Quant.FP8_TENSOR, dtype, static_scale=method.static_input_scales)


def _online(method, dtype: DType) -> Format:
    if method.weight_block_size is not None:
        return _in_blocks(method.weight_block_size, dtype)
    return Format(Quant.FP8_CHANNEL if method.per_out_ch_quant else Quant.FP8_TENSOR, dtype)


def _in_blocks(shape, dtype: DType) -> Format:
    if list(shape) != [BLOCK, BLOCK]:
        raise Declined(
            f"weights have a scale per block of {'x'.join(map(str, shape))}: only {BLOCK}x{BLOCK} is supported"
        )
    return Format(Quant.FP8_BLOCK, dtype)


#: Class of vLLM's method -> its Format. A subclass is another method: it may store its weights otherwise.
METHODS: dict[str, Callable[..., Format]] = {
    "UnquantizedFusedMoEMethod": _unquantized,
    "Fp8MoEMethod": _checkpoint,
    "Fp8OnlineMoEMethod": _checkpoint,  # 0.24
    "ModelOptFp8MoEMethod": _modelopt,
    "CompressedTensorsW8A8Fp8MoEMethod": _compressed_tensors,
    "Fp8PerTensorOnlineMoEMethod": _online,
    "Fp8PerBlockOnlineMoEMethod": _online,
    "Fp8PtpcOnlineMoEMethod": _online,
}

#: Value of vLLM's MoEActivation -> ours. Its swigluoai has gate and up rows in turn, its constants are in its kernel.
ACTIVATIONS = {
    "silu": Activation(Gate.SILU),
    "gelu": Activation(Gate.GELU_ERF),
    "gelu_tanh": Activation(Gate.GELU_TANH),
    "swigluoai": Activation(Gate.SILU, alpha=1.702, beta=1.0, limit=7.0, interleaved=True),
    "silu_no_mul": Activation(Gate.SILU, gated=False),
    "gelu_no_mul": Activation(Gate.GELU_ERF, gated=False),
    "gelu_tanh_no_mul": Activation(Gate.GELU_TANH, gated=False),
    "relu2_no_mul": Activation(Gate.RELU2, gated=False),
}
UNINTERLEAVED = "swigluoai_uninterleave"  # the same with gate rows before up rows, constants given


def activation_of(name: str, limit=None, alpha=None, beta=None) -> Activation:
    """The Activation that vLLM computes for the value of its MoEActivation and the layer's SwiGLU constants.

    Needs     constants that the named activation has: vLLM ignores others, which is then not what the model meant
    """
    if name == UNINTERLEAVED:
        if limit is None:
            raise Declined(f"activation {name} without a limit")
        return Activation(Gate.SILU, True, _or(alpha, 1.0), _or(beta, 0.0), float(limit))
    if name not in ACTIVATIONS:
        raise Declined(f"activation {name} is not one that expertile has")
    known = ACTIVATIONS[name]
    if name == "silu" and limit is not None:
        known = Activation(Gate.SILU, limit=float(limit))
    given = {"limit": limit, "alpha": alpha, "beta": beta}
    for constant, value in given.items():
        if value is not None and value != getattr(known, constant):
            raise Declined(f"activation {name} with swiglu_{constant}={value}")
    return known


def _or(value, default: float) -> float:
    return default if value is None else float(value)
