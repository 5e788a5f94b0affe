"""From a torch device to its Hardware: asked once, at the edge; below it hardware is an argument."""

from __future__ import annotations

import torch

from ..hardware import CPU, H100, H200, Hardware

#: Dense 16-bit FLOP one multiprocessor does a clock, by compute capability; the last entry not above it counts.
FLOPS_PER_CLOCK = (((7, 0), 1024), ((8, 0), 2048), ((8, 6), 1024), ((9, 0), 4096))
SUSTAINED = 0.7  # of the peak rates, by caution: what the H200 reaches of its data sheet (766 of 990 TFLOP/s) and less
FALLBACK_CLOCK_HZ = 1.4e9  # where the driver reports none (CUDA 13 no longer does)
FALLBACK_BYTES_PER_S = 0.5e12
LAUNCH_US = 2.0


def detect(device: torch.device | str | int | None = None) -> Hardware:
    """The Hardware of a device; of the current CUDA device, or else of the CPU, when none is named.

    >>> detect("cpu").name
    'cpu'
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if device.type != "cuda" or torch.version.cuda is None:
        return CPU
    return from_properties(torch.cuda.get_device_properties(device))


def interpreted() -> bool:
    """Whether Triton runs kernels in its interpreter, where tensors may lie on a CPU."""
    try:
        from triton import knobs
    except ImportError:  # torch without Triton
        return False
    return bool(knobs.runtime.interpret)


def from_properties(properties) -> Hardware:
    """The Hardware of what the driver says about a CUDA device (`torch.cuda.get_device_properties`).

    A whole H200 or H100 gets the measured constants. Anything else, a slice of one included (its name or its number of
    multiprocessors differ), gets the driver's own sizes and rates that err on the slow side.
    """
    name = " ".join(properties.name.lower().split())
    capability = (properties.major, properties.minor)
    sms = properties.multi_processor_count
    for key, known in (("h200", H200), ("h100", H100)):
        same_chip = (capability, sms) == (known.capability, known.sms)
        if same_chip and key in name.split() and "mig" not in name.split():
            return known
    clock = (getattr(properties, "clock_rate", 0) or 0) * 1e3 or FALLBACK_CLOCK_HZ
    flops_16 = sms * clock * _flops_per_clock(capability) * SUSTAINED
    return Hardware(
        name=name,
        capability=capability,
        sms=sms,
        smem_bytes=getattr(properties, "shared_memory_per_block_optin", 0) or properties.shared_memory_per_block,
        l2_bytes=properties.L2_cache_size,
        hbm_bytes_per_s=_bytes_per_s(properties) * SUSTAINED,
        flops_per_s_16=flops_16,
        flops_per_s_8=flops_16 * (2 if capability >= (8, 9) else 1),
        launch_us=LAUNCH_US,
    )


def _flops_per_clock(capability: tuple[int, int]) -> int:
    found = FLOPS_PER_CLOCK[0][1]
    for least, flops in FLOPS_PER_CLOCK:
        if capability >= least:
            found = flops
    return found


def _bytes_per_s(properties) -> float:
    clock_hz = (getattr(properties, "memory_clock_rate", 0) or 0) * 1e3
    bus_bytes = (getattr(properties, "memory_bus_width", 0) or 0) / 8
    return 2 * clock_hz * bus_bytes or FALLBACK_BYTES_PER_S
