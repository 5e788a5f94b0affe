"""`warm` compiles from declarations alone, and the launches that follow compile nothing."""

import os
import subprocess
import sys
import threading

import guard_driver
import guard_kernels as kernels
import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.tools.tensor_descriptor import TensorDescriptor

import expertile
from expertile import guard
from expertile.errors import ExpertileError, Recompiled, ShapeError
from expertile.guard import Variant
from expertile.hardware import H200
from expertile.plans import Backend
from expertile.policy import decide
from expertile.problem import named_problem
from expertile.runtime.triton_experts import specializations, triton_experts
from expertile.warming import turning_points
from expertile.weights import DTYPES

PLUS = dict(types={"x_ptr": "*i32", "n": "i32"}, constants={"BLOCK": 64})


def test_what_was_warmed_is_launched_without_an_event(x):
    variants = [
        Variant(kernels.plus, **PLUS),
        Variant(kernels.plus, PLUS["types"], PLUS["constants"], divisible_by_16=("x_ptr", "n")),
        Variant(kernels.plus, PLUS["types"], PLUS["constants"], divisible_by_16=()),
        Variant(kernels.plus, {"x_ptr": "*i32"}, {"BLOCK": 64, "n": 1}),
        Variant(kernels.plus, {"x_ptr": "*i32", "n": "i64"}, {"BLOCK": 64}),
        Variant(kernels.plus, {"x_ptr": "*bf16", "n": "u64"}, {"BLOCK": 64}, options={"num_warps": 8, "num_stages": 2}),
    ]
    warmed = guard.warm(variants, progress=False)
    assert (warmed.variants, warmed.compiled) == (6, 6) and warmed.seconds > 0
    with guard.seal("error") as sealed:
        for tensor, n in ((x, 5), (x, 32), (x[1:], 5), (x, 1), (x, 2**40 + 1)):
            kernels.plus[(1,)](tensor, n, 64)
        kernels.plus[(1,)](x.bfloat16(), 2**63 + 1, 64, num_warps=8, num_stages=2)
        assert not sealed.events
        with pytest.raises(Recompiled, match="BLOCK: 128; compiled: 64"):
            kernels.plus[(1,)](x, 5, 128)


def test_arguments_of_every_kind():
    sixteen = torch.zeros(16)
    given = {"x_ptr": "*fp32", "scale": "fp32", "sizes": ("i32", 1)}
    guard.warm(
        [
            Variant(kernels.affine, {**given, "bias_ptr": "*bf16"}, {"DTYPE": tl.float32}),
            Variant(kernels.affine, given, {"DTYPE": tl.float16, "bias_ptr": None, "KIND": "other"}),
            Variant(kernels.apply, {"x_ptr": "*fp32"}, {"F": kernels.twice}),
            Variant(kernels.gluon_plus, {"x_ptr": "*i32", "n": "i32"}, {"LAYOUT": kernels.layout()}),
            Variant(kernels.plus_typed, {"x_ptr": "*i32", "n": "i64"}, {"BLOCK": 64}),
            Variant(kernels.plus_unspecialized, {"x_ptr": "*i32", "n": "i32"}, {"BLOCK": 64}),
        ],
        progress=False,
    )
    with guard.seal("error") as sealed:
        kernels.affine[(1,)](sixteen, sixteen.bfloat16(), 2.0, (5, 1), tl.float32)
        kernels.affine[(1,)](sixteen, None, 2.0, (7, 1), tl.float16, "other")
        kernels.apply[(1,)](sixteen, kernels.twice)
        kernels.gluon_plus[(1,)](sixteen.int(), 7, kernels.layout())
        kernels.plus_typed[(1,)](sixteen.int(), 7, 64)
        for n in (1, 2, 16):
            kernels.plus_unspecialized[(1,)](sixteen.int(), n, 64)
    assert not sealed.events


@pytest.mark.parametrize("by", ["type", "value"])
def test_a_tensor_descriptor_by_its_type_or_standing_for_itself(by):
    descriptor = TensorDescriptor.from_tensor(torch.zeros(64, 64, dtype=torch.bfloat16), [16, 64])
    kind = descriptor if by == "value" else "tensordesc<bf16[16, 64]>"
    guard.warm([Variant(kernels.copy_tile, {"x_desc": kind, "y_ptr": "*bf16"})], progress=False)
    with guard.seal("error") as sealed:
        kernels.copy_tile[(1,)](descriptor, torch.zeros(16, 64, dtype=torch.bfloat16))
        assert not sealed.events
        other = TensorDescriptor.from_tensor(torch.zeros(64, 64, dtype=torch.bfloat16), [32, 64])
        with pytest.raises(Recompiled, match=r"x_desc.*bf16\[32, 64\].*compiled: .*bf16\[16, 64\]"):
            kernels.copy_tile[(1,)](other, torch.zeros(16, 64, dtype=torch.bfloat16))


def test_warming_again_compiles_nothing(x):
    variants = [Variant(kernels.plus, **PLUS)]
    assert guard.warm(variants, progress=False).compiled == 1
    assert guard.warm(variants, progress=False).compiled == 0
    kernels.plus.device_caches.clear()
    assert guard.warm(variants, progress=False).compiled == 0  # found on disk
    with guard.seal("error") as sealed:
        kernels.plus[(1,)](x, 5, 64)
    assert not sealed.events


def test_variants_that_do_not_compile_are_named_and_the_others_are_in_place(x):
    variants = [
        Variant(kernels.broken, {"x_ptr": "*i32", "n": "i32"}),
        Variant(kernels.plus, **PLUS),
        Variant(kernels.plus, PLUS["types"], {"BLOCK": 63}),
    ]
    with pytest.raises(ExpertileError, match=r"(?s)2 of 3 variants do not compile:.*broken: .*plus: ") as caught:
        guard.warm(variants, progress=False)
    assert "does not compile" in str(caught.value) and "power of 2" in str(caught.value)
    with guard.seal("error") as sealed:
        kernels.plus[(1,)](x, 5, 64)
    assert not sealed.events
    with pytest.raises(triton.CompilationError):
        kernels.broken[(1,)](x, 5)
    assert len(kernels.plus.device_caches[0][0]) == 1 and not kernels.broken.device_caches[0][0]


@pytest.mark.parametrize("target", [None, GPUTarget("cuda", 90, 32)])
def test_warming_under_a_guard_that_refuses_is_refused_as_a_launch_is(target):
    with guard.seal("error"), pytest.raises(Recompiled, match="plus would be compiled after sealing") as caught:
        guard.warm([Variant(kernels.plus, **PLUS)], target=target, progress=False)
    assert caught.value.event.kind == "compile"


@pytest.mark.parametrize(
    ("variant", "message"),
    [
        (Variant(kernels.plus, {"x_ptr": "*i32"}, {"BLOCK": 64}), "plus: n has neither a type nor a constant"),
        (Variant(kernels.plus, **PLUS, divisible_by_16=("m",)), "plus has no argument m: it has x_ptr, n, BLOCK"),
        (Variant(kernels.plus, {"x_ptr": "*i32"}, {"BLOCK": 64, "n": 5}), "n=5 is no constant to Triton"),
        (Variant(kernels.plus, PLUS["types"], {"BLOCK": 64, "n": 1}), "plus: n has a type and a constant: give one"),
        (Variant(kernels.plus, {"x_ptr": "*i7", "n": "i32"}, {"BLOCK": 64}), "points to 'i7', which no torch dtype is"),
        (Variant(kernels.plus, {"x_ptr": "*i32", "n": "long"}, {"BLOCK": 64}), "n has type 'long'"),
        (Variant(kernels.plus_typed, {"x_ptr": "*i32", "n": "i32"}, {"BLOCK": 64}), "declared i32, a launch makes"),
        (Variant(kernels.tuned, {"x_ptr": "*i32", "n": "i32"}), "give an autotuned kernel's own function, kernel.fn"),
        (Variant("plus", **PLUS), "'plus' is not a @triton.jit function: give the decorated kernel itself"),
        (kernels.plus, "no variant: give expertile.guard.Variant"),
        ({"kernel": kernels.plus}, "no variant: give expertile.guard.Variant"),
        (Variant(kernels.plus, ["*i32", "i32"], {"BLOCK": 64}), r"plus: types=\['\*i32', 'i32'\]: give a dict by name"),
        (Variant(kernels.plus, PLUS["types"], None), "plus: constants=None: give a dict by name"),
        (Variant(kernels.plus, {0: "*i32", "n": "i32"}, {"BLOCK": 64}), "plus: types={0: .*give a dict by name"),
        (Variant(kernels.plus, **PLUS, divisible_by_16="n"), "divisible_by_16='n': give a tuple of names"),
        (Variant(kernels.plus, PLUS["types"]), "plus: BLOCK is a tl.constexpr: give its value among the constants"),
        (Variant(kernels.plus, PLUS["types"], {"BLOCK": [64]}), r"plus: BLOCK=\[64\] cannot be hashed"),
        (Variant(kernels.plus, {"x_ptr": torch.int32, "n": "i32"}, {"BLOCK": 64}), "x_ptr has type torch.int32"),
        (Variant(kernels.plus, {"x_ptr": object(), "n": "i32"}, {"BLOCK": 64}), "plus: types=.*failed to specialize"),
        (Variant(kernels.plus, {"x_ptr": "*i32"}, {"BLOCK": 64, "n": torch.ones(2)}), "n=tensor.* is no constant to"),
        (Variant(kernels.plus, **PLUS, options={"warps": 4}), "plus: options={'warps': 4}: Triton has no option warps"),
        (Variant(kernels.plus, **PLUS, options={"num_warps": 3}), "plus: options={'num_warps': 3}: num_warps must be"),
        (Variant(kernels.plus, **PLUS, options={"num_warps": "4"}), "plus: options={'num_warps': '4'}: "),
        (Variant(kernels.plus, **PLUS, options={"n": 4}), "plus: n among the options is an argument"),
        (Variant(kernels.plus, **PLUS, options=[4]), r"plus: options=\[4\]: give a dict by name"),
        (Variant(kernels.copy_tile, {"x_desc": "tensordesc<bf16[17, 64]>", "y_ptr": "*bf16"}), "power of 2"),
        (Variant(kernels.copy_tile, {"x_desc": "tensordesc<bf16[,]>", "y_ptr": "*bf16"}), "which is no descriptor"),
    ],
)  # fmt: skip
def test_a_declaration_that_contradicts_the_kernel_is_refused(variant, message):
    with pytest.raises(ShapeError, match=message):
        guard.warm([variant], progress=False)


@pytest.mark.parametrize(
    ("variants", "options", "message"),
    [
        (None, {}, "variants=None: give a list of Variant"),
        (Variant(kernels.plus, **PLUS), {}, "give a list of Variant"),
        ([Variant(kernels.plus, **PLUS)], dict(workers=-1), "workers=-1: give a number of threads, at least 1"),
        ([Variant(kernels.plus, **PLUS)], dict(workers="2"), "workers='2'"),
        ([Variant(kernels.plus, **PLUS)], dict(target="cuda 90"), "target='cuda 90': give one as GPUTarget"),
        ([Variant(kernels.plus, **PLUS)], dict(target=GPUTarget("moon", 7, 32)), "this Triton has no backend for it"),
    ],
)
def test_what_warm_itself_is_given_is_refused_with_its_value(variants, options, message):
    with pytest.raises(ShapeError, match=message):
        guard.warm(variants, progress=False, **options)


def test_an_interpreted_kernel_is_refused_with_the_reason():
    code = "from expertile import guard; import guard_kernels as k; guard.warm([guard.Variant(k.plus)])"
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([*sys.path])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert "plus is interpreted, so nothing is compiled: unset TRITON_INTERPRET" in done.stderr


def test_warming_under_a_sealed_guard_is_a_compilation_like_any_other():
    with guard.seal("error"), pytest.raises(Recompiled, match="plus would be compiled"):
        guard.warm([Variant(kernels.plus, **PLUS)], progress=False)


@pytest.mark.parametrize("kernel", [kernels.plus, kernels.gluon_plus], ids=["Triton", "Gluon"])
def test_compiled_for_a_target_without_a_gpu_it_is_what_a_launch_looks_for(kernel, x, driver):
    constants = {"BLOCK": 64} if kernel is kernels.plus else {"LAYOUT": kernels.layout()}
    variant = Variant(kernel, {"x_ptr": "*i32", "n": "i32"}, constants, options={"num_warps": 4})
    triton.runtime.driver.set_active(None)  # as where there is no GPU: asking for a driver raises
    if torch.cuda.is_available():
        pytest.skip("there is a GPU, so Triton finds its driver")
    assert guard.warm([variant], target=GPUTarget("cuda", 90, 32), progress=False).compiled == 1
    assert guard.warm([variant], progress=False).compiled == 0  # sm_90 is what is taken where there is no GPU
    triton.runtime.driver.set_active(driver)
    with guard.seal("error") as sealed:
        kernel[(1,)](x, 5, *constants.values(), num_warps=4)
    assert [event.kind for event in sealed.events] == ["load"]


def empty(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize(
    ("sizes", "most", "quant"),
    [
        ("64,48,8,2", 96, "bf16"),
        ("64,48,8,2", 96, "fp8_channel"),
        ("64,64,4,2", 160, "bf16"),
        ("64,64,4,2", 160, "fp8_channel"),
    ],
)
def test_no_launch_of_a_layer_compiles_after_its_specializations_were_warmed(sizes, most, quant):
    """The last two come to specialised products, whose descriptors have Gluon's layouts."""
    layer = named_problem(sizes, 1, quant)
    weights = weights_of(layer)
    plans = [decide(layer.with_tokens(tokens), H200) for tokens in range(1, most + 1)]
    assert {plan.backend for plan in plans} == {Backend.TRITON}
    assert any(plan.gemm1.specialized for plan in plans) == (most > 96)
    points = turning_points(layer, H200, most)
    warmed = guard.warm([spec for tokens in points for spec in specializations(plans[tokens - 1])], progress=False)
    assert warmed.compiled > 3
    with guard.seal("error") as sealed:
        for plan in plans:
            tokens, top_k = plan.problem.tokens, plan.problem.top_k
            x, out = (empty(tokens, layer.hidden, dtype=DTYPES[layer.dtype]) for _ in range(2))
            ids, probs = empty(tokens, top_k, dtype=torch.int32), empty(tokens, top_k)
            triton_experts(plan, x, weights, ids, probs, out)
    assert not sealed.events, sealed.events[0].text


def weights_of(layer):
    dtype = DTYPES[layer.dtype]
    stored = dtype if layer.label == "bf16" else torch.float8_e4m3fn
    w13 = empty(layer.experts, layer.w13_rows, layer.hidden, dtype=stored)
    w2 = empty(layer.experts, layer.hidden, layer.inter, dtype=stored)
    scales = {}
    if layer.label == "fp8_channel":
        scales = dict(w13_scale=empty(*w13.shape[:2]), w2_scale=empty(*w2.shape[:2]))
    return expertile.prepare(w13, w2, quant=layer.quant, activation=layer.activation, dtype=dtype, **scales)


def test_variants_are_compiled_in_parallel(monkeypatch):
    from triton.backends.nvidia.compiler import CUDABackend

    together, make_cubin = threading.Barrier(2, timeout=30), CUDABackend.make_cubin

    def meeting(self, *arguments):
        together.wait()  # passes only when a second compilation is under way
        return make_cubin(self, *arguments)

    monkeypatch.setattr(CUDABackend, "make_cubin", meeting)
    variants = [Variant(kernels.plus, PLUS["types"], {"BLOCK": block}) for block in (32, 64)]
    assert guard.warm(variants, workers=2, progress=False).compiled == 2


def test_warming_loads_the_kernel_and_builds_its_launcher(x, driver, monkeypatch):
    monkeypatch.setattr(driver, "launcher_cls", guard_driver.building_launcher())
    guard.warm([Variant(kernels.plus, **PLUS)], progress=False)
    with guard.seal("error") as sealed:
        kernels.plus[(1,)](x, 5, 64)
    assert not sealed.events


def test_on_a_terminal_there_is_a_bar(monkeypatch):
    import io

    from rich.console import Console

    shown = io.StringIO()
    monkeypatch.setattr("rich.console.Console", lambda **_: Console(file=shown, force_terminal=True, width=80))
    guard.warm([Variant(kernels.plus, **PLUS)])
    assert "warming" in shown.getvalue() and "1/1" in shown.getvalue()
