"""Our kernels without what keeps them from splitting, to measure what that is worth."""

from __future__ import annotations


def specialise() -> None:
    """From now on this process launches our kernels as @triton.jit and @gluon.jit make them when nothing is said."""
    import triton
    from triton.experimental import gluon

    from ..kernels import (
        combine,
        decode_experts,
        grouped_gemm,
        hopper_gemm,
        quantize,
        routing,
        stream,
        swapped_gemm,
    )

    for module in (combine, decode_experts, grouped_gemm, hopper_gemm, quantize, routing, stream, swapped_gemm):
        for name, kernel in list(vars(module).items()):
            if name.endswith("_kernel") and hasattr(kernel, "arg_names"):
                again = gluon.jit if "Gluon" in type(kernel).__name__ else triton.jit
                setattr(module, name, again(kernel.fn))
