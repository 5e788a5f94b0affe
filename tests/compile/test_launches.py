"""What a call really asks Triton for: its launches recorded instead of made, on tensors without memory.

Triton compiles one variant for each set of types, constants, options and integer classes (1, a multiple of 16, other).
They are derived here as a launch derives them, so that "nothing compiles after warming" is known without a GPU.
"""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.jit import JITFunction, create_function_from_signature

import expertile
from expertile.hardware import H200
from expertile.plans import Backend
from expertile.policy import decide
from expertile.problem import Quant, named_problem
from expertile.runtime.launches import Calls
from expertile.runtime.triton_experts import specializations, triton_experts
from expertile.runtime.workspace import Workspace
from expertile.warming import turning_points
from expertile.weights import DTYPES, FP8

BACKEND = CUDABackend(GPUTarget("cuda", 90, 32))
MOST = 600
LAYERS = [
    ("qwen3-30b-a3b", "bf16", False),
    ("qwen3-30b-a3b", "fp8_tensor", True),
    ("qwen3-30b-a3b", "fp8_tensor", False),
    ("qwen3-30b-a3b", "fp8_block", False),
    ("deepseek-v3-tp8", "fp8_block", False),
    ("nemotron-3-nano", "fp8_channel", False),
    ("gpt-oss-120b", "bf16", False),
    ("64,48,7,3", "fp8_block", False),
]
EACH = pytest.mark.parametrize(("name", "label", "static"), LAYERS, ids=str)


def empty(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")


def weights_of(problem) -> expertile.Weights:
    e, h, i, rows = problem.experts, problem.hidden, problem.inter, problem.w13_rows
    dtype, fields = DTYPES[problem.dtype], {}
    if problem.quant is Quant.FP8_BLOCK:
        split = problem.activation.gated and not problem.activation.interleaved
        w13_blocks = 2 * -(-i // 128) if split else -(-rows // 128)
        fields = dict(w13_scale=empty(e, w13_blocks, -(-h // 128)), w2_scale=empty(e, -(-h // 128), -(-i // 128)))
        fields["split_scale"] = split
    elif problem.quant is not Quant.NONE:
        shapes = ((e,), (e,)) if problem.quant is Quant.FP8_TENSOR else ((e, rows), (e, h))
        fields = dict(zip(("w13_scale", "w2_scale"), (empty(*shape) for shape in shapes), strict=True))
    if problem.bias:
        fields |= dict(w13_bias=empty(e, rows, dtype=dtype), w2_bias=empty(e, h, dtype=dtype))
    stored = dtype if problem.quant is Quant.NONE else FP8
    w13, w2 = empty(e, rows, h, dtype=stored), empty(e, h, i, dtype=stored)
    weights = expertile.prepare(w13, w2, quant=problem.quant, activation=problem.activation, dtype=dtype, **fields)
    return replace(weights, x_scale=empty(1), h_scale=empty(1)) if problem.static_scale else weights


def launches(plan, weights, ids_dtype=torch.int32) -> list[SimpleNamespace]:
    """The launches of one call: kernel, what each argument is specialised to, options."""
    made = []

    def record(self, *arguments, grid, warmup, **keywords):
        bind = create_function_from_signature(self.signature, self.params, BACKEND)
        bound, specialization, options = bind(*arguments, **keywords)
        made.append(
            SimpleNamespace(kernel=self, arguments=dict(zip(bound, specialization, strict=True)), options=options)
        )

    tokens, top_k, hidden = plan.problem.tokens, plan.problem.top_k, plan.problem.hidden
    x, out = (empty(tokens, hidden, dtype=DTYPES[plan.problem.dtype]) for _ in range(2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JITFunction, "run", record)
        triton_experts(plan, x, weights, empty(tokens, top_k, dtype=ids_dtype), empty(tokens, top_k), out)
    return made


def variant(launch) -> tuple:
    return launch.kernel.__name__, repr(launch.arguments), repr(sorted(launch.options.items()))


def plan_of(problem, tokens):
    plan = decide(problem.with_tokens(tokens), H200)
    assert plan.backend is Backend.TRITON
    return plan


@EACH
def test_after_warming_no_number_of_tokens_asks_for_a_new_variant(name, label, static):
    """Case 27: no count that follows the tokens, nor a product of it, may change class on the way."""
    problem = named_problem(name, 1, label, static_scale=static)
    weights = weights_of(problem)
    warmed, points = set(), turning_points(problem, H200, MOST, weights.split_scale)
    for tokens in points:
        warmed |= {variant(launch) for launch in launches(plan_of(problem, tokens), weights)}
    for tokens in range(1, MOST + 1):
        new = [launch for launch in launches(plan_of(problem, tokens), weights) if variant(launch) not in warmed]
        assert not new, f"T={tokens} compiles {new[0].kernel.__name__}: {new[0].arguments}"


@EACH
def test_the_signatures_say_what_the_launches_ask_for(name, label, static):
    problem = named_problem(name, 1, label, static_scale=static)
    weights = weights_of(problem)
    for tokens in turning_points(problem, H200, MOST, weights.split_scale):
        plan = plan_of(problem, tokens)
        said, made = specializations(plan, weights.split_scale), launches(plan, weights)
        assert [spec.kernel for spec in said] == [launch.kernel for launch in made]
        for spec, launch in zip(said, made, strict=True):
            assert spec.options == launch.options
            for argument, (kind, value) in launch.arguments.items():
                assert spec.types[argument] == kind, f"{spec.kernel.__name__} {argument}, T={tokens}"
                if kind == "constexpr":
                    assert spec.constants[argument] == value, f"{spec.kernel.__name__} {argument}, T={tokens}"
                elif kind.startswith("*") or argument.startswith("stride"):
                    assert (value == "D") == (argument in spec.divisible_by_16), f"{spec.kernel.__name__} {argument}"


@pytest.fixture
def started(monkeypatch):
    """(kernel, its arguments by name, whether a record started it) of launches that are stood in for."""
    log = []

    class Compiled:
        packed_metadata = ()

        def __init__(self, kernel, arguments):
            self.kernel, self.arguments = kernel, arguments

        def __getitem__(self, grid):
            return lambda *addresses: log.append((self.kernel, self.arguments, True))

    def run(self, *arguments, grid, warmup, **keywords):
        bound = dict(zip(self.arg_names, arguments, strict=False))
        log.append((self.__name__, bound, False))
        return Compiled(self.__name__, bound)

    monkeypatch.setattr(JITFunction, "run", run)
    return log


def test_a_record_is_not_for_biases_of_another_dtype(started):
    calls = Calls()

    def call(dtype):
        biases = dict(w13_bias=torch.zeros(4, 128, dtype=dtype), w2_bias=torch.zeros(4, 64, dtype=dtype))
        w13, w2 = torch.zeros(4, 128, 64, dtype=torch.bfloat16), torch.zeros(4, 64, 64, dtype=torch.bfloat16)
        weights = expertile.prepare(w13, w2, **biases)
        x, ids = torch.zeros(1, 64, dtype=torch.bfloat16), torch.tensor([[0, 1]], dtype=torch.int32)
        plan = decide(weights.problem(1, 2), H200)
        workspace = Workspace.for_plan(plan, x.device, calls=calls)
        triton_experts(plan, x, weights, ids, torch.ones(1, 2), torch.zeros_like(x), workspace=workspace)

    for dtype, recorded in ((torch.bfloat16, False), (torch.float32, False), (torch.bfloat16, True)):
        started.clear()
        call(dtype)
        assert started and all(again is recorded for *_, again in started)
        assert {a["bias_ptr"].dtype for _, a, _ in started} == {dtype}


@pytest.mark.parametrize("width, first", [(260, 0), (264, 4)], ids=["stride", "address"])
def test_rows_that_do_not_begin_at_sixteen_bytes_are_laid_out_anew_to_be_gathered(started, width, first):
    w13, w2 = torch.zeros(8, 512, 256, dtype=torch.bfloat16), torch.zeros(8, 256, 256, dtype=torch.bfloat16)
    weights = expertile.prepare(w13, w2)
    x = torch.randn(2048, width, dtype=torch.bfloat16)[:, first : first + 256]
    ids = torch.zeros(2048, 2, dtype=torch.int32)
    plan = decide(weights.problem(2048, 2), H200)
    assert plan.gemm1.specialized
    triton_experts(plan, x, weights, ids, torch.ones(2048, 2), torch.zeros(2048, 256, dtype=torch.bfloat16))
    gathering = next(a for name, a, _ in started if name == "_hopper_gemm_kernel" and a["x_ptr"] is not None)
    rows = gathering["x_ptr"]
    assert rows.data_ptr() % 16 == 0 and gathering["stride_xm"] == rows.stride(0) == 256 and torch.equal(rows, x)
