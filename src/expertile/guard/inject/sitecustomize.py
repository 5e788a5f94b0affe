"""Put on PYTHONPATH by `expertile watch`, so that every Python process of the watched program runs it at its start.

It imports nothing but what a starting Python has, waits for `import triton`, and runs the sitecustomize that it hides.
"""

import importlib.machinery
import importlib.util
import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))


class _OnTriton:
    """A finder that calls `_watch` when the module triton has been executed. Looking for it alone does nothing."""

    def __init__(self):
        self.asked = False

    def find_spec(self, name, path=None, target=None):
        if name != "triton" or self.asked:
            return None
        self.asked = True
        try:
            spec = importlib.util.find_spec("triton")
        finally:
            self.asked = False
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module):
                execute(module)
                _watch()

            spec.loader.exec_module = exec_module
        return spec


def _watch():
    try:
        _expertile()
        from expertile.guard.watching import watch_this_process
    except Exception as error:
        print(f"expertile watch: process {os.getpid()} is not watched: {error}", file=sys.stderr)
        return
    watch_this_process()


def _expertile():
    """expertile as installed here, else the watcher's own: another environment's interpreter need not have it."""
    try:
        if importlib.util.find_spec("expertile.guard.watching") is not None:
            return
    except ImportError:
        pass
    home = os.path.dirname(os.path.dirname(_HERE))
    init = os.path.join(home, "__init__.py")
    spec = importlib.util.spec_from_file_location("expertile", init, submodule_search_locations=[home])
    module = importlib.util.module_from_spec(spec)
    sys.modules["expertile"] = module
    spec.loader.exec_module(module)


def _hidden_sitecustomize():
    """Runs the sitecustomize that Python would have found without us. Our folder stays on sys.path: Inductor makes its
    workers' PYTHONPATH of that.
    """
    others = [entry for entry in sys.path if os.path.abspath(entry or os.curdir) != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


if os.environ.get("EXPERTILE_WATCH"):
    sys.meta_path.insert(0, _OnTriton())
_hidden_sitecustomize()
