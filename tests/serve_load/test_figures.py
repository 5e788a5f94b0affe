"""Events out of bytes, and figures out of samples, where no endpoint is needed."""

import random

import pytest

pytest.importorskip("aiohttp", reason="needs the extra `bench`")
from hypothesis import given
from hypothesis import strategies as st

from expertile.bench.load.client import Sample
from expertile.bench.load.figures import failures, figures, meets, percentile, tpot
from expertile.bench.load.lengths import parse_lengths
from expertile.bench.load.stream import Events, StreamFault, parse


@given(
    st.lists(st.text(alphabet="aä\U0001f600:{ ", min_size=1), max_size=6), st.data(), st.sampled_from(["\n", "\r\n"])
)
def test_events_are_the_same_however_the_bytes_are_cut(texts, data, end):
    whole = "".join(f": ping{end}data: {text}{end}{end}" for text in texts).encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=8)))
    events, found = Events(), []
    for first, last in zip([0, *cuts], [*cuts, len(whole)], strict=True):
        found += events.feed(whole[first:last])
    assert found == texts and not events.unfinished


def test_several_lines_of_data_are_one_event_and_fields_we_do_not_need_are_skipped():
    events = Events()
    assert events.feed(b"event: x\nid: 1\nretry: 5\ndata:{\ndata:}\n\n") == ["{\n}"]
    assert events.feed(b"data: half") == [] and events.unfinished


def test_an_event_without_end_is_a_fault_and_not_memory():
    events = Events()
    with pytest.raises(StreamFault, match="more than 8 MiB"):
        for _ in range(100):
            events.feed(b"data: " + b"x" * (1 << 20))


@pytest.mark.parametrize("text", ["[]", "7", '{"choices": {"a": 1}}', '{"choices": [3]}', "", "nan x"])
def test_what_is_no_event_is_a_fault(text):
    with pytest.raises(StreamFault, match="malformed stream"):
        parse(text)


@pytest.mark.parametrize("usage", [None, {}, {"prompt_tokens": "4"}, {"prompt_tokens": -1}, 5])
def test_a_usage_that_says_nothing_is_none(usage):
    import json

    assert parse(json.dumps({"choices": [], "usage": usage})).input_tokens is None


@given(st.lists(st.floats(0, 100), min_size=1, max_size=60), st.sampled_from([50, 90, 99]))
def test_percentiles_are_numpys(values, percent):
    numpy = pytest.importorskip("numpy")
    assert percentile(values, percent) == pytest.approx(float(numpy.percentile(values, percent)), rel=1e-9, abs=1e-12)


def sample(start=0.0, first=0.5, last=2.5, tokens=5, **more):
    return Sample(10, start, first, last, [0.5] * 4, tokens, cut=more.pop("cut", False), **more)


def test_tpot_is_the_time_after_the_first_token_over_the_tokens_after_it():
    assert tpot(sample()) == 0.5
    assert tpot(sample(tokens=1)) == 0.0


def test_an_answer_of_one_token_has_no_tpot_to_be_averaged():
    found = figures([sample(), sample(tokens=1, last=0.5)], 10.0, {})
    assert found["tpot_ms_mean"] == 500.0 and found["ttft_ms_mean"] == 500.0


def test_only_requests_that_succeeded_count():
    found = figures([sample(), sample(error="HTTP 500"), sample(cut=True)], 2.0, {"ttft": 1.0})
    assert (found["requests"], found["failed"], found["cut"]) == (1, 1, 1)
    assert found["output_tokens_per_s"] == 2.5 and found["tokens_per_s"] == 7.5 and found["goodput_per_s"] == 0.5


@pytest.mark.parametrize(
    "slo, good", [({"ttft": 0.5}, True), ({"ttft": 0.4}, False), ({"ttft": 1, "tpot": 0.4}, False)]
)
def test_a_bound_that_is_just_met_is_met(slo, good):
    assert meets(sample(), slo) is good


def test_many_reasons_are_summed_up():
    found = failures([sample(error=f"reason {number}") for number in range(14)] + [sample(error="often")] * 3)
    assert found[0] == ("often", 3) and found[-1] == ("other reasons", 5) and len(found) == 11


def test_lengths_are_drawn_by_their_weights():
    lengths, chance = parse_lengths("10/1*3,20-29/2"), random.Random(0)
    drawn = [lengths.draw(chance) for _ in range(4000)]
    assert sum(pair == (10, 1) for pair in drawn) / 4000 == pytest.approx(0.75, abs=0.03)
    assert {given for given, made in drawn if made == 2} == set(range(20, 30))
