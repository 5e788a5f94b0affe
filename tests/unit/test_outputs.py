"""Where results go is tried before they are made: for every command that writes at its end, on any machine."""

import importlib
import os
import stat

import pytest

from expertile.errors import ExpertileError
from expertile.outputs import check_file, check_folder


def places(tmp_path):
    """(what no file can be written at, by whoever runs this; what is said of it)"""
    (tmp_path / "file").write_text("kept")
    return [
        (tmp_path, "is a folder: give a file"),
        (tmp_path / "file" / "out.jsonl", "cannot be written"),
        (tmp_path / "new" / ("x" * 300), "cannot be written: File name too long"),
        (tmp_path / "zero\0", "cannot be written"),
    ]


def test_what_cannot_be_written_is_named_with_the_reason(tmp_path):
    for path, said in places(tmp_path):
        with pytest.raises(ExpertileError, match=r"^out=") as caught:
            check_file(path)
        assert said in str(caught.value)
    with pytest.raises(ExpertileError, match=r"logs=.*is no folder"):
        check_folder(tmp_path / "file", "logs")
    assert [each.name for each in tmp_path.iterdir()] == ["file"] and (tmp_path / "file").read_text() == "kept"


def test_a_file_where_a_folder_should_be_is_named(tmp_path):
    (tmp_path / "file").write_text("kept")
    for path in (tmp_path / "file" / "t.json", tmp_path / "file" / "a" / "t.json"):
        with pytest.raises(ExpertileError, match=r"cannot be written: .*file is no folder"):
            check_file(path)
    assert (tmp_path / "file").read_text() == "kept"


def test_what_can_be_written_stays_as_it_is(tmp_path):
    (tmp_path / "file").write_text("kept")
    for path in (tmp_path / "file", tmp_path / "a" / "b" / "c", tmp_path / "new"):
        assert check_file(path) == path
    assert check_folder(tmp_path / "logs", "logs") == tmp_path / "logs"
    assert [each.name for each in tmp_path.iterdir()] == ["file"] and (tmp_path / "file").read_text() == "kept"
    os.mkfifo(tmp_path / "pipe")
    check_file(tmp_path / "pipe")  # nobody reads there: to open it would wait for ever
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written_is_refused(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(ExpertileError, match="Permission denied"):
        check_file(tmp_path / "file")


#: (module of the command, what would begin the work, arguments before the place)
COMMANDS = [
    ("cli_bench", "bench.experts.run", ("experts", "--problem", "64,48,8,2", "--device", "cpu", "--out")),
    ("cli_bench", "bench.layer.run", ("layer", "--problem", "64,48,8,2", "--device", "cpu", "--out")),
    ("cli_bench", "bench.policy.run", ("policy", "--device", "cpu", "--out")),
    ("cli_bench", "bench.inv_rope.run", ("rope", "--device", "cpu", "--out")),
    ("cli_bench", "bench.cold.run", ("cold", "--device", "cpu", "--out")),
    ("cli_bench", "bench.rows.read", ("report", "rows.jsonl", "--plot")),
    ("cli_bench", "bench.serve_commands._eval_ids", ("vllm-same", "--logs")),
    ("cli_bench", "bench.load.session.measure", ("serve", "http://127.0.0.1:9", "--out")),
    ("cli_bench", "bench.serve.start", ("vllm", "--commit", "c", "--out")),
    ("cli_bench", "bench.serve.start", ("vllm", "--commit", "c", "--logs")),
    ("cli", "tune.command.supervise", ("tune", "--problem", "64,48,8,2", "--quant", "bf16", "--out")),
    ("cli", "guard.watcher.watch", ("watch", "--json", "PLACE", "--", "true")),
    ("cli", "guard.cache.pack", ("cache", "pack")),
]


@pytest.mark.parametrize(
    ("module", "work", "words"), COMMANDS, ids=lambda value: " ".join(value[:2]) if isinstance(value, tuple) else value
)
def test_a_command_refuses_before_it_begins(tmp_path, monkeypatch, module, work, words):
    pytest.importorskip("torch")
    if words[0] == "serve":
        pytest.importorskip("aiohttp")
    from typer.testing import CliRunner

    app = importlib.import_module(f"expertile.{module}").app
    where, name = f"expertile.{work}".rsplit(".", 1)
    monkeypatch.setattr(importlib.import_module(where), name, lambda *args, **fields: pytest.fail("it began"))
    if words[0] == "vllm":
        monkeypatch.setattr("expertile.bench.serve_commands._environment", lambda commit: {"gpu": "h200", "date": "d"})
    (tmp_path / "file").write_text("kept")
    place = str(tmp_path / "file" if words[-1] == "--logs" else tmp_path)
    given = [place if word == "PLACE" else word for word in words]
    done = CliRunner().invoke(app, given if "PLACE" in words else [*given, place])
    assert isinstance(done.exception, ExpertileError), done.output
    assert place in str(done.exception) and "folder" in str(done.exception)
