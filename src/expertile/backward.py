"""There is no backward pass, and no gradient goes missing in silence: forward runs, backward says so."""

from __future__ import annotations

import torch
from torch import Tensor

from .errors import UnsupportedProblem

NONE = (
    "expertile has no backward pass: call it under torch.no_grad(), detach() what needs no gradient, or train with "
    "another implementation of the experts"
)


def wanted(*tensors: Tensor | None) -> bool:
    """Whether a gradient would have to come back to one of them."""
    if not torch.is_grad_enabled():
        return False
    for tensor in tensors:  # noqa: SIM110  any() takes twice as long, on every call
        if tensor is not None and tensor.requires_grad:
            return True
    return False


def refused(y: Tensor, *sources: Tensor | None) -> Tensor:
    """y, which was made of the sources, with a backward that raises UnsupportedProblem where one of them needs a
    gradient.
    """
    return _Refused.apply(y, *sources)


class _Refused(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, *sources):
        ctx.mark_dirty(y)
        return y

    @staticmethod
    def backward(ctx, *grads):
        raise UnsupportedProblem(NONE)


def refuse(operator) -> None:
    """Gives a custom operator that backward. torch.compile traces it together with forward, even where nobody will run
    it, so it holds an operator that raises when it runs instead of raising itself.
    """

    def setup_context(ctx, inputs, output):
        ctx.wanted = [(each.shape, each.dtype) if isinstance(each, Tensor) else None for each in inputs]

    def backward(ctx, *grads):
        # of ids it is zeros: what hangs on them alone would be moved into forward
        grad = next(grad for grad in grads if grad is not None and grad.is_floating_point())
        needs = zip(ctx.wanted, ctx.needs_input_grad, strict=True)
        return tuple(_refusal(grad, *like) if needed else None for like, needed in needs)

    operator.register_autograd(backward, setup_context=setup_context)


@torch.library.custom_op("expertile::no_backward", mutates_args=())
def _refusal(grad: Tensor, shape: list[int], dtype: torch.dtype) -> Tensor:
    raise UnsupportedProblem(NONE)


@_refusal.register_fake
def _(grad, shape, dtype):
    return grad.new_empty(shape, dtype=dtype)


__all__ = ["refuse", "refused", "wanted"]
