"""Keys, URLs and options: what is secret stays so, what is wrong is refused in one sentence."""

import json
import re

import pytest

pytest.importorskip("aiohttp", reason="needs the extra `bench`")
from endpoint import run

from expertile.errors import ExpertileError


def test_the_key_comes_from_the_environment_and_is_written_nowhere(tmp_path, serving, monkeypatch):
    url, endpoint = serving(first=0.0, gap=0.0, key="secret-word")
    monkeypatch.setenv("SOME_KEY", "secret-word")
    named = ("--requests", "2", "--lengths", "9/2", "--api-key-env", "SOME_KEY")
    code, output, found = run(tmp_path, url, *named)
    assert code == 0 and "secret-word" not in output + json.dumps(found) and len(endpoint.bodies) == 4
    with pytest.raises(ExpertileError, match="HTTP 401 a key is needed"):
        run(tmp_path, url, "--requests", "2")


def test_a_user_and_password_in_the_url_are_not_written(tmp_path, serving):
    url, _ = serving(first=0.0, gap=0.0)
    _, output, (row,) = run(tmp_path, url.replace("//", "//me:hidden@"), "--requests", "2", "--lengths", "9/2")
    assert "hidden" not in output + json.dumps(row)


def test_no_endpoint_is_one_sentence(tmp_path):
    with pytest.raises(ExpertileError, match=r"GET http://127\.0\.0\.1:9/v1/models: cannot connect: Connect"):
        run(tmp_path, "127.0.0.1:9")


def test_a_model_that_is_not_served_is_refused_with_those_that_are(tmp_path, serving):
    url, _ = serving()
    with pytest.raises(ExpertileError, match="model='large' is not served here, but small"):
        run(tmp_path, url, "--model", "large")


@pytest.mark.parametrize(
    "options, message",
    [
        (("--lengths", "12"), "is not IN/OUT"),
        (("--lengths", "9-3/4"), "needs 1 <= first <= last"),
        (("--lengths", "9/4*0"), "would never be drawn"),
        (("--slo", "ttft=500"), "give bounds of ttft, tpot or e2el"),
        (("--slo", "ttft=1s,ttft=2s"), "give bounds"),
        (("--concurrency", "0"), "give a number above 0"),
        (("--concurrency", "1.5"), "whole numbers"),
        (("--rate", "nan"), "give a number above 0"),
        (("--prompts", "ids"), "ids:VOCABULARY"),
        (("--prompts", "ids:\u00b2"), "ids:VOCABULARY"),
        (("--lengths", "\u0661/4"), "is not IN/OUT"),
        (("--prompts", "ids:99", "--api", "chat"), "a chat takes text only"),
        (("--api", "embeddings"), "use completions or chat"),
        (("--body", "[1]"), "give a JSON object"),
    ],
)
def test_a_bad_option_is_refused_before_anything_is_sent(tmp_path, options, message):
    with pytest.raises(ExpertileError, match=re.escape(message)):
        run(tmp_path, "http://127.0.0.1:9", *options)


@pytest.mark.parametrize("url", ["ftp://host", "http://", "http://host:x", "http://host?x=1"])
def test_a_url_that_is_none_is_refused(tmp_path, url):
    with pytest.raises(ExpertileError, match="give that of an endpoint"):
        run(tmp_path, url)
