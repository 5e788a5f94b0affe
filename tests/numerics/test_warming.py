"""Warming covers every variant: what each number of tokens asks the compiler for, its integers included."""

import ast
import inspect

import pytest
import torch

import expertile
from expertile import warming
from expertile.errors import ShapeError
from expertile.hardware import CPU, H200
from expertile.kernels import combine, grouped_gemm, quantize, router, routing, stream, swapped_gemm
from expertile.plans import Backend
from expertile.policy import decide
from expertile.problem import named_problem
from expertile.runtime.triton_experts import specializations
from expertile.runtime.workspace import Workspace

MOST = 1100
FILES = (combine, grouped_gemm, quantize, router, routing, stream, swapped_gemm)
#: Integer arguments that are the same for every number of tokens: strides of weights and rows, experts in all.
CONSTANT = {"stride_xm", "stride_we", "stride_wn", "stride_om", "stride_lt", "total"}


@pytest.mark.parametrize(
    ("name", "quant"), [("qwen3-30b-a3b", "fp8_tensor"), ("gpt-oss-120b", "bf16"), ("64,48,8,2", "fp8_block")]
)
def test_the_turning_points_ask_for_all_that_any_number_of_tokens_asks_for(name, quant):
    problem = named_problem(name, 1, quant)
    points = warming.turning_points(problem, H200, MOST)
    assert points == sorted(points) and points[0] == 1 and len(points) < 30

    def variants(tokens):
        plan = decide(problem.with_tokens(tokens), H200)
        assert plan.backend is Backend.TRITON
        return {warming._variant(spec) for spec in specializations(plan)}

    warmed = set().union(*map(variants, points))
    assert all(variants(tokens) <= warmed for tokens in range(1, MOST + 1))
    asked = [warming._variant(spec) for spec in warming.variants(problem, H200, MOST)]
    assert set(asked) == warmed and len(asked) == len(warmed), "for guard.warm: each variant once"
    for index, tokens in enumerate(points):
        assert not variants(tokens) <= set().union(*map(variants, points[:index])), f"T={tokens} brings nothing new"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.__name__.rpartition(".")[2])
def test_integers_that_follow_the_tokens_do_not_specialise(file):
    """Triton compiles again when an integer becomes 1 or a multiple of 16, unless it is told not to look."""
    kernels = [node for node in ast.parse(inspect.getsource(file)).body if isinstance(node, ast.FunctionDef)]
    looked_at = 0
    for node in kernels:
        if not node.name.endswith("_kernel"):
            continue
        looked_at += 1
        told = {name.value for deco in node.decorator_list for name in ast.walk(deco) if isinstance(name, ast.Constant)}
        plain = {argument.arg for argument in node.args.args if argument.annotation is None}
        integers = {name for name in plain if not name.endswith(("_ptr", "_desc"))}
        assert integers <= told | CONSTANT, f"{node.name}: {sorted(integers - told - CONSTANT)}"
    assert looked_at >= 1


def test_nothing_to_warm_where_nothing_is_compiled():
    weights = expertile.prepare(torch.randn(4, 32, 16), torch.randn(4, 16, 16))
    assert expertile.warm(weights, 2, 64, hardware=CPU) == []
    with pytest.raises(ShapeError, match="max_tokens=0"):
        expertile.warm(weights, 2, 0)


def test_warming_makes_the_calls_that_will_be_made(monkeypatch):
    """Each turning point once, smallest first, with what the calls will have; ids name experts that exist."""
    calls, said = [], []
    monkeypatch.setattr(warming, "moe", lambda *arguments, **options: calls.append((arguments, options)))
    w13, w2 = (torch.ones(8, *shape, dtype=torch.bfloat16) for shape in ((96, 64), (64, 48)))
    weights = expertile.prepare(w13, w2, quant="fp8_tensor", x_scale=0.1, h_scale=0.1)
    expert_map = torch.tensor([-1, 0, 1, 2, -1, 3, 4, 5, 6, 7], dtype=torch.int32)
    given = dict(expert_map=expert_map, weight_on_input=True, scaling_factor=2.5)
    given |= dict(hardware=H200, workspace=Workspace(torch.empty(0, dtype=torch.uint8)))
    points = expertile.warm(weights, 1, 2048, **given, report=lambda done, of: said.append((done, of)))
    problem = weights.problem(1, 1, total_experts=10, weight_on_input=True)
    assert points == warming.turning_points(problem, H200, 2048, mapped=True)
    assert [arguments[0].shape[0] for arguments, _ in calls] == points
    assert said == [(done, len(points)) for done in range(1, len(points) + 1)]
    for (x, used, ids, probs), options in calls:
        assert x.dtype is torch.bfloat16 and x.is_contiguous() and used is weights
        assert ids.dtype is torch.int32 and probs.dtype is torch.float32 and ids.shape == probs.shape
        assert ids.min() >= 0 and ids.max() < 10
        assert options.keys() == given.keys() and all(options[name] is given[name] for name in given)
