"""What it runs on: the figures that decide between kernels, as plain data. `runtime.device.detect()` fills it in."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Hardware:
    """One device. Rates are what was measured on it, not the data sheet's.

    name          normalised: "h200", "h100", "cpu", or the driver's name in lower case
    capability    CUDA compute capability, (0, 0) without a GPU
    sms           multiprocessors
    smem_bytes    shared memory one block may have
    l2_bytes      level-two cache
    hbm_bytes_per_s   reading
    flops_per_s_16, flops_per_s_8   dense products in bf16/fp16 and in fp8
    launch_us     from one dependent kernel in a CUDA graph to the next
    """

    name: str
    capability: tuple[int, int]
    sms: int
    smem_bytes: int
    l2_bytes: int
    hbm_bytes_per_s: float
    flops_per_s_16: float
    flops_per_s_8: float
    launch_us: float

    @property
    def is_gpu(self) -> bool:
        return self.capability != (0, 0)

    @property
    def is_hopper(self) -> bool:
        return self.capability == (9, 0)


#: Measured 2026-12-02 (torch 2.11.0, driver 580.159.04): reading 4.45 TB/s, 8192^3 products.
H200 = Hardware("h200", (9, 0), 132, 232448, 60 << 20, 4.4e12, 766e12, 1390e12, 1.6)
#: The same processor with 3.35 TB/s of memory by the data sheet, scaled as on the H200; not measured.
H100 = Hardware("h100", (9, 0), 132, 232448, 50 << 20, 3.07e12, 766e12, 1390e12, 1.6)
#: Two cores, order of magnitude only: no choice between kernels hangs on it.
CPU = Hardware("cpu", (0, 0), 2, 0, 32 << 20, 2e10, 1e11, 1e11, 20.0)

DEVICES = {device.name: device for device in (H200, H100, CPU)}
