"""Names of Gluon that moved between Triton 3.6 and 3.9, under one name each."""

from __future__ import annotations

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma

tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
cp_async = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
cp_async_commit = async_copy.commit_group
cp_async_wait = async_copy.wait_group
thread_barrier = getattr(gl, "thread_barrier", None) or gl.barrier
