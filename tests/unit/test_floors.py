"""What may be imported without what, and that the installed package is whole."""

import json
import os
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest

WITHOUT_TORCH = [
    "errors",
    "problem",
    "hardware",
    "router",
    "plans",
    "policy",
    "audit",
    "guard",
    "cli_audit",
    "cli_serve",
    "cli",
]


def imported_with(statement: str) -> set[str]:
    """Top-level modules in a fresh Python after the statement."""
    code = f"{statement}\nimport json, sys\nprint(json.dumps(sorted({{name.split('.')[0] for name in sys.modules}})))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout))


@pytest.mark.parametrize("module", WITHOUT_TORCH)
def test_deciding_imports_neither_torch_nor_triton(module):
    assert not imported_with(f"import expertile.{module}") & {"torch", "triton", "numpy"}


def test_importing_expertile_imports_only_python():
    assert not imported_with("import expertile") & {"torch", "triton", "numpy", "typer", "rich"}


def test_a_plan_is_made_without_torch():
    problem = "expertile.Problem(tokens=16, hidden=2048, inter=768, experts=128, top_k=8)"
    statement = (
        f"import expertile\nfrom expertile.policy import decide, explain\nexplain(decide({problem}, expertile.H200))"
    )
    assert not imported_with(statement) & {"torch", "triton", "numpy"}


def test_a_models_layer_is_explained_without_torch(tmp_path):
    config = dict(hidden_size=64, moe_intermediate_size=32, num_experts=8, num_experts_per_tok=2)
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = ["expertile", "explain", "--model", str(tmp_path), "--tokens", "4"]
    statement = (
        f"import contextlib, io, sys\nsys.argv = {words}\nfrom expertile.cli import app\n"
        "with contextlib.redirect_stdout(io.StringIO()) as out:\n    app(standalone_mode=False)\n"
        "assert 'H=64 I=32' in out.getvalue()"
    )
    assert not imported_with(statement) & {"torch", "triton", "numpy"}


def test_the_guard_needs_no_import_of_its_own():
    """As the README calls it."""
    statement = "import expertile\nassert callable(expertile.guard.seal) and callable(expertile.guard.ready)"
    assert not imported_with(statement) & {"torch", "triton", "numpy"}


def test_every_public_name_exists():
    pytest.importorskip("torch")
    import expertile

    for name in expertile.__all__:
        assert getattr(expertile, name) is not None


def test_measured_tables_name_a_known_device_and_hold_entries():
    from expertile.hardware import DEVICES

    folder = files("expertile.policy") / "tables"
    for table in folder.iterdir() if folder.is_dir() else ():
        name, _, ending = table.name.partition(".")
        assert name in DEVICES and ending == "json"
        assert json.loads(table.read_text())["entries"], table.name


@pytest.mark.skipif("EXPERTILE_WHEEL" not in os.environ, reason="only against the installed wheel (`make wheel`)")
def test_the_wheel_is_what_is_tested():
    import expertile

    installed = Path(expertile.__file__).parent
    assert installed.is_relative_to(sys.prefix)
    source = Path(__file__).parents[2] / "src" / "expertile"
    shipped = {path.relative_to(installed) for path in installed.rglob("*.*") if "__pycache__" not in path.parts}
    wanted = {path.relative_to(source) for path in source.rglob("*.*") if "__pycache__" not in path.parts}
    assert shipped == wanted
