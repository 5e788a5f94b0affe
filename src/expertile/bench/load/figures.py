"""What the samples of a load come to. The definitions are those of `vllm bench serve`; docs/bench-serve.md has them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean, quantiles

from ...errors import ExpertileError
from .client import Sample

TIMES = ("ttft", "tpot", "itl", "e2el")
PERCENTS = (50, 90, 99)
MOST_REASONS = 10
_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_BOUND = re.compile(r"(ttft|tpot|e2el)=([0-9]{1,18}(?:\.[0-9]{1,18})?)(us|ms|s)")


def parse_slo(text: str) -> dict[str, float]:
    """
    >>> parse_slo("ttft=500ms,tpot=50ms")
    {'ttft': 0.5, 'tpot': 0.05}
    """
    found: dict[str, float] = {}
    for part in text.split(","):
        bound = _BOUND.fullmatch(part.strip())
        if not bound or bound[1] in found:
            raise ExpertileError(
                f"slo={text!r}: give bounds of ttft, tpot or e2el, as in ttft=500ms,tpot=50ms,e2el=10s"
            )
        found[bound[1]] = float(bound[2]) * _UNITS[bound[3]]
    return found


def percentile(values: Sequence[float], percent: int) -> float:
    """With linear interpolation between neighbours; 0 of nothing.

    >>> percentile([1.0, 2.0, 3.0, 4.0], 50), percentile([7.0], 99)
    (2.5, 7.0)
    """
    if len(values) < 2:
        return values[0] if values else 0.0
    return quantiles(values, n=100, method="inclusive")[percent - 1]


def tpot(sample: Sample) -> float:
    """Seconds a token after the first; 0 for an answer of one token."""
    more = (sample.output_tokens or 0) - 1
    return (sample.last - sample.first) / more if more > 0 else 0.0


def figures(samples: Sequence[Sample], seconds: float, slo: Mapping[str, float]) -> dict:
    """The figures of a row. Only requests that succeeded count; `seconds` is how long all of it took."""
    good = [sample for sample in samples if sample.good]
    tokens_in, tokens_out = (sum(getattr(each, f"{way}_tokens") for each in good) for way in ("input", "output"))
    times = {
        "ttft": [each.first - each.start for each in good],
        "tpot": [tpot(each) for each in good if each.output_tokens > 1],
        "itl": [gap for each in good for gap in each.gaps],
        "e2el": [each.last - each.start for each in good],
    }
    found = {
        "requests": len(good), "failed": sum(bool(each.error) for each in samples),
        "cut": sum(each.cut for each in samples), "input_tokens": tokens_in, "output_tokens": tokens_out,
        "seconds": seconds, "requests_per_s": len(good) / seconds, "output_tokens_per_s": tokens_out / seconds,
        "tokens_per_s": (tokens_in + tokens_out) / seconds,
    }  # fmt: skip
    for name, values in times.items():
        found[f"{name}_ms_mean"] = 1e3 * fmean(values) if values else 0.0
        found |= {f"{name}_ms_p{percent}": 1e3 * percentile(values, percent) for percent in PERCENTS}
    if slo:
        found["goodput_per_s"] = sum(meets(each, slo) for each in good) / seconds
    return {name: round(value, 4) if isinstance(value, float) else value for name, value in found.items()}


def meets(sample: Sample, slo: Mapping[str, float]) -> bool:
    """Whether a request that succeeded is within all bounds."""
    taken = {"ttft": sample.first - sample.start, "tpot": tpot(sample), "e2el": sample.last - sample.start}
    return all(taken[name] <= bound for name, bound in slo.items())


def failures(samples: Sequence[Sample]) -> list[tuple[str, int]]:
    """Reasons and how often, the most frequent first; those beyond MOST_REASONS as one."""
    counted = Counter(sample.error for sample in samples if sample.error).most_common()
    rest = sum(count for _, count in counted[MOST_REASONS:])
    return counted[:MOST_REASONS] + ([("other reasons", rest)] if rest else [])
