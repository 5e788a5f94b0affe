"""Our kernels without what keeps them from splitting, to measure what that is worth."""

from __future__ import annotations


def specialised(kernel):
    """The kernel as @triton.jit or @gluon.jit makes it when nothing is said: every argument is specialised."""
    import triton
    from triton.experimental import gluon

    return (gluon.jit if "Gluon" in type(kernel).__name__ else triton.jit)(kernel.fn)


def specialise() -> None:
    """From now on this process launches our layers' kernels specialised."""
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
                setattr(module, name, specialised(kernel))
