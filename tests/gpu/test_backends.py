"""Other libraries' experts as installed here: the layer's answer, skipped slots, capture. Skipped without them."""

import pytest
import torch

import expertile
from expertile import reference
from expertile.bench.check import bar, dequantized, red, row_errors
from expertile.plans import Backend
from expertile.policy import reasons
from expertile.problem import activation
from expertile.runtime.backends import installed, vllm
from expertile.runtime.device import detect

pytestmark = pytest.mark.gpu

STATIC = dict(x_scale=8 / 448, h_scale=64 / 448)
LAYERS = {
    Backend.VLLM_TRITON: [("none", "silu"), ("fp8_tensor", "relu2"), ("fp8_channel", "silu"), ("fp8_block", "silu")],
    Backend.VLLM_CUTLASS: [("fp8_tensor", "silu"), ("fp8_channel", "silu")],
    Backend.VLLM_DEEPGEMM: [("fp8_block", "silu")],
    Backend.FLASHINFER_CUTLASS: [("fp8_tensor", "silu"), ("fp8_tensor", "relu2")],
    Backend.TRITON_KERNELS: [("none", "swiglu_oai")],
}
EXPERTS, HIDDEN, INTER, TOP_K = 16, 512, 256, 4


def layer(quant, name):
    act = activation(name, interleaved=name == "swiglu_oai")
    torch.manual_seed(0)
    rows = INTER * (2 if act.gated else 1)
    w13 = torch.randn(EXPERTS, rows, HIDDEN, device="cuda", dtype=torch.bfloat16) / HIDDEN**0.5
    w2 = torch.randn(EXPERTS, HIDDEN, INTER, device="cuda", dtype=torch.bfloat16) / INTER**0.5
    fields = STATIC if quant == "fp8_tensor" else {}
    if name == "swiglu_oai":
        fields = dict(
            w13_bias=torch.randn(EXPERTS, rows, device="cuda"), w2_bias=torch.randn(EXPERTS, HIDDEN, device="cuda")
        )
        fields = {key: value.bfloat16() / 10 for key, value in fields.items()}
    return expertile.prepare(w13, w2, quant=quant, activation=act, **fields)


def call_inputs(tokens, seed):
    torch.manual_seed(seed)
    x = torch.randn(tokens, HIDDEN, device="cuda", dtype=torch.bfloat16)
    probs, ids = torch.randn(tokens, EXPERTS, device="cuda").softmax(-1).topk(TOP_K)
    return x, ids.int(), probs


def errors(got, x, weights, ids, probs):
    """Against float64 with nothing but the weights quantised: how x and h are is a library's own choice (vLLM's
    block scales of them are powers of two, ours are not).
    """
    exact = dequantized(weights, torch.arange(EXPERTS, device="cuda"))
    return row_errors(got, reference.moe(x, exact, ids, probs))


def assert_close(error, weights):
    """Of every row, and of many rows in the mean."""
    assert error.numel() >= 64
    assert red(error, bar(weights)) is None


@pytest.mark.parametrize(
    ("backend", "quant", "name"), [(backend, *each) for backend, layers in LAYERS.items() for each in layers], ids=str
)
def test_a_library_computes_the_layer_and_can_be_captured(backend, quant, name):
    weights = layer(quant, name)
    problem = weights.problem(64, TOP_K)
    if why := reasons(backend, problem, detect(), installed()):
        pytest.skip("; ".join(why))
    with vllm.session():
        found = []
        for tokens in (1, 7, 64):
            x, ids, probs = call_inputs(tokens, tokens)
            ids[0, 0], ids[-1, 2] = -1, ids[-1, 1]  # no expert; an expert twice
            got = expertile.moe(x, weights, ids, probs, backend=backend.value)
            found.append(errors(got, x, weights, ids, probs))
        assert_close(torch.cat(found), weights)
        graph, out = torch.cuda.CUDAGraph(), torch.empty_like(x)
        with torch.cuda.graph(graph):
            expertile.moe(x, weights, ids, probs, backend=backend.value, out=out)
        for seed in (5, 6):
            for held, new in zip((x, ids, probs), call_inputs(64, seed), strict=True):
                held.copy_(new)
            graph.replay()
            torch.cuda.synchronize()
            assert_close(errors(out, x, weights, ids, probs), weights)


def test_weights_are_not_loaded_under_capture():
    weights = layer("fp8_tensor", "silu")
    if why := reasons(Backend.VLLM_TRITON, weights.problem(4, TOP_K), detect(), installed()):
        pytest.skip("; ".join(why))
    x, ids, probs = call_inputs(4, 0)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(expertile.UnsupportedProblem, match="before capture"), torch.cuda.graph(graph):
        expertile.moe(x, weights, ids, probs, backend="vllm-triton")
