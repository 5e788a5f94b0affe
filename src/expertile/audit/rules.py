"""From a launch to findings: which argument varies, which variants that makes, and what to do about it."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from . import names
from .expressions import Expressions
from .kernels import Kernel, Parameter
from .launches import Launch, Passed
from .report import Finding, Severity
from .syntax import show
from .values import BUCKETS, INT_BITS, MANY, UNKNOWN, Value

OPTIONS = {"num_warps", "num_stages", "num_ctas", "maxnreg"}  # part of the key, as constexprs are
CHOSEN = 4  # values that somebody may have meant to choose from
_EACH = "Triton compiles one variant for each"


def findings_of(launch: Launch, kernel: Kernel, path: str) -> Iterator[Finding]:
    """All findings of one launch of one kernel."""
    given = bound(launch, kernel)
    for name, passed in given.items():
        parameter = kernel.by_name.get(name)
        if passed.value.tensor is not None or (parameter is not None and parameter.pointer) or names.is_fixed(name):
            continue
        if name in kernel.keys:
            yield from _key(kernel, name, passed, path)
        if parameter is None:
            if name in OPTIONS:
                yield from _constexpr(kernel, Parameter(name, 0), passed, path, "launch option")
        elif parameter.constexpr:
            yield from _constexpr(kernel, parameter, passed, path, "constexpr")
        else:
            yield from _integer(kernel, parameter, passed, path)
    for name, expression in kernel.heuristics.items():
        if name not in given and name in kernel.by_name:
            value = _heuristic(expression, given)
            passed = Passed(value, launch.node.func)
            yield from _constexpr(kernel, kernel.by_name[name], passed, path, "constexpr", show(expression.body))


def bound(launch: Launch, kernel: Kernel) -> dict[str, Passed]:
    """Parameter -> what it gets, as far as the launch shows; options of the launch by their own names."""
    found = dict(zip((parameter.name for parameter in kernel.parameters), launch.positional, strict=False))
    return found | launch.keywords


def _integer(kernel: Kernel, parameter: Parameter, passed: Passed, path: str) -> Iterator[Finding]:
    value = passed.value
    if not value.varies or value.logical:
        return
    classes = classes_of(value, parameter)
    wide = value.bits >= INT_BITS and not parameter.width
    if len(classes) > 1:
        told = [*classes, "64 bit"] if wide else classes
        yield _finding(
            "specialised-int", Severity.WARNING, kernel, parameter, passed, path,
            f"varies and is specialised: {_EACH} of {', '.join(told)}",
            _advice_for_integer(parameter), tuple(told), len(told),
        )  # fmt: skip
    elif wide:
        yield _finding(
            "int-width", Severity.NOTE, kernel, parameter, passed, path,
            "varies and may pass 2^31: Triton then compiles a second variant with 64 bits",
            f"annotate it, `{parameter.name}: tl.int64`: then it always has 64 bits", ("32 bit", "64 bit"), 2,
        )  # fmt: skip


def classes_of(value: Value, parameter: Parameter) -> list[str]:
    """What Triton tells apart of an integer, among the values it can have: at least one class."""
    if not parameter.specialised:
        return ["any"]
    if value.options:
        names = {"==1" if n == 1 else "%16" if n % 16 == 0 and parameter.aligned else "other" for n in value.options}
        return sorted(names)
    found = []
    if not value.above_one and value.multiple == 1:
        found.append("==1")
    if parameter.aligned:
        found.append("%16")
        return found if value.multiple % 16 == 0 else [*found, "other"]
    return [*found, "other"]


def _advice_for_integer(parameter: Parameter) -> str:
    name = parameter.name
    if parameter.handed_on and not parameter.addresses:
        return f'do_not_specialize=["{name}"], if the functions that it is handed on to make no wide accesses of it'
    if not parameter.addresses:
        return f'do_not_specialize=["{name}"]: it enters no address that is read or written here, so nothing is lost'
    return (
        "it enters addresses, where a multiple of 16 is what allows 16-byte accesses: a bare do_not_specialize gives "
        f"them up. Compute {name} in the kernel from the size that it follows; or keep what is always true of it, by "
        f"tl.multiple_of({name}.to(tl.int64), ...) or by passing it in units of its alignment (tl.multiple_of on the "
        f'argument itself has no effect). Only where accesses are narrow anyway: do_not_specialize=["{name}"]'
    )


def _constexpr(
    kernel: Kernel, parameter: Parameter, passed: Passed, path: str, kind: str, text: str = ""
) -> Iterator[Finding]:
    value = passed.value
    if not value.varies:
        return
    severity, variants, classes = grade(value)
    name = parameter.name
    if variants is None:
        message = f"{kind} fed from a value that varies: Triton compiles a variant for each value"
        advice = (
            "choose it from a few constants"
            if kind == "launch option"
            else f'make {name} an ordinary argument with do_not_specialize=["{name}"]; where it must be constexpr, '
            "round it up to a power of two and compile those ahead"
        )
    else:
        message = f"{kind} takes up to {variants} values as sizes vary: {_EACH}"
        advice = f"compile all {variants} before serving"
    yield _finding(
        "varying-constexpr", severity, kernel, parameter, passed, path, message, advice, classes, variants, text
    )


def _key(kernel: Kernel, name: str, passed: Passed, path: str) -> Iterator[Finding]:
    value = passed.value
    if not value.varies:
        return
    severity, variants, classes = grade(value)
    severity = max(severity, Severity.WARNING, key=lambda each: each.rank)
    often = "each new value" if variants is None else f"each of up to {variants} values"
    parameter = kernel.by_name.get(name) or Parameter(name, 0)
    yield _finding(
        "autotune-key", severity, kernel, parameter, passed, path,
        f"key of the autotuner: {often} benchmarks all its configurations when it first comes",
        "key it on a bucket (the next power of two, as an argument of its own), or choose configurations offline",
        classes, variants,
    )  # fmt: skip


def grade(value: Value) -> tuple[Severity, int | None, tuple[str, ...]]:
    """(severity, variants, classes) of something whose every value is a variant."""
    if value.values >= MANY:
        return Severity.ERROR, None, ("each value",)
    if value.values <= CHOSEN:
        return Severity.NOTE, value.values, (f"{value.values} constants",)
    many = Severity.WARNING if value.values <= 4 * BUCKETS else Severity.ERROR
    return many, value.values, (f"{value.values} values",)


def _heuristic(expression: ast.Lambda, given: dict[str, Passed]) -> Value:
    """Of a constexpr that `@triton.heuristics` computes from the arguments."""
    if not expression.args.args:
        return UNKNOWN
    return _Heuristic(expression.args.args[0].arg, given).value(expression.body)


class _Heuristic(Expressions):
    """Reads args["M"] as what the launch passes for M."""

    def __init__(self, argument: str, given: dict[str, Passed]):
        super().__init__({})
        self.argument, self.given = argument, given

    def _of_Subscript(self, node: ast.Subscript) -> Value:
        if isinstance(node.value, ast.Name) and node.value.id == self.argument and isinstance(node.slice, ast.Constant):
            passed = self.given.get(str(node.slice.value))
            return passed.value if passed is not None else UNKNOWN
        return super()._of_Subscript(node)


def _finding(rule, severity, kernel, parameter, passed, path, message, advice, classes, variants, text="") -> Finding:
    value = text or passed.text or show(passed.node)
    steps = passed.value.because
    return Finding(
        rule=rule,
        severity=severity,
        path=path,
        line=passed.node.lineno,
        end_line=passed.node.end_lineno,
        column=passed.node.col_offset + 1,
        message=f"{value} {message}",
        advice=advice,
        kernel=kernel.name,
        argument=parameter.name,
        kernel_path=kernel.path,
        kernel_line=kernel.line,
        parameter_line=parameter.line,
        value=value,
        because=steps,
        classes=classes,
        variants=variants,
        addresses=parameter.addresses,
    )
