"""Launches through functions that are given the kernel, and what the audit says of what it cannot follow."""

from pathlib import Path

import pytest

import expertile
from expertile.audit import audit, in_words

KERNEL = """
import triton
import triton.language as tl

@triton.jit
def kernel(x_ptr, rows, stride, BLOCK: tl.constexpr):
    tl.store(x_ptr + rows * stride, 0.0)
"""
LAUNCHER = """
def launch(kernel, grid, *arguments, **options):
    return kernel[grid](*arguments, **options)
"""
SIZED = """
def sized(fn, x, n, block=64):
    fn[(1,)](x, n * 2, x.stride(0), BLOCK=block)
"""
METHOD = """
class Starter:
    def start(self, kernel, grid, *rest):
        kernel[grid](*rest, BLOCK=64)
"""


def report_of(tmp_path, **files):
    for name, text in files.items():
        (tmp_path / f"{name}.py").write_text(text)
    return audit([tmp_path])


def arguments(report):
    return [(finding.line, finding.argument) for finding in report.open]


CALLS = {
    "launch(kernel, (4,), x, num_tokens, 8, BLOCK=64)": (LAUNCHER, ["rows"]),
    "launch(kernel, (4,), x, 7, 8, BLOCK=num_tokens)": (LAUNCHER, ["BLOCK"]),
    "launch(kernel, (4,), x, rows=num_tokens, stride=8, BLOCK=64)": (LAUNCHER, ["rows"]),
    "launch(kernel=kernel, grid=(4,), x_ptr=x, rows=num_tokens, stride=8, BLOCK=64)": (LAUNCHER, ["rows"]),
    "launch(kernel, (4,), x, 7, 8, **dict(BLOCK=num_tokens))": (LAUNCHER, ["BLOCK"]),
    "k = kernel; launch(k, (4,), x, num_tokens, 8, BLOCK=64)": (LAUNCHER, ["rows"]),
    "launch(kernel, (4,), x, 7, 8, BLOCK=64)": (LAUNCHER, []),
    "sized(kernel, x, num_tokens)": (SIZED, ["rows"]),
    "sized(kernel, x, 8)": (SIZED, []),
    "sized(kernel, x, 8, block=num_tokens)": (SIZED, ["BLOCK"]),
    "Starter().start(kernel, (4,), x, num_tokens, 8)": (METHOD, ["rows"]),
    "self.start(kernel, (4,), x, num_tokens, 8)": (METHOD, ["rows"]),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_launch_through_a_function_that_is_given_the_kernel_is_judged_at_its_call(tmp_path, call):
    launcher, found = CALLS[call]
    report = report_of(tmp_path, one=f"{KERNEL}{launcher}\ndef host(self, x, num_tokens):\n    {call}\n")
    assert report.launches == 1 and report.unfollowed.launches == report.unfollowed.kernels == ()
    line = (KERNEL + launcher).count("\n") + 3
    assert arguments(report) == [(line, name) for name in found]


@pytest.mark.parametrize("parameter", ["launch=launch", "start=launch"])
def test_a_launcher_is_found_in_another_file_and_as_a_default(tmp_path, parameter):
    """As expertile's own kernels are launched; the file of the call holds no x[...](...) at all."""
    name = parameter.partition("=")[0]
    host = f"from tiles import launch\nfrom kernels import kernel\ndef host(x, num_tokens, *, {parameter}):\n"
    host += f"    {name}(kernel, (4,), x, num_tokens, 8, BLOCK=64)\n"
    report = report_of(tmp_path, kernels=KERNEL, tiles=LAUNCHER, host=host)
    assert arguments(report) == [(4, "rows")] and report.unfollowed.kernels == ()


def test_a_comment_at_the_call_suppresses(tmp_path):
    host = "\ndef host(x, num_tokens):\n    sized(  # expertile: ok warmed\n        kernel, x, num_tokens)\n"
    report = report_of(tmp_path, one=KERNEL + SIZED + host)
    assert [finding.suppressed for finding in report.findings] == ["warmed"]


def test_behind_a_star_of_the_call_nothing_is_claimed_and_that_is_said(tmp_path):
    host = "\ndef host(x, more, num_tokens):\n    launch(kernel, (4,), x, *more, num_tokens, BLOCK=64)\n"
    report = report_of(tmp_path, one=KERNEL + LAUNCHER + host)
    assert (report.launches, report.open, report.unfollowed.hidden) == (1, (), 1)
    assert list(in_words(report))[-1] == "arguments behind * or ** were not judged in 1 launch"


def test_a_parameter_that_is_assigned_is_not_what_was_passed(tmp_path):
    launcher = SIZED.replace("    fn[", "    n = 8\n    fn[")
    host = "\ndef host(x, num_tokens):\n    sized(kernel, x, num_tokens)\n"
    assert report_of(tmp_path, one=KERNEL + launcher + host).open == ()


def test_a_parameter_is_not_the_modules_kernel_of_that_name(tmp_path):
    report = report_of(tmp_path, one=KERNEL + LAUNCHER)
    assert report.launches == 0 and len(report.unfollowed.kernels) == len(report.unfollowed.launches) == 1


UNFOLLOWED = {
    "TABLE = {'a': kernel}\ndef host(x, key):\n    TABLE[key][grid_of(x)](x, 7, 8, 64)\n": (1, 1),
    "def host(x):\n    start(kernel, (4,), x, 7, 8, BLOCK=64)\n": (1, 0),
    "def host(self, x):\n    self.forward[lambda meta: (1,)](x, 7, 8, BLOCK=64)\n": (1, 1),
    "def host(x, kernels: dict[str, int]):\n    return kernels['a'](x), Foo[int, str](x), handlers[x](x)\n": (1, 0),
    "@triton.jit\ndef other(x_ptr):\n    kernel(x_ptr, 1, 2, 64)\ndef host(x):\n    other[(1,)](x)\n": (0, 0),
    "@triton.jit\ndef other(x_ptr, F: tl.constexpr):\n    F(x_ptr)\ndef host(x):\n    other[(1,)](x, F=kernel)\n": (
        0,
        0,
    ),
}


@pytest.mark.parametrize("host", UNFOLLOWED)
def test_what_cannot_be_followed_is_counted_and_named(tmp_path, host):
    report = report_of(tmp_path, one=KERNEL + "\n" + host)
    assert (len(report.unfollowed.kernels), len(report.unfollowed.launches)) == UNFOLLOWED[host]
    said = "\n".join(in_words(report))
    assert ("no launch could be followed of 1 kernel: kernel (" in said) == bool(report.unfollowed.kernels)
    assert ("the kernel is not known of 1 launch: " in said) == bool(report.unfollowed.launches)
    assert len(report.to_dict()["unfollowed"]["kernels"]) == len(report.unfollowed.kernels)


def test_of_many_kernels_the_text_names_a_few(tmp_path):
    many = "".join(KERNEL.replace("def kernel", f"def kernel_{n}") for n in range(9))
    assert "of 9 kernels: " in (said := list(in_words(report_of(tmp_path, one=many)))[-1])
    assert said.endswith("and 4 more, all in --json") and said.count("one.py") == 5


def test_of_our_own_kernels_each_is_met():
    """Launched where the audit sees it, or used in one that is. What the recorder launches is not known."""
    root = Path(expertile.__file__).parent
    report = audit([root])
    assert report.launches >= 12 and report.unfollowed.kernels == () and report.open == ()
    assert [path for path, _ in report.unfollowed.launches] == [f"{root.as_posix()}/runtime/launches.py"]
