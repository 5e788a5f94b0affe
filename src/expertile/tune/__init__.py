"""Measures plans and writes the winners as the policy's tables: `expertile tune`.

For every number of tokens and routing a handful of plans that could win is measured, checked first as every benchmark
is, interleaved in one process. The plan that the policy would choose without a table, and the one that the table has,
are always among them, so an entry is never slower than none. What was measured goes into a journal, so that a run that
was killed goes on where it was.

search, journal, tables   cells -> lines -> entries
supervise                 the same in a process that may die
peers                     other libraries' times out of benchmark rows
engine_files, export      the files of vLLM and SGLang for their own Triton kernel, and the search for what is in them
"""

from __future__ import annotations

from .search import Machine, Task, tune

__all__ = ["Machine", "Task", "tune"]
