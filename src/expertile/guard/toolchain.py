"""What a compiled kernel depends on besides its source: one part of the hash under which Triton caches it."""

from __future__ import annotations

import hashlib
import platform
import sys
from dataclasses import dataclass


@dataclass(frozen=True)
class Toolchain:
    """triton        its version
    build         hash of its compiler, front end included: two builds of one version do not share kernels
    ptxas         as it names itself
    target        "cuda 90"
    device        the GPU's name; "" where there was none
    environment   variables that change what is compiled
    platform      operating system, processor and Python, for the launchers that Triton 3.6 compiles with the C compiler
    """

    triton: str
    build: str
    ptxas: str
    target: str
    device: str
    environment: dict[str, str]
    platform: str

    @classmethod
    def here(cls, target: str) -> Toolchain:
        """Of this machine, for the target."""
        import triton
        from triton._C.libtriton import get_cache_invalidating_env_vars
        from triton.backends.compiler import GPUTarget
        from triton.compiler import make_backend
        from triton.runtime.cache import triton_key

        backend, _, arch = target.partition(" ")
        compiler = make_backend(
            GPUTarget(backend, int(arch) if arch.isdigit() else arch, 32 if backend == "cuda" else 64)
        )
        return cls(
            triton=triton.__version__,
            build=hashlib.sha256(triton_key().encode()).hexdigest()[:16],
            ptxas=" ".join(str(compiler.hash()).split()),
            target=target,
            device=_device(),
            environment=dict(sorted(get_cache_invalidating_env_vars().items())),
            platform=f"{platform.system()} {platform.machine()} {sys.implementation.cache_tag}",
        )

    def reasons_against(self, here: Toolchain) -> list[str]:
        """Why kernels made with this would not be found by a process with `here`; nothing when they will."""
        found = [
            f"made with {what} {mine!r}, here is {yours!r}"
            for what, mine, yours in (
                ("Triton", self.triton, here.triton),
                ("ptxas", self.ptxas, here.ptxas),
                ("the environment", self.environment, here.environment),
                ("platform", self.platform, here.platform),
            )
            if mine != yours
        ]
        if self.triton == here.triton and self.build != here.build:
            found.append(f"made with another build of Triton {self.triton}")
        present = _target()
        if present and present != self.target:
            found.append(f"made for target {self.target!r}, the GPU here is {present!r}")
        return found


def _device() -> str:
    """The name of the GPU at hand."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else ""


def _target() -> str:
    """The target of the GPU at hand; "" without one. Triton's driver is not asked: starting it calls the C compiler."""
    import torch

    if not torch.cuda.is_available():
        return ""
    if torch.version.hip:
        return f"hip {torch.cuda.get_device_properties().gcnArchName.partition(':')[0]}"
    major, minor = torch.cuda.get_device_capability()
    return f"cuda {major * 10 + minor}"
