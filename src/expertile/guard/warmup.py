"""`warm`: compiles variants ahead from what is declared of their arguments, without tensors and in parallel.

With a GPU the result lands in each kernel's own cache in this process, under the very key that a launch asks for, and
its module is loaded. Without one (or for a `target`) it lands in Triton's cache on disk, where a process with that GPU
finds it; `expertile cache pack` makes one file of it.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter

from ..errors import ExpertileError, ShapeError
from .sealing import Guard

#: An integer of each class that Triton tells apart: neither 1 nor a multiple of 16, and a multiple of 16.
_INTEGERS = {"i32": (3, 16), "i64": ((1 << 40) + 3, 1 << 40), "u64": ((1 << 63) + 3, 1 << 63)}
_DESCRIPTOR = re.compile(r"tensordesc<(\w+)\[([\d, ]+)\](?:,NVMMASharedLayout(\(.*\)))?>")  # with a layout: of Gluon
_NARROW = ("i8", "i16", "u8", "u16", "u32")  # only by an annotation in the kernel, whatever the value


@dataclass(frozen=True)
class Variant:
    """One variant of one kernel. `kernels.tiles.Specialization` has the same fields and is taken as well.

    kernel     a @triton.jit or @gluon.jit function
    types      argument -> Triton type ("*bf16", "i32", "fp32", "tensordesc<bf16[64, 128]>", in Gluon with the text of
               its layout behind the sizes), a tuple of such, or a value that stands for itself; those with a constant
               need none
    constants  the value of each tl.constexpr argument, and of every other argument that is None or 1
    divisible_by_16   arguments whose value or address is a multiple of 16; default: every pointer
    options    num_warps, num_stages, ... in the order in which the launch gives them: it is part of Triton's key

    >>> Variant(kernel, {"x_ptr": "*bf16", "n": "i32"}, {"BLOCK": 128}, options={"num_warps": 4})  # doctest: +SKIP
    """

    kernel: object
    types: Mapping[str, object] = field(default_factory=dict)
    constants: Mapping[str, object] = field(default_factory=dict)
    divisible_by_16: tuple[str, ...] | None = None
    options: Mapping[str, object] = field(default_factory=dict)


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
              the variants that do not compile, after all others are in place
    """
    variants = list(variants)
    for variant in variants:
        _check_names(variant)
    start = perf_counter()
    workers = workers or min(os.cpu_count() or 1, 32)
    run = _into_process if target is None and _has_gpu() else _onto_disk
    with Guard("count", counters=False).seal() as guard, _bar(len(variants), progress) as advance:
        failed = run(variants, target, workers, advance)
    if failed:
        lines = "".join(f"\n  {variant.kernel.__name__}: {_last_line(error)}" for variant, error in failed)
        raise ExpertileError(f"{len(failed)} of {len(variants)} variants do not compile:{lines}") from failed[0][1]
    compiled = sum(event.kind == "compile" and not event.failed for event in guard.events)
    return Warmed(len(variants), compiled, perf_counter() - start)


def _last_line(error: Exception) -> str:
    """Of a compiler's message, which shows the source before."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]


def _check_names(variant) -> None:
    kernel, names = variant.kernel, getattr(variant.kernel, "arg_names", ())
    if not hasattr(kernel, "device_caches"):
        raise ShapeError(
            f"{kernel!r} is not a @triton.jit function: give an autotuned kernel's own function, kernel.fn"
        )
    unknown = {*variant.types, *variant.constants, *(variant.divisible_by_16 or ())} - {*names}
    if unknown:
        raise ShapeError(f"{kernel.__name__} has no argument {', '.join(sorted(unknown))}: it has {', '.join(names)}")


def arguments(variant, backend) -> tuple:
    """Positional arguments that Triton's binder takes for a launch of the variant: checked against the declaration."""
    from triton.runtime.jit import create_function_from_signature

    kernel = variant.kernel
    given = tuple(_argument(variant, param) for param in kernel.params)
    _, found, _ = create_function_from_signature(kernel.signature, kernel.params, backend)(*given, **variant.options)
    for param, value, specialized in zip(kernel.params, given, found, strict=True):
        _check(variant, param, value, specialized)
    return given


def _argument(variant, param):
    name = param.name
    if name in variant.constants:
        value = variant.constants[name]
        if not param.is_constexpr and value is not None and value != 1:
            raise ShapeError(
                f"{variant.kernel.__name__}: {name}={value!r} is no constant to Triton: of arguments that are no "
                "tl.constexpr only None and 1 are; give its type instead"
            )
        return value
    if name in variant.types and not param.is_constexpr:
        return _example(variant.types[name], _is_divisible(variant, name), f"{variant.kernel.__name__}: {name}")
    if param.has_default:
        return param.default
    raise ShapeError(f"{variant.kernel.__name__}: {name} has neither a type nor a constant")


def _is_divisible(variant, name: str) -> bool:
    if variant.divisible_by_16 is None:
        return str(variant.types[name]).startswith("*")
    return name in variant.divisible_by_16


def _example(kind, divisible: bool, where: str):
    """A value that Triton gives this type."""
    if isinstance(kind, tuple):
        return tuple(_example(each, divisible, where) for each in kind)
    if not isinstance(kind, str):
        return kind
    if kind.startswith("*"):
        return _pointer(kind[1:], 16 if divisible else 8, where)
    if described := _DESCRIPTOR.fullmatch(kind):
        block = [int(size) for size in described[2].split(",")]
        return _descriptor(_pointer(described[1], 16, where), block, described[3])
    if kind in _INTEGERS or kind in _NARROW:
        return _INTEGERS.get(kind, _INTEGERS["i32"])[divisible]
    if kind in ("i1", "u1"):
        return True
    if kind.startswith(("fp", "bf")):
        return 0.5
    raise ShapeError(
        f"{where} has type {kind!r}: give a pointer, integer, float or descriptor, or a value that stands for itself"
    )


def _pointer(element: str, address: int, where: str):
    """Stands for a tensor of that element type at an address like that."""
    import torch
    from triton._utils import type_canonicalisation_dict
    from triton.runtime.jit import MockTensor

    element = element.removeprefix("k")
    names = [name for name, found in type_canonicalisation_dict.items() if found == element and hasattr(torch, name)]
    if not names:
        raise ShapeError(f"{where} points to {element!r}, which no torch dtype is to Triton")
    mock = MockTensor(getattr(torch, names[0]))
    mock.data_ptr = lambda: address
    return mock


def _descriptor(base, block: list[int], layout: str | None):
    """A tensor of one block, its rows 1024 elements apart so that any of them may start there. `layout` is what stands
    behind the name in the text of a Gluon layout: "(swizzle_byte_width=128, ...)".
    """
    strides = [1024 ** (len(block) - 1 - axis) for axis in range(len(block))]
    if layout is None:
        from triton.tools.tensor_descriptor import TensorDescriptor

        return TensorDescriptor(base, block, strides, block)
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    said = {each.arg: ast.literal_eval(each.value) for each in ast.parse(f"f{layout}", mode="eval").body.keywords}
    return TensorDescriptor(base, block, strides, block, NVMMASharedLayout(**said))


def _check(variant, param, value, specialized: tuple) -> None:
    """The declaration says what a launch would have compiled, or it is wrong."""
    found, said = specialized[0], variant.types.get(param.name)
    if param.name in variant.constants or not isinstance(said, (str, tuple)) or param.is_constexpr:
        return
    if not _agrees(said, found):
        raise ShapeError(f"{variant.kernel.__name__}: {param.name} is declared {said}, a launch makes it {found}")


def _agrees(said, found) -> bool:
    if isinstance(said, tuple):
        return isinstance(found, tuple) and len(said) == len(found) and all(map(_agrees, said, found))
    return not isinstance(said, str) or {"i1": "u1"}.get(said, said) == found.replace("*k", "*")


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
    backend = make_backend(target)
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
