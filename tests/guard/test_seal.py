"""What a sealed guard does with a compilation: refuse it, say it once, or count it; and what it leaves alone."""

import json
import logging
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import guard_driver
import guard_kernels as kernels
import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget

from expertile import guard
from expertile.errors import ExpertileError, Recompiled
from expertile.guard.intercept import INTERCEPTION

HERE = "test_seal.py"


@pytest.fixture
def compilations(monkeypatch):
    """The stages that Triton's compiler really runs, told by the compiler itself."""
    seen = []
    monkeypatch.setattr(triton.knobs.compilation, "listener", lambda **said: seen.append(said["cache_hit"]))
    return seen


def test_in_mode_error_nothing_is_compiled_and_nothing_launched(x, compilations):
    kernels.plus[(1,)](x, 5, 64)
    launches, before = guard_driver.Launcher.launches, list(compilations)
    with guard.seal("error") as sealed:
        for _ in range(2):
            with pytest.raises(
                Recompiled, match=r"guard_kernels.plus would be compiled .*test_seal.py:\d+ in test_in_mode"
            ):
                kernels.plus[(1,)](x, 16, 64)
        kernels.plus[(1,)](x, 7, 64)
    assert compilations == before == [False]
    assert guard_driver.Launcher.launches == launches + 1
    assert [event.ms for event in sealed.events] == [None, None] and sealed.lost_ms == 0
    kernels.plus[(1,)](x, 16, 64)  # as if nothing had been
    assert compilations == [False, False]


def test_mode_warn_compiles_and_says_each_cause_once(x, caplog):
    kernels.plus[(1,)](x, 5, 64)
    with caplog.at_level(logging.INFO, "expertile.guard"), guard.seal("warn") as sealed:
        for n, block in ((16, 64), (5, 32), (5, 128), (5, 256)):
            kernels.plus[(1,)](x, n, block)
    assert len(sealed.events) == 4 and all(event.ms > 0 for event in sealed.events)
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    assert (
        "n=16: divisible by 16" in caplog.text and "BLOCK: 32; compiled: 64" in caplog.text and "128" not in caplog.text
    )
    assert set(sealed.causes) == {
        "compile guard_kernels.plus: n (divisible by 16)", "compile guard_kernels.plus: BLOCK (constexpr value)",
    }  # fmt: skip


def test_mode_count_says_nothing(x, caplog):
    with caplog.at_level(logging.DEBUG), guard.seal("count") as sealed:
        kernels.plus[(1,)](x, 5, 64)
    assert sealed.compiles == 1 and not [record for record in caplog.records if record.name.startswith("expertile")]


def test_an_unknown_mode_is_refused():
    with pytest.raises(ExpertileError, match="mode='loud' is not known: use one of error, warn, count"):
        guard.seal("loud")


def test_a_kernel_on_disk_is_loaded_in_every_mode(x, caplog):
    kernels.plus[(1,)](x, 5, 64)
    kernels.plus.device_caches.clear()  # as a new process
    with caplog.at_level(logging.INFO, "expertile.guard"), guard.seal("error") as strict, guard.seal("warn"):
        kernels.plus[(1,)](x, 5, 64)
    (event,) = strict.events
    assert event.kind == "load" and event.ms > 0 and strict.compiles == 0
    assert event.blame == "not launched before" and "compiled or loaded it before" in event.text
    assert [record.levelname for record in caplog.records] == [
        "INFO"
    ] and "was loaded from the cache on disk" in event.text


def test_a_launch_that_compiles_nothing_calls_the_same_functions_sealed_and_not(x):
    def functions_called():
        called = []
        sys.setprofile(lambda frame, what, _: called.append((frame.f_code.co_name, what)) if what == "call" else None)
        try:
            kernels.plus[(1,)](x, 5, 64)
        finally:
            sys.setprofile(None)
        return called

    kernels.plus[(1,)](x, 5, 64)
    free = functions_called()
    with guard.seal("error", json_log="never-written"):
        assert functions_called() == free
    assert len(free) > 3


def test_strange_hooks_work_before_and_after_sealing_and_stay(x, monkeypatch):
    said = []

    def hook(name):
        return lambda **arguments: said.append((name, arguments["fn"].name)) and None

    runtime, before, after = triton.knobs.runtime, hook("before"), hook("after")
    monkeypatch.setattr(runtime, "jit_cache_hook", before)
    monkeypatch.setattr(runtime, "jit_post_compile_hook", after)
    with guard.seal("count") as sealed:
        assert (runtime.jit_cache_hook, runtime.jit_post_compile_hook) == (before, after)
        kernels.plus[(1,)](x, 5, 64)
        late = hook("late")
        runtime.jit_post_compile_hook = late  # a monitor that takes the only place
        kernels.plus[(1,)](x, 16, 64)
    assert (runtime.jit_cache_hook, runtime.jit_post_compile_hook) == (before, late)
    assert [name for name, _ in said] == ["before", "after", "before", "late"]
    assert sealed.compiles == 2


def test_a_hook_that_takes_the_compilation_itself_leaves_nothing_to_report(x, monkeypatch):
    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", lambda **_: True)
    with guard.seal("error") as sealed:
        assert kernels.plus[(1,)](x, 5, 64) is None
    assert not sealed.events


def test_triton_is_as_it_was_after_the_last_guard_is_gone():
    from triton.compiler import code_generator
    from triton.runtime.autotuner import Autotuner

    originals = code_generator.ast_to_ttir, Autotuner._bench
    first, second = guard.seal("count"), guard.seal("count")
    assert code_generator.ast_to_ttir is not originals[0] and Autotuner._bench is not originals[1]
    first.unseal()
    assert code_generator.ast_to_ttir is not originals[0]
    assert guard.unseal() is second and guard.unseal() is None
    assert (code_generator.ast_to_ttir, Autotuner._bench) == originals


def test_a_stranger_who_wrapped_ours_keeps_his_and_nothing_is_counted_twice(x, monkeypatch):
    from triton.compiler import code_generator

    original, calls = code_generator.ast_to_ttir, []
    first = guard.seal("count")
    ours = code_generator.ast_to_ttir

    def strangers(*arguments, **keywords):
        calls.append(1)
        return ours(*arguments, **keywords)

    code_generator.ast_to_ttir = strangers
    first.unseal()
    assert code_generator.ast_to_ttir is strangers
    with guard.seal("count") as second:
        kernels.plus[(1,)](x, 5, 64)
    assert len(second.events) == len(calls) == 1 and not first.events
    code_generator.ast_to_ttir = ours
    guard.seal("count").unseal()
    assert code_generator.ast_to_ttir is original


def test_guards_overlap_and_each_sees_everything(x):
    with guard.seal("count") as outer:
        kernels.plus[(1,)](x, 5, 64)
        with guard.seal("error") as inner, pytest.raises(Recompiled):
            kernels.plus[(1,)](x, 16, 64)
        kernels.plus[(1,)](x, 16, 64)
    assert len(inner.events) == 1 and [event.ms is None for event in outer.events] == [False, True, False]


def test_threads_compile_at_once_and_each_event_is_its_own():
    def launch(block):
        kernels.plus_unspecialized[(1,)](torch.zeros(4096), 5, block)

    blocks = [2**power for power in range(4, 12)]
    launch(8192)
    with guard.seal("count") as sealed, ThreadPoolExecutor(4, thread_name_prefix="serving") as pool:
        list(pool.map(launch, blocks))
    assert sorted(int(event.differences[0].now) for event in sealed.events) == blocks
    assert all(event.site.startswith(__file__) and event.site.endswith("launch") for event in sealed.events)
    assert all(event.thread.startswith("serving") and event.ms > 0 for event in sealed.events)


def test_a_log_handler_that_launches_a_kernel_does_not_loop(x):
    class Launching(logging.Handler):
        def emit(self, record):
            kernels.plus[(1,)](x, 5, 128)

    logger, handler = logging.getLogger("expertile.guard"), Launching()
    logger.addHandler(handler)
    try:
        with guard.seal("warn") as sealed:
            kernels.plus[(1,)](x, 5, 64)
    finally:
        logger.removeHandler(handler)
    assert [event.kernel for event in sealed.events] == ["guard_kernels.plus"]
    assert len(kernels.plus.device_caches[0][0]) == 2


def test_a_kernel_that_does_not_compile_raises_its_own_error_and_is_an_event(x):
    with guard.seal("count") as sealed:
        with pytest.raises(triton.CompilationError, match="does not compile"):
            kernels.broken[(1,)](x, 5)
        kernels.plus[(1,)](x, 5, 64)
    assert [(event.failed, event.kernel) for event in sealed.events] == [
        (True, "guard_kernels.broken"), (False, "guard_kernels.plus"),
    ]  # fmt: skip
    assert "failed to compile" in sealed.events[0].text


@pytest.mark.parametrize("then", ["compile", "load"])
def test_a_compilation_that_fails_later_is_an_event_too(x, monkeypatch, then):
    from triton.backends.nvidia.compiler import CUDABackend

    def fails(*arguments):
        raise RuntimeError("no ptxas")

    if then == "load":
        kernels.plus[(1,)](x, 16, 64)
        kernels.plus.device_caches.clear()
    with guard.seal("count") as sealed:
        with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="no ptxas"):
            patch.setattr(CUDABackend, "make_cubin", fails)
            kernels.plus[(1,)](x, 5, 64)
        kernels.plus[(1,)](x, 16, 64)
    assert [(event.kind, event.failed) for event in sealed.events] == [("compile", True), (then, False)]


def test_what_the_guard_cannot_explain_it_still_reports(x, monkeypatch):
    from expertile.guard import observe

    def fails(*arguments):
        raise KeyError("no such thing")

    monkeypatch.setattr(observe, "key_of", fails)
    with guard.seal("count") as sealed:
        kernels.plus[(1,)](x, 5, 64)
    assert sealed.events[0].kernel == "guard_kernels.plus" and sealed.events[0].differences[0].kind == "unknown"


def test_an_autotuner_that_measures_is_one_event_with_the_key_to_blame(x):
    kernels.tuned[(1,)](x, 5)
    with guard.seal("count") as sealed:
        kernels.tuned[(1,)](x, 5)
        assert not sealed.events
        kernels.plus_unspecialized.device_caches.clear()
        kernels.tuned[(1,)](x, 6)
    (event,) = sealed.events[:1]
    assert (event.kind, event.kernel) == ("autotune", "guard_kernels.plus_unspecialized")
    assert [(each.argument, each.kind, each.now, each.before) for each in event.differences] == [
        ("n", "autotune_key", "6", "5")
    ]
    assert event.ms > 0 and HERE in event.site and "test_an_autotuner" in event.site
    assert len(sealed.events) == 1, "what an autotuner compiles is part of its event"


def test_an_autotuner_says_how_many_configurations_it_compiled(x):
    with guard.seal("count") as sealed:
        kernels.tuned[(1,)](x, 5)
    (event,) = sealed.events
    assert (
        event.compiles == 3 and event.differences[0].kind == "untuned" and "(3 configurations compiled)" in event.text
    )


def test_a_tensor_of_another_type_is_another_key_of_an_autotuner(x):
    kernels.tuned[(1,)](x, 5)
    with guard.seal("count") as sealed:
        kernels.tuned[(1,)](x.float(), 5)
    assert [(each.argument, each.now) for each in sealed.events[0].differences] == [("x_ptr", "torch.float32")]


def test_in_mode_error_an_autotuner_measures_nothing(x, compilations):
    kernels.tuned[(1,)](x, 5)
    before, launches = list(compilations), guard_driver.Launcher.launches
    with guard.seal("error"), pytest.raises(Recompiled, match="would be tuned"):
        kernels.tuned[(1,)](x, 6)
    assert compilations == before and guard_driver.Launcher.launches == launches
    assert len(kernels.tuned.cache) == 1
    kernels.tuned[(1,)](x, 6)


def source_of(kernel, kinds):
    from triton.compiler import ASTSource

    return ASTSource(kernel, kinds, {(2,): 64}, {(0,): [["tt.divisibility", 16]]})


def test_triton_compile_called_directly_as_inductor_does(compilations):
    kinds = {"x_ptr": "*i32", "n": "i32", "BLOCK": "constexpr"}
    with guard.seal("error"), pytest.raises(Recompiled, match=r"guard_kernels.plus would be compiled .*test_seal.py"):
        triton.compile(source_of(kernels.plus, kinds), target=GPUTarget("cuda", 90, 32))
    assert not compilations
    with guard.seal("count") as sealed:
        triton.compile(source_of(kernels.plus, kinds), target=GPUTarget("cuda", 90, 32))
        triton.compile(source_of(kernels.plus, kinds), target=GPUTarget("cuda", 90, 32))
    assert [event.kind for event in sealed.events] == ["compile", "load"] and compilations == [False, True]
    assert all(event.ms > 0 for event in sealed.events)


def test_a_file_of_ir_is_seen_as_well(tmp_path):
    kinds = {"x_ptr": "*i32", "n": "i32", "BLOCK": "constexpr"}
    made = triton.compile(source_of(kernels.plus, kinds), target=GPUTarget("cuda", 90, 32))
    path = tmp_path / "plus.ttgir"
    path.write_text(made.asm["ttgir"])
    with guard.seal("error"), pytest.raises(Recompiled, match=r"plus.ttgir would be compiled"):
        triton.compile(str(path), target=GPUTarget("cuda", 90, 32))


def test_asynchronous_compilation_is_refused_where_it_is_asked_for(x, compilations):
    kernels.plus[(1,)](x, 5, 64)
    with (
        guard.seal("error") as sealed, ThreadPoolExecutor(1) as pool, pytest.raises(Recompiled, match="n=16"),
        triton.AsyncCompileMode(pool),
    ):  # fmt: skip
        kernels.plus.warmup(torch.int32, 16, 64, grid=(1,))
    assert compilations == [False] and HERE in sealed.events[0].site


def test_asynchronous_compilation_has_the_call_site_of_the_launch(x):
    kernels.plus[(1,)](x, 5, 64)
    with guard.seal("count") as sealed, ThreadPoolExecutor(2) as pool, triton.AsyncCompileMode(pool):
        kernels.plus.warmup(torch.int32, 16, 64, grid=(1,))
        kernels.plus.warmup(torch.int32, 5, 128, grid=(1,))
    assert sorted(event.differences[0].argument for event in sealed.events) == ["BLOCK", "n"]
    assert all(HERE in event.site and event.ms > 0 and event.key for event in sealed.events)


def test_asynchronous_compilation_of_what_is_on_disk_is_let_through(x):
    kernels.plus[(1,)](x, 5, 64)
    kernels.plus.device_caches.clear()
    with guard.seal("error") as sealed:
        with ThreadPoolExecutor(1) as pool, triton.AsyncCompileMode(pool):
            kernels.plus.warmup(torch.int32, 5, 64, grid=(1,))
        kernels.plus[(1,)](x, 5, 64)
    assert [event.kind for event in sealed.events] == ["load"]


def test_a_launcher_built_by_the_c_compiler_is_an_event(x, driver, monkeypatch):
    """As Triton 3.6's driver does for each new signature, at the first launch."""
    monkeypatch.setattr(driver, "launcher_cls", guard_driver.building_launcher())
    kernels.plus.warmup(torch.int32, 5, 64, grid=(1,))  # compiled, but never launched
    with guard.seal("error") as sealed:
        with pytest.raises(Recompiled, match=r"guard_kernels.plus would have its C launcher compiled"):
            kernels.plus[(1,)](x, 5, 64)
        sealed.mode = "count"
        kernels.plus[(1,)](x, 5, 64)
    assert [(event.kind, event.ms is None) for event in sealed.events] == [("launcher", True), ("launcher", False)]
    assert HERE in sealed.events[0].site


def test_the_json_log_has_one_line_an_event(x, tmp_path):
    log = tmp_path / "events-{pid}.jsonl"
    with guard.seal("count", json_log=log) as sealed:
        kernels.plus[(1,)](x, 5, 64)
        kernels.plus[(1,)](x, 16, 64)
    (written,) = tmp_path.glob("events-*.jsonl")
    first, second = map(json.loads, written.read_text().splitlines())
    assert second["differences"] == [
        {
            "argument": "n",
            "kind": "divisible_by_16",
            "now": "divisible by 16",
            "before": "not divisible by 16",
            "value": "16",
        }
    ]
    assert second["ms"] == sealed.events[1].ms and HERE in second["site"] and second["kernel"] == "guard_kernels.plus"
    assert second["key"] and second["nearest_key"] == first["key"] and second["cause"] == sealed.events[1].cause


def test_a_log_that_cannot_be_written_any_more_stops_no_launch_and_is_said_once(x, caplog, tmp_path):
    (tmp_path / "gone").mkdir()
    with guard.seal("count", json_log=tmp_path / "gone" / "events.jsonl") as sealed:
        (tmp_path / "gone").rmdir()
        for n in (5, 16, 1):
            kernels.plus[(1,)](x, n, 64)
    assert len(sealed.events) == 3
    assert [record.message.startswith("events are no longer written by JsonLines") for record in caplog.records] == [
        True
    ]


def test_counters_for_prometheus_by_kernel_and_argument(x):
    prometheus = pytest.importorskip("prometheus_client")

    def value(name, **labels):
        labels = {"kind": "compile", "kernel": "guard_kernels.plus", "argument": "n (divisible by 16)", **labels}
        return prometheus.REGISTRY.get_sample_value(name, labels) or 0

    counted, lost = value("expertile_guard_events_total"), value("expertile_guard_lost_seconds_total")
    kernels.plus[(1,)](x, 5, 64)
    for _ in range(2):  # a second guard takes the same counters
        with guard.seal("count"):
            kernels.plus[(1,)](x, 16, 64)
        kernels.plus.device_caches[0][0].popitem()
    assert value("expertile_guard_events_total") == counted + 1
    assert value("expertile_guard_events_total", kind="load") >= 1
    assert 0 < value("expertile_guard_lost_seconds_total") - lost < 60


def test_without_prometheus_client_there_is_no_counter(x, monkeypatch):
    from expertile.guard import sealing, sinks

    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    monkeypatch.setattr(sealing, "prometheus", sinks.prometheus.__wrapped__)
    with guard.seal("count") as sealed:
        kernels.plus[(1,)](x, 5, 64)
    assert sealed.compiles == 1 and not sealed._sinks


def test_importing_the_guard_imports_neither_torch_nor_triton():
    found = "[name for name in ('torch', 'triton', 'rich', 'prometheus_client') if name in sys.modules]"
    code = f"import expertile.guard, json, sys; print(json.dumps({found}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []


def test_a_triton_that_the_guard_does_not_know_is_refused_in_words(monkeypatch):
    from triton.runtime.autotuner import Autotuner

    monkeypatch.delattr(Autotuner, "_bench")
    with pytest.raises(ExpertileError, match=r"Triton .* is not one that the guard knows \(3.6 to 3.8\).*_bench"):
        guard.seal()
    assert not INTERCEPTION.guards


def test_sealing_in_one_thread_guards_all(x):
    caught = []

    def serve():
        try:
            kernels.plus[(1,)](x, 16, 64)
        except Recompiled as error:
            caught.append(error)

    kernels.plus[(1,)](x, 5, 64)
    with guard.seal("error"):
        thread = threading.Thread(target=serve)
        thread.start()
        thread.join()
    assert len(caught) == 1


@pytest.mark.parametrize("place", ["/nowhere/events.jsonl", "/", "", "x" * 5000])
def test_a_log_that_cannot_be_written_is_refused_at_once(place):
    with pytest.raises(ExpertileError, match=r"json_log='.*name a file to write"):
        guard.seal("count", json_log=place)
