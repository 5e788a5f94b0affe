"""Benchmarks: our kernels and the peers, on the same inputs, in the same process; every figure is a row (`rows.py`).

experts, layer   the two benchmarks of a MoE layer; runner checks, times and makes the rows of both
inputs, floor    weights, x and routing; the time that no kernel can beat
ours, peers      what is measured, all behind one interface (implementation)
check            each answer against float64, before any timing
rows             their fields, read and written; table, plot: what they say
"""
