"""The README is run: its Python blocks in order, its `$ expertile` blocks with the output that they show."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def test_python_blocks_run_in_order():
    names: dict = {"__name__": "readme"}
    found = blocks("python")
    assert found
    for block in found:
        if "transformers" in block:
            pytest.importorskip("transformers")
        exec(compile(block, "README.md", "exec"), names)


def commands() -> list[tuple[str, str]]:
    """(command line, the output shown) of each console block."""
    parts = [part for block in blocks("console") for part in re.split(r"^\$ ", block, flags=re.MULTILINE) if part]
    return [tuple(part.split("\n", 1)) for part in parts]


@pytest.mark.parametrize(("command", "shown"), commands())
def test_a_command_prints_what_the_readme_shows(command, shown):
    program, *arguments = shlex.split(command)
    assert program == "expertile"
    done = subprocess.run([sys.executable, "-m", "expertile.cli", *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == shown.strip()


def test_it_fits_and_its_links_lead_somewhere():
    assert len(README.splitlines()) <= 120
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert "://" in target or (Path(__file__).parents[2] / target).exists(), target
