"""The step loop on a model that checks what it is given."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from serve_models import POISON, Counting, counting_from, started

from expertile.serve.engine import EngineStopped, QueueFull


def wanted(first: int, prompt: int, tokens: int) -> str:
    return "".join(f"<{first + prompt + i}>" for i in range(tokens))


@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 30), st.integers(1, 12)), min_size=1, max_size=20), st.integers(1, 5))
def test_any_mix_of_lengths_is_answered_each_as_if_alone(lengths, rows):
    engine = started(Counting(rows))
    sequences = [counting_from(10 * i, prompt=prompt, tokens=tokens) for i, (prompt, tokens) in enumerate(lengths)]
    engine.submit(sequences)
    for i, (sequence, (prompt, tokens)) in enumerate(zip(sequences, lengths, strict=True)):
        assert sequence.emit.finish() == "length"
        assert sequence.emit.text == wanted(10 * i, prompt, tokens)
        assert sequence.emit.events[-1].tokens == tokens
    engine.stop()
    assert engine.running == 0 and not engine.waiting


def test_sequences_share_their_steps():
    model = Counting(4)
    engine = started(model, prefill_chunk=100)
    sequences = [counting_from(10 * i, tokens=20) for i in range(4)]
    engine.submit(sequences)
    assert [each.emit.finish() for each in sequences] == ["length"] * 4
    engine.stop()
    assert model.batches.count(4) >= 15


@pytest.mark.parametrize("place", [0, 1, 3])
def test_a_failing_request_does_not_take_its_batch_along(place):
    model = Counting(4)
    engine = started(model, prefill_chunk=100)
    good = [counting_from(10 * i, tokens=30) for i in range(3)]
    bad = counting_from(POISON - 10, tokens=30)  # its eighth token is the poison
    engine.submit([*good[:place], bad, *good[place:]])
    assert bad.emit.finish() == "error"
    assert bad.emit.events[-1].error == "the model failed on this request"
    assert [each.emit.finish() for each in good] == ["length"] * 3
    assert [each.emit.text for each in good] == [wanted(10 * i, 3, 30) for i in range(3)]
    later = counting_from(500)
    engine.submit([later])
    assert later.emit.finish() == "length" and not engine.broken
    engine.stop()


def test_a_poisoned_prompt_fails_alone():
    engine = started(Counting(2))
    bad, good = counting_from(POISON), counting_from(5)
    engine.submit([bad, good])
    assert (bad.emit.finish(), good.emit.finish()) == ("error", "length")
    engine.stop()


def test_logits_that_are_no_numbers_fail_their_own_row_only():
    class Odd(Counting):
        def step(self, first_row, ids, starts):
            logits = super().step(first_row, ids, starts)
            for row, tokens in enumerate(ids):
                if 301 in tokens:
                    logits[row] = torch.nan
            return logits

    engine = started(Odd(2))
    odd, good = counting_from(298, tokens=9), counting_from(5, tokens=9)
    engine.submit([odd, good])
    assert (odd.emit.finish(), good.emit.finish()) == ("error", "length")
    assert good.emit.text == wanted(5, 3, 9)
    engine.stop()


def test_a_lost_device_breaks_the_engine_and_everybody_hears_of_it():
    class Lost(Counting):
        def step(self, first_row, ids, starts):
            raise torch.AcceleratorError("an illegal memory access was encountered")

    engine = started(Lost(2))
    sequences = [counting_from(5), counting_from(50), counting_from(500)]
    engine.submit(sequences)
    assert [each.emit.finish() for each in sequences] == ["error"] * 3
    with pytest.raises(EngineStopped, match="AcceleratorError"):
        engine.submit([counting_from(5)])


def test_stop_tokens_and_stop_strings_end_a_text():
    engine = started(Counting())
    by_token, by_string = counting_from(0, tokens=50, ends={7}), counting_from(0, tokens=50, stops=["><9"])
    engine.submit([by_token, by_string])
    assert (by_token.emit.finish(), by_token.emit.text, by_token.emit.events[-1].tokens) == ("stop", "<3><4><5><6>", 5)
    assert (by_string.emit.finish(), by_string.emit.text) == ("stop", "<3><4><5><6><7><8")
    engine.stop()


def test_more_than_slots_and_queue_is_refused_as_a_whole():
    model = Counting(2)
    model.gate.clear()
    engine = started(model, max_queue=3)
    engine.submit([counting_from(10 * i) for i in range(5)])
    with pytest.raises(QueueFull):
        engine.submit([counting_from(900), counting_from(910), counting_from(920), counting_from(930)])
    assert not [each for each in engine.waiting if each.prompt[0] >= 900]
    model.gate.set()
    engine.stop()


def test_cancelled_sequences_leave_slots_and_queue():
    model = Counting(1)
    engine = started(model)
    first, second, third = counting_from(0, tokens=900), counting_from(0, tokens=900), counting_from(5)
    engine.submit([first, second, third])
    engine.cancel([second, first])
    assert (first.emit.finish(), second.emit.finish(), third.emit.finish()) == ("cancelled", "cancelled", "length")
    assert third.emit.text == wanted(5, 3, 5)
    engine.stop()
    assert engine.running == 0


def test_stopping_answers_what_is_under_way():
    engine = started(Counting(1))
    sequences = [counting_from(0, tokens=900), counting_from(0, tokens=900)]
    engine.submit(sequences)
    engine.stop()
    assert {each.emit.finish() for each in sequences} <= {"error", "length"}
    with pytest.raises(EngineStopped):
        engine.submit([counting_from(0)])
