"""`expertile watch`: a program and its child processes, end to end, with the guard armed when the program is ready."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import triton

from expertile.errors import ExpertileError
from expertile.guard import ready
from expertile.guard.report import causes
from expertile.guard.watcher import INJECTED, watch

HERE = Path(__file__).parent

PRELUDE = f"""
import sys, time, os
sys.path.insert(0, {str(HERE)!r})
import guard_driver, guard_kernels as kernels, torch
guard_driver.activate()
x = torch.zeros(256, dtype=torch.int32)
"""

SERVER = (
    PRELUDE
    + """
import multiprocessing

def worker(queue):
    kernels.plus[(1,)](x, 5, 64)
    queue.put("warm")
    while not os.path.exists(sys.argv[1]):
        time.sleep(0.01)
    for n in (16, 48):
        kernels.plus_typed[(1,)](x, n, 64)

if __name__ == "__main__":
    kernels.plus[(1,)](x, 5, 64)
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    child = context.Process(target=worker, args=(queue,))
    child.start()
    assert queue.get() == "warm"
    print("Application startup complete", file=sys.stderr)
    deadline = time.time() + 30
    folder = os.environ["EXPERTILE_WATCH"]
    while not os.path.exists(os.path.join(folder, "ready")) and time.time() < deadline:
        time.sleep(0.01)
    open(sys.argv[1], "w").close()
    kernels.plus[(1,)](x, 7, 64)
    kernels.plus[(1,)](x, 16, 64)
    for block in (32, 128):
        kernels.plus[(1,)](x, 5, block)
    child.join()
    print("served")
    sys.exit(3)
"""
)


def program(tmp_path, text: str) -> Path:
    path = tmp_path / "program.py"
    path.write_text(text)
    return path


def expertile(*arguments, **options):
    command = [sys.executable, str(HERE / "guard_command.py"), "watch", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, **options)


def test_a_server_and_its_worker_are_watched_from_a_line_of_output_on(tmp_path):
    out, server = tmp_path / "causes.json", program(tmp_path, SERVER)
    done = expertile(
        "--ready-line", "startup .*complete", "--json", out, "--", sys.executable, server, tmp_path / "go",
    )  # fmt: skip
    assert done.returncode == 3, done.stderr
    assert done.stdout == "served\n"
    assert "Application startup complete" in done.stderr
    said = json.loads(out.read_text())
    assert said["exit_code"] == 3 and said["ready"]["by"] == "a line of output"
    assert len(said["processes"]) == 2 and {each["triton"] for each in said["processes"]} == {triton.__version__}
    found = {(each["kernel"], each["blame"]): each for each in said["causes"]}
    assert set(found) == {
        ("guard_kernels.plus", "n (divisible by 16)"),
        ("guard_kernels.plus", "BLOCK (constexpr value)"),
        ("guard_kernels.plus_typed", "not launched before"),
    }
    blocks = found["guard_kernels.plus", "BLOCK (constexpr value)"]
    assert blocks["count"] == 2 and blocks["ms"] > 0 and blocks["values"] == ["BLOCK=32", "BLOCK=128"]
    assert all("program.py" in site for site in blocks["sites"])
    pids = {event["kernel"]: event["pid"] for event in said["events"]}
    assert pids["guard_kernels.plus"] != pids["guard_kernels.plus_typed"], "the worker is another process"
    assert "4 events of 3 causes" in done.stderr and "BLOCK=32" in done.stderr and "divisible by 16" in done.stderr


UNENDED = (
    PRELUDE
    + """
def until_armed(seconds):
    deadline = time.time() + seconds
    while not os.path.exists(os.path.join(os.environ["EXPERTILE_WATCH"], "ready")) and time.time() < deadline:
        time.sleep(0.01)
    return os.path.exists(os.path.join(os.environ["EXPERTILE_WATCH"], "ready"))
"""
)


def test_a_line_that_is_not_ended_arms_as_well(tmp_path):
    text = UNENDED + 'sys.stdout.write("ready")\nassert until_armed(30)\nkernels.plus[(1,)](x, 5, 64)\n'
    watched = watch([sys.executable, str(program(tmp_path, text))], ready_line="^ready$")
    assert watched.exit_code == 0 and len(watched.events) == 1


def test_output_that_was_closed_without_an_end_of_line_arms(tmp_path):
    text = UNENDED + 'os.write(1, b"ready")\nos.close(1)\nassert until_armed(30)\n'
    assert watch([sys.executable, str(program(tmp_path, text))], ready_line="ready").exit_code == 0


def test_the_beginning_of_a_line_that_goes_on_is_not_taken_for_it(tmp_path):
    """print() without a buffer writes each of its arguments by itself."""
    text = UNENDED + 'print("done", "with a tenth")\nassert not until_armed(1)\nprint("done")\nassert until_armed(30)\n'
    watched = watch([sys.executable, str(program(tmp_path, text))], ready_line="^done$")
    assert watched.exit_code == 0


def test_the_report_is_asked_for_in_vain_and_the_exit_code_stays(tmp_path):
    """The place was right when the program started. Trying it leaves a link a link."""
    out = tmp_path / "report.json"
    done = expertile("--json", out, "--", "sh", "-c", f"mkdir {out}; exit 3")
    assert done.returncode == 3 and "cannot write" in done.stderr and "Traceback" not in done.stderr
    link = tmp_path / "link.json"
    link.symlink_to(tmp_path / "there.json")
    assert expertile("--json", link, "--", "true").returncode == 0
    assert link.is_symlink() and json.loads((tmp_path / "there.json").read_text())["exit_code"] == 0


@pytest.mark.parametrize("command", ["python program.py", []])
def test_a_command_that_is_no_list_is_refused(command):
    with pytest.raises(ExpertileError, match="give a list, the program and its arguments"):
        watch(command)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(mode="loud"), "mode='loud' is not known"),
        (dict(ready_after="5"), "ready_after='5': give seconds"),
        (dict(ready_line=5), "ready_line=5 is not a regular expression"),
    ],
)
def test_options_that_cannot_be_are_refused_before_the_program_runs(tmp_path, options, message):
    with pytest.raises(ExpertileError, match=message):
        watch(["touch", str(tmp_path / "ran")], **options)
    assert not (tmp_path / "ran").exists()


def test_the_program_may_say_itself_that_it_is_ready(tmp_path):
    text = PRELUDE + (
        "from expertile import guard\nkernels.plus[(1,)](x, 5, 64)\n"
        "assert guard.ready()\nkernels.plus[(1,)](x, 16, 64)\n"
    )
    watched = watch([sys.executable, str(program(tmp_path, text))])
    assert watched.exit_code == 0 and watched.ready["by"] == "the program's call"
    assert [each.blame for each in causes(watched.events)] == ["n (divisible by 16)"]
    assert not ready(), "nobody watches this process"


def test_a_time_from_the_start_on(tmp_path):
    text = PRELUDE + "kernels.plus[(1,)](x, 5, 64)\ntime.sleep(0.1)\nkernels.plus[(1,)](x, 16, 64)\n"
    watched = watch([sys.executable, str(program(tmp_path, text))], ready_after=0)
    assert watched.ready["by"] == "0 s" and len(watched.events) == 2
    watched = watch([sys.executable, str(program(tmp_path, text))], ready_after=600)
    assert watched.ready is None and not watched.events


def test_in_mode_error_the_program_gets_the_exception(tmp_path):
    text = PRELUDE + "from expertile import guard\nguard.ready()\nkernels.plus[(1,)](x, 5, 64)\n"
    done = expertile("--mode", "error", sys.executable, program(tmp_path, text))
    assert done.returncode == 1
    assert "Recompiled: guard_kernels.plus would be compiled after sealing" in done.stderr
    assert "1 event of 1 cause, 0 ms" in done.stderr


def test_the_programs_own_guard_and_the_watchers_do_not_disturb_each_other(tmp_path):
    text = PRELUDE + (
        "from expertile import guard\nguard.ready()\nsealed = guard.seal('count')\nkernels.plus[(1,)](x, 5, 64)\n"
        "assert guard.unseal() is sealed and guard.unseal() is None\nkernels.plus[(1,)](x, 16, 64)\n"
        "print(len(sealed.events))\n"
    )
    done = expertile(sys.executable, program(tmp_path, text))
    assert done.returncode == 0 and done.stdout == "1\n" and "2 events of 2 causes" in done.stderr


def test_a_program_that_compiles_nothing_and_one_that_never_was_ready_are_told_apart(tmp_path):
    warm = (
        PRELUDE
        + "from expertile import guard\nkernels.plus[(1,)](x, 5, 64)\nguard.ready()\nkernels.plus[(1,)](x, 7, 64)\n"
    )
    done = expertile(sys.executable, program(tmp_path, warm))
    assert done.returncode == 0 and "expertile watch: nothing was compiled after readiness" in done.stderr
    done = expertile("--ready-line", "never", sys.executable, program(tmp_path, PRELUDE))
    assert "the guard was never armed" in done.stderr and "nothing was compiled" not in done.stderr
    done = expertile("--ready-after", "0", "--", sys.executable, "-c", "print('hello')")
    assert "no Python process of the program imported Triton" in done.stderr
    assert "nothing was compiled" not in done.stderr and done.stdout == "hello\n"


def interrupted(tmp_path, number: int):
    """A watcher whose program is serving, after it was sent a signal alone, as `kill` or a supervisor does."""
    text = (
        PRELUDE
        + """
import signal
def stop(*_):
    print("cleaned up", flush=True)
    sys.exit(7)
signal.signal(signal.SIGINT, stop)
signal.signal(signal.SIGTERM, stop)
from expertile import guard
guard.ready()
kernels.plus[(1,)](x, 5, 64)
print("serving", flush=True)
while True:
    time.sleep(0.01)
"""
    )
    command = [sys.executable, str(HERE / "guard_command.py"), "watch", sys.executable, str(program(tmp_path, text))]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout.readline() == "serving\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_watcher_reaches_the_program_and_the_table_comes(tmp_path, number):
    process = interrupted(tmp_path, number)
    process.send_signal(number)
    out, error = process.communicate(timeout=30)
    assert process.returncode == 7 and out == "cleaned up\n"
    assert "1 event of 1 cause" in error and "not launched before" in error


def test_ctrl_c_reaches_the_program_once_and_the_table_comes(tmp_path):
    """At a terminal both get the signal from it, so the watcher must not send it on."""
    import pty

    text = (
        PRELUDE
        + """
import signal
seen = []
signal.signal(signal.SIGINT, lambda *_: seen.append(1))
from expertile import guard
guard.ready()
kernels.plus[(1,)](x, 5, 64)
print("serving", flush=True)
while not seen:
    time.sleep(0.01)
time.sleep(0.5)
print("signals", len(seen), flush=True)
"""
    )
    path = program(tmp_path, text)
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, str(HERE / "guard_command.py"), "watch", sys.executable, str(path)])
    shown, deadline = b"", time.time() + 60
    pressed = False
    while time.time() < deadline:
        try:
            chunk = os.read(terminal, 4096)
        except OSError:  # the terminal is closed: both have ended
            break
        shown += chunk
        if b"serving" in shown and not pressed:
            pressed = bool(os.write(terminal, b"\x03"))
    _, status = os.waitpid(pid, 0)
    assert b"signals 1" in shown and b"1 event of 1 cause" in shown and os.waitstatus_to_exitcode(status) == 0, shown


def test_a_program_that_dies_of_a_signal_has_a_shells_exit_code_and_keeps_its_events(tmp_path):
    text = (
        PRELUDE + "from expertile import guard\nguard.ready()\nkernels.plus[(1,)](x, 5, 64)\nos.kill(os.getpid(), 9)\n"
    )
    done = expertile(sys.executable, program(tmp_path, text))
    assert done.returncode == 128 + 9 and "1 event of 1 cause" in done.stderr


def test_another_sitecustomize_and_pythonpath_still_work(tmp_path):
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "sitecustomize.py").write_text("import sys\nsys.their_own = 'ran'\n")
    (tmp_path / "theirs" / "their_module.py").write_text("value = 5\n")
    text = "import sys, sitecustomize, their_module\nprint(sys.their_own, their_module.value, sitecustomize.__file__)\n"
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tmp_path / "theirs"), os.environ.get("PYTHONPATH", "")]),
    }
    done = expertile(sys.executable, program(tmp_path, text), env=environment)
    assert done.stdout == f"ran 5 {tmp_path / 'theirs' / 'sitecustomize.py'}\n", done.stderr


def test_a_child_that_gets_its_pythonpath_from_sys_path_is_watched(tmp_path):
    """As Inductor starts its compile workers."""
    child = PRELUDE + "kernels.plus[(1,)](x, 5, 64)\n"
    text = (
        "import os, subprocess, sys\n"
        "env = {**os.environ, 'PYTHONPATH': os.pathsep.join(sys.path)}\n"
        f"subprocess.run([sys.executable, '-c', {child!r}], env=env, check=True)\n"
    )
    watched = watch([sys.executable, str(program(tmp_path, text))], ready_after=0)
    assert len(watched.processes) == len(watched.events) == 1


def test_asking_whether_triton_is_there_does_not_use_up_the_hook(tmp_path):
    text = (
        "import importlib.util\nassert importlib.util.find_spec('triton')\n"
        + PRELUDE
        + ("from expertile import guard\nguard.ready()\nkernels.plus[(1,)](x, 5, 64)\n")
    )
    assert len(watch([sys.executable, str(program(tmp_path, text))]).events) == 1


def test_a_starting_python_is_not_made_to_import_anything(tmp_path):
    text = "import sys\nprint(sorted({'torch', 'triton', 'expertile', 'json', 'logging'} & set(sys.modules)))\n"
    assert expertile(sys.executable, "-S", "-c", text).stdout == "[]\n"
    assert (
        expertile(sys.executable, "-c", text).stdout
        == subprocess.run([sys.executable, "-c", text], capture_output=True, text=True).stdout
    )


def test_an_interpreter_that_does_not_have_expertile_is_watched_too(tmp_path):
    """Its packages may be of another environment; only Triton is needed there."""
    hide = "import sys\nsys.path[:] = [entry for entry in sys.path if not entry.endswith('src')]\n"
    text = hide + PRELUDE + "kernels.plus[(1,)](x, 5, 64)\nfrom expertile import guard\nprint(guard.__file__)\n"
    done = expertile("--ready-after", "0", sys.executable, program(tmp_path, text))
    assert done.stdout.strip().endswith("expertile/guard/__init__.py"), done.stderr
    assert "1 event of 1 cause" in done.stderr


def test_a_triton_that_cannot_be_watched_is_said_and_the_program_runs(tmp_path):
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton" / "__init__.py").write_text("__version__ = '2.0'\n")
    text = f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\nimport triton\nprint(triton.__version__)\n"
    done = expertile("--ready-after", "0", sys.executable, program(tmp_path, text))
    assert done.returncode == 0 and done.stdout == "2.0\n"
    assert "was not watched: ExpertileError: Triton 2.0 is not one that the guard knows" in " ".join(
        done.stderr.split()
    )


def test_output_is_passed_on_as_it_comes_and_unchanged(tmp_path):
    text = "import sys\nsys.stdout.buffer.write(b'\\xff\\x00a\\r\\nno newline')\nsys.stderr.write('error text')\n"
    command = [sys.executable, str(HERE / "guard_command.py"), "watch", "--ready-line", "x", sys.executable]
    done = subprocess.run([*command, str(program(tmp_path, text))], capture_output=True, timeout=60)
    assert done.stdout == b"\xff\x00a\r\nno newline" and b"error text" in done.stderr


def test_options_after_the_command_belong_to_it(tmp_path):
    text = "import sys\nprint(sys.argv[1:])\n"
    for dashes in ((), ("--",)):
        done = expertile(
            "--ready-after", "5", *dashes, sys.executable, program(tmp_path, text), "--json", "x", "--help", "--"
        )
        assert done.stdout == "['--json', 'x', '--help', '--']\n", done.stderr


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("--ready-line", "(", "--", "true"), "ready_line='('"),
        (("--ready-after", "-1", "--", "true"), "ready_after=-1"),
        (("--mode", "loud", "--", "true"), "mode='loud'"),
        (("--ready-after", "inf", "--", "true"), "ready_after=inf: give seconds"),
        (("--ready-after", "1e300", "--", "true"), "ready_after=1e+300"),
        (("--ready-after", "nan", "--", "true"), "ready_after=nan"),
        (("--json", "/nowhere/at/all.json", "--", "true"), "no folder '/nowhere/at'"),
        (("--json", "/", "--", "echo", "ran"), "json='/' is a folder: give a file"),
        (("--json", "/proc/report.json", "--", "echo", "ran"), "json='/proc/report.json' cannot be written"),
        (("--", "/nowhere/at/all"), "cannot run '/nowhere/at/all': No such file"),
    ],
)
def test_bad_input_is_one_line_on_stderr(arguments, word):
    done = expertile(*arguments)
    assert done.returncode == 2 and done.stdout == ""
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("expertile: ") and word in line


def test_a_command_that_cannot_start_is_an_error_of_the_library_too():
    with pytest.raises(ExpertileError, match="cannot run 'no-such-program'"):
        watch(["no-such-program"])
    assert (INJECTED / "sitecustomize.py").is_file()
