"""The command `expertile bench`. What each of its own measures is in benchmarks/README.md."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Annotated

import typer

from .bench import serve_commands
from .bench.load import command as load_command
from .errors import ExpertileError
from .outputs import check_file, refuse_unused

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Measure ours and the peers on this machine, on the same inputs; every figure becomes a row.",
)

QUANTS = ("bf16", "fp16", "fp32", "fp8_tensor", "fp8_channel", "fp8_block")
DEFAULT_PROBLEM = "qwen3-30b-a3b"
MOST_TOKENS = 1 << 20
OURS, BACKENDS = "expertile", ("triton", "torch", "reference")
PEERS = ("vllm-triton", "vllm-cutlass", "vllm-deepgemm", "flashinfer-cutlass", "torch-grouped-mm")
_RANGE = re.compile(r"([0-9]{1,18})-([0-9]{1,18})")


def measure(
    context: typer.Context,
    problem: Annotated[
        list[str] | None,
        typer.Option(help="a known layer, H,I,E,k, or all; may be repeated", show_default=DEFAULT_PROBLEM),
    ] = None,
    quant: Annotated[str, typer.Option(help=f"some of {','.join(QUANTS)}")] = "bf16",
    tokens: Annotated[str, typer.Option(help="1,8,64 or 1-4096 (its powers of two)")] = "1-4096",
    routing: Annotated[str, typer.Option(help="some of uniform,zipf1.2,hot")] = "uniform",
    impl: Annotated[str, typer.Option(help=f"some of {','.join((OURS, f'{OURS}:BACKEND', *PEERS))}, or all")] = "all",
    router: Annotated[str | None, typer.Option(help="layer only; default: that of the problem's model")] = None,
    out: Annotated[
        Path | None, typer.Option(help="appended to", show_default="benchmarks/results/<date>-<gpu>-<what>.jsonl")
    ] = None,
    replays: Annotated[int, typer.Option(help="the median is taken over these")] = 15,
    sets: Annotated[int, typer.Option(help="calls in one CUDA graph, each with its own input")] = 8,
    seed: Annotated[int, typer.Option(help="of weights, inputs and routing")] = 0,
    plan_override: Annotated[
        list[str] | None,
        typer.Option(help='[NAME=]JSON, e.g. narrow={"gemm1":{"block_n":64}}: measured too, as expertile:NAME'),
    ] = None,
    flashinfer_module: Annotated[
        Path | None, typer.Option(envvar="FI_SO", help="FlashInfer's fused_moe_90.so, where it was built beforehand")
    ] = None,
    device: Annotated[str, typer.Option(help="cuda, cpu, or auto")] = "auto",
    commit: Annotated[str | None, typer.Option(help="for the rows, where there is no git checkout")] = None,
):
    bench = context.info_name
    if router is not None and bench != "layer":
        raise ExpertileError("--router goes with `bench layer`: in `bench experts` the routing is given")
    from .bench import experts, layer, rows
    from .bench.runner import Request

    request = Request(
        bench, _problems(problem), _quants(quant), parse_tokens(tokens), _routings(routing), sets, replays, seed
    )
    if router is not None:
        layer.router_of("", router)  # before what is absent is told
    setting = setting_of(device, commit)
    chosen = _implementations(impl, plan_override or [], flashinfer_module, setting.hardware)
    path = check_file(out or rows.default_path(setting.shared, bench))
    outcomes = (
        layer.run(request, chosen, setting, router) if bench == "layer" else experts.run(request, chosen, setting)
    )
    if not _follow(outcomes, request, chosen, path):
        raise typer.Exit(1)


app.command(
    "experts",
    help="A layer's experts: top-k ids and weights given; quantisation of x included.",
    short_help="A layer's experts: top-k ids and weights given.",
)(measure)
app.command("layer", help="A whole layer: router logits in, output out.")(measure)


@app.command(short_help="What the policy's choice loses against the fastest plan.")
def policy(
    context: typer.Context,
    problem: Annotated[
        list[str] | None,
        typer.Option(help="H,I,E,k or a known layer; may be repeated", show_default="six that no table has"),
    ] = None,
    quant: Annotated[str | None, typer.Option(help="with --problem; some of those of `experts`")] = None,
    tokens: Annotated[
        str | None, typer.Option(help="1,8,64 or 1-4096", show_default="13 between 1 and 6144, off the tables'")
    ] = None,
    routing: Annotated[str, typer.Option(help="some of uniform,zipf1.2,hot,trace:FILE")] = "uniform,zipf1.2,hot",
    judge: Annotated[
        Path | None, typer.Option(help="measure nothing: what today's choice loses in the cells of these rows")
    ] = None,
    against_default: Annotated[
        bool, typer.Option("--against-default", help="fp8_tensor of two models, sizes of a mix that mostly decodes")
    ] = False,
    budget_seconds: Annotated[float | None, typer.Option(help="begin no cell that would end after that many")] = None,
    out: Annotated[
        Path | None, typer.Option(help="appended to", show_default="benchmarks/results/<date>-<gpu>-policy.jsonl")
    ] = None,
    replays: Annotated[int, typer.Option(help="the median is taken over these")] = 15,
    sets: Annotated[int, typer.Option(help="calls in one CUDA graph, each with its own input")] = 8,
    seed: Annotated[int, typer.Option(help="of weights, inputs, routing and the order of cells")] = 0,
    flashinfer_module: Annotated[
        Path | None, typer.Option(envvar="FI_SO", help="FlashInfer's fused_moe_90.so, where it was built beforehand")
    ] = None,
    device: Annotated[str, typer.Option(help="cuda, cpu, or auto")] = "auto",
    commit: Annotated[str | None, typer.Option(help="for the rows, where there is no git checkout")] = None,
):
    """What the policy's choice loses against the fastest of all candidates, and gains on a fixed list of backends."""
    from .api import settings
    from .bench import policy as room
    from .bench import rows
    from .policy.settings import Settings
    from .runtime.backends import installed

    if judge is not None:
        refuse_unused(context, "--judge", {"judge"})
        typer.echo("\n".join(room.judgement(rows.read(judge), settings())))
        return
    if budget_seconds is not None and not budget_seconds >= 0:
        raise ExpertileError(f"budget_seconds={budget_seconds}: give at least 0")
    if against_default:
        if quant or tokens:
            raise ExpertileError("--against-default has its own --quant and --tokens: leave them out")
        names = list(problem or ("nemotron-3-nano", "qwen3-30b-a3b"))
        todo = room.cells([(name, "fp8_tensor") for name in names], tuple(room.DECODE_MIX), _routings(routing), seed)
    else:
        if (problem is None) != (quant is None):
            raise ExpertileError("--problem and --quant go together here: without them six layers, each in its format")
        pairs = [(name, each) for name in _problems(problem) for each in _quants(quant)] if problem else room.PROBLEMS
        counts = parse_tokens(tokens) if tokens else room.TOKENS
        todo = room.cells(pairs, counts, _routings(routing), seed)
    setting = setting_of(device, commit)
    path = check_file(out or rows.default_path(setting.shared, room.BENCH))
    outcomes = room.run(
        todo, setting, Settings(others=True, installed=installed()), replays=replays, sets=sets, seed=seed,
        budget_s=budget_seconds, flashinfer_module=flashinfer_module,
    )  # fmt: skip
    if not room.follow(outcomes, len(todo), path):
        raise typer.Exit(1)


app.command("vllm", short_help="vLLM with random weights, stock and ours in turn.")(serve_commands.vllm)
app.command("vllm-same", short_help="Tokens and loss in vLLM: ours against stock.")(serve_commands.vllm_same)
app.command("serve", short_help="Load any OpenAI-compatible endpoint.")(load_command.serve)


@app.command(short_help="DeepSeek-V4's inverse RoPE with fp8: ours, vLLM's, a copy.")
def rope(
    shape: Annotated[
        list[str] | None,
        typer.Option(help="deepseek-v4-flash, deepseek-v4-flash-tp8, or HEADS,GROUPS; may be repeated"),
    ] = None,
    tokens: Annotated[str, typer.Option(help="1,8,64 or 1-16384 (its powers of two)")] = "1-16384",
    impl: Annotated[
        str,
        typer.Option(
            help="some of expertile,vllm-triton,torch-copy,expertile:unaligned,expertile:specialised,expertile:4x4 ..."
        ),
    ] = "expertile,vllm-triton,torch-copy",
    cold: Annotated[
        bool, typer.Option("--cold", help="instead: every count from 1 to the most of --tokens, nothing compiled yet")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="appended to", show_default="benchmarks/results/<date>-<gpu>-rope.jsonl")
    ] = None,
    replays: Annotated[int, typer.Option(help="the median is taken over these")] = 15,
    sets: Annotated[int, typer.Option(help="calls in one CUDA graph at least, each with its own input")] = 8,
    seed: Annotated[int, typer.Option(help="of inputs")] = 0,
    device: Annotated[str, typer.Option(help="cuda, cpu, or auto")] = "auto",
    commit: Annotated[str | None, typer.Option(help="for the rows, where there is no git checkout")] = None,
):
    """DeepSeek-V4's inverse-RoPE + fp8 kernel: ours, vLLM's, and a copy of as many bytes."""
    from rich.console import Console

    from .bench import inv_rope, rows
    from .bench.inv_rope_contenders import contenders
    from .bench.runner import Request

    shapes, counts = tuple(shape or inv_rope.SHAPES), parse_tokens(tokens)
    for name in shapes:
        inv_rope.shape(name)
    setting = setting_of(device, commit)
    chosen = contenders(setting.device, _split(impl))
    if cold:
        counts, chosen = (max(counts),), [each for each in chosen if each.kernel]
    request = Request(inv_rope.BENCH, shapes, (inv_rope.QUANT,), counts, sets=sets, replays=replays, seed=seed)
    path, measured = check_file(out or rows.default_path(setting.shared, "rope")), []

    def outcomes():
        streams = (inv_rope.cold(name, range(1, counts[0] + 1), chosen, setting, seed) for name in shapes)
        for outcome in chain.from_iterable(streams) if cold else inv_rope.run(request, chosen, setting):
            measured.extend([outcome.row] if outcome.row else [])
            yield outcome

    good = _follow(outcomes(), request, chosen, path)
    for made in inv_rope.tables(measured):
        Console().print(made)
    if not good:
        raise typer.Exit(1)


@app.command(short_help="What first calls cost when nothing is compiled.")
def cold(
    problem: Annotated[str, typer.Option(help="a known layer, or H,I,E,k")] = DEFAULT_PROBLEM,
    quant: Annotated[str, typer.Option(help=f"some of {','.join(QUANTS)}")] = "bf16,fp8_block",
    most: Annotated[int, typer.Option(min=1, max=MOST_TOKENS, help="tokens of the largest call")] = 4096,
    impl: Annotated[
        str, typer.Option(help="some of expertile,expertile:specialised,expertile:warm,expertile:packed")
    ] = "expertile,expertile:specialised,expertile:warm,expertile:packed",
    out: Annotated[
        Path | None, typer.Option(help="appended to", show_default="benchmarks/results/<date>-<gpu>-cold.jsonl")
    ] = None,
    device: Annotated[str, typer.Option(help="cuda, cpu, or auto")] = "auto",
    commit: Annotated[str | None, typer.Option(help="for the rows, where there is no git checkout")] = None,
):
    """What first calls cost when nothing is compiled: as called, specialised on every argument, warmed, unpacked."""
    from rich.console import Console

    from .api import settings
    from .bench import cold as room
    from .bench import rows

    settings()
    _problems([problem])
    console, setting, good = Console(highlight=False), setting_of(device, commit), True
    path, measured = check_file(out or rows.default_path(setting.shared, room.COLD)), []
    where = setting.device.type
    for each in _quants(quant):
        with console.status(f"{problem} {each}: a process for each way, nothing compiled"):
            for name, row, wrong in room.run(problem, each, most, _split(impl), setting.shared, device=where):
                if row is None:
                    console.print(f"{name}: {wrong}", markup=False)
                    good = False
                else:
                    rows.write(path, [row])
                    measured.append(row)
    console.print(room.table(measured))
    console.print(f"{len(measured)} rows in {path}", markup=False)
    if not good:
        raise typer.Exit(1)


@app.command(short_help="Rows as tables, with the fastest peer beside ours.")
def report(
    files: Annotated[list[Path], typer.Argument(help="rows, as the other commands write them")],
    plot: Annotated[Path | None, typer.Option(help="also time over tokens as a PNG; needs the extra `bench`")] = None,
):
    """Rows as tables: ours, the peers, the floor, and how much faster than the fastest peer."""
    from rich.console import Console

    from .bench import rows
    from .bench.table import TIMED, tables, without_table

    if plot is not None:
        check_file(plot, "plot")
    found = [row for file in files for row in rows.read(file)]
    if not found:
        raise ExpertileError(f"no rows in {', '.join(map(str, files))}")
    console, made = Console(), tables(found)
    if left_out := ", ".join(without_table(found)):
        said = f"no table is made of rows of {left_out}, only of {' and '.join(TIMED)}"
        if not made:
            raise ExpertileError(f"{said}: give rows that `bench experts` or `bench layer` wrote")
        typer.echo(said, err=True)
    for table in made:
        console.print(table)
    if plot is not None:
        from .bench.plot import plot as draw

        console.print(f"plot: {draw(found, plot)}", highlight=False)


def parse_tokens(text: str) -> tuple[int, ...]:
    """
    >>> parse_tokens("1,8,64"), parse_tokens("1-8,12")
    ((1, 8, 64), (1, 2, 4, 8, 12))
    """
    found: list[int] = []
    for part in text.split(","):
        pair = _RANGE.fullmatch(part.strip())
        first, last = (int(pair[1]), int(pair[2])) if pair else (_integer(part, text), 0)
        found += [1 << bit for bit in range(21) if first <= 1 << bit <= last] if pair else [first]
    if not found or min(found) < 1 or max(found) > MOST_TOKENS:
        raise ExpertileError(f"tokens={text!r}: give numbers from 1 to {MOST_TOKENS}, or a range of such")
    return tuple(dict.fromkeys(found))


def _integer(part: str, text: str) -> int:
    from .problem import whole_number

    found = whole_number(part.strip())
    if found is None:
        raise ExpertileError(f"tokens={text!r}: give numbers with commas between them, or a range as in 1-4096")
    return found


def _problems(names: Sequence[str] | None) -> tuple[str, ...]:
    from .problem import LAYERS, named_problem

    if names and "all" in names:
        return tuple(LAYERS)
    for name in names or ():
        named_problem(name, tokens=1)
    return tuple(names or (DEFAULT_PROBLEM,))


def _quants(text: str) -> tuple[str, ...]:
    names = QUANTS if text == "all" else _split(text)
    for name in names:
        if name not in QUANTS:
            raise ExpertileError(f"quant={name!r} is not known: use some of {', '.join(QUANTS)}")
    return names


def _routings(text: str) -> tuple[str, ...]:
    from .bench.inputs import check_routing

    names = _split(text)
    for name in names:
        check_routing(name)
    return names


def _split(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(part.strip() for part in text.split(",")))


def setting_of(name: str, commit: str | None):
    """Where it is measured: device, Hardware and the fields that all rows share."""
    import torch

    from .bench import rows
    from .bench.runner import Setting
    from .runtime.device import detect

    if name not in ("auto", "cuda", "cpu"):
        raise ExpertileError(f"device={name!r} is not known: use cuda, cpu or auto")
    if name == "cuda" and not torch.cuda.is_available():
        raise ExpertileError("device='cuda', but torch finds no GPU here: leave --device out to measure on the CPU")
    hardware = detect(None if name == "auto" else name)
    return Setting(
        torch.device("cuda" if hardware.is_gpu else "cpu"), hardware, rows.environment(hardware.name, commit)
    )


def _implementations(text: str, overrides: Sequence[str], flashinfer_module: Path | None, hardware) -> list:
    from .api import settings
    from .bench.ours import Expertile, parse_override
    from .bench.peers import peer

    settings()  # what is wrong with EXPERTILE_POLICY is the command's error, not a crash of ours in each cell
    names = [*dict.fromkeys(each for name in _split(text) for each in ((OURS, *PEERS) if name == "all" else (name,)))]
    chosen = []
    for name in names:
        base, _, backend = name.partition(":")
        if name == OURS or (base == OURS and backend in BACKENDS):
            chosen.append(Expertile(hardware, variant=backend, backend=backend or None))
        elif name in PEERS:
            chosen.append(peer(name, flashinfer_module))
        else:
            known = ", ".join((OURS, *(f"{OURS}:{each}" for each in BACKENDS), *PEERS))
            raise ExpertileError(f"impl={name!r} is not known: use some of {known}, or all")
    for text in overrides:
        variant, changes = parse_override(text)
        chosen.append(Expertile(hardware, variant=variant, changes=changes))
    if len({each.name for each in chosen}) < len(chosen):
        raise ExpertileError("two implementations have one name: give each --plan-override a NAME= of its own")
    return chosen


def _follow(outcomes, request, chosen, path: Path) -> bool:
    """Writes rows as they come, shows progress and, last, the tables; False when something of ours got no row."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from .bench import rows
    from .bench.runner import State
    from .bench.table import is_ours, tables

    console = Console()
    of_a_layer = len(request.routings) * len(request.tokens)
    of_all = len(request.problems) * len(request.quants) * of_a_layer
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    written, good = [], True
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(request.bench, total=of_all * len(chosen))
        for outcome in outcomes:
            parts = (outcome.problem, outcome.quant, outcome.routing, outcome.tokens)
            where = " ".join(str(part) for part in parts if part)
            done = 1 if outcome.tokens else of_a_layer if outcome.problem else of_all
            progress.update(task, description=where or request.bench, advance=done)
            if outcome.state is State.MEASURED:
                rows.write(path, [outcome.row])
                written.append(outcome.row)
                continue
            good = good and not is_ours(outcome.impl)
            label = f"{outcome.impl} ({where})" if where else outcome.impl
            console.print(f"{label} {outcome.state.value}: {outcome.message}", markup=False, highlight=False)
    for table in tables(written):
        console.print(table)
    console.print(f"{len(written)} rows in {path}" if written else "no rows", highlight=False, markup=False)
    return good
