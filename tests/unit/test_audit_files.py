"""The audit on whole trees: kernels across files, suppressions, files that cannot be read, the command and its JSON."""

import json
import os
import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner

from expertile.audit import Severity, audit, in_words
from expertile.cli_audit import audit as command
from expertile.errors import ExpertileError

KERNEL = """import triton
import triton.language as tl

@triton.jit
def kernel(
    x_ptr,
    rows,
    BLOCK: tl.constexpr,
):
    tl.store(x_ptr + tl.arange(0, BLOCK), 0.0, mask=tl.arange(0, BLOCK) < rows)
"""
HOST = """
def host(x, num_tokens):
    kernel[(1,)](
        x,
        num_tokens,
        BLOCK=64,
    )
"""


def write(folder, **files):
    for name, text in files.items():
        path = folder / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def arguments(report):
    return [finding.argument for finding in report.open]


# Across files


@pytest.mark.parametrize(
    "imported",
    [
        "from ops.kernels import kernel",
        "from .kernels import kernel",
        "from ops import kernels\nkernel = kernels.kernel",
        "import ops.kernels as k\nkernel = k.kernel",
    ],
)
def test_a_kernel_is_found_where_it_was_imported_from(tmp_path, imported):
    write(tmp_path, ops__kernels=KERNEL, ops__host=imported + HOST)
    report = audit([tmp_path])
    (finding,) = report.findings
    assert (report.files, report.kernels, report.launches) == (2, 1, 1)
    assert finding.path.endswith("ops/host.py") and finding.kernel_path.endswith("ops/kernels.py")
    assert (finding.kernel_line, finding.parameter_line) == (5, 7)


def test_of_two_kernels_of_one_name_the_imported_one_counts(tmp_path):
    safe = KERNEL.replace("@triton.jit", '@triton.jit(do_not_specialize=["rows"])')
    write(tmp_path, a__kernels=KERNEL, b__kernels=safe, host="from b.kernels import kernel" + HOST)
    assert arguments(audit([tmp_path])) == []
    write(tmp_path, host="from a.kernels import kernel" + HOST)
    assert arguments(audit([tmp_path])) == ["rows"]
    write(tmp_path, host="from elsewhere import kernel" + HOST)  # which of the two is not known
    assert audit([tmp_path]).launches == 0


def test_a_name_that_was_not_imported_is_no_kernel(tmp_path):
    write(tmp_path, kernels=KERNEL, host=HOST)
    assert audit([tmp_path]).launches == 0


def test_the_last_definition_above_a_launch_is_the_one_that_is_launched(tmp_path):
    safe = KERNEL.replace("@triton.jit", '@triton.jit(do_not_specialize=["rows"])')
    write(tmp_path, one=KERNEL + HOST + safe + HOST.replace("host", "other"))
    (finding,) = audit([tmp_path]).findings
    assert finding.line < 20


# Suppressions


PLACES = {
    "argument": ("        num_tokens,", 1),
    "launch": ("    kernel[(1,)](", 1),
    "parameter": ("    rows,", 1),
    "def": ("def kernel(", 1),
    "elsewhere": ("    BLOCK: tl.constexpr,", 0),
    "another argument": ("        BLOCK=64,", 0),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_comment_with_a_reason_suppresses_where_it_stands(tmp_path, place):
    line, hidden = PLACES[place]
    text = (KERNEL + HOST).replace(line, f"{line}  # expertile: ok three variants, warmed at start")
    (finding,) = audit([write(tmp_path, one=text)]).findings
    assert finding.suppressed == ("three variants, warmed at start" if hidden else "")
    assert audit([tmp_path]).counts() == {"note": 0, "warning": 1 - hidden, "error": 0, "suppressed": hidden}


def test_a_comment_without_a_reason_suppresses_nothing_and_is_a_finding(tmp_path):
    text = (KERNEL + HOST).replace("        num_tokens,", "        num_tokens,  # expertile: ok")
    found = [(finding.rule, finding.suppressed) for finding in audit([write(tmp_path, one=text)]).findings]
    assert sorted(found) == [("specialised-int", ""), ("unexplained-suppression", "")]


def test_a_string_is_no_comment(tmp_path):
    text = (KERNEL + HOST).replace("        num_tokens,", '        num_tokens + len("# expertile: ok because"),')
    assert arguments(audit([write(tmp_path, one=text)])) == ["rows"]


# Files


@pytest.mark.parametrize(
    ("data", "word"),
    [
        (b"@triton.jit\ndef kernel(:\n", "line 2"),
        (b"# triton jit\nx = '\xff\xfe'\n", "utf-8"),
        (b"# triton jit\nx = 1\x00\n", "null"),
        (b"# triton jit\nx = " + b"(" * 5000 + b")" * 5000, ""),
        (b"# -*- coding: no-such -*-\n# triton jit\n", "no-such"),
    ],
    ids=["syntax", "encoding", "null byte", "nesting", "cookie"],
)
def test_a_file_that_cannot_be_parsed_is_said_and_the_others_are_read(tmp_path, data, word):
    write(tmp_path, good=KERNEL + HOST)
    (tmp_path / "bad.py").write_bytes(data)
    bad, good = audit([tmp_path]).findings
    assert (bad.rule, bad.severity) == ("unreadable", Severity.NOTE) and word in bad.message
    assert good.argument == "rows"


def test_other_encodings_are_read_as_they_say(tmp_path):
    text = "# -*- coding: latin-1 -*-\n# \xe9t\xe9\n" + KERNEL + HOST
    (tmp_path / "one.py").write_bytes(text.encode("latin-1"))
    assert arguments(audit([tmp_path])) == ["rows"]
    (tmp_path / "one.py").write_bytes(b"\xef\xbb\xbf" + (KERNEL + HOST).replace("\n", "\r\n").encode())
    assert arguments(audit([tmp_path])) == ["rows"]


def test_a_sum_of_thousands_of_terms_does_not_end_it(tmp_path):
    long = f"def host(x, num_tokens):\n    kernel[(1,)](x, {' + '.join(['num_tokens'] * 4000)}, BLOCK=64)\n"
    write(tmp_path, good=KERNEL + HOST, long="from good import kernel\n" + long)
    report = audit([tmp_path])
    assert "rows" in arguments(report) and len(report.findings) == 2


def test_a_kernel_nested_too_deeply_is_said(tmp_path):
    deep = KERNEL.replace("0.0", " + ".join(["rows"] * 3000)).replace("kernel(", "deep(")
    report = audit(
        [write(tmp_path, good=KERNEL + HOST, deep=deep + "\ndef f(x, n):\n    deep[(1,)](x, n, BLOCK=64)\n")]
    )
    assert "rows" in arguments(report) and all(
        finding.rule != "unreadable" or "deep" in finding.path for finding in report.findings
    )


def test_a_folder_that_cannot_be_listed_is_said(tmp_path, monkeypatch):
    write(tmp_path, one=KERNEL + HOST, locked__two=KERNEL + HOST)
    scan = os.scandir

    def refuse(path):
        if str(path).endswith("locked"):
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse)
    found = {finding.path.rpartition("/")[2]: finding.rule for finding in audit([tmp_path]).findings}
    assert found == {"one.py": "specialised-int", "locked": "unreadable"}


def test_a_huge_file_is_said_and_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr("expertile.audit.sources.LARGEST_BYTES", 1 << 20)
    (tmp_path / "big.py").write_text(KERNEL + "#" * (1 << 20))
    (finding,) = audit([tmp_path]).findings
    assert finding.rule == "unreadable" and "larger than 1 MiB" in finding.message


def test_links_neither_loop_nor_count_twice(tmp_path):
    write(tmp_path, sub__one=KERNEL + HOST)
    (tmp_path / "sub" / "up").symlink_to(tmp_path, target_is_directory=True)
    (tmp_path / "again.py").symlink_to(tmp_path / "sub" / "one.py")
    (tmp_path / "self.py").symlink_to(tmp_path / "self.py")
    (tmp_path / "gone.py").symlink_to(tmp_path / "nowhere.py")
    report = audit([tmp_path, tmp_path / "sub", tmp_path / "sub" / "one.py"])
    assert arguments(report).count("rows") == report.launches == 1
    assert sorted(f.path.rpartition("/")[2] for f in report.findings if f.rule == "unreadable") == [
        "gone.py",
        "self.py",
    ]


@pytest.mark.parametrize("target", ["", "/dev/zero", "/dev/stdin"])
def test_what_is_no_file_is_said_and_not_opened(tmp_path, target):
    write(tmp_path, good=KERNEL + HOST)
    place = tmp_path / "endless.py"
    os.mkfifo(place) if not target else place.symlink_to(target)
    code = "import sys; from expertile.audit import audit; print([f.message for f in audit(sys.argv[1:]).findings])"
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, stdin=subprocess.PIPE, capture_output=True, text=True, timeout=60, check=True)
    assert "not read" in done.stdout and "num_tokens varies" in done.stdout
    if target != "/dev/stdin":
        with pytest.raises(ExpertileError, match=r"endless.py is a .*give files and folders"):
            audit([place])


def test_a_name_that_is_no_text_is_printed(tmp_path):
    place = os.path.join(os.fsencode(tmp_path), b"\xff.py")
    with open(place, "w") as file:
        file.write(KERNEL + HOST)
    for line in in_words(audit([tmp_path])):
        line.encode()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read_is_said(tmp_path):
    write(tmp_path, one=KERNEL + HOST)
    (tmp_path / "one.py").chmod(0)
    assert [finding.rule for finding in audit([tmp_path]).findings] == ["unreadable"]


def test_hidden_folders_and_other_files_are_left_out(tmp_path):
    write(tmp_path, **{".venv__one": KERNEL + HOST, "__pycache____two": KERNEL + HOST})
    (tmp_path / "three.txt").write_text(KERNEL + HOST)
    assert audit([tmp_path]).files <= 1


def test_nothing_is_run(tmp_path):
    write(tmp_path, one="open('trace', 'w')\nraise SystemExit(3)\n" + KERNEL + HOST)
    assert arguments(audit([tmp_path])) == ["rows"] and not (tmp_path / "trace").exists()


def test_it_needs_python_alone():
    code = "import sys, expertile.audit; print(sorted({name.split('.')[0] for name in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "triton", "numpy", "typer", "rich"} & set(eval(done.stdout))


def test_two_thousand_files_take_seconds(tmp_path):
    filler = "\n".join(f"def f{n}(a, b):\n    c = a[{n}](b) if a else [b]\n    return c\n" for n in range(40))
    for number in range(2000):
        text = KERNEL + HOST if number % 50 == 0 else filler
        (tmp_path / f"m{number}.py").write_text(text)
    start = time.perf_counter()
    report = audit([tmp_path])
    assert time.perf_counter() - start < 30
    assert (report.files, report.launches, len(report.findings)) == (2000, 40, 40)


def test_the_order_does_not_depend_on_the_file_system(tmp_path):
    write(tmp_path, b=KERNEL + HOST, a=KERNEL + HOST, sub__c=KERNEL + HOST)
    places = [(finding.path, finding.line) for finding in audit([tmp_path]).findings]
    assert places == sorted(places) and len(places) == 3


# The command


def run(*options):
    import typer

    app = typer.Typer()
    app.command()(command)
    return CliRunner().invoke(app, [str(option) for option in options])


ERROR = HOST.replace("BLOCK=64", "BLOCK=num_tokens")


@pytest.mark.parametrize(
    ("text", "level", "code"),
    [
        (KERNEL + HOST, None, 0),
        (KERNEL + HOST, "any", 1),
        (KERNEL + HOST, "warning", 1),
        (KERNEL + HOST, "error", 0),
        (KERNEL + ERROR, "error", 1),
        (KERNEL, "any", 0),
        ("# jit triton\nx = (", "any", 1),
        ("# jit triton\nx = (", "warning", 0),
    ],
)
def test_the_exit_code_says_whether_a_finding_reaches_the_level(tmp_path, text, level, code):
    write(tmp_path, one=text)
    options = [] if level is None else ["--fail-on", level]
    assert run(tmp_path, *options).exit_code == code
    assert run(tmp_path, "--json", *options).exit_code == code


def test_what_is_suppressed_fails_nothing(tmp_path):
    write(tmp_path, one=(KERNEL + HOST).replace("(1,)](", "(1,)](  # expertile: ok warmed"))
    done = run(tmp_path, "--fail-on", "any")
    assert done.exit_code == 0 and "1 suppressed" in done.output and "warmed" not in done.output
    assert "suppressed: warmed" in run(tmp_path, "--suppressed").output


def test_the_text_names_place_kernel_argument_cause_and_remedy(tmp_path):
    lines = list(in_words(audit([write(tmp_path, one=KERNEL + HOST)])))
    assert lines[0].startswith(f"{tmp_path}/one.py:15:9: warning: kernel.rows: num_tokens varies")
    assert lines[1] == "    because num_tokens is an argument, by its name"
    assert 'do_not_specialize=["rows"]' in lines[2]
    assert lines[-1] == "1 files, 1 kernels, 1 launches: 0 notes, 1 warning, 0 errors, 0 suppressed"


def test_the_json_has_a_fixed_form(tmp_path):
    made = json.loads(run(write(tmp_path, one=KERNEL + HOST + ERROR.replace("host", "other")), "--json").output)
    assert list(made) == ["schema", "files", "kernels", "launches", "unfollowed", "counts", "rules", "findings"]
    assert made["unfollowed"] == {"kernels": [], "launches": [], "hidden_arguments": 0}
    assert made["schema"] == 1 and made["counts"] == {"note": 0, "warning": 2, "error": 1, "suppressed": 0}
    for finding in made["findings"]:
        assert list(finding) == [
            *("rule", "severity", "path", "line", "end_line", "column", "message", "advice", "kernel", "argument"),
            *("kernel_path", "kernel_line", "parameter_line", "value", "because", "classes", "variants", "addresses"),
            "suppressed",
        ]
        assert finding["rule"] in made["rules"]
    assert [finding["variants"] for finding in made["findings"]] == [3, 3, None]


def test_one_path_is_no_list_of_them(tmp_path):
    with pytest.raises(ExpertileError, match="give a list of paths"):
        audit(str(tmp_path))


def test_bad_input_is_named(tmp_path):
    for options, word in (
        ([tmp_path / "nowhere"], "nowhere"),
        ([tmp_path, "--fail-on", "note"], "'note'"),
        (["a" * 5000], "too long"),
    ):
        error = run(*options).exception
        assert isinstance(error, ExpertileError) and word in str(error)
