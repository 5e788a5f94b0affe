"""Text as it grows is the text of the whole, and a stop string ends it wherever the tokens' borders lie."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from serve_process import TINY
from tokenizers import Tokenizer

from expertile.serve.text import Growing, StopStrings

TOKENIZER = Tokenizer.from_file(str(TINY / "tokenizer.json"))


def decode(ids):
    return TOKENIZER.decode(ids, skip_special_tokens=True)


def grown(ids, prompt=()):
    growing = Growing(decode, list(prompt))
    return [growing.push(token) for token in ids], growing.rest()


@given(st.text(max_size=40))
def test_pieces_add_up_to_the_text(text):
    pieces, rest = grown(TOKENIZER.encode(text).ids)
    assert "".join(pieces) + rest == text


@given(st.lists(st.integers(1, 4095), max_size=30), st.lists(st.integers(1, 4095), max_size=10))
def test_any_tokens_behind_any_prompt_can_be_decoded(ids, prompt):
    pieces, rest = grown(ids, prompt)
    assert all(isinstance(piece, str) for piece in (*pieces, rest))


def test_a_character_of_several_tokens_comes_whole():
    ids = TOKENIZER.encode("a\N{THINKING FACE}b").ids
    pieces, rest = grown(ids)
    assert len(ids) > 3 and "".join(pieces) == "a\N{THINKING FACE}b" and not rest
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


def test_half_a_character_at_the_end_is_not_lost():
    ids = TOKENIZER.encode("\N{THINKING FACE}").ids
    pieces, rest = grown(ids[:-1])
    assert "".join(pieces) == "" and "\N{REPLACEMENT CHARACTER}" in rest


@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), st.data())
def test_the_first_stop_string_ends_the_text_however_it_is_cut(text, stops, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    stopping = StopStrings(stops)
    out = "".join(stopping.push(text[a:b]) for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True))
    ends = [text.find(stop) for stop in stops if stop in text]
    if ends:
        assert stopping.stopped
        assert text.startswith(out) and not any(stop in out for stop in stops)
    else:
        assert out + stopping.rest() == text and not stopping.stopped


@pytest.mark.parametrize("pieces", [["x EN", "D y"], ["x E", "N", "D y"], ["x END y"], [*"x END y"]])
def test_a_stop_string_that_straddles_pieces(pieces):
    stopping = StopStrings(["END"])
    assert "".join(map(stopping.push, pieces)) == "x "
    assert stopping.stopped and stopping.rest() == ""


def test_what_only_began_like_a_stop_string_comes_through():
    stopping = StopStrings(["END"])
    assert [stopping.push(piece) for piece in ("a E", "N", "d")] == ["a ", "", "ENd"]
