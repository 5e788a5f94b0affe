"""What only a Hopper GPU can show: graphs, compilation, streams, large addresses, a memory checker."""

import inspect
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import expertile
from expertile.bench import check
from expertile.kernels import decode_experts, decode_roles, hopper_gemm, hopper_roles
from expertile.plans import RING_TOKENS, Backend, Plan, Stream
from expertile.policy.tiles import ring_tiles
from expertile.reference import moe as reference_moe
from expertile.runtime.device import detect

QUANTS = ("none", "fp8_tensor", "fp8_tensor dynamic", "fp8_channel", "fp8_block")
HIDDEN, INTER, EXPERTS, TOP_K = 2048, 768, 128, 8


def layer(quant, hidden=HIDDEN, inter=INTER, experts=EXPERTS, **fields):
    generator = torch.Generator("cuda").manual_seed(0)
    w13 = torch.empty(experts, 2 * inter, hidden, device="cuda", dtype=torch.bfloat16)
    w2 = torch.empty(experts, hidden, inter, device="cuda", dtype=torch.bfloat16)
    w13.normal_(0, hidden**-0.5, generator=generator)
    w2.normal_(0, inter**-0.5, generator=generator)
    if quant == "fp8_tensor":
        fields = dict(x_scale=8 / 448, h_scale=64 / 448) | fields
    return expertile.prepare(w13, w2, quant=quant.split()[0], **fields)


def inputs(tokens, seed=0, hidden=HIDDEN, experts=EXPERTS, top_k=TOP_K):
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(tokens, hidden, device="cuda", generator=generator).bfloat16()
    probs, ids = torch.randn(tokens, experts, device="cuda", generator=generator).softmax(-1).topk(top_k)
    return x, ids.int(), probs.contiguous()


class Compilations:
    """Counts what Triton compiles while it is active."""

    def __enter__(self):
        import triton

        self.count, self.names = 0, []
        self.knobs, self.before = triton.knobs.runtime, triton.knobs.runtime.jit_post_compile_hook
        self.knobs.jit_post_compile_hook = self.hook
        return self

    def hook(self, *arguments, **keywords):
        self.count += 1
        self.names.append(str(keywords.get("repr", "")))

    def __exit__(self, *error):
        self.knobs.jit_post_compile_hook = self.before


@pytest.mark.parametrize("quant", QUANTS)
@pytest.mark.parametrize("tokens", [1, 3, 16, 100, 1000, 3000])
def test_rows_are_the_layer_in_float64(quant, tokens):
    weights, (x, ids, probs) = layer(quant), inputs(tokens)
    kept = x.clone()
    out = torch.full_like(x, float("nan"))
    expertile.moe(x, weights, ids, probs, out=out)
    rows = check.sample(tokens, 32).to("cuda")
    want = reference_moe(x[rows], weights, ids[rows], probs[rows])
    errors = (out[rows].double() - want).norm(dim=1) / want.norm(dim=1)
    assert torch.isfinite(out).all() and check.red(errors, check.bar(weights)) is None
    assert torch.equal(x, kept)  # case 22


@pytest.mark.parametrize("quant", QUANTS)
@pytest.mark.parametrize("tokens", [1, 2, 16, 300, 3000])
def test_a_workspace_starts_the_kernels_of_a_recorded_call(quant, tokens):
    """Other inputs, another output, another layer's weights: the launches are the recorded ones, the answer is not."""
    first, second = layer(quant), layer(quant)
    second.w2.copy_(second.w2.flip(0))
    plan = expertile.plan(first.problem(tokens, TOP_K), detect())
    rings = range(len(ring_tiles(plan.problem, detect()))) if tokens <= RING_TOKENS else ()
    for each in [plan, *(ring_plan(first, tokens, which) for which in rings)]:
        workspace = expertile.Workspace.for_plan(each, "cuda")
        for seed, weights in enumerate((first, second, first)):
            x, ids, probs = inputs(tokens, seed)
            out = torch.full_like(x, float("nan"))
            expertile.moe(x, weights, ids, probs, out=out, plan=each, workspace=workspace)
            (recorded,) = workspace.calls
            assert all(start.direct for start in recorded.launches), "the driver's way was not found"
            fresh = expertile.Workspace(torch.empty(each.workspace_bytes, dtype=torch.uint8, device="cuda"), None)
            want = expertile.moe(x, weights, ids, probs, plan=each, workspace=fresh)
            assert torch.equal(out, want), (each.name, seed)
            assert torch.equal(expertile.moe(x, weights, ids, probs, plan=each), want), (each.name, seed)


@pytest.mark.parametrize("quant", ["none", "fp8_tensor", "fp8_block"])
@pytest.mark.parametrize("tokens", [1, 8, 300, 2000])
def test_case_21_a_graph_replays_with_other_ids_and_allocates_nothing(quant, tokens):
    weights, (x, ids, probs) = layer(quant), inputs(tokens)
    plan = expertile.plan(weights.problem(tokens, TOP_K), detect())
    workspace, out = expertile.Workspace.for_plan(plan, x.device), torch.empty_like(x)

    def call():
        expertile.moe(x, weights, ids, probs, out=out, plan=plan, workspace=workspace)

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        call()
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    spread = torch.arange(TOP_K, device="cuda", dtype=torch.int32).expand(tokens, -1)
    for replay, other_ids in enumerate((None, torch.full_like(ids, 7), spread, torch.full_like(ids, -1), None)):
        new_x, new_ids, new_probs = inputs(tokens, seed=replay + 1)
        x.copy_(new_x)
        ids.copy_(new_ids if other_ids is None else other_ids)  # all slots to one expert, each to its own, none
        probs.copy_(new_probs)
        workspace.memory.fill_(255)
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, expertile.moe(x, weights, ids, probs))
        assert torch.equal(x, new_x)


def ring_plan(weights, tokens, which=0):
    """Both products in one launch, whatever the policy would choose."""
    problem, hardware = weights.problem(tokens, TOP_K), detect()
    tile = ring_tiles(problem, hardware)[which]
    return Plan(problem, hardware.name, Backend.TRITON, tile, tile, stream=Stream.RING, pdl=True, sms=hardware.sms)


@pytest.mark.parametrize("ring", [False, True], ids=["chosen", "ring"])
@pytest.mark.parametrize("quant", QUANTS)
def test_a_thousand_replays_agree(quant, ring):
    """What one launch may leave too late for the next shows now and then only."""
    weights, (x, ids, probs) = layer(quant), inputs(4)
    plan = ring_plan(weights, 4) if ring else expertile.plan(weights.problem(4, TOP_K), detect())
    workspace, out = expertile.Workspace.for_plan(plan, x.device), torch.empty_like(x)
    want = expertile.moe(x, weights, ids, probs, plan=plan)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        expertile.moe(x, weights, ids, probs, out=out, plan=plan, workspace=workspace)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(1000):
        workspace.memory.fill_(255)
        out.fill_(float("nan"))
        graph.replay()
        wrong += (out != want).any()  # a NaN differs as well
    assert wrong.item() == 0


@pytest.mark.parametrize("quant", QUANTS)
@pytest.mark.parametrize("tokens", [1, 40, 600, 1500])
def test_what_fresh_memory_held_does_not_matter(tokens, quant):
    """Cases 6 to 9: slots of no expert and experts twice, with the allocator's memory full of NaN, then of 0x7F."""
    weights, (x, ids, probs) = layer(quant), inputs(tokens)
    ids[:, 1], ids[:, -1] = torch.tensor([-1, EXPERTS, EXPERTS + 7, 2**30]).repeat(tokens)[:tokens], ids[:, 0]
    ids[tokens // 2, 2:] = -1
    ids[-1] = 2**30
    want = expertile.moe(x, weights, ids, probs)
    assert torch.isfinite(want).all() and (want[-1] == 0).all()
    for byte in (0xFF, 0x7F):
        blocks = [
            torch.full((2**size,), byte, dtype=torch.uint8, device="cuda") for size in range(9, 28) for _ in "abcd"
        ]
        del blocks
        assert torch.equal(expertile.moe(x, weights, ids, probs), want)


def forget_compiled_kernels():
    """As in a process that has just begun, but for Triton's cache on disk."""
    from triton.runtime.jit import JITFunction

    from expertile import api
    from expertile.kernels import combine, grouped_gemm, quantize, router, routing, stream, swapped_gemm

    files = (combine, decode_experts, grouped_gemm, hopper_gemm, quantize, router, routing, stream, swapped_gemm)
    for file in files:
        for kernel in vars(file).values():
            if isinstance(kernel, JITFunction):
                kernel.device_caches.clear()
    api._calls.cache_clear()  # what earlier tests recorded would start without asking Triton


@pytest.mark.parametrize("experts", [EXPERTS, 64])  # in the table, and not
@pytest.mark.parametrize("quant", QUANTS)
def test_nothing_compiles_once_it_is_warm(quant, experts):
    weights = layer(quant, experts=experts)
    forget_compiled_kernels()
    with Compilations() as seen:
        points = expertile.warm(weights, TOP_K, 4096)
        torch.cuda.synchronize()
    assert seen.count >= len(points) > 1  # the count is alive: each point was chosen for a new variant
    with Compilations() as seen:
        for tokens in (*range(1, 513), *range(513, 4097, 97)):
            expertile.moe(*_with(weights, inputs(tokens, experts=experts)))
        torch.cuda.synchronize()
    assert seen.count == 0, seen.names


def _with(weights, arguments):
    x, ids, probs = arguments
    return x, weights, ids, probs


@pytest.mark.parametrize("tokens", [1, 16, 500, 3000])
def test_beside_another_kernel_on_a_second_stream(tokens):
    weights, arguments = layer("fp8_tensor"), inputs(tokens)
    want = expertile.moe(*_with(weights, arguments))
    other = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(10):
            other @ other
    found = [expertile.moe(*_with(weights, arguments)) for _ in range(20)]
    torch.cuda.synchronize()
    assert all(torch.equal(y, want) for y in found)


@pytest.mark.parametrize("quant", ["none", "fp8_tensor dynamic", "fp8_block"])
def test_two_rings_at_once_hang_on_nothing(quant):
    """Blocks of one wait for h of others: neither launch may need all of its blocks on the device at once."""
    layers, (x, ids, probs) = [layer(quant), layer(quant)], inputs(16)
    plan = ring_plan(layers[0], 16)
    want = expertile.moe(x, layers[0], ids, probs, plan=plan)
    torch.cuda.synchronize()
    streams, found = [torch.cuda.Stream(), torch.cuda.Stream()], []
    for _ in range(200):
        for stream, weights in zip(streams, layers, strict=True):
            with torch.cuda.stream(stream):
                found.append(expertile.moe(x, weights, ids, probs, plan=plan))
    torch.cuda.synchronize()
    assert all(torch.equal(y, want) for y in found)


@pytest.mark.parametrize(
    ("quant", "hidden", "inter", "experts", "tokens"),
    [
        ("fp8_block", 3072, 384, 256, 6),
        ("fp8_block", 4096, 384, 128, 12),
        ("fp8_tensor", 2048, 1024, 64, 48),
        ("none", 4096, 704, 128, 12),
    ],
)
def test_rings_of_other_sizes_compute_the_layer(quant, hidden, inter, experts, tokens):
    """More blocks than GEMM1 has items; GEMM2's items shorter than the ring. Two smaller blocks an SM failed here."""
    weights = layer(quant, hidden, inter, experts)
    problem, hardware = weights.problem(tokens, TOP_K), detect()
    for tile in ring_tiles(problem, hardware):
        plan = Plan(problem, hardware.name, Backend.TRITON, tile, tile, stream=Stream.RING, pdl=True, sms=hardware.sms)
        for seed in range(8):
            x, ids, probs = inputs(tokens, seed, hidden, experts)
            out = torch.full_like(x, float("nan"))
            expertile.moe(x, weights, ids, probs, out=out, plan=plan)
            want = reference_moe(x, weights, ids, probs)
            errors = (out.double() - want).norm(dim=1) / want.norm(dim=1)
            assert torch.isfinite(out).all() and check.red(errors, check.bar(weights)) is None, (tile.name, seed)


@pytest.mark.parametrize("quant", QUANTS)
def test_case_24_a_row_is_the_same_alone_and_in_a_batch_under_one_tile(quant):
    weights, (x, ids, probs) = layer(quant), inputs(64)
    whole = expertile.plan(weights.problem(64, TOP_K), detect())
    together = expertile.moe(x, weights, ids, probs, plan=whole)
    alone = replace(whole, problem=weights.problem(1, TOP_K))
    assert torch.equal(expertile.moe(x[5:6], weights, ids[5:6], probs[5:6], plan=alone), together[5:6])


@pytest.mark.parametrize("tokens", [1, 300])
def test_weights_that_began_amid_other_memory_and_a_column_of_expert_maps(tokens):
    """TMA reads neither, kernels read a map as contiguous: the one is laid out anew once, the other on each call."""
    weights, (x, ids, probs) = layer("none"), inputs(tokens)
    memory = torch.empty(weights.w13.numel() + 1, device="cuda", dtype=torch.bfloat16)
    askew = memory[1:].view(weights.w13.shape).copy_(weights.w13)
    assert askew.data_ptr() % 16
    maps = torch.arange(EXPERTS, device="cuda", dtype=torch.int32)[:, None].repeat(1, 2)
    maps[:, 1] = -1
    want = expertile.moe(x, weights, ids, probs, expert_map=maps[:, 0].clone())
    found = expertile.prepare(askew, weights.w2)
    assert torch.equal(expertile.moe(x, found, ids, probs, expert_map=maps[:, 0]), want)


def test_case_22_compiled_as_one_graph():
    weights, (x, _, _) = layer("fp8_block"), inputs(5)
    logits = torch.randn(5, EXPERTS, device="cuda")

    class Layer(torch.nn.Module):
        def forward(self, x, logits):
            return expertile.moe(x, weights, logits=logits, router="softmax_renormalize", top_k=TOP_K) + x

    kept = x.clone()
    with torch.no_grad():
        assert torch.equal(torch.compile(Layer(), fullgraph=True)(x, logits), Layer()(x, logits))
    assert torch.equal(x, kept)


@pytest.mark.parametrize("quant", ["none", "fp8_block"])
@pytest.mark.parametrize("size", [2048, 4096])  # the report's; and where row 524 288 of our h and y begins at 2^31
def test_cases_1_and_4_addresses_beyond_32_bits(size, quant):
    tokens, top_k, experts = 100_000, 6, 8
    weights = layer(quant, hidden=size, inter=size, experts=experts)
    x, ids, probs = inputs(tokens, hidden=size, experts=experts, top_k=top_k)
    out = torch.full_like(x, float("nan"))
    expertile.moe(x, weights, ids, probs, out=out)
    row = 524_288 // top_k  # its token; h is in another order, so others from everywhere as well
    rows = torch.cat([torch.arange(row - 2, row + 4), check.sample(tokens, 64)]).to("cuda")
    want = reference_moe(x[rows], weights, ids[rows], probs[rows])
    assert check.red(check.row_errors(out[rows], want), check.bar(weights)) is None
    assert torch.isfinite(out).all()


def test_case_2_the_last_row_of_a_large_sum():
    from expertile.kernels.combine import combine

    for tokens, top_k, hidden in ((131_073, 8, 2048), (52_430, 10, 4096)):
        y = torch.ones(tokens * top_k, hidden, device="cuda", dtype=torch.bfloat16)
        y[-top_k:] = torch.arange(top_k, device="cuda")[:, None].bfloat16()
        ids = torch.zeros(tokens, top_k, device="cuda", dtype=torch.int32)
        out = torch.full((tokens, hidden), float("nan"), device="cuda", dtype=torch.bfloat16)
        combine(y, ids, torch.ones(tokens, top_k, device="cuda"), out, 1)
        assert (out[-1] == top_k * (top_k - 1) / 2).all() and (out[:-1] == top_k).all()


SANITIZER = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")

#: One call of a small layer under each quant with the plan of that kind: sizes are off every tile.
SANITIZED = """
import sys
import torch, expertile
from expertile.plans import Backend, GemmConfig, Plan, Stream
from expertile.policy import tile_reasons
from expertile.policy.tiles import SPECIALIZED, fused_quant, ring_tiles, stream_tiles
from expertile.runtime.device import detect

kind, static = sys.argv[1], dict(x_scale=8 / 448, h_scale=64 / 448)
for quant, scales in (("none", {}), ("fp8_tensor", static), ("fp8_tensor", {}), ("fp8_channel", {}), ("fp8_block", {})):
    hidden, inter = (288, 256) if kind in ("specialized", "ring") else (240, 208)
    shapes = (8, 2 * inter, hidden), (8, hidden, inter)
    w13, w2 = (torch.randn(*s, device="cuda", dtype=torch.bfloat16) / 16 for s in shapes)
    weights = expertile.prepare(w13, w2, quant=quant, **scales)
    tokens = {"stream_down": 3, "stream_both": 3, "ring": 20, "specialized": 600}.get(kind, 70)
    wide = 64 if quant == "none" else 128
    problem = weights.problem(tokens, 2)
    thin = GemmConfig(16, 128, wide, 4, 3, True)
    up, down = stream_tiles(problem)
    gemm1, gemm2, stream = {
        "swap": (thin, thin, Stream.NO),
        "tma": (GemmConfig(16, 128, wide, 4, 3, True, 1, True),) * 2 + (Stream.NO,),
        "tma_wide": (GemmConfig(16, 256, wide, 8, 3, True, 1, True),) * 2 + (Stream.NO,),
        "plain": (GemmConfig(64, 128, wide, 4, 4, False, 8),) * 2 + (Stream.NO,),
        "plain_wide": (GemmConfig(128, 256, wide, 8, 3, False, 8),) * 2 + (Stream.NO,),
        "specialized": (SPECIALIZED[wide],) * 2 + (Stream.NO,),
        "stream_down": (thin, down, Stream.DOWN),
        "stream_both": (up, down, Stream.BOTH),
        "ring": (*ring_tiles(problem, detect())[:1] * 2, Stream.RING) if kind == "ring" else (),
    }[kind]
    assert stream in (Stream.BOTH, Stream.RING) or not tile_reasons(gemm1, problem, detect())
    fuse = stream is Stream.NO and fused_quant(problem, gemm1)
    plan = Plan(problem, "h200", Backend.TRITON, gemm1, gemm2, stream=stream, fuse_quant=fuse, pdl=True)
    x = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16)
    probs, ids = expertile.route(torch.randn(tokens, 8, device="cuda"), "softmax", 2)[::-1]
    ids[0, 0] = -1
    y = expertile.moe(x, weights, ids, probs, plan=plan)
    assert y.isfinite().all(), quant
torch.cuda.synchronize()
print("done", kind)
"""
KINDS = ("swap", "tma", "tma_wide", "plain", "plain_wide", "specialized", "stream_down", "stream_both", "ring")


@pytest.mark.skipif(SANITIZER is None, reason="compute-sanitizer is neither on the PATH nor in /usr/local/cuda/bin")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_the_memory_checker_finds_nothing(tool, kind):
    # The caching allocator would hide a step past the end of a tensor within its blocks.
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    command = [SANITIZER, "--tool", tool, "--print-limit", "10000", sys.executable, "-c", SANITIZED, kind]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    said = done.stdout[-2000:] + done.stderr[-2000:]
    assert f"done {kind}" in done.stdout, said
    if tool == "racecheck" and kind in ("specialized", "ring"):
        assert all(map(joined_by_barriers, HAZARD.findall(done.stdout))), said
    else:
        assert done.returncode == 0 and unexplained(done.stdout + done.stderr) == 0, said


def unexplained(said: str) -> int:
    """Errors that memcheck or racecheck counted, but for the one that a recorded launch provokes: runtime/direct.py
    asks the driver for one parameter more than a kernel should have.
    """
    (errors,) = re.findall(r"SUMMARY: (\d+) ", said)
    return int(errors) - len(re.findall(r"CUDA_ERROR_INVALID_VALUE .* on CUDA API call to cuFuncGetParamInfo\.", said))


HAZARD = re.compile(r"access at \S+ in (\w+\.py):(\d+)")


def joined_by_barriers(place) -> bool:
    """Whether racecheck's hazard is where warps of different roles meet: what Triton tells them at the start, and the
    next tile. One thread arrives at an mbarrier for its whole role, after a barrier of the role; racecheck does not put
    the two together. All other shared memory of these kernels is written by asynchronous copies.
    """
    name, line = place[0], int(place[1])
    for file in (hopper_gemm, decode_experts):
        if name == Path(file.__file__).name:
            return True
    for function in (f for file in (hopper_roles, decode_roles) for f in (file._tell, file._hear)):
        lines, first = inspect.getsourcelines(function.fn)
        if name == Path(inspect.getsourcefile(function.fn)).name and first <= line < first + len(lines):
            return True
    return False
