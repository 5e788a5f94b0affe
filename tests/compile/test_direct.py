"""What the driver is handed is what the kernels take: every parameter's place and size, read from their PTX."""

from __future__ import annotations

import ctypes
import re
import struct
from types import SimpleNamespace

import pytest

from expertile.hardware import H200
from expertile.plans import Backend
from expertile.policy import decide
from expertile.problem import named_problem
from expertile.runtime import direct as launching
from expertile.runtime.compile import compile_specialization
from expertile.runtime.direct import MAP_BYTES, Moving, direct
from expertile.runtime.triton_experts import specializations

SIZES = {"64": 8, "32": 4, "16": 2, "8": 1}
NEW = 0x7F0000000000


class Map:
    """As large as Triton's object for a tensor map."""

    __slots__ = tuple(f"word{n}" for n in range(20))


class Driver:
    """The CUDA driver as far as a launch asks it; kernels are known by their PTX."""

    def __init__(self, ptx: str):
        self.parameters, place = [], 0
        entry = ptx[ptx.index(".entry") :]
        for match in re.finditer(r"\.param (?:\.align (\d+) )?\.[bufs](\d+)[^\n,)]*?(?:\[(\d+)\])?[,\n]",
                                 entry[: entry.index(")")]):  # fmt: skip
            align, bits, count = match.groups()
            size = SIZES[bits] * int(count or 1)
            aligned = int(align) if align and count else size
            place = -(-place // aligned) * aligned
            self.parameters.append((place, size))
            place += size
        self.launched: list[list[bytes]] = []

    def cuFuncGetParamInfo(self, function, n, offset, size):
        if n.value >= len(self.parameters):
            return 1
        offset._obj.value, size._obj.value = self.parameters[n.value]
        return 0

    def cuTensorMapReplaceAddress(self, where, address):
        ctypes.memmove(where.value, struct.pack("Q", address.value), 8)
        return 0

    def cuLaunchKernelEx(self, config, function, pointers, extra):
        self.config = config._obj
        self.launched.append(
            [ctypes.string_at(where, size) for where, (_, size) in zip(pointers, self.parameters, strict=True)]
        )
        return 0


def starts():
    """Every kernel of a few plans: its Specialization."""
    for name, label, static, tokens in (
        ("qwen3-30b-a3b", "bf16", False, (1, 16, 512, 4096)),
        ("qwen3-30b-a3b", "fp8_tensor", True, (1, 8, 2048)),
        ("qwen3-30b-a3b", "fp8_block", False, (4, 64, 2048)),
        ("nemotron-3-nano", "fp8_channel", False, (32,)),
    ):
        for count in tokens:
            plan = decide(named_problem(name, count, label, static_scale=static), H200)
            assert plan.backend is Backend.TRITON
            yield from specializations(plan)


def stub(spec, ptx: str, **metadata):
    """A compiled kernel as Triton returns it from a launch."""
    signature = {name: "constexpr" if name in spec.constants else spec.types[name] for name in spec.kernel.arg_names}
    said = dict(global_scratch_size=0, profile_scratch_size=0, launch_cooperative_grid=False, launch_pdl=True)
    said["tensordesc_meta"] = [{} for kind in signature.values() if kind.startswith("tensordesc")]
    return SimpleNamespace(
        src=SimpleNamespace(signature=signature), packed_metadata=(4, 1, 1024), function=7,
        metadata=SimpleNamespace(**(said | metadata)), ptx=ptx,
    )  # fmt: skip


def arguments_of(compiled):
    """(values, what moves): pointers and descriptors by turns from two sources."""
    values, moving = [], {}
    for position, kind in enumerate(compiled.src.signature.values()):
        if kind.startswith(("*", "tensordesc")):
            moving[position] = Moving(position % 2, 16 * position, 4096 + 16 * position)
        values.append(kind if kind.startswith("tensordesc") else 3 if kind[0] in "iu" else 0.5)
    return values, moving


@pytest.fixture
def tensor_maps(monkeypatch):
    """Triton's way to a tensor map needs a GPU; sizes and strides are told by their rank here."""

    def made(kind, meta):
        rank = kind.split("[")[1].split("]")[0].count(",") + 1
        return [Map(), *range(1, rank + 1), *range(11, rank + 11)]

    monkeypatch.setattr(launching, "_tensor_map", made)
    # An object's memory is Python's, not a map: here it is one that has the recorded address.
    monkeypatch.setattr(launching, "_map_bytes", lambda made: bytes(MAP_BYTES))


@pytest.mark.parametrize("spec", list(starts()), ids=lambda spec: spec.kernel.__name__)
def test_the_driver_is_handed_what_the_kernel_takes(spec, tensor_maps, monkeypatch):
    made = compile_specialization(spec)
    compiled, driver = stub(spec, made.ptx), Driver(made.ptx)
    monkeypatch.setattr(launching, "_points_there", lambda driver, where, address: True)
    values, moving = arguments_of(compiled)
    start = direct(compiled, (5, 1, 1), values, moving, driver)
    assert start is not None, driver.parameters
    assert start([NEW, 2 * NEW], stream=99)
    handed, (kinds,) = iter(driver.launched[0]), [list(compiled.src.signature.values())]
    for position, kind in enumerate(kinds):
        address = NEW * (1 + position % 2) + 16 * position
        if kind == "constexpr":
            continue
        if kind.startswith("tensordesc"):
            rank = kind.split("[")[1].split("]")[0].count(",") + 1
            assert struct.unpack("Q", next(handed)[:8]) == (address,)
            assert [struct.unpack("i", next(handed))[0] for _ in range(rank)] == list(range(1, rank + 1))
            assert [struct.unpack("q", next(handed))[0] for _ in range(rank)] == list(range(11, rank + 11))
        elif kind.startswith("*"):
            assert struct.unpack("Q", next(handed)) == (address,)
        else:
            assert struct.unpack({"i32": "i", "fp32": "f"}[kind], next(handed))[0] == values[position]
    assert list(handed) == [bytes(8)] * 2
    config = driver.config
    assert (config.grid_x, config.block_x, config.shared, config.stream) == (5, 128, 1024, 99)
    assert (config.count, config.attributes[0].id, config.attributes[0].value) == (1, 6, 1)


def small(**metadata):
    spec = next(iter(starts()))
    made = compile_specialization(spec)
    return stub(spec, made.ptx, **metadata), Driver(made.ptx)


@pytest.mark.parametrize(
    "metadata", [dict(global_scratch_size=1), dict(launch_cooperative_grid=True), dict(instrumentation_mode="gsan")]
)
def test_what_needs_more_than_parameters_is_left_to_triton(metadata):
    compiled, driver = small(**metadata)
    assert direct(compiled, (5, 1, 1), *arguments_of(compiled), driver) is None


def test_another_layout_of_the_parameters_is_left_to_triton():
    compiled, driver = small()
    assert direct(compiled, (5, 1, 1), *arguments_of(compiled), driver)
    whole = driver.parameters
    for other in (whole[:-1], [*whole, (whole[-1][0] + 8, 8)], [(whole[0][0], 4), *whole[1:]]):
        driver.parameters = other
        assert direct(compiled, (5, 1, 1), *arguments_of(compiled), driver) is None


def test_an_empty_grid_and_two_blocks_a_cluster_are_left_to_triton():
    compiled, driver = small()
    assert direct(compiled, (0, 1, 1), *arguments_of(compiled), driver) is None
    compiled.packed_metadata = (4, 2, 1024)
    assert direct(compiled, (5, 1, 1), *arguments_of(compiled), driver) is None


def test_a_refused_launch_is_said():
    compiled, driver = small()
    start = direct(compiled, (5, 1, 1), *arguments_of(compiled), driver)
    driver.cuLaunchKernelEx = lambda *arguments: 201
    start.driver = driver
    assert not start([NEW, NEW], stream=0)


def test_what_is_no_tensor_map_is_found_out():
    """The object's last bytes are taken for the map: the driver must be able to point it there, and elsewhere."""
    memory = ctypes.create_string_buffer(3 * MAP_BYTES)
    where = ctypes.c_void_p(ctypes.addressof(memory))
    driver = Driver(".entry k(\n)")
    assert not launching._points_there(driver, where, 4096)  # had another address
    driver.cuTensorMapReplaceAddress(where, ctypes.c_void_p(4096))
    assert launching._points_there(driver, where, 4096)
    driver.cuTensorMapReplaceAddress = lambda where, address: 1
    assert not launching._points_there(driver, where, 4096)
