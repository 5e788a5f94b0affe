"""A driver without a GPU: Triton compiles for sm_90 as ever and its hooks run, only the launch itself does nothing."""

from __future__ import annotations

import time
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget


class Launcher:
    """Takes the place of the compiled launcher; counts."""

    launches = 0

    def __init__(self, source, metadata):
        pass

    def __call__(self, *arguments):
        Launcher.launches += 1


LAUNCHER = """
from triton.runtime.build import compile_module_from_src
STUB = '''
#include <Python.h>
static struct PyModuleDef stub = {PyModuleDef_HEAD_INIT, "stub", 0, -1, 0};
PyMODINIT_FUNC PyInit_stub(void) { return PyModule_Create(&stub); }
'''
class Launcher(base):
    def __init__(self, source, metadata):
        compile_module_from_src(STUB, "stub")
"""


def building_launcher() -> type:
    """A Launcher that is compiled by the C compiler, as in Triton 3.6: code that lies where Triton's driver lies."""
    room = {"base": Launcher}
    exec(compile(LAUNCHER, Path(triton.__file__).parent / "backends" / "nvidia" / "driver.py", "exec"), room)
    return room["Launcher"]


class Utils:
    def get_device_properties(self, device):
        return {"max_shared_mem": 232448, "multiprocessor_count": 132}

    def load_binary(self, name, kernel, shared, device):
        return object(), object(), 32, 0, 1024  # module, function, registers, spills, threads

    def unload_module(self, module):
        pass


class Driver:
    utils, launcher_cls, device = Utils(), Launcher, 0

    def get_current_device(self):
        return self.device

    def set_current_device(self, device):
        self.device = device

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_benchmarker(self):
        return benchmark


def benchmark(call, quantiles):
    start = time.perf_counter()
    call()
    return [time.perf_counter() - start] * len(quantiles)


def activate() -> Driver:
    driver = Driver()
    triton.runtime.driver.set_active(driver)
    return driver
