"""One layer's expert weights as a frozen record of tensors, and the checks that let them in."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property, lru_cache

import torch

from .errors import ShapeError
from .problem import BLOCK, Activation, DType, Problem, Quant

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
ALIGNMENT = 16  # bytes: where TMA's views of weights begin
DTYPES = {DType.BF16: torch.bfloat16, DType.FP16: torch.float16, DType.FP32: torch.float32}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, eq=False, repr=False)
class Weights:
    """Weights of E experts, in the layout checkpoints use.

    w13        [E, N, H], N = 2I (gate rows then up rows, or alternating when activation.interleaved), or I without a
    gate
    w2         [E, H, I]
    w13_scale, w2_scale    fp32: [E] fp8_tensor | [E, N], [E, H] fp8_channel
                           | [E, rows/128, ceil(H/128)], [E, ceil(H/128), ceil(I/128)] fp8_block
    split_scale   fp8_block with I % 128 != 0: gate and up rows have scale blocks of their own, 2 * ceil(I/128) in all
                  (False: blocks run over the N rows as they lie, ceil(N/128) in all)
    w13_bias, w2_bias      [E, N], [E, H]
    x_scale, h_scale       fp32 scalars on the device: static activation scales (fp8_tensor), x_q = x / x_scale
    dtype      of x and y
    layout     all that is not a tensor, as JSON: what the compiled operator is told beside the tensors
    """

    w13: torch.Tensor
    w2: torch.Tensor
    dtype: DType
    quant: Quant
    activation: Activation
    w13_scale: torch.Tensor | None = None
    w2_scale: torch.Tensor | None = None
    split_scale: bool = False
    w13_bias: torch.Tensor | None = None
    w2_bias: torch.Tensor | None = None
    x_scale: torch.Tensor | None = None
    h_scale: torch.Tensor | None = None
    layout: str = field(init=False)

    def __repr__(self) -> str:
        shapes = f"w13 {tuple(self.w13.shape)}, w2 {tuple(self.w2.shape)}"
        kind = f"{self.dtype.value}, {self.quant.value}, {self.activation.name}"
        return f"Weights({shapes}, {kind}, on {self.device})"

    @property
    def experts(self) -> int:
        return self.w13.shape[0]

    @property
    def hidden(self) -> int:
        return self.w2.shape[1]

    @property
    def inter(self) -> int:
        return self.w2.shape[2]

    @property
    def device(self) -> torch.device:
        return self.w13.device

    @cached_property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All that there are."""
        found = (getattr(self, each.name) for each in fields(self))
        return tuple(value for value in found if isinstance(value, torch.Tensor))

    def __post_init__(self):
        text = json.dumps([self.dtype.value, self.quant.value, asdict(self.activation), self.split_scale])
        object.__setattr__(self, "layout", text)

    @classmethod
    def from_layout(cls, layout: str, **tensors) -> Weights:
        dtype, quant, activation, split_scale = json.loads(layout)
        return cls(
            dtype=DType(dtype),
            quant=Quant(quant),
            activation=Activation(**activation),
            split_scale=split_scale,
            **tensors,
        )

    def problem(self, tokens: int, top_k: int, *, total_experts=None, weight_on_input: bool = False) -> Problem:
        return _problem(
            tokens=tokens,
            hidden=self.hidden,
            inter=self.inter,
            experts=self.experts,
            top_k=top_k,
            dtype=self.dtype,
            quant=self.quant,
            activation=self.activation,
            static_scale=self.x_scale is not None,
            bias=self.w13_bias is not None,
            weight_on_input=weight_on_input,
            total_experts=total_experts,
        )


_problem = lru_cache(maxsize=4096, typed=True)(Problem)  # a layer asks for the same one on every step


def check_weights(w: Weights) -> None:
    """Raises ShapeError with the value that is wrong. Called once, when a layer is loaded; nothing here waits for the
    GPU, so of values it knows nothing: see quantization.
    """
    check_sizes(w.w13, w.w2, w.activation)
    experts, rows, hidden = w.w13.shape
    inter = w.inter
    want = FP8 if w.quant is not Quant.NONE else DTYPES[w.dtype]
    for name in ("w13", "w2"):
        tensor = getattr(w, name)
        if tensor.dtype != want:
            raise ShapeError(
                f"{name} has dtype {tensor.dtype}, quant={w.quant.value} and dtype={w.dtype.value} need {want}"
            )
    _check_scales(w, experts, rows, hidden, inter)
    if (w.w13_bias is None) != (w.w2_bias is None):
        raise ShapeError("give a bias for both projections or for neither: w13_bias and w2_bias")
    for name, shape in (("w13_bias", (experts, rows)), ("w2_bias", (experts, hidden))):
        bias = getattr(w, name)
        if bias is not None and (tuple(bias.shape) != shape or bias.dtype not in NAMES):
            raise ShapeError(f"{name} is {bias.dtype} {tuple(bias.shape)}, needs bf16, fp16 or fp32 and {shape}")
    for name in ("w2", "w13_scale", "w2_scale", "w13_bias", "w2_bias", "x_scale", "h_scale"):
        tensor = getattr(w, name)
        if tensor is not None and tensor.device != w.device:
            raise ShapeError(f"{name} is on {tensor.device}, w13 is on {w.device}")
    for name in ("w13", "w2"):
        if is_askew(getattr(w, name)):
            raise ShapeError(
                f"{name} begins at address {getattr(w, name).data_ptr():#x}, which is no multiple of {ALIGNMENT} bytes "
                f"as TMA reads weights: give a clone() of it instead of a view into other memory"
            )


def check_tensor(name: str, value) -> None:
    if not isinstance(value, torch.Tensor):
        raise ShapeError(f"{name} is a {type(value).__name__}: give a torch.Tensor")


def check_sizes(w13, w2, activation: Activation) -> None:
    """Raises ShapeError unless w13 and w2 are the two matrices of one layer's experts."""
    shapes = f"w13 {tuple(w13.shape)} and w2 {tuple(w2.shape)}"
    if w13.ndim != 3 or w2.ndim != 3:
        raise ShapeError(f"{shapes} need three dimensions: [E, 2I, H] (or [E, I, H] without a gate) and [E, H, I]")
    if 0 in w13.shape or 0 in w2.shape:
        raise ShapeError(f"{shapes} must not be empty")
    experts, hidden, inter = w2.shape
    rows = inter * (2 if activation.gated else 1)
    if w13.shape != (experts, rows, hidden):
        raise ShapeError(
            f"{shapes} do not fit: with activation {activation.name} and w2 [E, H, I], w13 must be "
            f"[{experts}, {rows}, {hidden}]"
        )


def is_askew(w) -> bool:
    """Whether the memory of weights on a GPU begins where TMA cannot read them."""
    return w.is_cuda and w.data_ptr() % ALIGNMENT != 0


def _check_scales(w: Weights, experts: int, rows: int, hidden: int, inter: int) -> None:
    def blocks(n):
        return -(-n // BLOCK)

    w13_blocks = 2 * blocks(inter) if w.split_scale else blocks(rows)
    shapes = {
        Quant.NONE: (None, None),
        Quant.FP8_TENSOR: ((experts,), (experts,)),
        Quant.FP8_CHANNEL: ((experts, rows), (experts, hidden)),
        Quant.FP8_BLOCK: ((experts, w13_blocks, blocks(hidden)), (experts, blocks(hidden), blocks(inter))),
    }[w.quant]
    for name, shape in zip(("w13_scale", "w2_scale"), shapes, strict=True):
        scale = getattr(w, name)
        if shape is None:
            if scale is not None:
                raise ShapeError(f"{name} was given, but quant={w.quant.value} has no weight scales")
        elif scale is None:
            raise ShapeError(f"quant={w.quant.value} needs {name} of shape {shape}")
        elif scale.dtype != torch.float32 or tuple(scale.shape) != shape:
            raise ShapeError(
                f"{name} is {scale.dtype} {tuple(scale.shape)}, quant={w.quant.value} with H={hidden}, I={inter} "
                f"needs float32 {shape}"
            )
    if (w.x_scale is None) != (w.h_scale is None):
        raise ShapeError("give static activation scales for both products or for neither: x_scale and h_scale")
    for name in ("x_scale", "h_scale"):
        scale = getattr(w, name)
        if scale is not None and w.quant is not Quant.FP8_TENSOR:
            raise ShapeError(
                f"{name} is a static activation scale: quant=fp8_tensor takes one, {w.quant.value} does not"
            )
        if scale is not None and (scale.dtype != torch.float32 or scale.numel() != 1):
            raise ShapeError(f"{name} is {scale.dtype} {tuple(scale.shape)}, needs one float32 value")
