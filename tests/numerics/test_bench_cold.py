"""`bench cold`: a process for each way, rows that are valid, and what goes wrong said."""

from __future__ import annotations

import subprocess
import sys

import pytest

from expertile.bench import cold, rows
from expertile.errors import ExpertileError

SHARED = rows.environment("none", "abc")
SMALL = "64,48,8,2"


def test_a_row_for_the_start_and_one_for_the_stream():
    found = list(cold.run(SMALL, "fp32", 20, ["expertile:warm", "expertile"], SHARED, device="cpu"))
    assert [(name, row["what"]) for name, row, wrong in found] == [
        ("expertile", "stream of T=1-20"), ("expertile:warm", "start: warm T=1-20"),
        ("expertile:warm", "stream of T=1-20"),
    ]  # fmt: skip
    assert all(not rows.faults(row) and row["first_ms"] > 0 for _, row, _ in found)


def test_a_process_that_fails_says_why():
    ((_, row, wrong),) = cold.run("nonsense", "bf16", 4, ["expertile"], SHARED, device="cpu")
    assert row is None and "nonsense" in wrong


@pytest.mark.parametrize(("chosen", "said"), [(["expertile:packed"], "measure both"), (["other"], "not known")])
def test_what_cannot_be_measured_is_refused(chosen, said):
    with pytest.raises(ExpertileError, match=said):
        list(cold.run(SMALL, "bf16", 4, chosen, SHARED, device="cpu"))


PROGRAM = """
from expertile.bench.specialised import specialise
from expertile.kernels import decode_experts, routing
before = [routing._route_kernel, decode_experts._decode_experts_kernel]
specialise()
after = [routing._route_kernel, decode_experts._decode_experts_kernel]
for old, new in zip(before, after):
    assert type(old) is type(new) and old is not new and new.fn is old.fn
    assert any(p.do_not_specialize for p in old.params) and not any(p.do_not_specialize for p in new.params)
"""


def test_specialised_kernels_are_the_same_without_what_keeps_them_from_splitting(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
