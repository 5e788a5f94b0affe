"""What `make demo` shows: a model through our experts, plans for known layers, what the compiler makes of a tile."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from .errors import ExpertileError, MissingExtra, ShapeError
from .hardware import H200, Hardware
from .plans import Backend, Plan
from .policy import decide, explain
from .policy.libraries import LIBRARIES
from .problem import LAYERS, named_problem

PROMPTS = ("The :mod:`json` module", "Return a new list", "def main():\n")
NEW_TOKENS = 40
EVAL_TOKENS = 16384  # of eval.txt, so that the demo stays well under five minutes on two cores
WINDOW, BATCH = 512, 8  # tokens of a text that the model sees at once, texts in a call
STOCK = "grouped_mm"  # what transformers 5 takes when nothing is asked for
OURS = ("expertile", "expertile_fp8_tensor", "expertile_fp8_channel", "expertile_fp8_block")
TOKENS = (1, 16, 256, 4096)
MEASURED = "qwen3-30b-a3b"


def run(model_dir: Path | None = None, eval_tokens: int = EVAL_TOKENS) -> None:
    """All parts in order. ExpertileError, before anything is shown, when a part cannot run."""
    folder = model_folder(model_dir)
    if importlib.util.find_spec("transformers") is None:
        raise MissingExtra("the demo runs a model through transformers: pip install 'expertile[transformers]'")
    if eval_tokens < WINDOW:
        raise ShapeError(f"eval_tokens={eval_tokens}: give at least {WINDOW}, one window of text")
    if not (folder / "eval.txt").is_file():
        raise ExpertileError(f"no eval.txt in {folder}: give the folder of tiny-moe with --model")
    console = Console(width=None if sys.stdout.isatty() else 132, highlight=False)
    started = time.perf_counter()
    show_language(console, folder, eval_tokens)
    show_plans(console)
    show_swap(console)
    show_kernels(console)
    console.print(f"\nDone in {time.perf_counter() - started:.0f} s.")


def model_folder(asked: Path | None) -> Path:
    """The folder asked for, else models/tiny-moe in the repository that this file or the shell is in."""
    here = Path(__file__).resolve()
    tried = [asked] if asked else [base / "models" / "tiny-moe" for base in (*here.parents, Path.cwd())]
    for folder in tried:
        if (folder / "config.json").is_file():
            return folder
    where = asked or "models/tiny-moe"
    raise ExpertileError(f"no model in {where}: config.json is not there; give its folder with --model")


@dataclass
class Loss:
    """Sum of the losses over `tokens` predictions and the time that the model took for them."""

    total: float = 0.0
    tokens: int = 0
    seconds: float = 0.0

    @property
    def per_token(self) -> float:
        return self.total / self.tokens


def show_language(console: Console, folder: Path, eval_tokens: int) -> None:
    """Text for the prompts, then the loss on eval.txt for transformers' experts and for ours."""
    import torch

    model, tokenizer = load(folder)
    config = model.config
    console.rule(
        f"[bold]{folder.name}: {config.num_experts} experts, top {config.num_experts_per_tok}, on {model.device}"
    )
    console.print('Text by the model with experts_implementation="expertile", greedy:\n')
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt").to(model.device)
        whole = model.generate(**ids, max_new_tokens=NEW_TOKENS, do_sample=False)[0]
        text = tokenizer.decode(whole[ids["input_ids"].shape[1] :])
        console.print(f"[bold]{prompt.rstrip()}[/bold]", end="" if prompt == prompt.rstrip() else "\n")
        console.print(text.rstrip() + "\n", markup=False, style="cyan")

    text = (folder / "eval.txt").read_text(encoding="utf-8")
    ids = torch.tensor(tokenizer(text, verbose=False)["input_ids"], device=model.device)
    count = min(eval_tokens, len(ids)) // WINDOW
    windows = ids[: count * WINDOW].view(count, WINDOW)
    names = (STOCK, *OURS)
    console.print(
        f"Loss of {len(names)} kinds of experts on {count * WINDOW} tokens of eval.txt, batch by batch in turn ..."
    )
    with _progress(console) as progress:
        task = progress.add_task("loss on eval.txt", total=len(names) * count)
        losses = measure_losses(model, windows, names, lambda done: progress.advance(task, done))
    console.print(loss_table(losses, count * WINDOW, len(ids)))


def load(folder: Path):
    """(model with our experts, tokenizer), on the GPU where there is a Hopper."""
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    from .plugins.transformers import register
    from .runtime.device import detect

    disable_progress_bar()
    register()
    device = torch.device("cuda" if detect().is_hopper else "cpu")
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, experts_implementation="expertile")
        return model.to(device).eval(), AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, SafetensorError) as error:
        reason = " ".join(str(error).split())
        raise ExpertileError(f"the model in {folder} cannot be loaded: {reason}") from None


def measure_losses(model, windows, names: tuple[str, ...], advance: Callable[[int], object]) -> dict[str, Loss]:
    """Loss of the next token over the windows for each experts implementation, batch by batch in turn.

    In turn, so that all of them meet the same load of the machine. A first call of each is not timed: it quantises
    weights and compiles kernels.
    """
    import torch

    found = {name: Loss() for name in names}
    with torch.inference_mode():
        for first, batch in enumerate(windows.split(BATCH)):
            for name in names:
                model.set_experts_implementation(name)
                if first == 0:
                    model(batch[:1]).logits.sum().item()
                start = time.perf_counter()
                logits = model(batch).logits[:, :-1].float()
                loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="sum")
                found[name].total += loss.item()  # waits for a GPU
                found[name].seconds += time.perf_counter() - start
                found[name].tokens += batch[:, 1:].numel()
                advance(len(batch))
    return found


def loss_table(losses: dict[str, Loss], used: int, whole: int) -> Table:
    """One row an experts implementation, with its difference to the first."""
    table = Table(title=f"Loss per token on eval.txt\nfirst {used} of {whole} tokens, windows of {WINDOW}")
    for column, justify in (("experts", "left"), ("loss", "right"), ("difference", "right"), ("seconds", "right")):
        table.add_column(column, justify=justify)
    first = next(iter(losses.values())).per_token
    for name, loss in losses.items():
        label = f"transformers {name}" if name == STOCK else name + (" bf16" if name == "expertile" else "")
        table.add_row(label, f"{loss.per_token:.4f}", f"{loss.per_token - first:+.4f}", f"{loss.seconds:.1f}")
    return table


def show_plans(console: Console) -> None:
    """What would run on an H200 for each known layer, and why; one decision in full."""
    console.rule("[bold]Plans for an H200 (no GPU needed), bf16")
    table = Table()
    for column in ("layer", "T", "rows/expert", "plan", "us", "floor us", "why"):
        table.add_column(column, justify="right" if column in ("T", "rows/expert", "us", "floor us") else "left")
    for layer in LAYERS:
        for tokens in TOKENS:
            plan = decide(named_problem(layer, tokens), H200)
            each = f"{plan.problem.rows_per_expert:.3g}"
            cells = (
                str(tokens),
                each,
                escape(plan.name.removesuffix("+pdl")),
                f"{plan.time_us:.1f}",
                f"{plan.floor_us:.1f}",
                why(plan),
            )
            table.add_row(layer if tokens == TOKENS[0] else "", *cells, end_section=tokens == TOKENS[-1])
    console.print(table)
    console.print("us: measured, or estimated by a model fitted to measurements, as each row says. One in full:\n")
    console.print(explain(decide(named_problem("qwen3-30b-a3b", 16, "fp8_block"), H200)), markup=False)
    console.print("\nOthers: expertile explain --problem H,I,E,k --quant fp8_tensor --tokens 1,64 --device h100")


def why(plan: Plan) -> str:
    """The source of the choice, and what the others would have cost or why they could not."""
    others = []
    for other in plan.candidates:
        if other.backend in (plan.backend, Backend.REFERENCE) or (other.backend in LIBRARIES and other.reasons):
            continue
        price = "; ".join(other.reasons) or f"{other.time_us:.0f} us"
        others.append(f"{other.backend.value}: {price}")
    return "; ".join((plan.source, *others))


def show_swap(console: Console) -> None:
    """Instruction shapes and resources of a decode tile with and without swapped operands, from the compiler."""
    console.rule("[bold]A decode tile compiled for sm_90a, operands swapped and not")
    if importlib.util.find_spec("triton") is None:
        console.print("Triton is not installed (it exists for Linux only), so nothing can be compiled here.")
        return
    from .evidence import LAYER, TOKENS, swap_evidence

    table = Table(title=f"GEMM1 of {LAYER} at T={TOKENS}, one step over block_k")
    for column in ("weights", "tile", "instructions", "registers", "spills", "shared memory"):
        table.add_column(column, justify="right" if column in ("registers", "spills", "shared memory") else "left")
    with console.status("compiling"):
        for row in swap_evidence():
            k = row.compiled
            figures = (str(k.registers), f"{k.spill_bytes} B", f"{k.smem_bytes} B")
            table.add_row(row.label, row.config.name, row.instructions, *figures, end_section=not row.config.swap)
    console.print(table)
    console.print(
        "Swapped, weight rows fill the 64 rows of a warpgroup's product and 16 tokens its narrow side. Not swapped,\n"
        "16 tokens are too few for it: each warp multiplies alone, and e4m3 is first widened to fp16.\n"
        "tma: weights come by tensor copies, one instruction for a tile."
    )


def show_kernels(console: Console) -> None:
    """Microseconds beside the floor, where there is a Hopper GPU."""
    from .runtime.device import detect

    hardware = detect()
    console.rule(f"[bold]On this machine: {hardware.name}")
    if not hardware.is_hopper:
        console.print("No Hopper GPU here: the kernels were compiled, not run, and nothing was timed.")
        return
    table = Table(
        title=f"Experts of {MEASURED}: CUDA-graph replays, weights from memory; checked against float64 first"
    )
    for column in ("weights", "T", "us", "floor us", "us / floor", "row error", "plan"):
        table.add_column(column, justify="left" if column in ("weights", "plan") else "right")
    with console.status("running the kernels"):
        for cells in measured_cells(hardware):
            table.add_row(*cells)
    console.print(table)


def measured_cells(hardware: Hardware) -> Iterator[tuple[str, ...]]:
    """A table row for each quant and number of tokens, as `expertile bench experts` measures it."""
    import torch

    from .bench import experts
    from .bench.ours import Expertile
    from .bench.rows import environment
    from .bench.runner import Request, Setting

    request = Request(experts.BENCH, (MEASURED,), ("bf16", "fp8_tensor", "fp8_block"), TOKENS)
    setting = Setting(torch.device("cuda"), hardware, environment(hardware.name))
    for outcome in experts.run(request, [Expertile(hardware)], setting):
        if outcome.row is None:
            yield outcome.quant, str(outcome.tokens or ""), outcome.state.value, "", "", "", escape(outcome.message)
            continue
        us, floor = outcome.row["time_us"], outcome.row["floor_us"]
        figures = f"{us:.1f}", f"{floor:.1f}", f"{us / floor:.2f}", f"{outcome.row['err']:.1e}"
        yield outcome.quant, str(outcome.tokens), *figures, escape(outcome.row["plan"])


def _progress(console: Console) -> Progress:
    return Progress(TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), console=console, transient=True)
