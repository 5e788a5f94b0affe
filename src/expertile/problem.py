"""What is to be computed: one MoE layer's experts on a number of tokens, as plain data. Needs nothing but Python."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from .errors import ShapeError, check_count, check_flag, check_number, member

BLOCK = 128  # rows and columns of one scale block in fp8_block; values of one activation scale group
#: (least, most) of a Problem's sizes. No machine holds the most; far beyond, a plan could not even be priced.
BOUNDS = {
    "tokens": (0, 1 << 40),
    **dict.fromkeys(("hidden", "inter"), (1, 1 << 24)),
    **dict.fromkeys(("experts", "top_k", "total_experts"), (1, 1 << 16)),
}


class DType(str, Enum):
    """Dtype of x and y. Weights have it too unless `quant` says otherwise."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"

    @property
    def bytes(self) -> int:
        return 4 if self is DType.FP32 else 2


class Quant(str, Enum):
    """How the expert weights are stored and the activations quantised before each product.

    fp8_tensor   w e4m3, one fp32 scale an expert | x one static scale, or one a token when none is given
    fp8_channel  w e4m3, one fp32 scale a row     | x one scale a token
    fp8_block    w e4m3, one fp32 scale per 128x128 block | x one scale per token and 128 values
    """

    NONE = "none"
    FP8_TENSOR = "fp8_tensor"
    FP8_CHANNEL = "fp8_channel"
    FP8_BLOCK = "fp8_block"


class Gate(str, Enum):
    """The function applied to the gate half (or, without a gate, to the only half)."""

    SILU = "silu"  # g * sigmoid(alpha * g)
    GELU_TANH = "gelu_tanh"
    GELU_ERF = "gelu_erf"
    RELU2 = "relu2"  # max(g, 0)^2


@dataclass(frozen=True)
class Activation:
    """h = f(min(g, limit)) * (clamp(u, -limit, limit) + beta), or h = f(g) without a gate.

    f          Gate; alpha only matters for SILU
    gated      w13 holds gate and up rows (2 * inter); False: inter rows and no product
    interleaved  gate and up rows alternate (g0, u0, g1, u1, ...) instead of gate rows before up rows

    >>> ACTIVATIONS["swiglu_oai"]
    Activation(gate=<Gate.SILU: 'silu'>, gated=True, alpha=1.702, beta=1.0, limit=7.0, interleaved=False)
    """

    gate: Gate = Gate.SILU
    gated: bool = True
    alpha: float = 1.0
    beta: float = 0.0
    limit: float | None = None
    interleaved: bool = False

    def __post_init__(self):
        object.__setattr__(self, "gate", member(Gate, self.gate, "gate"))
        for name in ("gated", "interleaved"):
            check_flag(getattr(self, name), f"activation {name}")
        for name in ("alpha", "beta") if self.limit is None else ("alpha", "beta", "limit"):
            check_number(getattr(self, name), f"activation {name}")
        if self.limit is not None and self.limit <= 0:
            raise ShapeError(f"activation limit={self.limit}: give a positive number, or None for no clamp")
        if not self.gated and (self.limit is not None or self.beta or self.interleaved):
            raise ShapeError("an activation without a gate takes no limit, beta or interleaved: there is no up half")
        if self.gate is not Gate.SILU and self.alpha != 1.0:
            raise ShapeError(f"alpha={self.alpha} only applies to gate='silu', not {self.gate.value!r}")

    @property
    def name(self) -> str:
        for name, known in ACTIVATIONS.items():
            if replace(self, interleaved=False) == known:
                return name + ("/interleaved" if self.interleaved else "")
        text = self.gate.value + ("" if self.gated else "/no-gate")
        text += "".join(
            f",{key}={value:g}"
            for key, value, default in (("alpha", self.alpha, 1.0), ("beta", self.beta, 0.0))
            if value != default
        )
        text += f",limit={self.limit:g}" if self.limit is not None else ""
        return text + ("/interleaved" if self.interleaved else "")


ACTIVATIONS = {
    "silu": Activation(Gate.SILU),
    "gelu_tanh": Activation(Gate.GELU_TANH),
    "gelu_erf": Activation(Gate.GELU_ERF),
    "swiglu_oai": Activation(Gate.SILU, alpha=1.702, beta=1.0, limit=7.0),
    "swiglu_clamp": Activation(Gate.SILU, limit=10.0),
    "relu2": Activation(Gate.RELU2, gated=False),
}


_OTHER = re.compile(
    rf"({'|'.join(gate.value for gate in Gate)})(/no-gate)?(,(alpha|beta|limit)=[-+.e0-9]+)*(/interleaved)?"
)


def is_activation_name(text: str) -> bool:
    """Whether some Activation has that name.

    >>> [is_activation_name(text) for text in ("swiglu_oai/interleaved", "silu,limit=7", "swish")]
    [True, True, False]
    """
    return text.removesuffix("/interleaved") in ACTIVATIONS or bool(_OTHER.fullmatch(text))


def named_activation(text: str) -> Activation:
    """The Activation of that name, as Activation.name has it; ShapeError where none has.

    >>> named_activation("silu,limit=7").limit
    7.0
    """
    plain = text.removesuffix("/interleaved")
    if plain in ACTIVATIONS:
        return activation(plain, interleaved=plain != text)
    if not _OTHER.fullmatch(text):
        known = f"one of {', '.join(ACTIVATIONS)}, and /interleaved or nothing behind it"
        raise ShapeError(f"{text!r} is not {known}, nor as explain shows others: silu,limit=7")
    kind, *changes = plain.split(",")
    gate = kind.removesuffix("/no-gate")
    fields = {}
    for key, _, value in (change.partition("=") for change in changes):
        try:
            fields[key] = float(value)
        except ValueError:
            fields[key] = math.nan
        if not math.isfinite(fields[key]):
            raise ShapeError(f"{text!r}: {key}={value} is no finite number")
    return Activation(Gate(gate), gated=kind == gate, interleaved=plain != text, **fields)


def activation(name: str | Activation, **changes) -> Activation:
    """The Activation of that name (a key of ACTIVATIONS), with fields changed: `activation("silu", limit=10.0)`."""
    if isinstance(name, Activation):
        return replace(name, **changes)
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise ShapeError(f"activation={name!r} is not known: use one of {', '.join(ACTIVATIONS)} or an Activation")
    return replace(ACTIVATIONS[name], **changes)


@dataclass(frozen=True)
class Problem:
    """One call of a MoE layer's experts.

    tokens, hidden, inter, experts, top_k   T, H, I, E and the experts a token visits
    experts is the number on this rank; `total_experts` the number that ids are drawn from (EP), default the same
    static_scale   the activations' scales are given ahead (fp8_tensor only)
    bias           both products add one
    weight_on_input  x is multiplied by the router's weight before GEMM1 (needs top_k == 1)

    >>> p = Problem(tokens=16, hidden=2048, inter=768, experts=128, top_k=8, quant="fp8_block")
    >>> p.rows, p.w13_rows, round(p.rows_per_expert, 2), round(p.experts_hit, 1)
    (128, 1536, 1.0, 82.4)
    """

    tokens: int
    hidden: int
    inter: int
    experts: int
    top_k: int
    dtype: DType = DType.BF16
    quant: Quant = Quant.NONE
    activation: Activation = ACTIVATIONS["silu"]
    static_scale: bool = False
    bias: bool = False
    weight_on_input: bool = False
    total_experts: int | None = None

    def __post_init__(self):
        object.__setattr__(self, "dtype", member(DType, self.dtype, "dtype"))
        object.__setattr__(self, "quant", member(Quant, self.quant, "quant"))
        object.__setattr__(self, "activation", activation(self.activation))
        if self.total_experts is None:
            object.__setattr__(self, "total_experts", self.experts)
        for name, (least, most) in BOUNDS.items():
            check_count(getattr(self, name), name, least, most)
        for name in ("static_scale", "bias", "weight_on_input"):
            check_flag(getattr(self, name), name)
        if self.total_experts < self.experts:
            raise ShapeError(f"total_experts={self.total_experts} is fewer than the experts={self.experts} held here")
        if self.top_k > self.total_experts:
            raise ShapeError(f"top_k={self.top_k} is more than the {self.total_experts} experts there are")
        if self.weight_on_input and self.top_k != 1:
            raise ShapeError(f"weight_on_input needs top_k=1, got top_k={self.top_k}: x would need a copy an expert")
        if self.static_scale and self.quant is not Quant.FP8_TENSOR:
            raise ShapeError(f"static activation scales go with quant='fp8_tensor', not {self.quant.value!r}")

    @property
    def rows(self) -> int:
        """Routed rows, one for each token and expert it visits."""
        return self.tokens * self.top_k

    @property
    def local_rows(self) -> float:
        """Routed rows at this rank's experts, expected under uniform routing."""
        return self.rows_per_expert * self.experts

    @property
    def w13_rows(self) -> int:
        return self.inter * (2 if self.activation.gated else 1)

    @property
    def rows_per_expert(self) -> float:
        return self.rows / self.total_experts

    @property
    def experts_hit(self) -> float:
        """Experts on this rank that get at least one token, expected under uniform routing."""
        miss = (1 - self.top_k / self.total_experts) ** self.tokens
        return self.experts * (1 - miss)

    @property
    def label(self) -> str:
        """The `quant` of a benchmark row: the dtype where nothing is quantised."""
        return self.dtype.value if self.quant is Quant.NONE else self.quant.value

    def with_tokens(self, tokens: int) -> Problem:
        return replace(self, tokens=tokens)


#: Layers of well-known models, each as (hidden, inter, experts, top_k, further Problem fields).
LAYERS: dict[str, dict[str, Any]] = {
    "qwen3-30b-a3b": dict(hidden=2048, inter=768, experts=128, top_k=8),
    "qwen3-next-80b-a3b": dict(hidden=2048, inter=512, experts=512, top_k=10),
    "nemotron-3-nano": dict(hidden=2688, inter=1856, experts=128, top_k=6, activation="relu2"),
    "deepseek-v3-tp8": dict(hidden=7168, inter=256, experts=256, top_k=8),
    "mixtral-8x7b-tp2": dict(hidden=4096, inter=7168, experts=8, top_k=2),
    "gpt-oss-120b": dict(
        hidden=2880,
        inter=2880,
        experts=128,
        top_k=4,
        bias=True,
        activation=replace(ACTIVATIONS["swiglu_oai"], interleaved=True),
    ),
}


def named_problem(name: str, tokens: int, quant: str = "bf16", **fields) -> Problem:
    """The Problem of a key of LAYERS, or of "H,I,E,k", which an activation's name and `bias` may follow; quant as a
    benchmark row has it (bf16, fp16, fp8_...).

    >>> named_problem("64,32,8,2", tokens=4).hidden
    64
    >>> named_problem("64,32,8,2,swiglu_oai/interleaved,bias", tokens=4).activation.interleaved
    True
    """
    layer = dict(LAYERS[name]) if name in LAYERS else _sized(name)
    if quant in [dtype.value for dtype in DType]:
        layer.update(dtype=quant, quant=Quant.NONE)
    elif quant in [quant.value for quant in Quant if quant is not Quant.NONE]:
        layer["quant"] = quant
    else:
        known = [*(dtype.value for dtype in DType), *(q.value for q in Quant if q is not Quant.NONE)]
        raise ShapeError(f"quant={quant!r} is not known: use one of {', '.join(known)}")
    return Problem(tokens=tokens, **{**layer, **fields})


def whole_number(text: str) -> int | None:
    r"""The number in a text of digits, else None: int() takes more ("1_0", "\uff11"), isdigit() what int() refuses.

    >>> whole_number("16"), whole_number("-1"), whole_number("\u00b2"), whole_number("9" * 5000)
    (16, None, None, None)
    """
    return int(text) if re.fullmatch(r"[0-9]{1,18}", text) else None


def _sized(name: str) -> dict[str, Any]:
    """Fields of the Problem "H,I,E,k[,activation][,bias]"."""
    parts = [part.strip() for part in name.split(",")]
    sizes, further = parts[:4], parts[4:]
    bias = further[-1:] == ["bias"]
    named = further[:-1] if bias else further
    numbers = [whole_number(part) for part in sizes]
    if len(numbers) != 4 or None in numbers:
        raise ShapeError(f"problem={name!r} is neither H,I,E,k[,activation][,bias] nor one of {', '.join(LAYERS)}")
    found: dict[str, Any] = dict(zip(("hidden", "inter", "experts", "top_k"), numbers, strict=True), bias=bias)
    if named:
        try:
            found["activation"] = named_activation(",".join(named))
        except ShapeError as error:
            raise ShapeError(f"problem={name!r}: {error}; known layers: {', '.join(LAYERS)}") from None
    return found
