"""What /metrics says, and the last minute in numbers for the page."""

from __future__ import annotations

import time
from collections import deque

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

TTFT_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
TPOT_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)
RECENT = 60.0  # seconds
KEPT = 1024  # requests whose times are kept for the page


class Metrics:
    """Counters of one server, in a registry of its own."""

    def __init__(self):
        self.registry = CollectorRegistry()
        mine = dict(registry=self.registry, namespace="expertile_serve")
        self.requests = Counter("requests", "Answers to HTTP requests", ("path", "status"), **mine)
        self.sequences = Counter("sequences", "Choices that came to an end", ("finish",), **mine)
        self.prompt_tokens = Counter("prompt_tokens", "Tokens of prompts that were taken in", **mine)
        self.generated_tokens = Counter("generated_tokens", "Tokens that were made", **mine)
        self.ttft = Histogram("ttft_seconds", "Arrival to first token", buckets=TTFT_SECONDS, **mine)
        self.tpot = Histogram("tpot_seconds", "Time per token after the first", buckets=TPOT_SECONDS, **mine)
        self.running = Gauge("running", "Sequences with a slot", **mine)
        self.waiting = Gauge("waiting", "Sequences that wait for a slot", **mine)
        self.ready = Gauge("ready", "1 when loaded, warm and sealed", **mine)
        self.compiles = Gauge("compiles_after_ready", "Kernels compiled or tuned after readiness", **mine)
        self.plan = Gauge(
            "plan_info", "1 for each plan in use", ("layers", "problem", "tokens", "backend", "plan"), **mine
        )
        self._recent: deque[tuple[float, float, float]] = deque(maxlen=KEPT)  # when, seconds to first token, in all

    def token(self, sequence) -> None:
        """A token was made."""
        self.generated_tokens.inc()
        if sequence.tokens == 1:
            self.prompt_tokens.inc(len(sequence.prompt))
            self.ttft.observe(sequence.first_token - sequence.arrived)

    def finished(self, sequence, finish: str) -> None:
        self.sequences.labels(finish).inc()
        now = time.perf_counter()
        if sequence.first_token is None:
            return
        if sequence.tokens > 1:
            self.tpot.observe((now - sequence.first_token) / (sequence.tokens - 1))
        self._recent.append((now, sequence.first_token - sequence.arrived, now - sequence.arrived))

    def recent(self) -> dict[str, float | None]:
        """Of the sequences that ended in the last minute: how many, TTFT p50 and p90 in ms, mean seconds in all."""
        since = time.perf_counter() - RECENT
        rows = [row for row in list(self._recent) if row[0] >= since]
        ttft = sorted(first * 1e3 for _, first, _ in rows)
        if not rows:
            return dict(ended=0, ttft_p50_ms=None, ttft_p90_ms=None, seconds=None)
        at = lambda share: ttft[min(len(ttft) - 1, int(share * len(ttft)))]
        seconds = sum(row[2] for row in rows) / len(rows)
        return dict(ended=len(rows), ttft_p50_ms=at(0.5), ttft_p90_ms=at(0.9), seconds=seconds)

    def page(self) -> bytes:
        """Prometheus' text format: this server's, then the process' own (memory, garbage collector, guard events)."""
        return generate_latest(self.registry) + generate_latest(REGISTRY)
