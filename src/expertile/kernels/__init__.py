"""Device code and its launchers: routing, quantize, grouped_gemm, swapped_gemm, combine, router. Neighbours, no
stack.
"""
