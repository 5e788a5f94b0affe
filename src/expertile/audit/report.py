"""What an audit found: plain data, as text and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from enum import Enum


class Severity(str, Enum):
    """How many variants the argument can make Triton compile.

    note     one more, rarely reached (64 bit), or one of a few constants that somebody chose
    warning  a handful: the classes of an integer (1, a multiple of 16, other), or buckets
    error    one for each value
    """

    NOTE = "note"
    WARNING = "warning"
    ERROR = "error"

    @property
    def rank(self) -> int:
        return list(Severity).index(self)


#: rule -> what it says, for the JSON and the documentation.
RULES = {
    "specialised-int": "an integer that varies is specialised: Triton compiles a variant for each of its classes",
    "varying-constexpr": "a constexpr or launch option is fed from a value that varies",
    "autotune-key": "an autotuner's key varies: every new value is benchmarked while serving",
    "int-width": "an integer may pass 2^31: Triton compiles a second variant, with 64 bits",
    "unexplained-suppression": "a suppression without a reason suppresses nothing",
    "unreadable": "a file that could not be read or parsed: what it holds is not known",
}


_SHOWN = 5  # places of what was not followed, as text


@dataclass(frozen=True)
class Finding:
    """One argument of one launch.

    path, line, end_line, column   the argument at the launch
    kernel_path, kernel_line, parameter_line   where the kernel is defined; empty and 0 where there is none
    value           what is passed, as it is written
    because         the steps from there back to the size that varies
    classes         what Triton tells apart: "==1", "%16", "other", "64 bit", "each value", "n constants", "buckets"
    variants        how many that makes, None: as many as there are values
    addresses       the argument enters addresses in the kernel, so what is known of its alignment matters for speed
    suppressed      the reason that a comment gives for leaving it as it is; empty: it counts
    """

    rule: str
    severity: Severity
    path: str
    line: int
    end_line: int
    column: int
    message: str
    advice: str = ""
    kernel: str = ""
    argument: str = ""
    kernel_path: str = ""
    kernel_line: int = 0
    parameter_line: int = 0
    value: str = ""
    because: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    variants: int | None = 1
    addresses: bool = False
    suppressed: str = ""

    def with_reason(self, reason: str) -> Finding:
        return replace(self, suppressed=reason)


@dataclass(frozen=True)
class Unfollowed:
    """What was seen without being understood, so that no finding means less than it seems to.

    kernels   (path, line, name) of those that no launch is seen of and no other kernel calls
    launches  (path, line) of those whose kernel is not known
    hidden    launches with arguments behind * or **, which were not judged
    """

    kernels: tuple[tuple[str, int, str], ...] = ()
    launches: tuple[tuple[str, int], ...] = ()
    hidden: int = 0

    def to_dict(self) -> dict:
        return {
            "kernels": [{"path": path, "line": line, "kernel": name} for path, line, name in self.kernels],
            "launches": [{"path": path, "line": line} for path, line in self.launches],
            "hidden_arguments": self.hidden,
        }

    def in_words(self) -> Iterable[str]:
        if self.kernels:
            places = _some([f"{name} ({path}:{line})" for path, line, name in self.kernels])
            yield f"no launch could be followed of {_number(len(self.kernels), 'kernel')}: {places}"
        if self.launches:
            places = _some([f"{path}:{line}" for path, line in self.launches])
            yield f"the kernel is not known of {_number(len(self.launches), 'launch', 'es')}: {places}"
        if self.hidden:
            yield f"arguments behind * or ** were not judged in {_number(self.hidden, 'launch', 'es')}"


@dataclass(frozen=True)
class Report:
    """All findings in the order of their places; `files` read, `kernels` and `launches` found in them."""

    files: int = 0
    kernels: int = 0
    launches: int = 0
    findings: tuple[Finding, ...] = field(default=())
    unfollowed: Unfollowed = field(default_factory=Unfollowed)

    @property
    def open(self) -> tuple[Finding, ...]:
        """Those that no comment suppresses."""
        return tuple(finding for finding in self.findings if not finding.suppressed)

    def counts(self) -> dict[str, int]:
        """severity -> open findings, plus how many are suppressed."""
        found = Counter(finding.severity.value for finding in self.open)
        return {s.value: found[s.value] for s in Severity} | {"suppressed": len(self.findings) - len(self.open)}

    def reaches(self, threshold: str) -> bool:
        """Whether an open finding is at least that severe; `any` is every finding."""
        least = Severity.NOTE if threshold == "any" else Severity(threshold)
        return any(finding.severity.rank >= least.rank for finding in self.open)

    def to_dict(self) -> dict:
        """JSON's own types only; `schema` changes when a field changes its meaning."""
        findings = []
        for finding in self.findings:
            fields = asdict(finding) | {"severity": finding.severity.value}
            findings.append(fields | {"because": list(finding.because), "classes": list(finding.classes)})
        return {
            "schema": 1,
            "files": self.files,
            "kernels": self.kernels,
            "launches": self.launches,
            "unfollowed": self.unfollowed.to_dict(),
            "counts": self.counts(),
            "rules": RULES,
            "findings": findings,
        }


def in_words(report: Report, suppressed: bool = False) -> Iterable[str]:
    """Lines for a terminal: one finding after the other, as compilers print them, the counts, what was not followed."""
    for finding in report.findings if suppressed else report.open:
        where = f"{finding.path}:{finding.line}:{finding.column}"
        name = ".".join(part for part in (finding.kernel, finding.argument) if part)
        yield f"{where}: {finding.severity.value}: {name + ': ' if name else ''}{finding.message} [{finding.rule}]"
        yield from (f"    because {step}" for step in finding.because)
        if finding.suppressed:
            yield f"    suppressed: {finding.suppressed}"
        elif finding.advice:
            yield f"    {finding.advice}"
    counts = report.counts()
    found = ", ".join(f"{number} {name}{_plural(name, number)}" for name, number in counts.items())
    yield f"{report.files} files, {report.kernels} kernels, {report.launches} launches: {found}"
    yield from report.unfollowed.in_words()


def _plural(name: str, number: int) -> str:
    return "s" if number != 1 and name != "suppressed" else ""


def _number(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}{plural if number != 1 else ''}"


def _some(texts: list[str]) -> str:
    more = f" and {len(texts) - _SHOWN} more, all in --json" if len(texts) > _SHOWN else ""
    return ", ".join(texts[:_SHOWN]) + more
