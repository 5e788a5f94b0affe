"""`expertile bench serve` against an endpoint whose moments are known: what it measures is what was programmed."""

import asyncio
import os
import random
import re
import signal
import subprocess
import sys
import time
from itertools import pairwise

import pytest

pytest.importorskip("aiohttp", reason="needs the extra `bench`")

from endpoint import run

from expertile.bench import rows
from expertile.bench.load.client import Sample
from expertile.bench.load.drive import Load, arrivals, drive

ENDLESS = ("--requests", "100000", "--concurrency", "3", "--lengths", "9/4")
LATE = 0.03  # what a busy machine may add to a programmed time, seconds


def near(milliseconds, programmed, late=LATE):
    return programmed * 1e3 - 1 <= milliseconds <= (programmed + late) * 1e3


def test_the_programmed_times_are_measured(tmp_path, serving):
    url, _ = serving(first=0.15, gap=0.03)
    code, output, found = run(tmp_path, url, "--requests", "6", "--concurrency", "2", "--lengths", "33/11")
    (row,) = found
    assert code == 0, output
    for what in ("mean", "p50", "p90"):
        assert near(row[f"ttft_ms_{what}"], 0.15)
        assert near(row[f"tpot_ms_{what}"], 0.03, 0.01)
        assert near(row[f"itl_ms_{what}"], 0.03, 0.015)
        assert near(row[f"e2el_ms_{what}"], 0.15 + 10 * 0.03, 0.1)
    assert (row["requests"], row["failed"], row["cut"], row["output_tokens"]) == (6, 0, 0, 66)
    assert row["seconds"] == pytest.approx(3 * 0.45, rel=0.25)  # two at a time
    assert row["output_tokens_per_s"] == pytest.approx(66 / row["seconds"], rel=1e-3)
    assert row["tokens_per_s"] == pytest.approx((66 + row["input_tokens"]) / row["seconds"], rel=1e-3)


def test_tokens_that_come_together_count_for_tpot_and_not_for_itl(tmp_path, serving):
    url, _ = serving(first=0.02, gap=0.05, together=5)
    _, _, (row,) = run(tmp_path, url, "--requests", "2", "--concurrency", "2", "--lengths", "33/20")
    assert near(row["itl_ms_p50"], 0.05)
    assert near(row["tpot_ms_p50"], 3 * 0.05 / 19, 0.005)


def test_prompts_are_fitted_to_the_count_of_the_server(tmp_path, serving):
    url, endpoint = serving(first=0.0, gap=0.0)
    _, _, (row,) = run(tmp_path, url, "--requests", "20", "--lengths", "101/2")
    assert row["input_tokens"] == 20 * 101
    assert len({body["prompt"] for body in endpoint.bodies[2:]}) == 20


def test_ids_are_exact_and_within_the_vocabulary(tmp_path, serving):
    url, endpoint = serving(first=0.0, gap=0.0)
    run(tmp_path, url, "--requests", "5", "--lengths", "40-60/2", "--prompts", "ids:100")
    for body in endpoint.bodies:
        assert 40 <= len(body["prompt"]) <= 60 and all(10 <= each < 100 for each in body["prompt"])


def test_a_request_is_what_the_api_asks_for(tmp_path, serving):
    url, endpoint = serving(first=0.0, gap=0.0)
    run(tmp_path, f"{url}/v1/", "--requests", "1", "--lengths", "9/7", "--api", "chat", "--body", '{"top_k": 1}')
    body = endpoint.bodies[-1]
    assert body.pop("messages")[0]["role"] == "user"
    assert body == {
        "model": "small", "max_tokens": 7, "stream": True, "stream_options": {"include_usage": True},
        "temperature": 0.0, "ignore_eos": True, "top_k": 1,
    }  # fmt: skip


def test_the_same_seed_asks_the_same_and_warm_ups_ask_something_else(tmp_path, serving):
    asked = []
    for _ in range(2):
        url, endpoint = serving(first=0.0, gap=0.0)
        run(tmp_path, url, "--requests", "4", "--lengths", "20-90/2-9", "--warm-up", "3", "--concurrency", "1")
        asked.append([(body["prompt"], body["max_tokens"]) for body in endpoint.bodies])
    assert asked[0] == asked[1] and len(asked[0]) == 2 + 3 + 4
    assert not set(asked[0][2:5]) & set(asked[0][5:])


def test_no_more_requests_at_once_than_wanted_and_as_many(tmp_path, serving):
    url, endpoint = serving(first=0.05, gap=0.0)
    run(tmp_path, url, "--requests", "20", "--concurrency", "5", "--lengths", "9/2")
    assert endpoint.most == 5


def test_several_loads_become_several_rows(tmp_path, serving):
    url, _ = serving(first=0.0, gap=0.0, owner="vllm")
    options = ("--requests", "4", "--concurrency", "1,4", "--lengths", "9/2", "--quant", "bf16")
    _, _, found = run(tmp_path, url, *options)
    assert [row["concurrency"] for row in found] == [1, 4]
    assert {(row["impl"], row["problem"], row["quant"], row["bench"]) for row in found} == {
        ("vllm-0.26.0", "small", "bf16", "load")
    }


def test_a_rate_is_kept_whatever_the_answers_take(tmp_path, serving):
    url, endpoint = serving(first=0.3, gap=0.0)
    _, _, (row,) = run(tmp_path, url, "--requests", "40", "--rate", "40", "--lengths", "9/2")
    span = endpoint.arrived[-1] - endpoint.arrived[2]
    assert span == pytest.approx(1.0, abs=0.25) and endpoint.most > 5
    assert row["arrival"] == "40 requests/s" and row["concurrency"] == 0


def test_arrivals_are_poisson_with_the_exact_mean():
    due = list(arrivals(Load(0, 8.0, 4000, 1e9, 0), random.Random(1)))
    gaps = [later - sooner for sooner, later in pairwise(due)]
    mean = sum(gaps) / len(gaps)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert due[-1] == pytest.approx(500.0)
    assert deviation == pytest.approx(mean, rel=0.06)  # of an exponential distribution; a steady beat has 0
    assert sum(gap < mean for gap in gaps) / len(gaps) == pytest.approx(0.632, abs=0.03)


def test_goodput_counts_requests_within_all_bounds(tmp_path, serving):
    url, _ = serving(first=0.1, gap=0.02)
    options = ("--requests", "4", "--concurrency", "4", "--lengths", "9/5")
    for slo, share in (("ttft=300ms,tpot=100ms", 1.0), ("ttft=50ms,tpot=100ms", 0.0), ("e2el=0.1s", 0.0)):
        (tmp_path / "rows.jsonl").unlink(missing_ok=True)
        _, output, (row,) = run(tmp_path, url, *options, "--slo", slo)
        assert row["goodput_per_s"] == pytest.approx(share * row["requests_per_s"], rel=1e-3) and row["slo"] == slo
        assert "goodput under" in output


@pytest.mark.parametrize(
    "fault, reason",
    [
        ("429", "HTTP 429 the queue is full"),
        ("disconnect", "disconnected before the first token"),
        ("cut", "disconnected in the middle of an answer"),
        ("half", "the stream ended in the middle of an answer"),
        ("html", "malformed stream: a line that begins '<html>busy</html>'"),
        ("garbage", "malformed stream: '{nope' is not JSON"),
        ("silent", "no token: the stream ended before the first"),
        ("error", "error in the stream: engine died"),
        ("binary", "malformed stream: not UTF-8"),
        ("hang", "timeout: no complete answer in 0.4 s"),
    ],
)
def test_a_failure_is_counted_with_its_reason_and_the_others_go_on(tmp_path, serving, fault, reason):
    url, _ = serving(first=0.01, gap=0.01, fault=fault, every=3)
    patience = "0.4" if fault == "hang" else "20"  # a busy machine must not make a good request late
    code, output, (row,) = run(tmp_path, url, "--requests", "9", "--timeout", patience, "--lengths", "9/4")
    assert code == 1
    assert (row["requests"], row["failed"]) == (6, 3)
    assert re.search(rf"\b3 x {re.escape(reason)}\n", output), output
    assert near(row["ttft_ms_p50"], 0.01, 0.3)


def test_when_everything_fails_there_is_a_row_that_says_so(tmp_path, serving):
    url, _ = serving(fault="429")
    code, _, (row,) = run(tmp_path, url, "--requests", "5", "--lengths", "9/4")
    assert code == 1 and (row["requests"], row["failed"], row["output_tokens_per_s"]) == (0, 5, 0.0)


def test_a_server_that_counts_nothing_is_told_about(tmp_path, serving):
    url, _ = serving(first=0.0, gap=0.0, usage=False)
    _, output, (row,) = run(tmp_path, url, "--requests", "3", "--lengths", "9/4")
    assert "one word is taken for one token" in output
    assert (row["input_tokens"], row["output_tokens"]) == (27, 12)


def test_time_is_bounded_and_what_is_under_way_then_counts_nowhere(tmp_path, serving):
    url, _ = serving(first=0.05, gap=0.05)
    began = time.monotonic()
    _, _, (row,) = run(tmp_path, url, *ENDLESS, "--seconds", "0.5", "--drain", "0")
    assert time.monotonic() - began < 3
    assert row["cut"] == 3 and 3 <= row["requests"] <= 9 and row["seconds"] == pytest.approx(0.5, abs=0.2)


def test_with_time_to_drain_nothing_is_cut(tmp_path, serving):
    url, _ = serving(first=0.05, gap=0.05)
    _, _, (row,) = run(tmp_path, url, *ENDLESS, "--seconds", "0.3")
    assert row["cut"] == 0 and row["requests"] % 3 == 0


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interruption_reports_and_writes_what_there_is(tmp_path, serving, number, code):
    url, endpoint = serving(first=0.02, gap=0.02)
    path = tmp_path / "rows.jsonl"
    options = ["--requests", "100000", "--concurrency", "4,8", "--gpu", "none", "--commit", "abc", "--out", str(path)]
    command = [sys.executable, "-m", "expertile.cli", "bench", "serve", url, *options, "--lengths", "9/4"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ)
    until = time.monotonic() + 20
    while len(endpoint.bodies) < 60 and time.monotonic() < until:
        time.sleep(0.02)
    process.send_signal(number)
    output, _ = process.communicate(timeout=10)
    assert process.returncode == code, output
    (row,) = rows.read(path)  # the second load was not begun
    assert row["requests"] > 20 and row["cut"] == 4 and row["failed"] == 0
    assert "TTFT" in output and "Traceback" not in output


def test_an_interruption_before_anything_was_measured_writes_nothing(tmp_path, serving):
    url, endpoint = serving(fault="hang")
    endpoint.answer = lambda *_: asyncio.sleep(60)
    options = ["--gpu", "none", "--out", str(tmp_path / "rows")]
    process = subprocess.Popen(
        [sys.executable, "-m", "expertile.cli", "bench", "serve", url, *options],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    until = time.monotonic() + 20
    while not endpoint.most and time.monotonic() < until:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=10)
    assert process.returncode == 130 and not (tmp_path / "rows").exists() and "Traceback" not in output


def test_a_fault_of_the_generator_itself_is_not_swallowed():
    async def measure():
        def ask(number):
            raise ZeroDivisionError

        await drive(Load(2, 0.0, 5, 5.0, 0.0), ask, asyncio.Event(), random.Random(0))

    with pytest.raises(ZeroDivisionError):
        asyncio.run(measure())


def test_a_request_that_never_began_is_cut_and_not_good():
    assert not Sample(5).good
