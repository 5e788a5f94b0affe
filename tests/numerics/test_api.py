"""Wrong input is one ExpertileError that names the value, before anything runs."""

from dataclasses import replace

import pytest
import torch

import expertile
from expertile import ExpertileError, UnsupportedProblem, policy
from expertile.plans import Backend, Plan, Stream
from expertile.weights import check_weights

from .kernel_inputs import SWAP, Case, make_layer, make_plan, make_stream_plan

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
    "scaling_factor=True": dict(ids=IDS, probs=PROBS, scaling_factor=True),
    "weight_on_input=1": dict(ids=IDS, probs=PROBS, weight_on_input=1),
    r"logits are \(3, 5\), x and the experts need \(3, 4\)": dict(
        logits=torch.randn(T, E + 1), router="softmax", top_k=2),
    r"logits are \(3, 4\), x and the experts need \(3, 6\)": dict(
        logits=LOGITS, router="softmax", top_k=2, expert_map=torch.arange(6, dtype=torch.int32)),
    "either ids and probs, or logits": dict(ids=IDS, logits=LOGITS, router="softmax", top_k=2),
    "probs go with ids": dict(probs=PROBS, logits=LOGITS, router="softmax", top_k=2),
    "router, top_k and bias go with logits": dict(ids=IDS, probs=PROBS, router="softmax"),
    "out is torch.float16": dict(ids=IDS, probs=PROBS, out=torch.empty(T, H).half()),
    "each with memory of its own": dict(ids=IDS, probs=PROBS, out=torch.empty(1, H).bfloat16().expand(T, H)),
    "needs torch.bfloat16 .* on cpu": dict(ids=IDS, probs=PROBS, out=torch.empty(T, H, device="meta").bfloat16()),
    "x is a list": dict(x=X.tolist(), ids=IDS, probs=PROBS),
    "x is a NoneType": dict(x=None, ids=IDS, probs=PROBS),
    "ids is a list": dict(ids=IDS.tolist(), probs=PROBS),
    "probs is a ndarray": dict(ids=IDS, probs=PROBS.numpy()),
    "logits is a list": dict(logits=LOGITS.tolist(), router="softmax", top_k=2),
    "bias is a list": dict(logits=LOGITS, router="softmax", top_k=2, bias=[0.0] * E),
    "expert_map is a list": dict(ids=IDS, probs=PROBS, expert_map=list(range(E))),
    "out is a list": dict(ids=IDS, probs=PROBS, out=[]),
    "weights is a tuple": dict(ids=IDS, probs=PROBS, weights=(W13, W2)),
    "top_k=2.0": dict(logits=LOGITS, router="softmax", top_k=2.0),
    r"router=\['softmax'\]": dict(logits=LOGITS, router=["softmax"], top_k=2),
    r"backend=\['torch'\]": dict(ids=IDS, probs=PROBS, backend=["torch"]),
    "hardware='h200'": dict(ids=IDS, probs=PROBS, hardware="h200"),
    "workspace is a Tensor": dict(ids=IDS, probs=PROBS, workspace=torch.empty(9)),
    "plan is a str": dict(ids=IDS, probs=PROBS, plan="torch"),
    "runs on a GPU, x is on cpu.*without hardware=h200": dict(ids=IDS, probs=PROBS, hardware=expertile.H200),
}  # fmt: skip

TILE = dict(gemm1=SWAP, gemm2=SWAP, stream=Stream.NO, fuse_quant=False)
BROUGHT = {
    "fuse_quant: a scale of h in fp8_channel spans": dict(TILE, quant="fp8_channel", fuse_quant=True),
    "fuse_quant: a scale of h in fp8_tensor spans": dict(TILE, quant="fp8_tensor", fuse_quant=True),
    "fuse_quant: a scale of h in fp8_block .*block_n=64": dict(TILE, quant="fp8_block", fuse_quant=True),
    "fuse_quant: a scale of h in bf16": dict(TILE, fuse_quant=True),
    "block_k=8: a power of two": dict(TILE, gemm1=replace(SWAP, block_k=8)),
    "block_m=16 and 32: one list of row tiles": dict(TILE, gemm2=replace(SWAP, block_m=32)),
    "bytes of shared memory, h200 has": dict(TILE, gemm1=replace(SWAP, block_n=256, block_k=256, stages=9)),
    "warps=3: use one of": dict(TILE, gemm2=replace(SWAP, warps=3)),
    "gemm1=None, gemm2=None: both products need a tile": dict(TILE, gemm1=None, gemm2=None),
    "ring: warps=4": dict(TILE, stream=Stream.RING),
    "needs compute capability 9.0": dict(TILE, hardware=expertile.Hardware(
        "old", (8, 0), 108, 232448, 40 << 20, 1e12, 1e14, 1e14, 2.0)),
}  # fmt: skip


@pytest.mark.parametrize("message", BROUGHT)
def test_a_plan_that_is_brought_must_be_one_that_can_run(message):
    fields = dict(BROUGHT[message])
    hardware = fields.pop("hardware", None)
    weights = expertile.prepare(W13, W2, quant=fields.pop("quant", None))
    plan = Plan(weights.problem(T, 2), "h200", Backend.TRITON, **fields)
    for _ in range(2):
        with pytest.raises(UnsupportedProblem, match=message):
            expertile.moe(X.clone(), weights, IDS, PROBS, plan=plan, hardware=hardware)


def test_a_plan_that_is_brought_is_looked_at_once(monkeypatch):
    layer, looked = make_layer(Case()), []
    plan = make_plan(layer, SWAP)
    monkeypatch.setattr(policy, "unable", lambda *about: looked.append(about) or [])
    for _ in range(3):
        expertile.moe(layer.x, layer.weights, layer.ids, layer.probs, plan=plan)
    assert len(looked) == 1
    expertile.moe(layer.x, layer.weights, layer.ids, layer.probs, plan=replace(plan))
    assert len(looked) == 2


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


@pytest.mark.parametrize("entered", ["eagerly", "where a gradient is wanted", "compiled"])
@pytest.mark.parametrize("message", CALLS)
def test_a_wrong_call_names_the_value(message, entered, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # what needs a GPU does so again
    w13, w2 = (torch.nn.Parameter(w, requires_grad=entered != "eagerly") for w in (W13, W2))
    arguments = {"x": X, "weights": expertile.prepare(w13, w2), **CALLS[message]}
    moe = expertile.moe
    if entered == "compiled":
        torch._dynamo.reset()
        moe = torch.compile(moe, backend="eager")
    with pytest.raises(ExpertileError, match=message):
        moe(**arguments)


def test_a_wrong_call_that_must_compile_whole_still_names_the_value():
    weights = expertile.prepare(W13, W2)
    torch._dynamo.reset()
    moe = torch.compile(expertile.moe, backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"logits are \(3, 5\), x and the experts need \(3, 4\)"):
        moe(X, weights, logits=torch.randn(T, E + 1), router="softmax", top_k=2)


PLANS = {
    "problem is a dict": lambda: expertile.plan(dict(tokens=1)),
    "hardware=3": lambda: expertile.plan(expertile.prepare(W13, W2).problem(1, 2), 3),
    "'triton2'": lambda: expertile.plan(expertile.prepare(W13, W2).problem(1, 2), "h200", "triton2"),
    "what is a str|problem is a str": lambda: expertile.explain("plan"),
    "logits is a list": lambda: expertile.route([[0.0]], "softmax", 1),
    "max_tokens=2.5": lambda: expertile.warm(expertile.prepare(W13, W2), 2, 2.5),
    "expert_map is a list": lambda: expertile.warm(expertile.prepare(W13, W2), 2, 8, expert_map=[0]),
}


@pytest.mark.parametrize("message", PLANS)
def test_what_is_no_call_of_moe_names_the_value_too(message):
    with pytest.raises(ExpertileError, match=message):
        PLANS[message]()


@pytest.mark.parametrize("stream", [False, True])
def test_a_column_of_a_table_of_expert_maps_is_read_as_what_it_is(stream):
    layer = make_layer(Case(mapped=True))
    plan = make_stream_plan(layer) if stream else make_plan(layer, SWAP)
    column = torch.stack([layer.expert_map, torch.zeros_like(layer.expert_map)], 1)[:, 0]
    assert not column.is_contiguous()
    want, got = (
        expertile.moe(layer.x, layer.weights, layer.ids, layer.probs, expert_map=each, plan=plan)
        for each in (layer.expert_map, column)
    )
    assert torch.equal(got, want)


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


#: Who wants a gradient, each alone.
WANTING = ["x", "probs", "logits", "bias", "w13", "w2", "w13_bias", "w2_bias", "w13_scale", "w2_scale"]


def _layer(wanting: str):
    """(x, weights, arguments) of a call in which that one requires a gradient."""
    stored = wanting.endswith("_scale")
    tensors = dict(w13=W13.float(), w2=W2.float())
    if stored:
        tensors = dict(w13=W13.to(FP8), w2=W2.to(FP8), w13_scale=torch.ones(E), w2_scale=torch.ones(E))
    tensors |= dict(w13_bias=torch.randn(E, 2 * INTER), w2_bias=torch.randn(E, H))
    call = dict(x=X.float(), probs=PROBS.clone())
    if wanting in ("logits", "bias"):
        call = dict(x=X.float(), logits=LOGITS.clone(), bias=torch.zeros(E))
    for each in (tensors, call):
        if wanting in each:
            each[wanting].requires_grad_()
    weights = expertile.prepare(**tensors, dtype=torch.float32)
    more = dict(router="sigmoid", top_k=2) if "logits" in call else dict(ids=IDS)
    return call.pop("x"), weights, call | more


@pytest.mark.parametrize("wanting", WANTING)
@pytest.mark.parametrize("compiler", [None, "aot_eager"])
def test_where_a_gradient_is_wanted_forward_runs_and_backward_says_that_there_is_none(wanting, compiler):
    x, weights, arguments = _layer(wanting)
    with torch.no_grad():
        want = expertile.moe(x, weights, **arguments)
    torch._dynamo.reset()
    moe = torch.compile(expertile.moe, backend=compiler, fullgraph=True) if compiler else expertile.moe
    y = moe(x, weights, **arguments)
    assert y.requires_grad
    torch.testing.assert_close(y, want)
    with pytest.raises(UnsupportedProblem, match=r"no backward pass: call it under torch.no_grad\(\)"):
        (2 * y).sum().backward()


@pytest.mark.parametrize("compiler", [None, "aot_eager"])
def test_a_model_with_parameters_runs_forward_for_any_number_of_tokens(compiler):
    """Nothing of backward may be run by forward, which AOTAutograd compiles together with it."""

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w13, self.w2 = torch.nn.Parameter(W13.float()), torch.nn.Parameter(W2.float())
            self.gate, self.bias = torch.nn.Linear(H, E), torch.nn.Parameter(torch.zeros(E))
            self.weights = expertile.prepare(self.w13, self.w2)

        def forward(self, x, scaling_factor=1.0):
            options = dict(router="sigmoid", top_k=2, bias=self.bias, scaling_factor=scaling_factor, backend="torch")
            return x + expertile.moe(x, self.weights, logits=self.gate(x), **options)

    layer = Layer()
    torch._dynamo.reset()
    run = torch.compile(layer, backend=compiler, fullgraph=True) if compiler else layer
    for tokens in (3, 5, 7):
        for factor in (1.0, 1.5, 2.5):
            x = torch.randn(tokens, H)
            y = run(x, factor)
            with torch.no_grad():
                torch.testing.assert_close(y, layer(x, factor))
    with pytest.raises(UnsupportedProblem, match="no backward pass"):
        y.sum().backward()


def test_out_may_be_part_of_a_buffer_where_a_gradient_is_wanted():
    x, weights, arguments = _layer("w13")
    buffer = torch.full((T + 2, H), 7.0)
    y = expertile.moe(x, weights, **arguments, out=buffer[:T])
    assert torch.equal(buffer[:T], y) and (buffer[T:] == 7).all()
    with pytest.raises(UnsupportedProblem, match="no backward pass"):
        buffer.sum().backward()
    with pytest.raises(ExpertileError, match="out requires a gradient"):
        expertile.moe(x, weights, **arguments, out=torch.empty(T, H).requires_grad_())


def test_a_plan_and_a_workspace_are_used_where_a_gradient_is_wanted():
    x, weights, arguments = _layer("x")
    plan = expertile.plan(weights.problem(T, 2), "cpu", "reference")
    y = expertile.moe(x, weights, **arguments, plan=plan)
    assert torch.equal(y, expertile.moe(x.detach(), weights, **arguments, backend="reference"))


def test_route_has_no_gradient_either():
    logits = LOGITS.clone().requires_grad_()
    ids, probs = expertile.route(logits, "softmax", 2)
    assert not ids.requires_grad
    with pytest.raises(UnsupportedProblem, match="no backward pass"):
        probs.sum().backward()
