"""The commands `expertile cache pack|unpack|verify`: compiled kernels as one file that goes with the program."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from .errors import ExpertileError
from .outputs import check_file

app = typer.Typer(
    no_args_is_help=True, help="Compiled kernels as one file: pack it, unpack it before serving, verify it."
)

FILE = Annotated[Path, typer.Argument(help="the packed cache")]
MOST_TOKENS = 1 << 20
FOLDER = Annotated[str | None, typer.Option(help="default: Triton's own, TRITON_CACHE_DIR or ~/.triton/cache")]


@app.command()
def pack(
    file: FILE,
    cache_dir: FOLDER = None,
    problem: Annotated[
        str | None,
        typer.Option(help="compile every variant of this layer first (a known one, or H,I,E,k); needs no GPU"),
    ] = None,
    quant: Annotated[str | None, typer.Option(help="bf16 fp16 fp8_tensor fp8_channel fp8_block; default: bf16")] = None,
    static_scale: Annotated[bool, typer.Option(help="fp8_tensor with activation scales given ahead")] = False,
    expert_map: Annotated[bool, typer.Option(help="calls will have an expert_map")] = False,
    max_tokens: Annotated[int | None, typer.Option(help="largest number of tokens of a call; default: 4096")] = None,
    device: Annotated[
        str | None, typer.Option(help="whose plans: h200 h100, or auto for this machine; default: auto")
    ] = None,
):
    """Pack Triton's cache as it is, or the variants of one layer."""
    from .guard.cache import pack as write
    from .guard.cache import place

    check_file(file, "file")
    place(file)  # no device either, which packing would replace; before minutes of compiling
    if problem is None:
        of_layer = dict(
            quant=quant, static_scale=static_scale, expert_map=expert_map, max_tokens=max_tokens, device=device
        )
        if given := [f"{name}={value!r}" for name, value in of_layer.items() if value not in (None, False)]:
            raise ExpertileError(f"{', '.join(given)}: of a layer that is compiled first; give its problem as well")
        manifest = write(file, cache_dir)
    else:
        quant, device = ("bf16" if quant is None else quant), ("auto" if device is None else device)
        max_tokens = 4096 if max_tokens is None else max_tokens
        manifest = _pack_layer(file, cache_dir, problem, quant, static_scale, expert_map, max_tokens, device)
    _say(file, manifest)


@app.command(short_help="Unpack into Triton's cache, if made for this machine.")
def unpack(file: FILE, cache_dir: FOLDER = None):
    """Unpack into Triton's cache; refused with the reason when damaged or made for something else."""
    from .guard.cache import unpack as read

    _say(file, read(file, cache_dir))


@app.command(short_help="Check every hash, and whether it would be used here.")
def verify(file: FILE):
    """Check every hash, and whether launches on this machine would find the kernels."""
    from .guard.cache import reasons_against_here
    from .guard.cache import verify as read

    manifest = read(file)
    _say(file, manifest)
    if reasons := reasons_against_here(manifest):
        raise ExpertileError(f"{file} is whole, but not for here: {'; '.join(reasons)}")


def _pack_layer(file, cache_dir, problem, quant, static_scale, expert_map, max_tokens, device):
    """Compiled into a folder of its own, so that the file holds this layer and nothing else."""
    import tempfile

    from triton import knobs
    from triton.backends.compiler import GPUTarget

    from .guard import warm
    from .guard.cache import pack as write
    from .guard.manifest import Plans

    if cache_dir is not None:
        raise ExpertileError(
            "cache_dir does not go with a problem, whose kernels are compiled into a folder of their own"
        )
    hardware = _hardware(device)
    variants = layer_variants(problem, quant, static_scale, expert_map, max_tokens, hardware)
    target = GPUTarget("cuda", hardware.capability[0] * 10 + hardware.capability[1], 32)
    with tempfile.TemporaryDirectory(prefix="expertile-cache-") as folder, knobs.cache.scope():
        knobs.cache.dir = folder
        warm(variants, target=target)
        plans = Plans.of(hardware.name, problem, quant, max_tokens)
        return write(file, folder, target=target, plans=plans)


def layer_variants(problem: str, quant: str, static_scale: bool, expert_map: bool, max_tokens: int, hardware) -> list:
    """The Specializations that calls of this layer with 1 ... max_tokens tokens ask for."""
    from .problem import Quant, named_problem
    from .warming import variants

    if not 1 <= max_tokens <= MOST_TOKENS:
        raise ExpertileError(f"max_tokens={max_tokens}: give 1 to {MOST_TOKENS}")
    layer = named_problem(problem, 1, quant, static_scale=static_scale)
    found = []
    for split_scale in (False, True) if layer.quant is Quant.FP8_BLOCK else (False,):
        found += variants(layer, hardware, max_tokens, split_scale, expert_map)
    if not found:
        raise ExpertileError(f"problem={problem!r} compiles nothing on {hardware.name}: its backend is not triton")
    return found


def _hardware(name: str):
    from .policy import device
    from .runtime.device import detect

    hardware = detect() if name == "auto" else device(name)
    if not hardware.is_gpu:
        raise ExpertileError("there is no GPU here: name the device whose plans to compile, e.g. --device h200")
    return hardware


def _say(file: Path, manifest) -> None:
    made = manifest.toolchain
    print(f"{file}: {manifest.kernels} kernels, {len(manifest.files)} files, {manifest.bytes / 1e6:.1f} MB unpacked")
    version = re.search(r"V[0-9.]+[0-9]", made.ptxas)  # of all that it says of itself
    ptxas = version[0] if version else made.ptxas
    print(f"for {made.target}, Triton {made.triton}, ptxas {ptxas}{', ' + made.device if made.device else ''}")
    if plans := manifest.plans:
        print(
            f"every variant of {plans.problem} {plans.quant} up to {plans.max_tokens} tokens on {plans.device}, "
            f"expertile {plans.expertile}, table {plans.table or 'none'}"
        )
