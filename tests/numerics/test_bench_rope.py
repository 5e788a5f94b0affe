"""`bench rope` without a GPU: rows come out whole, a wrong answer gets none, what is missing is shown as absent."""

import pytest
import torch
from typer.testing import CliRunner

from expertile.bench import inv_rope, rows
from expertile.bench.inv_rope_contenders import COPY, OURS, SPECIALISED, UNALIGNED, VLLM, Contender, contenders
from expertile.bench.runner import Request, Setting, State
from expertile.cli_bench import app
from expertile.errors import ExpertileError
from expertile.hardware import CPU
from expertile.kernels.inv_rope_quant import fused_inv_rope_fp8_quant
from expertile.reference_rope import fused_inv_rope_fp8_quant as reference

SHARED = {"date": "d", "commit": "c", "gpu": "cpu", "driver": "none", "torch": "t", "triton": "none"}
SETTING = Setting(torch.device("cpu"), CPU, SHARED)


def fake(name, spoil=lambda q, scales: (q, scales)):
    """The reference, spoilt on the way out."""
    return Contender(
        name, [], lambda: lambda call: spoil(*reference(call.o, call.positions, call.cos_sin, call.groups))
    )


def outcomes(monkeypatch, *chosen, tokens=(1, 5)):
    monkeypatch.setattr(inv_rope, "MOST_SETS", 2)
    return list(inv_rope.run(Request("quant", ("2,1",), ("fp8_block",), tokens, sets=2, replays=2), chosen, SETTING))


def test_every_cell_gives_a_valid_row_and_a_line_of_the_table(monkeypatch):
    copy = contenders(SETTING.device, [COPY])
    found = [outcome.row for outcome in outcomes(monkeypatch, fake(OURS), fake("vllm-x"), *copy)]
    assert len(found) == 6 and all(rows.faults(row) == [] for row in found)
    (table,) = inv_rope.tables(found)
    assert [column.header for column in table.columns][-2:] == ["peer / ours", "copy / ours"]
    assert table.row_count == 2 and "-" not in list(table.columns[-1].cells)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda q, scales: (q, scales * 2),
        lambda q, scales: (q.roll(1, 0), scales),
        lambda q, scales: (torch.cat([q[:-1], q[-1:] * float("nan")]), scales),
    ],
)
def test_a_wrong_answer_gets_no_row(monkeypatch, spoil):
    found = outcomes(monkeypatch, fake(OURS), fake("wrong", spoil), tokens=(5,))
    assert {outcome.impl: outcome.state for outcome in found} == {OURS: State.MEASURED, "wrong": State.WRONG}


def test_ours_passes_the_check_that_peers_pass():
    call = inv_rope.make_calls(3, 2, 1, SETTING, 1, seed=0)[0]
    run = lambda call: fused_inv_rope_fp8_quant(call.o, call.positions, call.cos_sin, call.groups)
    want = run(call)
    errors = inv_rope._errors(run, call)
    assert errors.shape == (6,) and 0 < errors.max() < 0.05
    for contender in contenders(SETTING.device, [UNALIGNED, SPECIALISED]):  # ablations compute the same
        for ours, theirs in zip(want, contender.load()(call), strict=True):
            assert torch.equal(ours.float(), theirs.float()) and ours.stride() == theirs.stride()


def test_calls_differ_and_fill_two_caches(monkeypatch):
    calls = inv_rope.make_calls(1, 8, 1, SETTING, 3, seed=0)
    assert len(calls) == inv_rope.MOST_SETS and not torch.equal(calls[0].o, calls[1].o)
    monkeypatch.setattr(inv_rope, "bytes_moved", lambda *sizes: 1 << 40)
    assert len(inv_rope.make_calls(1, 8, 1, SETTING, 3, seed=0)) == 3


def test_the_copy_moves_as_many_bytes():
    call = inv_rope.make_calls(64, 8, 1, SETTING, 1, seed=0)[0]
    moved = 2 * contenders(SETTING.device, [COPY])[0].load()(call).numel()
    assert abs(moved - inv_rope.bytes_moved(64, 8)) <= 32
    assert inv_rope.bytes_moved(64, 8) == 64 * 8 * 512 * 3 + 64 * 8 * 16 + 64 * (8 + 256)


def test_what_is_missing_is_absent_with_the_reason(monkeypatch):
    found = outcomes(monkeypatch, *contenders(SETTING.device, [OURS, VLLM]))
    assert [outcome.state for outcome in found] == [State.ABSENT] * 2
    assert "GPU" in found[0].message and "vllm" in found[1].message


def test_a_cold_pass_counts_what_it_compiles(monkeypatch):
    import triton

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)

    class Kernel:
        device_caches = {0: "old"}

    def load():
        seen = set()

        def run(call):
            if call.o.shape[0] % 2 not in seen:
                seen.add(call.o.shape[0] % 2)
                triton.knobs.runtime.jit_post_compile_hook(repr="made")

        return run

    before = triton.knobs.runtime.jit_post_compile_hook
    (outcome,) = inv_rope.cold("2,1", range(1, 6), [Contender(OURS, [], load, Kernel)], SETTING)
    assert rows.faults(outcome.row) == [] and outcome.row["compiles"] == 2 and not Kernel.device_caches
    assert outcome.row["what"] == "inverse rope, T=1-5, 5 counts"
    assert triton.knobs.runtime.jit_post_compile_hook is before
    assert inv_rope.tables([outcome.row])[0].row_count == 1


@pytest.mark.parametrize("name", ["nope", "6,4", "0,1", "4,0"])
def test_a_shape_that_is_none_is_refused(name):
    with pytest.raises(ExpertileError, match=name):
        inv_rope.shape(name)


def test_the_command_says_what_ran(monkeypatch, tmp_path):
    monkeypatch.setattr(inv_rope, "MOST_SETS", 1)
    path = tmp_path / "rows.jsonl"
    arguments = ["rope", "--shape", "2,1", "--tokens", "1,2", "--device", "cpu", "--replays", "1", "--sets", "1"]
    done = CliRunner().invoke(app, [*arguments, "--impl", "torch-copy", "--out", str(path), "--commit", "c"])
    assert done.exit_code == 0, done.output
    assert "inverse rope 2,1" in done.output and [row["tokens"] for row in rows.read(path)] == [1, 2]
    done = CliRunner().invoke(app, [*arguments, "--impl", "expertile", "--out", str(path)])
    assert done.exit_code == 1 and "absent: needs a GPU" in done.output
    done = CliRunner().invoke(app, [*arguments, "--impl", "nope"])
    assert isinstance(done.exception, ExpertileError) and "nope" in str(done.exception)
