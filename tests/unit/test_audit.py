"""What the audit finds and what it leaves alone: small sources for every rule, both ways."""

import pytest

from expertile.audit import Severity, audit

HEAD = """
import torch, triton
import triton.language as tl
"""

KERNEL = """
@triton.jit{jit}
def kernel(x_ptr, y_ptr, rows, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    n = tl.arange(0, BLOCK)
    tl.store(y_ptr + row * stride + n, tl.load(x_ptr + row * stride + n), mask=n < rows)
"""


def findings(tmp_path, *sources):
    """[(argument, rule, severity, classes)] of open findings."""
    path = tmp_path / "source.py"
    path.write_text(HEAD + "\n".join(sources))
    report = audit([path])
    assert not any(finding.rule == "unreadable" for finding in report.findings)
    assert report.launches >= 1
    return [(each.argument, each.rule, each.severity.value, list(each.classes)) for each in report.open]


def launch(
    rows,
    stride="8",
    block="64",
    before="",
    arguments="x: torch.Tensor, w13, num_tokens: int, hidden_size: int, top_k: int",
):
    return f"""
def host({arguments}):
{before}
    y = torch.empty_like(x)
    kernel[(4,)](x, y, {rows}, {stride}, BLOCK={block})
"""


def body(*lines):
    return "\n".join(f"    {line}" for line in lines)


ALL = ["==1", "%16", "other"]

#: What is passed as `rows`, and the lines before: an integer that varies with the tokens or the batch.
VARIES = {
    "x.shape[0]": "",
    "x.size(0)": "",
    "num_tokens": "",
    "num_tokens * top_k": "",
    "M": body("M, K = x.shape"),
    "T": body("B, T, H, D = x.shape"),
    "rows": body("rows = x.shape[0] * top_k"),
    "total": body("total = len(x) - 3"),
    "min(x.shape[0], num_tokens * top_k)": "",
    "max(num_tokens, 4) - 1": "",
    "triton.cdiv(num_tokens, 64)": "",
    "(num_tokens + 3) // 4": "",
    "n": body("n = x.view(-1, x.shape[-1]).shape[0]"),
    "topk_ids.numel()": body("topk_ids = x.topk_ids"),
    "metadata.num_actual_tokens": body("metadata = x.metadata"),
    "m": body("m = num_tokens", "if m > 8:", "    m = m + 1"),
    "rows  # in a loop": body("rows = 0", "for _ in range(3):", "    rows += num_tokens"),
    "rows  # by a condition": body("rows = num_tokens if w13 is None else x.shape[0]"),
    "triton.cdiv(num_tokens, tile)": body("tile = 16 if num_tokens < 64 else 64"),
    "x.size()[0]": "",
    "i": body("for i in range(x.shape[0]):", "    pass"),
    "math.prod(x.shape[:-1])": "",
    "rows  # walrus": body("if (rows := x.shape[0]) > 3:", "    pass"),
}


@pytest.mark.parametrize("passed", VARIES)
def test_an_integer_that_follows_the_tokens_is_found(tmp_path, passed):
    source = launch(passed.split("  #")[0], before=VARIES[passed])
    (found,) = findings(tmp_path, KERNEL.format(jit=""), source)
    assert found == ("rows", "specialised-int", "warning", ALL)


#: The same place, nothing that varies.
STAYS = {
    "x.shape[1]": "",
    "x.size()[1]": "",
    "x.shape[-1]": "",
    "i": body("for i in range(hidden_size):", "    pass"),
    "x.stride(0)": "",
    "x.stride(1)": "",
    "w13.shape[0]": "",
    "w13.size(0)": "",
    "hidden_size": "",
    "top_k": "",
    "17": "",
    "self.config.num_rows_per_block": body("self = x.self"),
    "config.max_num_tokens": body("config = x.config"),
    "len(BUCKETS)": body("BUCKETS = (1, 2, 3)"),
    "kv_cache.shape[0]": body("kv_cache = x.kv_cache"),
    "block_table.stride(0)": body("block_table = x.block_table"),
    "num_experts": body("num_experts = w13.shape[0]"),
    "heads": body("heads, num_tokens = x.shape"),
    "n": body("n = unheard_of(num_tokens)"),
    "num_tokens": body("num_tokens = 128"),
    "w.stride(0)": body("w = torch.empty(num_tokens, 96)"),
    "w.stride(-1)": body("w = torch.empty(num_tokens, 96)"),
    "x.dtype.itemsize": "",
    "K": body("M, K = x.shape"),
    "0 if w13 is None else 1": "",
    "num_tokens > 8": "",
    "num_tokens // batch_size": body("batch_size = len(x)"),
    "seq_len": body("batch, head = w13.shape[0], x.shape[1]", "seq_len = num_tokens // batch"),
    "B": body("B, M, K = x.shape"),
    "x.shape[0]": body("assert x.shape[0] % alignment() == 0"),
    "total_token_in_kvcache": "",
}


@pytest.mark.parametrize("passed", STAYS)
def test_what_stays_is_left_alone(tmp_path, passed):
    assert findings(tmp_path, KERNEL.format(jit=""), launch(passed, before=STAYS[passed])) == []


@pytest.mark.parametrize(
    ("passed", "before", "classes"),
    [
        ("triton.cdiv(num_tokens, 4) * 4", "", ["%16", "other"]),
        ("(num_tokens + 3) // 4 * 4", "", ["%16", "other"]),
        ("round_up(num_tokens, 8)", "", ["%16", "other"]),
        ("num_tokens", body("assert num_tokens % 8 == 0"), ["%16", "other"]),
        ("num_tokens + 16", "", ALL),
        ("x.shape[0]", body("assert x.shape[0] % 4 == 0 and top_k"), ["%16", "other"]),
        ("triton.next_power_of_2(num_tokens)", "", ALL),
        ("rows", body("rows = 1 if num_tokens < 4 else 48"), ["%16", "==1"]),
    ],
)
def test_classes_are_those_that_can_be_reached(tmp_path, passed, before, classes):
    (found,) = findings(tmp_path, KERNEL.format(jit=""), launch(passed, before=before))
    assert found[3] == classes


@pytest.mark.parametrize(
    ("passed", "before"),
    [
        ("triton.cdiv(num_tokens, 64) * 64", ""),
        ("round_up(num_tokens, 128)", ""),
        ("num_tokens * 32", ""),
        ("num_tokens - num_tokens % 16", ""),
        ("i", body("for i in range(0, num_tokens, 16):", "    pass")),
        ("num_tokens", body("assert num_tokens % 16 == 0")),
        ("rows", body("rows = 64 if num_tokens < 4 else 128")),
    ],
)
def test_a_value_of_one_class_only_is_left_alone(tmp_path, passed, before):
    assert findings(tmp_path, KERNEL.format(jit=""), launch(passed, before=before)) == []


@pytest.mark.parametrize(
    ("before", "jit"),
    [
        ("import triton as tr", "tr.jit"),
        ("from triton import jit as j", "j"),
        ("T = triton.jit", "T"),
        ("from triton.experimental import gluon as gl", "gl.jit"),
        ("import triton.experimental.gluon", "triton.experimental.gluon.jit"),
    ],
)
def test_a_kernel_is_seen_by_whatever_name_jit_has(tmp_path, before, jit):
    kernel = KERNEL.format(jit="").replace("triton.jit", jit)
    assert [found[0] for found in findings(tmp_path, before, kernel, launch("num_tokens"))] == ["rows"]


@pytest.mark.parametrize("option", ['["rows"]', "[2]", '("rows",)', "NEVER"])
def test_do_not_specialize_is_honoured_by_name_and_by_index(tmp_path, option):
    kernel = KERNEL.format(jit=f"(do_not_specialize={option})")
    assert findings(tmp_path, 'NEVER = ["rows"]', kernel, launch("num_tokens")) == []
    assert [found[0] for found in findings(tmp_path, 'NEVER = ["rows"]', kernel, launch("3", "num_tokens"))] == [
        "stride"
    ]


def test_do_not_specialize_on_alignment_leaves_one_and_other(tmp_path):
    kernel = KERNEL.format(jit='(do_not_specialize_on_alignment=["rows"])')
    (found,) = findings(tmp_path, kernel, launch("num_tokens"))
    assert found[3] == ["==1", "other"]
    assert findings(tmp_path, kernel, launch("num_tokens * 4 + 4")) == []


def test_of_a_list_that_cannot_be_read_nothing_is_claimed(tmp_path):
    kernel = KERNEL.format(jit="(do_not_specialize=make_names())")
    assert findings(tmp_path, kernel, launch("num_tokens", "num_tokens")) == []


@pytest.mark.parametrize(
    ("block", "severity", "classes"),
    [
        ("num_tokens", "error", ["each value"]),
        ("min(num_tokens, 500)", "error", ["500 values"]),
        ("triton.next_power_of_2(num_tokens)", "warning", ["18 values"]),
        ("min(256, triton.next_power_of_2(num_tokens))", "warning", ["9 values"]),
        ("max(16, triton.next_power_of_2(num_tokens))", "warning", ["14 values"]),
        ("16 if num_tokens < 32 else 64", "note", ["2 constants"]),
        ("num_tokens % 64 == 0", "note", ["2 constants"]),
    ],
)
def test_a_constexpr_fed_from_what_varies(tmp_path, block, severity, classes):
    (found,) = findings(tmp_path, KERNEL.format(jit=""), launch("3", block=block))
    assert found == ("BLOCK", "varying-constexpr", severity, classes)


@pytest.mark.parametrize(
    "block", ["64", "triton.next_power_of_2(hidden_size)", "x.shape[1]", "config['BLOCK']", "BLOCK"]
)
def test_a_constexpr_that_stays_is_left_alone(tmp_path, block):
    before = body("config = tuned(num_tokens)", "BLOCK = 128")
    assert findings(tmp_path, KERNEL.format(jit=""), launch("3", block=block, before=before)) == []


def test_a_ladder_of_tiles_counts_its_constants(tmp_path):
    before = body(
        "if num_tokens < 16:", "    block, warps = 16, 4", "elif num_tokens < 64:", "    block, warps = 64, 4", "else:",
        "    block, warps = 64, 8",
    )  # fmt: skip
    source = launch("3", block="block, num_warps=warps", before=before)
    assert findings(tmp_path, KERNEL.format(jit=""), source) == [
        ("BLOCK", "varying-constexpr", "note", ["2 constants"]),
        ("num_warps", "varying-constexpr", "note", ["2 constants"]),
    ]


TUNED = """
@triton.autotune([triton.Config(dict(BLOCK=64))], key={key})
""" + KERNEL.format(jit="").lstrip("\n")


@pytest.mark.parametrize(
    ("rows", "severity", "variants"),
    [("num_tokens", "error", None), ("triton.next_power_of_2(num_tokens)", "warning", 18)],
)
def test_an_autotuners_key_that_varies(tmp_path, rows, severity, variants):
    path = tmp_path / "source.py"
    path.write_text(HEAD + TUNED.format(key='["rows", "stride"]') + launch(rows).replace(", BLOCK=64", ""))
    key = next(each for each in audit([path]).findings if each.rule == "autotune-key")
    assert (key.argument, key.severity.value, key.variants) == ("rows", severity, variants)


@pytest.mark.parametrize("key", ['["stride"]', "[]", "make_key()"])
def test_an_autotuners_key_that_stays_is_left_alone(tmp_path, key):
    source = launch("num_tokens").replace(", BLOCK=64", "")
    assert [found[1] for found in findings(tmp_path, TUNED.format(key=key), source)] == ["specialised-int"]


def test_heuristics_are_read_for_what_they_make_of_the_arguments(tmp_path):
    table = '{"BLOCK": lambda args: triton.next_power_of_2(args["rows"]), "EVEN": lambda a: a["x_ptr"]}'
    kernel = f"@triton.heuristics({table})\n" + KERNEL.format(jit='(do_not_specialize=["rows"])').lstrip("\n")
    source = launch("{}").replace(", BLOCK=64", "")
    assert findings(tmp_path, kernel, source.format("num_tokens")) == [
        ("BLOCK", "varying-constexpr", "warning", ["18 values"])
    ]
    assert findings(tmp_path, kernel, source.format("hidden_size")) == []


def test_a_product_that_may_pass_2_to_the_31_is_a_note(tmp_path):
    before = body("q = torch.empty(8, num_tokens, hidden_size)")
    source = launch("3", "q.stride(0)", before=before)
    assert findings(tmp_path, KERNEL.format(jit=""), source) == [("stride", "int-width", "note", ["32 bit", "64 bit"])]
    wide = KERNEL.format(jit="").replace("stride,", "stride: tl.int64,")
    assert findings(tmp_path, wide, source) == []
    never = KERNEL.format(jit='(do_not_specialize=["stride"])')
    assert [found[1] for found in findings(tmp_path, never, source)] == ["int-width"]
    assert findings(tmp_path, KERNEL.format(jit=""), launch("3", "num_tokens * 16", before=before)) == []


def test_strides_come_from_the_allocation(tmp_path):
    """Rows of T rounded up to 4, as fp8 scales lie: both strides change class, the last one never."""
    before = body(
        "aligned = triton.cdiv(num_tokens, 4) * 4",
        "s = torch.empty(4 * 3 * aligned).as_strided((4, num_tokens, 3), (3 * aligned, 1, aligned))",
    )
    for index, expected in ((0, 1), (1, 0), (2, 1)):
        found = findings(tmp_path, KERNEL.format(jit=""), launch("3", f"s.stride({index})", before=before))
        assert len(found) == expected
    before = body("s = torch.empty(3, num_tokens).transpose(0, 1)[:5, :]")
    assert len(findings(tmp_path, KERNEL.format(jit=""), launch("3", "s.stride(-1)", before=before))) == 1
    assert findings(tmp_path, KERNEL.format(jit=""), launch("3", "s.stride(0)", before=before)) == []


def test_the_advice_differs_where_alignment_matters(tmp_path):
    path = tmp_path / "source.py"
    path.write_text(HEAD + KERNEL.format(jit="") + launch("num_tokens", "num_tokens"))
    rows, stride = audit([path]).findings
    assert (rows.argument, rows.addresses) == ("rows", False) and "nothing is lost" in rows.advice
    assert (stride.argument, stride.addresses) == ("stride", True) and "16-byte" in stride.advice
    assert stride.because[-1] == "num_tokens is an argument, by its name"


@pytest.mark.parametrize(
    "decorator", ["@triton.jit", "@gluon.jit", "@jit", "@triton.autotune([], key=[])\n@triton.jit", "@tl.jit()"]
)
def test_kernels_are_known_by_their_decorators(tmp_path, decorator):
    kernel = KERNEL.format(jit="").replace("@triton.jit", decorator)
    imports = "from triton import jit\nfrom triton.experimental import gluon"
    assert len(findings(tmp_path, imports, kernel, launch("num_tokens"))) == 1


@pytest.mark.parametrize(
    "call",
    [
        "kernel[(4,)](x, x, num_tokens, 8, 64)",
        "kernel[(4,)](x_ptr=x, y_ptr=x, rows=num_tokens, stride=8, BLOCK=64)",
        "kernel[grid](x, x, num_tokens, 8, **options)",
        "kernel[grid](*(x, x, 3, 8), **dict(rows=num_tokens))",
        "chosen[grid](x, x, num_tokens, 8, BLOCK=64)",
        "(kernel if top_k else other)[grid](x, x, num_tokens, 8, BLOCK=64)",
        "def inner(n=num_tokens, fn=kernel):\n        fn[grid](x, x, num_tokens, 8, BLOCK=64)",
        "print(kernel[grid](x, x, num_tokens, 8, BLOCK=64))",
    ],
)
def test_launches_are_seen_in_many_forms(tmp_path, call):
    host = f"""
other = None
def host(x, num_tokens: int, top_k: int):
    chosen = kernel if top_k > 1 else other
    options = dict(BLOCK=64)
    grid = lambda meta: (triton.cdiv(num_tokens, meta["BLOCK"]),)
    {call}
"""
    assert [found[0] for found in findings(tmp_path, KERNEL.format(jit=""), host)] == ["rows"]


def test_pointers_and_tensors_are_no_integers(tmp_path):
    """A tensor by the name of a count: by its annotation, by its use, or by what the kernel does with it."""
    source = """
def host(num_tokens: torch.Tensor, num_rows, x):
    kernel[(4,)](num_tokens, num_rows, x.numel, 8, BLOCK=64)
"""
    assert findings(tmp_path, KERNEL.format(jit=""), source) == []


def test_severities_are_ordered_by_variants():
    assert [each.rank for each in Severity] == [0, 1, 2]
