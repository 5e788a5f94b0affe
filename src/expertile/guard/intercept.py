"""Triton's own functions that run only when something is compiled, tuned or loaded, wrapped while a guard is sealed.

Why not `knobs.runtime.jit_cache_hook`: there is one, and whoever sets it later disarms the guard (vLLM's monitor and
torch's NVSHMEM do that to the one for after); as long as one is set, launches of kernels with a Gluon layout among
their constants (in Triton 3.6 also with a function) fail, because Triton writes those as JSON for it; and
`triton.compile`, which Inductor uses, does not call it at all. So hooks are left alone and keep working. A launch whose
kernel is in the process's cache reaches none of what is wrapped here.
"""

from __future__ import annotations

import functools
import hashlib
import threading
from collections.abc import Callable
from time import perf_counter

from ..errors import ExpertileError
from .observe import Observer
from .stack import Call


class Interception:
    """One a process, like the functions that it wraps."""

    def __init__(self):
        self.observer = Observer()
        self._lock = threading.RLock()
        self._wrapped: dict[tuple, tuple[Callable, Callable]] = {}  # (owner, name) -> (wrapper, original)

    @property
    def guards(self) -> tuple:
        return self.observer.guards

    def add(self, guard) -> None:
        with self._lock:
            for owner, name, wrap in _points():
                if (owner, name) not in self._wrapped:
                    original = getattr(owner, name)
                    wrapper = functools.wraps(original)(wrap(self.observer, original))
                    self._wrapped[owner, name] = (wrapper, original)
                    setattr(owner, name, wrapper)
            self.observer.guards = (*self.guards, guard)

    def remove(self, guard) -> None:
        """The last one puts the originals back. Where a stranger has wrapped ours meanwhile it stays below, idle."""
        with self._lock:
            self.observer.guards = tuple(each for each in self.guards if each is not guard)
            for (owner, name), (wrapper, original) in list(self._wrapped.items()) if not self.guards else ():
                if getattr(owner, name) is wrapper:
                    setattr(owner, name, original)
                    del self._wrapped[owner, name]


def _points() -> list[tuple]:
    """What is wrapped: owner, name, wrapper."""
    try:
        import triton
    except ImportError:
        raise ExpertileError("the guard needs Triton, which is not installed here") from None
    try:
        from triton.compiler import code_generator
        from triton.compiler.compiler import CompiledKernel, IRSource
        from triton.runtime import build
        from triton.runtime._async_compile import AsyncCompileMode
        from triton.runtime.autotuner import Autotuner

        points = [
            (code_generator, "ast_to_ttir", _ast_to_ttir),
            (IRSource, "make_ir", _make_ir),
            (CompiledKernel, "__init__", _compiled_kernel),
            (AsyncCompileMode, "submit", _submit),
            (Autotuner, "prune_configs", _prune_configs),
            (Autotuner, "_bench", _bench),
            (build, "_build", _build),
        ]
        for owner, name, _ in points:
            getattr(owner, name)
    except (ImportError, AttributeError) as error:
        raise ExpertileError(
            f"Triton {triton.__version__} is not one that the guard knows (3.6 to 3.8): {error}"
        ) from error
    return points


def _ast_to_ttir(observer: Observer, original: Callable) -> Callable:
    """The compiler's first step for a Triton or Gluon kernel, whoever asked for it."""

    def ast_to_ttir(fn, src, *arguments, **keywords):
        observer.compile_begins(src)
        try:
            return original(fn, src, *arguments, **keywords)
        except BaseException:
            observer.compile_failed()
            raise

    return ast_to_ttir


def _make_ir(observer: Observer, original: Callable) -> Callable:
    """The first step for a file of IR that was given to triton.compile."""

    def make_ir(self, *arguments, **keywords):
        observer.compile_begins(self)
        return original(self, *arguments, **keywords)

    return make_ir


def _compiled_kernel(observer: Observer, original: Callable) -> Callable:
    """The last step, of a compilation and of reading one from disk."""

    def __init__(self, src, *arguments, **keywords):
        start = perf_counter()
        original(self, src, *arguments, **keywords)
        observer.kernel_made(src, (perf_counter() - start) * 1e3)

    return __init__


def _submit(observer: Observer, original: Callable) -> Callable:
    """Under AsyncCompileMode the compiler runs in another thread: what is known here has to go along."""

    def submit(self, key, compile_fn, finalize_fn):
        if observer.guards:
            known = key in self.future_kernels
            compile_fn = observer.submitted(compile_fn, known, functools.partial(_on_disk, key))
        return original(self, key, compile_fn, finalize_fn)

    return submit


def _prune_configs(observer: Observer, original: Callable) -> Callable:
    """Chooses the configurations to measure, once for each key that is not tuned yet."""

    def prune_configs(self, *arguments, **keywords):
        found = original(self, *arguments, **keywords)
        observer.tuning_planned(self, len(found))
        return found

    return prune_configs


def _bench(observer: Observer, original: Callable) -> Callable:
    def _bench(self, *arguments, config, **keywords):
        with observer.measuring(self, keywords):
            return original(self, *arguments, config=config, **keywords)

    return _bench


def _build(observer: Observer, original: Callable) -> Callable:
    def _build(*arguments, **keywords):
        with observer.building():
            return original(*arguments, **keywords)

    return _build


def _on_disk(key: str, call: Call) -> bool:
    """Whether triton.compile will find the kernel compiled."""
    from triton import knobs
    from triton.runtime.cache import get_cache_manager

    if knobs.compilation.always_compile:
        return False
    if getattr(knobs.runtime, "add_stages_inspection_hook", None) is not None:
        key += knobs.runtime.add_stages_inspection_hook()[0]
    name = f"{call.source.name[:150]}.json"
    group = get_cache_manager(hashlib.sha256(key.encode()).hexdigest()).get_group(name)
    return bool(group) and name in group


INTERCEPTION = Interception()
