"""`warm`: compiles variants ahead from what is declared of their arguments, without tensors and in parallel.

With a GPU the result lands in each kernel's own cache in this process, under the very key that a launch asks for, and
its module is loaded. Without one (or for a `target`) it lands in Triton's cache on disk, where a process with that GPU
finds it; `expertile cache pack` makes one file of it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter

from ..errors import ExpertileError, Recompiled, ShapeError
from .declarations import Variant, arguments, check
from .sealing import Guard


@dataclass(frozen=True)
class Warmed:
    """What `warm` did: of `variants` it compiled some and found the others on disk or in the process."""

    variants: int
    compiled: int
    seconds: float


def warm(variants: Iterable, *, target=None, workers: int | None = None, progress: bool = True) -> Warmed:
    """Compiles every variant, so that the launch it describes compiles nothing.

    variants  Variant or kernels.tiles.Specialization
    target    a Triton GPUTarget: compile for it into the cache on disk; default: the GPU at hand, else sm_90
    workers   threads (default: the CPUs, at most 32); Triton's compiler runs outside of Python's lock
    progress  a bar on stderr, where that is a terminal

    Raises    ShapeError when a declaration contradicts the kernel, before anything is compiled; ExpertileError naming
              the variants that do not compile, after all others are in place; Recompiled under a guard in mode error
    """
    if isinstance(variants, (str, Variant)) or not isinstance(variants, Iterable):
        raise ShapeError(f"variants={variants!r}: give a list of Variant")
    variants = list(variants)
    for variant in variants:
        check(variant)
    if workers is not None and not (isinstance(workers, int) and workers > 0):
        raise ShapeError(f"workers={workers!r}: give a number of threads, at least 1")
    start = perf_counter()
    workers = workers or min(os.cpu_count() or 1, 32)
    run = _into_process if target is None and _has_gpu() else _onto_disk
    with Guard("count", counters=False).seal() as guard, _bar(len(variants), progress) as advance:
        failed = run(variants, target, workers, advance)
    for _, error in failed:
        if isinstance(error, Recompiled):  # another guard, in mode error: nothing is wrong with the variant
            raise error
    if failed:
        lines = "".join(f"\n  {variant.kernel.__name__}: {_last_line(error)}" for variant, error in failed)
        raise ExpertileError(f"{len(failed)} of {len(variants)} variants do not compile:{lines}") from failed[0][1]
    compiled = sum(event.kind == "compile" and not event.failed for event in guard.events)
    return Warmed(len(variants), compiled, perf_counter() - start)


def _last_line(error: Exception) -> str:
    """Of a compiler's message, which shows the source before, and after it how to run ptxas again."""
    lines = [line for line in str(error).partition("Repro command")[0].splitlines() if line.strip()]
    return (lines or [type(error).__name__])[-1]


def _into_process(variants: list, target, workers: int, advance) -> list[tuple]:
    """Into the kernels' own caches, by JITFunction.warmup in Triton's own asynchronous mode."""
    from triton import AsyncCompileMode
    from triton.runtime.driver import driver

    device = driver.active.get_current_device()
    jobs = [(each, arguments(each, each.kernel.device_caches[device][3])) for each in variants]
    with ThreadPoolExecutor(workers) as pool:
        with AsyncCompileMode(pool, ignore_errors=True) as mode:
            made = [each.kernel.warmup(*given, grid=(1,), **each.options) for each, given in jobs]
            for future in mode.raw_futures:
                future.add_done_callback(lambda _: advance(1))
            advance(len(variants) - len(mode.raw_futures))
        loads = {key: pool.submit(_load, kernel, device) for key, kernel in {id(each): each for each in made}.items()}
    failed = []
    for variant, kernel in zip(variants, made, strict=True):
        if error := loads[id(kernel)].exception():
            _forget(variant.kernel, device, kernel)
            failed.append((variant, error))
    return failed


def _load(kernel, device: int) -> None:
    """Loads the module; in Triton 3.6 that compiles its launcher, with the C compiler. The device is a thread's own."""
    from triton.runtime.driver import driver

    if kernel is None:
        raise ExpertileError("Triton's jit_cache_hook, set by another library, declined it")
    driver.active.set_current_device(device)
    (kernel.result() if hasattr(type(kernel), "result") else kernel).run  # noqa: B018


def _forget(fn, device: int, kernel) -> None:
    """A compilation that failed must not stay in the cache as if it were still running."""
    cache = fn.device_caches[device][0]
    for key in [key for key, found in cache.items() if found is kernel]:
        del cache[key]


def _onto_disk(variants: list, target, workers: int, advance) -> list[tuple]:
    """Into Triton's cache on disk, under the hash that a launch on such a device looks for."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend

    target = target or GPUTarget("cuda", 90, 32)
    if not isinstance(target, GPUTarget) or (target.backend == "cuda" and not isinstance(target.arch, int)):
        raise ShapeError(f'target={target!r}: give one as GPUTarget("cuda", 90, 32)')
    try:
        backend = make_backend(target)
    except RuntimeError:
        raise ShapeError(f"target={target!r}: this Triton has no backend for it") from None
    jobs = [(each, *_source(each, backend)) for each in variants]
    failed = []
    with ThreadPoolExecutor(workers) as pool:
        futures = {pool.submit(_compile, source, target, options): each for each, source, options in jobs}
        for future in as_completed(futures):
            advance(1)
            if future.exception():
                failed.append((futures[future], future.exception()))
    return failed


def _source(variant, backend):
    """The source and options that JITFunction.run would hand to the compiler."""
    from triton import knobs
    from triton.compiler import ASTSource
    from triton.runtime.jit import create_function_from_signature

    kernel = variant.kernel
    given = arguments(variant, backend)
    options = dict(variant.options)
    options["debug"] = options.get("debug", kernel.debug) or knobs.runtime.debug
    options["instrumentation_mode"] = knobs.compilation.instrumentation_mode
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, given_options = bind(*given, **options)
    parsed, signature, constants, attributes = kernel._pack_args(backend, options, bound, specialization, given_options)
    make = ASTSource
    if kernel.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource as make
    return make(kernel, signature, constants, attributes), parsed.__dict__


def _compile(source, target, options):
    import triton

    return triton.compile(source, target=target, options=options)


def _has_gpu() -> bool:
    from triton.runtime.driver import driver

    try:
        return driver.active is not None
    except RuntimeError:  # "0 active drivers"
        return False


@contextmanager
def _bar(total: int, wanted: bool):
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = TextColumn("warming"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True, disable=not (wanted and console.is_terminal)) as progress:
        task = progress.add_task("", total=total)
        yield lambda count: progress.advance(task, count)
