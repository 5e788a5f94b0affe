"""Calling other libraries' experts: what goes in, what is kept, what is refused.

The libraries are stand-ins here, whose experts are our own torch backend; tests/gpu calls the real ones.
"""

import gc
import sys
import types
import weakref

import pytest
import torch

import expertile
from expertile.errors import UnsupportedProblem
from expertile.hardware import H200
from expertile.plans import Backend, Plan
from expertile.policy.libraries import LIBRARIES
from expertile.runtime import backends
from expertile.runtime.backends import ADAPTERS, installed, module
from expertile.runtime.backends.triton_kernels import distinct
from expertile.runtime.torch_experts import torch_experts

E, H, INTER, K, T = 6, 32, 16, 2, 5


class Library:
    """A module that stands in for an adapter, and what it was asked."""

    def __init__(self):
        self.loads, self.calls = 0, []

    def load(self, backend, weights, problem):
        self.loads += 1
        tensors = weights.w13, weights.w2
        layer = dict(dtype=weights.dtype, quant=weights.quant, activation=weights.activation)

        def run(x, ids, probs):
            self.calls.append((x, ids, probs))
            return torch_experts(x, expertile.Weights(*tensors, **layer), ids, probs)

        return run


@pytest.fixture
def library(monkeypatch):
    found = Library()
    fake = types.ModuleType(f"{backends.__name__}.vllm")
    fake.load = found.load
    monkeypatch.setitem(sys.modules, fake.__name__, fake)
    return found


@pytest.fixture
def layer():
    torch.manual_seed(0)
    weights = expertile.prepare(torch.randn(E, 2 * INTER, H) / 6, torch.randn(E, H, INTER) / 4)
    ids = torch.stack([torch.randperm(E)[:K] for _ in range(T)]).int()
    return weights, torch.randn(T, H), ids, torch.rand(T, K)


def call(weights, x, ids, probs, **fields):
    plan = Plan(weights.problem(x.shape[0], ids.shape[1]), H200.name, Backend.VLLM_TRITON)
    return expertile.moe(x, weights, ids, probs, plan=plan, **fields)


def test_every_library_of_the_policy_has_an_adapter():
    assert list(ADAPTERS) == list(LIBRARIES)


def test_the_answer_is_the_layers_and_the_library_gets_what_it_wants(library, layer):
    weights, x, ids, probs = layer
    want = expertile.moe(x, weights, ids, probs, backend="reference")
    out = torch.full_like(x, float("nan"))
    got = call(weights, x, ids.long(), probs, out=out)
    assert got is out and torch.allclose(got, want, atol=1e-5)
    seen_x, seen_ids, seen_probs = library.calls[0]
    assert seen_x.is_contiguous() and seen_ids.dtype is torch.int32 and seen_probs.dtype is torch.float32
    assert torch.allclose(call(weights, x, ids, probs, scaling_factor=2.5), 2.5 * want, atol=1e-4)


def test_skipped_slots_add_nothing_and_read_no_expert_that_the_token_does_not_use(library, layer):
    weights, x, ids, probs = layer
    weights.w13[0] = float("nan")  # nobody goes there
    ids = torch.tensor([[1, 2], [3, -1], [E, 4], [-1, 2**30], [5, 5]], dtype=torch.int32)
    got = call(weights, x, ids, probs)
    want = expertile.moe(x, weights, ids, probs, backend="reference")
    assert torch.allclose(got[[0, 1, 2, 4]], want[[0, 1, 2, 4]], atol=1e-5)
    assert torch.equal(got[3], torch.zeros(H)), "exactly, although the library read an expert full of NaN"
    given = library.calls[0][1]
    assert ((given >= 0) & (given < E)).all() and not (given[[0, 1, 2, 4]] == 0).any()


def test_weights_are_loaded_once_and_freed_with_their_record(library):
    x, ids, probs = torch.randn(T, H), torch.zeros(T, 1, dtype=torch.int32), torch.ones(T, 1)
    weights = expertile.prepare(torch.randn(E, 2 * INTER, H), torch.randn(E, H, INTER))
    for _ in range(3):
        call(weights, x, ids, probs)
    assert library.loads == 1
    gone, tensor = weakref.ref(weights), weakref.ref(weights.w13)
    del weights
    gc.collect()
    assert gone() is None and tensor() is None


def test_an_expert_map_is_refused(library, layer):
    weights, x, ids, probs = layer
    with pytest.raises(UnsupportedProblem, match="expert map"):
        call(weights, x, ids, probs, expert_map=torch.arange(E, dtype=torch.int32))


def test_a_library_without_the_name_that_is_called_is_an_error_with_its_version():
    with pytest.raises(UnsupportedProblem, match=r"torch\.nowhere.*torch \d"):
        module("torch.nowhere")
    with pytest.raises(UnsupportedProblem, match="not installed"):
        module("surely_not_a_package.experts")


def test_what_is_installed_is_found_without_importing_it():
    found = dict(installed())
    assert found["torch"] == torch.__version__.split("+")[0]
    assert ("vllm" in found) or "vllm" not in sys.modules


def test_forced_by_a_call_where_it_is_not_installed_it_is_an_error(layer):
    weights, x, ids, probs = layer
    if "vllm" in dict(installed()):
        pytest.skip("vllm is installed")
    with pytest.raises(UnsupportedProblem, match="vllm is not installed"):
        expertile.moe(x, weights, ids, probs, backend="vllm-triton", hardware=H200)


@pytest.mark.parametrize("experts", [4, 6, 128])
def test_no_expert_twice_and_the_same_sums(experts):
    torch.manual_seed(1)
    ids, probs = torch.randint(experts, (300, 4), dtype=torch.int32), torch.rand(300, 4)
    ids[0], ids[1] = torch.tensor([3, 3, 3, 3]), torch.arange(4)
    got, merged = distinct(ids, probs, experts)
    assert got.dtype == ids.dtype and got.min() >= 0 and got.max() < experts
    assert all(len(set(row)) == 4 for row in got.tolist())
    sums = [torch.zeros(300, experts).scatter_add_(1, at.long(), by) for at, by in ((ids, probs), (got, merged))]
    torch.testing.assert_close(*sums)
    assert torch.equal(got[1], ids[1]) and torch.equal(merged[1], probs[1])
