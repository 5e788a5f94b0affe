"""What only a Hopper GPU can show: graphs, compilation, streams, large addresses, a memory checker."""

import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

import expertile
from expertile.bench import check
from expertile.reference import moe as reference_moe
from expertile.runtime.device import detect

QUANTS = ("none", "fp8_tensor", "fp8_channel", "fp8_block")
HIDDEN, INTER, EXPERTS, TOP_K = 2048, 768, 128, 8


def layer(quant, hidden=HIDDEN, inter=INTER, experts=EXPERTS, **fields):
    generator = torch.Generator("cuda").manual_seed(0)
    w13 = torch.empty(experts, 2 * inter, hidden, device="cuda", dtype=torch.bfloat16)
    w2 = torch.empty(experts, hidden, inter, device="cuda", dtype=torch.bfloat16)
    w13.normal_(0, hidden**-0.5, generator=generator)
    w2.normal_(0, inter**-0.5, generator=generator)
    if quant == "fp8_tensor":
        fields = dict(x_scale=8 / 448, h_scale=64 / 448) | fields
    return expertile.prepare(w13, w2, quant=quant, **fields)


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
@pytest.mark.parametrize("tokens", [1, 3, 16, 100, 1000])
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


@pytest.mark.parametrize("quant", ["none", "fp8_tensor", "fp8_block"])
@pytest.mark.parametrize("tokens", [1, 8, 300])
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
    for replay in range(4):
        new_x, new_ids, new_probs = inputs(tokens, seed=replay + 1)
        if replay == 2:  # every token to the same experts
            new_ids = torch.arange(TOP_K, device="cuda", dtype=torch.int32).expand(tokens, -1)
        x.copy_(new_x), ids.copy_(new_ids), probs.copy_(new_probs)
        workspace.memory.fill_(255)
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, expertile.moe(x, weights, ids, probs))


@pytest.mark.parametrize("quant", QUANTS)
def test_nothing_compiles_once_it_is_warm(quant):
    weights = layer(quant, experts=64)
    expertile.warm(weights, TOP_K, 512)
    with Compilations() as seen:
        for tokens in range(1, 513):
            expertile.moe(*_with(weights, inputs(tokens, experts=64)))
        torch.cuda.synchronize()
    assert seen.count == 0, seen.names


def _with(weights, arguments):
    x, ids, probs = arguments
    return x, weights, ids, probs


@pytest.mark.parametrize("tokens", [1, 16, 500])
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


@pytest.mark.parametrize("quant", QUANTS)
def test_case_24_a_row_is_the_same_alone_and_in_a_batch_under_one_tile(quant):
    weights, (x, ids, probs) = layer(quant), inputs(64)
    whole = expertile.plan(weights.problem(64, TOP_K), detect())
    together = expertile.moe(x, weights, ids, probs, plan=whole)
    alone = replace(whole, problem=weights.problem(1, TOP_K))
    assert torch.equal(expertile.moe(x[5:6], weights, ids[5:6], probs[5:6], plan=alone), together[5:6])


def test_case_22_compiled_as_one_graph():
    weights, (x, _, _) = layer("fp8_block"), inputs(5)
    logits = torch.randn(5, EXPERTS, device="cuda")

    class Layer(torch.nn.Module):
        def forward(self, x, logits):
            return expertile.moe(x, weights, logits=logits, router="softmax_renormalize", top_k=TOP_K) + x

    with torch.no_grad():
        assert torch.equal(torch.compile(Layer(), fullgraph=True)(x, logits), Layer()(x, logits))


def test_cases_1_and_4_addresses_beyond_32_bits():
    weights = layer("none", hidden=1024, inter=2048, experts=8)
    x, ids, probs = inputs(100_000, hidden=1024, experts=8, top_k=6)
    out = expertile.moe(x, weights, ids, probs)
    rows = torch.tensor([0, 87_380, 87_381, 87_382, 99_999], device="cuda")  # either side of flat row 524 288
    want = reference_moe(x[rows], weights, ids[rows], probs[rows])
    assert ((out[rows].double() - want).norm(dim=1) / want.norm(dim=1)).max() < 0.01


def test_case_2_the_last_row_of_a_large_sum():
    from expertile.kernels.combine import combine

    for tokens, top_k, hidden in ((131_073, 8, 2048), (52_430, 10, 4096)):
        y = torch.ones(tokens * top_k, hidden, device="cuda", dtype=torch.bfloat16)
        y[-top_k:] = torch.arange(top_k, device="cuda")[:, None].bfloat16()
        ids = torch.zeros(tokens, top_k, device="cuda", dtype=torch.int32)
        out = torch.full((tokens, hidden), float("nan"), device="cuda", dtype=torch.bfloat16)
        combine(y, ids, torch.ones(tokens, top_k, device="cuda"), out, 1)
        assert (out[-1] == top_k * (top_k - 1) / 2).all() and (out[:-1] == top_k).all()


SANITIZED = """
import torch, expertile
for quant in ("none", "fp8_block"):
    shapes = (8, 384, 256), (8, 256, 192)
    w = expertile.prepare(*(torch.randn(*s, device="cuda", dtype=torch.bfloat16) for s in shapes), quant=quant)
    for tokens in (1, 5, 70, 600):
        x = torch.randn(tokens, 256, device="cuda", dtype=torch.bfloat16)
        expertile.moe(x, w, logits=torch.randn(tokens, 8, device="cuda"), router="softmax", top_k=2)
torch.cuda.synchronize()
"""


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_the_memory_checker_finds_nothing(tool):
    if shutil.which("compute-sanitizer") is None:
        pytest.skip("compute-sanitizer is not on the PATH")
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", sys.executable, "-c", SANITIZED]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
