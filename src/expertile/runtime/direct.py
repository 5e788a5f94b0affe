"""A compiled kernel started through the CUDA driver, its arguments laid out once.

Triton's way to a compiled kernel describes every argument anew and makes a tensor map per descriptor and launch. What a
recorded call changes is addresses: here they are written into an image of the kernel's parameters, and tensor maps are
pointed elsewhere. The image follows what Triton 3.6 to 3.8 pass (a descriptor: its map, sizes, strides; at the end two
scratch pointers). The driver is asked for every parameter's size; where one differs Triton starts the kernel as always.
"""

from __future__ import annotations

import ctypes
import inspect
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

MAP_BYTES = 128  # of a CUtensorMap
SHARED_BYTES = 228 << 10  # of a block; Triton 3.8 starts kernels with more in another mode
PDL = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
FORMATS = dict(i1="b", i8="b", i16="h", i32="i", i64="q", u8="B", u16="H", u32="I", u64="Q", fp32="f", fp64="d")


class _Attribute(ctypes.Structure):  # CUlaunchAttribute
    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int), ("rest", ctypes.c_char * 60)]


class _Config(ctypes.Structure):  # CUlaunchConfig
    _fields_ = [
        *((f"{of}_{axis}", ctypes.c_uint) for of in ("grid", "block") for axis in "xyz"),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    ]


@lru_cache(maxsize=1)
def cuda_driver() -> Any | None:
    """The CUDA driver's library, if it is there and can tell a kernel's parameters (CUDA 12.4)."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
        return library if library.cuFuncGetParamInfo and library.cuTensorMapReplaceAddress else None
    except (OSError, AttributeError):
        return None


@dataclass(eq=False)
class Direct:
    """One kernel on its grid. Not for two threads at once: the image is shared.

    words     the image's bytes as 64-bit words
    places    (word, source, bytes from the source's start)
    maps      tensor maps in the image: [where, source, bytes from the source's start, address it has now]
    """

    words: memoryview
    places: Sequence[tuple[int, int, int]]
    maps: Sequence[list]
    config: _Config
    arguments: tuple
    driver: Any
    keep: tuple  # what the driver is pointed at

    def __call__(self, addresses: Sequence[int], stream: int) -> bool:
        """Whether the driver took it."""
        words = self.words
        for word, source, offset in self.places:
            words[word] = addresses[source] + offset
        for each in self.maps:
            where, source, offset, now = each
            address = addresses[source] + offset
            if address != now:
                if self.driver.cuTensorMapReplaceAddress(where, ctypes.c_void_p(address)):
                    return False
                each[3] = address
        self.config.stream = stream
        return not self.driver.cuLaunchKernelEx(*self.arguments)


@dataclass(frozen=True)
class Moving:
    """An address that each call brings: `offset` bytes from the start of its source; `address` when it was recorded."""

    source: int
    offset: int
    address: int


def direct(compiled, grid: tuple, arguments: Sequence[Any], moving: Mapping[int, Moving], driver=None) -> Direct | None:
    """The launch of `compiled` on its grid; None where only Triton knows how.

    arguments    in the kernel's order
    moving       position -> what that tensor's, or tensor descriptor's, address will be
    """
    driver = driver or cuda_driver()
    if driver is None or not prod(grid):
        return None
    metadata, (warps, blocks, shared) = compiled.metadata, compiled.packed_metadata
    more = metadata.global_scratch_size or metadata.profile_scratch_size or metadata.launch_cooperative_grid
    if blocks != 1 or shared > SHARED_BYTES or more or getattr(metadata, "instrumentation_mode", ""):
        return None
    parameters = _parameters(compiled, arguments, moving)
    offsets = parameters and _offsets(driver, compiled.function, [len(data) for data, _ in parameters])
    if not parameters or not offsets:
        return None
    size = offsets[-1] + 8
    memory = ctypes.create_string_buffer(size + MAP_BYTES)
    start = -ctypes.addressof(memory) % MAP_BYTES
    image = memoryview(memory).cast("B")[start : start + size]
    first, places, maps = ctypes.addressof(memory) + start, [], []
    for (data, source), offset in zip(parameters, offsets, strict=True):
        image[offset : offset + len(data)] = data
        if source is not None and len(data) == MAP_BYTES:
            maps.append([ctypes.c_void_p(first + offset), source.source, source.offset, source.address])
        elif source is not None:
            places.append((offset // 8, source.source, source.offset))
    if any(not _points_there(driver, where, now) for where, _, _, now in maps):
        return None
    attribute = _Attribute(id=PDL, value=1)
    config = _Config(
        *grid, 32 * warps, 1, 1, shared, None, ctypes.pointer(attribute), 1 if metadata.launch_pdl else 0
    )  # fmt: skip
    pointers = (ctypes.c_void_p * len(offsets))(*(first + offset for offset in offsets))
    taken = (ctypes.byref(config), ctypes.c_void_p(compiled.function), pointers, None)
    return Direct(image.cast("Q"), places, maps, config, taken, driver, (memory, attribute, pointers))


def _parameters(compiled, arguments, moving) -> list[tuple[bytes, Moving | None]] | None:
    """What the kernel is passed, as bytes, with what moves; None at a type that is not known here."""
    found: list[tuple[bytes, Moving | None]] = []
    metas = iter(getattr(compiled.metadata, "tensordesc_meta", None) or ())
    kinds = list(compiled.src.signature.values())
    if len(kinds) != len(arguments):
        return None
    for position, (kind, value) in enumerate(zip(kinds, arguments, strict=True)):
        if kind == "constexpr":
            continue
        if not isinstance(kind, str):
            return None
        source = moving.get(position)
        if kind.startswith("tensordesc"):
            meta = next(metas, None)
            if meta is None:
                return None
            made, *numbers = _tensor_map(value, meta)
            found.append((_map_bytes(made), source))
            rank = len(numbers) // 2
            found += [(struct.pack("i", n), None) for n in numbers[:rank]]
            found += [(struct.pack("q", n), None) for n in numbers[rank:]]
        elif kind.startswith("*") and source is not None:
            found.append((struct.pack("Q", source.address), source))
        elif kind in FORMATS:
            found.append((struct.pack(FORMATS[kind], value), None))
        else:
            return None
    return [*found, (bytes(8), None), (bytes(8), None)]  # two scratch pointers


def _tensor_map(descriptor, meta) -> list:
    """Triton's tensor map for a descriptor, then its sizes and strides."""
    from triton.backends.nvidia.driver import make_tensordesc_arg

    more = len(inspect.signature(make_tensordesc_arg).parameters) - 2  # 3.8 has a third, unused
    return make_tensordesc_arg(descriptor, meta, *[None] * more)


def _map_bytes(made) -> bytes:
    """The CUtensorMap at the end of Triton's object for it."""
    return ctypes.string_at(id(made) + type(made).__basicsize__ - MAP_BYTES, MAP_BYTES)


def _offsets(driver, function: int, sizes: Sequence[int]) -> list[int] | None:
    """Where the driver has each parameter, if it has just these."""
    offset, size, found = ctypes.c_size_t(), ctypes.c_size_t(), []
    for n in range(len(sizes) + 1):
        failed = driver.cuFuncGetParamInfo(
            ctypes.c_void_p(function), ctypes.c_size_t(n), ctypes.byref(offset), ctypes.byref(size)
        )  # fmt: skip
        if n == len(sizes):
            return found if failed else None
        if failed or size.value != sizes[n] or (sizes[n] >= 8 and offset.value % 8):
            return None
        found.append(offset.value)
    return None


def _points_there(driver, where: ctypes.c_void_p, address: int) -> bool:
    """Whether a tensor map with that address lies there: pointing it there again changes nothing, elsewhere does."""
    assert where.value is not None
    before = ctypes.string_at(where.value, MAP_BYTES)
    for to, same in ((address, True), (address + MAP_BYTES, False), (address, True)):
        if driver.cuTensorMapReplaceAddress(where, ctypes.c_void_p(to)):
            return False
        if (ctypes.string_at(where.value, MAP_BYTES) == before) is not same:
            return False
    return True
