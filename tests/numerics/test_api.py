"""Wrong input is one ExpertileError that names the value, before anything runs."""

import pytest
import torch

import expertile
from expertile import ExpertileError

E, H, INTER, T = 4, 32, 16, 3
W13, W2 = torch.randn(E, 2 * INTER, H).bfloat16(), torch.randn(E, H, INTER).bfloat16()
X, IDS, PROBS = torch.randn(T, H).bfloat16(), torch.tensor([[0, 1], [2, 3], [1, 0]]), torch.rand(T, 2)
LOGITS = torch.randn(T, E)
FP8 = torch.float8_e4m3fn

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
}


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
