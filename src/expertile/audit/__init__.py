"""Reads Python sources, runs none of them, and says which launches make Triton compile again as sizes vary.

    sources ─► kernels (parameters, what is specialised)     ┐
            └► flow (values in the functions that launch)    ┴► rules ─► report

Standard library only: it also runs where neither torch nor Triton is.
"""

from __future__ import annotations

from .report import Finding, Report, Severity, in_words
from .search import audit

__all__ = ["Finding", "Report", "Severity", "audit", "in_words"]
