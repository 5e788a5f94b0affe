"""Wrong input is one ExpertileError that names the value, before anything runs."""

from dataclasses import replace

import pytest
import torch

import expertile
from expertile import ExpertileError
from expertile.weights import check_weights

E, H, INTER, T = 4, 32, 16, 3
W13, W2 = torch.randn(E, 2 * INTER, H).bfloat16(), torch.randn(E, H, INTER).bfloat16()
X, IDS, PROBS = torch.randn(T, H).bfloat16(), torch.tensor([[0, 1], [2, 3], [1, 0]]), torch.rand(T, 2)
LOGITS = torch.randn(T, E)
FP8 = torch.float8_e4m3fn

STORED = dict(w13=W13.to(FP8), w2=W2.to(FP8), w13_scale=torch.ones(E), w2_scale=torch.ones(E))


def _with(tensor, place, value):
    """The tensor with one of its values replaced."""
    tensor[place] = value
    return tensor


CALLS = {
    "uint32": dict(ids=IDS.to(torch.uint32), probs=PROBS),
    "one weight a slot": dict(ids=IDS, probs=IDS),
    r"\(1, 3, 32\)": dict(x=X[None], ids=IDS, probs=PROBS),
    "torch.float32, the weights were": dict(x=X.float(), ids=IDS, probs=PROBS),
    "strides": dict(x=torch.randn(H, T).bfloat16().t(), ids=IDS, probs=PROBS),
    "ids need probs": dict(ids=IDS),
    "either ids": dict(),
    "either ids and probs, or": dict(ids=IDS, probs=PROBS, logits=LOGITS),
    "top_k=9": dict(logits=LOGITS, router="softmax", top_k=9),
    "'softmx'": dict(logits=LOGITS, router="softmx", top_k=2),
    "need router": dict(logits=LOGITS, top_k=2),
    "need top_k": dict(logits=LOGITS, router="softmax"),
    "groups=8": dict(logits=LOGITS, router="deepseek_v3", top_k=2),
    "bfloat16 .*needs float32": dict(logits=LOGITS, router="sigmoid", top_k=2, bias=torch.zeros(E).bfloat16()),
    "shares memory": dict(ids=IDS, probs=PROBS, out=X),
    r"needs torch.bfloat16 \(3, 32\)": dict(ids=IDS, probs=PROBS, out=torch.empty(2, H).bfloat16()),
    "top_k=2": dict(ids=IDS, probs=PROBS, weight_on_input=True),
    "int64": dict(ids=IDS, probs=PROBS, expert_map=torch.arange(E)),
    "compute capability": dict(ids=IDS, probs=PROBS, backend="triton", hardware=expertile.Hardware(
        "cpu", (0, 0), 1, 0, 0, 1.0, 1.0, 1.0, 1.0)),
    "'cutlass'": dict(ids=IDS, probs=PROBS, backend="cutlass"),
    "scaling_factor='2'": dict(ids=IDS, probs=PROBS, scaling_factor="2"),
    "scaling_factor=nan": dict(ids=IDS, probs=PROBS, scaling_factor=float("nan")),
}  # fmt: skip

PREPARATIONS = {
    "do not fit": dict(w2=W2[:, :, :8]),
    "'mxfp4'": dict(quant="mxfp4"),
    "three dimensions": dict(w13=W13[0], w2=W2[0]),
    "int64": dict(w13=W13.long(), w2=W2.long()),
    "w2 has dtype torch.float32": dict(w2=W2.float()),
    "must not be empty": dict(w13=W13[:0], w2=W2[:0]),
    "'swish'": dict(activation="swish"),
    "they go with float8": dict(w13_scale=torch.ones(E)),
    "give w13_scale": dict(w13=W13.to(FP8), w2=W2.to(FP8)),
    "float8_e5m2": dict(w13=W13.to(torch.float8_e5m2), w2=W2.to(torch.float8_e5m2)),
    "above zero": dict(quant="fp8_tensor", x_scale=0.0, h_scale=1.0),
    "finite": dict(quant="fp8_tensor", x_scale=float("nan"), h_scale=1.0),
    "both products": dict(quant="fp8_tensor", x_scale=1.0),
    "goes with|takes one": dict(quant="fp8_block", x_scale=1.0, h_scale=1.0),
    "both projections": dict(w13_bias=torch.zeros(E, 2 * INTER)),
    "w2 has dtype torch.float8_e4m3fn, w13 has torch.bfloat16": dict(w2=W2.to(FP8), quant="fp8_channel"),
    "int8: use bf16": dict(w13=W13.char(), w2=W2.char(), quant="fp8_channel", dtype=torch.bfloat16),
    "int32: use bf16": dict(w13=W13.int(), w2=W2.int(), quant="fp8_block", dtype="bf16"),
    r"\(32,\) and w2 \(16,\) need three": dict(w13=W13[0, 0], w2=W2[0, 0], quant="fp8_block"),
    r"\(32, 32\) and w2 \(32, 16\) need three": dict(w13=W13[0], w2=W2[0], quant="fp8_tensor"),
    r"\(0, 32, 32\) and w2 \(0, 32, 16\) must not be empty": dict(w13=W13[:0], w2=W2[:0], quant="fp8_block"),
    r"\(\) and w2 \(\) need three": dict(STORED, w13=W13[0, 0, 0].to(FP8), w2=W2[0, 0, 0].to(FP8)),
    r"w13_scale\[2\] is nan": dict(STORED, w13_scale=_with(torch.ones(E), 2, float("nan"))),
    r"w2_scale\[1, 5\] is inf": dict(
        STORED, w13_scale=torch.ones(E, 2 * INTER), w2_scale=_with(torch.ones(E, H), (1, 5), float("inf"))),
    r"w13_scale\[3, 0, 0\] is -1": dict(
        STORED, quant="fp8_block", split_scale=False, w13_scale=_with(torch.ones(E, 1, 1), 3, -1.0),
        w2_scale=torch.ones(E, 1, 1)),
    r"w13\[1\] holds values that are not finite": dict(
        w13=_with(W13.clone(), (1, 0, 0), float("nan")), quant="fp8_block"),
    r"w2\[3\] holds values that are not finite": dict(
        w2=_with(W2.clone(), (3, 1, 2), float("-inf")), quant="fp8_tensor"),
    r"a scale each for gate and up rows.*w13_scale\[:, 0\].*repeat_interleave\(16, 1\)": dict(
        STORED, w13_scale=torch.ones(E, 2)),
    "a scale each for gate and up rows, which quant=fp8_tensor": dict(
        STORED, quant="fp8_tensor", w13_scale=torch.ones(E, 2)),
    "w13_bias is torch.float8_e4m3fn": dict(w13_bias=torch.zeros(E, 2 * INTER).to(FP8), w2_bias=torch.zeros(E, H)),
    "split_scale=True goes with quant=fp8_block, not none": dict(split_scale=True),
    "split_scale=False goes with quant=fp8_block, not fp8_tensor": dict(STORED, split_scale=False),
    "split_scale='no': give True or False": dict(quant="fp8_block", split_scale="no"),
    "relu2 has no gate rows": dict(
        w13=W13[:, :INTER], quant="fp8_block", activation="relu2", split_scale=True),
    "gate and up rows alternate": dict(
        quant="fp8_block", split_scale=True, activation=expertile.Activation(interleaved=True)),
    "w13 is a list": dict(w13=[[1.0]]),
    "w2_bias is a ndarray": dict(w13_bias=torch.zeros(E, 2 * INTER), w2_bias=torch.zeros(E, H).numpy()),
    r"activation=\['silu'\]": dict(activation=["silu"]),
    r"quant=\['fp8_block'\]": dict(quant=["fp8_block"]),
    "x_scale='1': give a finite number": dict(quant="fp8_tensor", x_scale="1", h_scale=1.0),
}  # fmt: skip


@pytest.mark.parametrize("message", CALLS)
def test_a_wrong_call_names_the_value(message):
    arguments = {"x": X, **CALLS[message]}
    with pytest.raises(ExpertileError, match=message):
        expertile.moe(arguments.pop("x"), expertile.prepare(W13, W2), **arguments)


@pytest.mark.parametrize("message", PREPARATIONS)
def test_wrong_weights_name_the_value(message):
    arguments = {"w13": W13, "w2": W2, **PREPARATIONS[message]}
    with pytest.raises(ExpertileError, match=message):
        expertile.prepare(arguments.pop("w13"), arguments.pop("w2"), **arguments)


def test_quantising_keeps_no_graph_and_takes_the_blocks_that_were_asked_for():
    w13 = torch.nn.Parameter(torch.randn(2, 2 * 192, 128))
    weights = expertile.prepare(w13, torch.nn.Parameter(torch.randn(2, 128, 192)), quant="fp8_block")
    assert weights.split_scale and weights.w13_scale.shape == (2, 4, 1)
    assert not weights.w13_scale.requires_grad and not weights.w13.requires_grad
    merged = expertile.prepare(w13, torch.randn(2, 128, 192), quant="fp8_block", split_scale=False)
    assert not merged.split_scale and merged.w13_scale.shape == (2, 3, 1)


def test_scales_of_one_block_column_are_no_scales_of_rows():
    w13, w2 = torch.ones(2, 512, 128).to(FP8), torch.ones(2, 128, 256).to(FP8)
    found = expertile.prepare(w13, w2, w13_scale=torch.ones(2, 4, 1), w2_scale=torch.ones(2, 1, 2))
    assert found.quant.value == "fp8_block"
    found = expertile.prepare(w13, w2, w13_scale=torch.ones(2, 512, 1), w2_scale=torch.ones(2, 128, 1))
    assert found.quant.value == "fp8_channel" and found.w13_scale.shape == (2, 512)


class OnGpu(torch.Tensor):
    """Says that it lies on a GPU."""

    is_cuda = True


def test_weights_on_a_gpu_that_begin_amid_other_memory_are_laid_out_anew():
    memory = torch.randn(E * 2 * INTER * H + 1).bfloat16()
    askew = memory[1:].view(E, 2 * INTER, H).as_subclass(OnGpu)
    assert askew.data_ptr() % 16 and not W2.data_ptr() % 16
    found = expertile.prepare(askew, W2)
    assert found.w13.data_ptr() % 16 == 0 and torch.equal(found.w13, askew)
    with pytest.raises(ExpertileError, match=r"w13 begins at address 0x.*clone\(\)"):
        check_weights(replace(found, w13=askew))


def test_case_20_scales_in_e8m0_are_converted_and_bytes_refused():
    w13, w2 = W13.to(FP8), W2.to(FP8)
    e8m0 = torch.full((E, 1, 1), 0.25).to(torch.float8_e8m0fnu)
    weights = expertile.prepare(w13, w2, quant="fp8_block", w13_scale=e8m0, w2_scale=e8m0, split_scale=False)
    assert weights.w13_scale.dtype == torch.float32 and (weights.w13_scale == 0.25).all()
    with pytest.raises(ExpertileError, match="uint8"):
        expertile.prepare(
            w13, w2, quant="fp8_block", w13_scale=e8m0.view(torch.uint8), w2_scale=e8m0, split_scale=False
        )


def test_an_unknown_keyword_is_a_type_error():
    with pytest.raises(TypeError, match="scaling"):
        expertile.moe(X, expertile.prepare(W13, W2), IDS, PROBS, scaling=2)


def test_case_22_one_operator_under_compile_and_no_gradient_passed_in_silence():
    weights = expertile.prepare(W13.float(), W2.float())
    x = X.float()

    class Layer(torch.nn.Module):
        def forward(self, x, logits):
            return x + expertile.moe(x, weights, logits=logits, router="softmax_renormalize", top_k=2)

    kept = x.clone()
    with torch.no_grad():
        compiled = torch.compile(Layer(), fullgraph=True, backend="aot_eager")(x, LOGITS)
        torch.testing.assert_close(compiled, Layer()(x, LOGITS))
    assert torch.equal(x, kept)
    y = expertile.moe(x.requires_grad_(), weights, IDS, PROBS)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        y.sum().backward()
