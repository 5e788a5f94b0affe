"""Each way in which a launch can ask for another variant is named: the argument, how it differs, its value."""

import guard_kernels as kernels
import pytest
import torch
import triton.language as tl

from expertile import guard
from expertile.errors import Recompiled

INTS, FLOATS, HALVES = torch.zeros(256, dtype=torch.int32), torch.zeros(64), torch.zeros(64, dtype=torch.float16)
PLUS = (INTS, 5, 64)
AFFINE = (FLOATS, FLOATS, 1.0, (5, 6), tl.float32, "plain")

#: kernel, arguments compiled before, arguments and options of the launch, argument to blame, kind, now, before, value
SPLITS = {
    "an integer becomes 1": (kernels.plus, PLUS, (INTS, 1, 64), {}, "n", "equal_1", "1", "i32", "1"),
    "an integer is no longer 1": (kernels.plus, (INTS, 1, 64), PLUS, {}, "n", "equal_1", "i32", "1", "5"),
    "1 with its type in the signature": (kernels.plus_typed, PLUS, (INTS, 1, 64), {}, "n", "equal_1", "1", "i64", "1"),
    "a multiple of 16": (kernels.plus, PLUS, (INTS, 48, 64), {}, "n", "divisible_by_16", "div", "not div", "48"),
    "no multiple of 16": (kernels.plus, (INTS, 48, 64), PLUS, {}, "n", "divisible_by_16", "not div", "div", "5"),
    "64 bits": (kernels.plus, PLUS, (INTS, 2**31 + 1, 64), {}, "n", "width", "i64", "i32", "2147483649"),
    "unsigned 64 bits": (kernels.plus, PLUS, (INTS, 2**63 + 1, 64), {}, "n", "width", "u64", "i32", str(2**63 + 1)),
    "an integer becomes a float": (kernels.plus, PLUS, (INTS, 5.0, 64), {}, "n", "dtype", "fp32", "i32", "5.0"),
    "an integer becomes a bool": (kernels.plus, PLUS, (INTS, True, 64), {}, "n", "dtype", "u1", "i32", "True"),
    "an address": (
        kernels.plus, PLUS, (INTS[1:], 5, 64), {}, "x_ptr", "address", "address not", "address div", "int32[255]",
    ),
    "a tensor's type": (kernels.plus, PLUS, (FLOATS, 5, 64), {}, "x_ptr", "dtype", "*fp32", "*i32", "float32[64]"),
    "None instead of a tensor": (
        kernels.affine, AFFINE, (FLOATS, None, *AFFINE[2:]), {}, "bias_ptr", "none", "None", "*fp32", "",
    ),
    "a tensor instead of None": (
        kernels.affine, (FLOATS, None, *AFFINE[2:]), AFFINE, {}, "bias_ptr", "none", "*fp32", "None", "float32[64]",
    ),
    "an element of a tuple": (
        kernels.affine, AFFINE, (*AFFINE[:3], (5, 16), *AFFINE[4:]), {}, "sizes[1]", "divisible_by_16", "div", "not",
        "16",
    ),
    "1 in a tuple": (
        kernels.affine, AFFINE, (*AFFINE[:3], (1, 6), *AFFINE[4:]), {}, "sizes[0]", "equal_1", "1", "i32", "1",
    ),
    "a constexpr number": (kernels.plus, PLUS, (INTS, 5, 128), {}, "BLOCK", "constexpr", "128", "64", "128"),
    "a constexpr string": (
        kernels.affine, AFFINE, (*AFFINE[:5], "other"), {}, "KIND", "constexpr", "'other'", "'plain'", "'other'",
    ),
    "a constexpr type": (
        kernels.affine, AFFINE, (*AFFINE[:4], tl.float16, "plain"), {}, "DTYPE", "constexpr", "triton.language.float16",
        "triton.language.float32", "",
    ),
    "a constexpr function": (
        kernels.apply, (FLOATS, kernels.twice), (FLOATS, kernels.thrice), {}, "F", "constexpr", "thrice", "twice", "",
    ),
    "an option": (kernels.plus, PLUS, PLUS, {"num_warps": 8}, "num_warps", "option", "8", "not given", ""),
    "a Gluon layout": (
        kernels.gluon_plus, (INTS, 5, kernels.layout()), (INTS, 5, kernels.layout(2)), {"num_warps": 2}, "LAYOUT",
        "constexpr", "BlockedLayout", "BlockedLayout", None,
    ),
    "an integer of a Gluon kernel": (
        kernels.gluon_plus, (INTS, 5, kernels.layout()), (INTS, 32, kernels.layout()), {}, "n", "divisible_by_16",
        "div", "not div", "32",
    ),
}  # fmt: skip


@pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS.keys())
def test_an_error_names_the_argument_and_how_it_differs(split):
    kernel, compiled, launched, options, argument, kind, now, before, value = split
    kernel[(1,)](*compiled)
    cache = kernel.device_caches[0][0]
    (nearest,) = cache
    with guard.seal("error"), pytest.raises(Recompiled) as caught:
        kernel[(1,)](*launched, **options)
    event = caught.value.event
    found = event.differences[0]
    assert (found.argument, found.kind) == (argument, kind)
    assert found.now.startswith(now) and found.before.startswith(before)
    assert value is None or found.value == value
    assert len(event.differences) == 1 + (argument == "LAYOUT")  # its launch needs another number of warps as well
    assert event.nearest_key == nearest and event.key not in cache and event.variants == 1
    assert event.kernel == f"guard_kernels.{kernel.__name__}"
    assert (
        argument in str(caught.value)
        and found.now in str(caught.value)
        and all(a in str(caught.value) for a in event.advice)
    )
    assert list(cache) == [nearest], "nothing may be compiled"


def test_the_nearest_variant_differs_in_the_fewest_arguments(x):
    for n, block in ((1, 32), (16, 64), (5, 128), (7, 16), (1, 16)):
        kernels.plus[(1,)](x, n, block)
    with guard.seal("count") as sealed:
        kernels.plus[(1,)](x, 16, 128)  # near (5, 128) and (16, 64), nearer than (1, 32)
        kernels.plus[(1,)](x, 2**40 + 1, 16)  # nearer to 7 than to the constant 1, although that came last
    first, second = sealed.events
    assert [(each.argument, each.kind) for each in first.differences] == [("n", "divisible_by_16")]
    assert [(each.argument, each.kind) for each in second.differences] == [("n", "width")]
    assert "128" in first.nearest_key


def test_two_arguments_that_differ_are_both_named(x):
    kernels.plus[(1,)](x, 5, 64)
    with guard.seal("count") as sealed:
        kernels.plus[(1,)](x[1:], 1, 64)
    assert [each.argument for each in sealed.events[0].differences] == ["x_ptr", "n"]
    assert sealed.events[0].blame == "x_ptr (address divisible by 16), n (== 1)"


def test_a_kernel_that_was_never_launched_says_so(x):
    with guard.seal("count") as sealed:
        kernels.plus[(1,)](x, 5, 64)
    (event,) = sealed.events
    assert event.blame == "not launched before" and event.advice == ("warm it before sealing",)
    assert event.nearest_key == "" and event.variants == 0


def test_the_same_options_in_another_order_are_another_key_but_nothing_is_compiled(x):
    kernels.plus[(1,)](x, 5, 64, num_warps=2, num_stages=2)
    with guard.seal("error") as sealed:
        kernels.plus[(1,)](x, 5, 64, num_stages=2, num_warps=2)
    (event,) = sealed.events
    assert event.kind == "load" and event.differences[0].kind == "spelling" and sealed.compiles == 0


def test_a_second_device_is_told_from_a_new_argument(x, driver):
    kernels.plus[(1,)](x, 5, 64)
    driver.device = 1
    with guard.seal("count") as sealed:
        kernels.plus[(1,)](x, 5, 64)
    (event,) = sealed.events
    assert event.kind == "load" and event.device == 1  # the second device's kernel is on disk
    assert event.differences[0].kind == "device" and "device 0" in event.differences[0].now


def test_many_arguments_and_only_one_to_blame(tmp_path, monkeypatch):
    names = [f"a{index}" for index in range(60)]
    lines = [
        "import triton",
        "import triton.language as tl",
        "",
        "",
        "@triton.jit",
        f"def many(x_ptr, {', '.join(names)}):",
    ]
    lines += [f"    tl.store(x_ptr, {' + '.join(names)})"]
    (tmp_path / "many_arguments.py").write_text("\n".join(lines) + "\n")
    monkeypatch.syspath_prepend(tmp_path)
    from many_arguments import many

    values = [3] * 60
    many[(1,)](INTS, *values)
    with guard.seal("error"), pytest.raises(Recompiled) as caught:
        many[(1,)](INTS, *values[:41], 16, *values[42:])
    assert [(each.argument, each.value) for each in caught.value.event.differences] == [("a41", "16")]


@pytest.mark.parametrize(
    ("kernel", "values"),
    [(kernels.plus_unspecialized, (1, 5, 16, 17, 4096)), (kernels.plus_unaligned, (5, 16, 17, 4096))],
    ids=["do_not_specialize", "do_not_specialize_on_alignment"],
)
def test_the_remedies_that_an_event_names_do_help(kernel, values, x):
    kernel[(1,)](x, values[0], 64)
    with guard.seal("error") as sealed:
        for n in values:
            kernel[(1,)](x, n, 64)
    assert not sealed.events


def test_an_unaligned_tensor_is_no_new_variant_where_alignment_is_not_looked_at(x):
    kernels.plus_unaligned[(1,)](x, 5, 64)
    with guard.seal("error") as sealed:
        kernels.plus_unaligned[(1,)](x[1:], 5, 64)
    assert not sealed.events


def test_advice_about_a_tuple_does_not_recommend_what_triton_ignores():
    kernels.affine[(1,)](*AFFINE)
    with guard.seal("count") as sealed:
        kernels.affine[(1,)](*AFFINE[:3], (5, 16), *AFFINE[4:])
    assert "do_not_specialize" not in sealed.events[0].advice[0] and "sizes[1]" in sealed.events[0].advice[0]
