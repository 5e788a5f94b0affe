"""The inverse-RoPE kernel against vLLM's and against a plain copy of as many bytes, in one run.

Rows      bench `quant` (one kernel), and with `cold` rows of that bench: what a stream of changing token counts costs
          when nothing is compiled yet
Inputs    every call has its own o and positions, and its result stays: as many calls as two L2 caches hold (at most
          MOST_SETS), so that from some 64 tokens on o comes from memory and q goes there
err       of q * scale against o rotated back in float64, the largest of a row (one token's one head)
"""

from __future__ import annotations

import math
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from rich.table import Table

from ..errors import ExpertileError
from ..reference_rope import BLOCK, HEAD_DIM, ROPE_DIM, inverse_rope
from ..runtime.measure import capture, interleave, pass_ms
from . import check, rows
from .cold import COLD
from .cold import table as cold_table
from .inv_rope_contenders import COPY, OURS, Call, Contender, bytes_moved, plan
from .runner import Outcome, Request, Setting, State, attempt
from .table import is_ours

BENCH, QUANT = "quant", "fp8_block"
MAX_POS, MOST_SETS = 16_384, 64
#: name -> (heads, groups) on one GPU.
SHAPES = {"deepseek-v4-flash": (64, 8), "deepseek-v4-flash-tp8": (8, 1)}
_SHAPE = re.compile(r"([0-9]{1,18}),([0-9]{1,18})")


def shape(name: str) -> tuple[int, int]:
    """(heads, groups) by a key of SHAPES, or as "HEADS,GROUPS".

    >>> shape("deepseek-v4-flash"), shape("16,2")
    ((64, 8), (16, 2))
    """
    found = _SHAPE.fullmatch(name)
    heads, groups = SHAPES.get(name) or (tuple(map(int, found.groups())) if found else (0, 0))
    if heads < 1 or groups < 1 or heads % groups:
        raise ExpertileError(f"shape={name!r} is not known: use {', '.join(SHAPES)}, or HEADS,GROUPS as in 16,2")
    return heads, groups


def make_calls(tokens: int, heads: int, groups: int, setting: Setting, sets: int, seed: int) -> list[Call]:
    """At least `sets` calls, more while they are small."""
    fill = math.ceil(2 * setting.hardware.l2_bytes / bytes_moved(tokens, heads))
    generator = torch.Generator(setting.device).manual_seed(seed)
    speed = 10_000.0 ** -(torch.arange(ROPE_DIM // 2, device=setting.device) / (ROPE_DIM // 2))
    turn = torch.arange(MAX_POS, device=setting.device)[:, None] * speed
    cos_sin = torch.cat([turn.cos(), turn.sin()], 1)
    made = []
    for _ in range(max(sets, min(MOST_SETS, fill))):
        o = torch.empty(tokens, heads, HEAD_DIM, dtype=torch.bfloat16, device=setting.device)
        o.normal_(generator=generator)
        positions = torch.randint(MAX_POS, (tokens,), device=setting.device, generator=generator)
        made.append(Call(o, positions, cos_sin, groups))
    return made


def run(request: Request, chosen: Sequence[Contender], setting: Setting) -> Iterator[Outcome]:
    """Outcomes as they come. request.problems are shapes; its quants and routings are not looked at."""
    with ExitStack() as stack:
        usable = {}
        for contender, ready, message in _loaded(chosen, setting, stack):
            if ready is None:
                yield Outcome(contender.name, State.ABSENT, message=message)
            else:
                usable[contender] = ready
        for name in request.problems:
            for tokens in request.tokens:
                yield from _cell(name, tokens, usable, request, setting)


def _cell(name: str, tokens: int, usable: Mapping, request: Request, setting: Setting) -> Iterator[Outcome]:
    heads, groups = shape(name)
    calls = make_calls(tokens, heads, groups, setting, request.sets, request.seed)
    errors, replays, kept = {}, {}, {}
    for contender, ready in usable.items():
        found, crash = torch.zeros(1), None
        if contender.checked:
            found, crash = attempt(partial(_errors, ready, calls[0]), contender.name, setting.device)
        if wrong := crash or check.red(found, check.FP8_BAR):
            state = State.CRASHED if crash else State.WRONG
            yield Outcome(contender.name, state, name, QUANT, tokens=tokens, message=wrong)
            continue
        errors[contender.name] = found.max().item()
        work = [partial(_keep, kept, (contender.name, index), ready, call) for index, call in enumerate(calls)]
        replays[contender.name] = capture(work, setting.device.type == "cuda")
    floor = 1e6 * bytes_moved(tokens, heads) / setting.hardware.hbm_bytes_per_s
    for contender, timing in interleave(replays, request.replays).items():
        row = rows.make(
            BENCH, setting.shared, impl=contender, problem=name, quant=QUANT, tokens=tokens,
            time_us=round(timing.median, 3), floor_us=round(floor, 3), err=round(errors[contender], 6),
            plan=plan(contender), p10_us=round(timing.p10, 3), p90_us=round(timing.p90, 3),
        )  # fmt: skip
        yield Outcome(contender, State.MEASURED, name, QUANT, tokens=tokens, row=row)


def _keep(kept: dict, key, ready, call: Call) -> None:
    """The result lives until the same call is made again: no two calls of a graph write to one place."""
    kept[key] = ready(call)


def _errors(ready, call: Call) -> torch.Tensor:
    """Relative error of every head of the tokens looked at."""
    chosen = check.sample(call.o.shape[0], check.SAMPLE).to(call.o.device)
    q, scales = ready(call)
    value = q[chosen].double() * scales[chosen].double().repeat_interleave(BLOCK, -1)
    want = inverse_rope(call.o[chosen], call.positions[chosen], call.cos_sin)
    return check.row_errors(value.reshape(-1, HEAD_DIM), want.reshape(-1, HEAD_DIM))


def cold(
    problem: str, stream: Sequence[int], chosen: Sequence[Contender], setting: Setting, seed: int = 0
) -> Iterator[Outcome]:
    """A row each of what one pass through the token counts `stream` costs with no variant compiled, and a second pass.

    first_ms, steady_ms   of all calls of a pass, each waited for; compiles: variants that the first pass compiled
    """
    heads, groups = shape(problem)
    call = make_calls(max(stream), heads, groups, setting, 1, seed)[-1]
    calls = [Call(call.o[:t], call.positions[:t], call.cos_sin, groups) for t in stream]
    with ExitStack() as stack:
        for contender, ready, message in _loaded([each for each in chosen if each.kernel], setting, stack):
            if ready is None:
                yield Outcome(contender.name, State.ABSENT, message=message)
                continue
            with nothing_compiled(contender.kernel()) as compiled:
                first, steady = (pass_ms([partial(ready, call) for call in calls]) for _ in range(2))
            row = rows.make(
                COLD, setting.shared, impl=contender.name, problem=problem, quant=QUANT,
                what=f"inverse rope, T={min(stream)}-{max(stream)}, {len(stream)} counts",
                first_ms=round(first, 3), steady_ms=round(steady, 3), compiles=len(compiled),
            )  # fmt: skip
            yield Outcome(contender.name, State.MEASURED, problem, QUANT, tokens=max(stream), row=row)


@contextmanager
def nothing_compiled(kernel) -> Iterator[list]:
    """As in a process that never launched the kernel, on a machine that never compiled it; lists what is compiled."""
    import triton

    compiled: list = []
    before = triton.knobs.runtime.jit_post_compile_hook

    def note(*arguments, **keywords):
        compiled.append(keywords.get("repr", ""))
        return before(*arguments, **keywords) if before else None

    kernel.device_caches.clear()
    with tempfile.TemporaryDirectory() as folder, triton.knobs.cache.scope():
        triton.knobs.cache.dir = folder
        triton.knobs.runtime.jit_post_compile_hook = note
        try:
            yield compiled
        finally:
            triton.knobs.runtime.jit_post_compile_hook = before


def _loaded(chosen: Iterable[Contender], setting: Setting, stack: ExitStack) -> Iterator[tuple]:
    """(contender, its run or None, why not)"""
    for contender in chosen:
        if contender.reasons:
            yield contender, None, "; ".join(contender.reasons)
            continue
        try:
            stack.enter_context(contender.session())
            yield contender, contender.load(), ""
        except ImportError as error:
            yield contender, None, f"{type(error).__name__}: {error}"


def tables(found: Sequence[Mapping]) -> list[Table]:
    """One of each shape, and one of all `cold` rows."""
    timed = [row for row in found if row["bench"] == BENCH]
    made = [_table(name, [row for row in timed if row["problem"] == name]) for name in _names(timed, "problem")]
    colds = [row for row in found if row["bench"] == COLD]
    return made + ([cold_table(colds)] if colds else [])


def _table(problem: str, found: Sequence[Mapping]) -> Table:
    """Times, the peer's over ours (above 1, we are faster), and ours as a share of copy bandwidth."""
    lines: dict[int, dict[str, float]] = {}
    for row in found:
        lines.setdefault(row["tokens"], {})[row["impl"]] = row["time_us"]
    names = _names(found, "impl")
    made = Table(title=f"inverse rope {problem}, us", title_justify="left")
    for heading in ("tokens", *names, "peer / ours", "copy / ours"):
        made.add_column(heading.replace("-", " "), justify="right")
    for tokens, line in sorted(lines.items()):
        peer = min((us for name, us in line.items() if name != COPY and not is_ours(name)), default=None)
        ratios = [_ratio(us, line.get(OURS)) for us in (peer, line.get(COPY))]
        made.add_row(str(tokens), *(f"{line[name]:.2f}" if name in line else "-" for name in names), *ratios)
    return made


def _names(found: Sequence[Mapping], field: str) -> list[str]:
    return list(dict.fromkeys(row[field] for row in found))


def _ratio(other: float | None, ours: float | None) -> str:
    return f"{other / ours:.2f}" if other and ours else "-"


__all__ = ["cold", "run", "shape", "tables"]
