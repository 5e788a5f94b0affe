"""What makes no sense is refused with 4xx, one sentence and the field's name, and the server goes on."""

import json
import time

import httpx
import pytest


def error(answer: httpx.Response, status: int) -> dict:
    assert answer.status_code == status, answer.text
    found = answer.json()["error"]
    assert set(found) == {"message", "type", "param", "code"}
    assert found["message"] and "\n" not in found["message"] and len(found["message"]) < 300
    return found


BAD = [
    (dict(temperature=-0.1), "temperature"),
    (dict(temperature=2.1), "temperature"),
    (dict(temperature="hot"), "temperature"),
    (dict(top_p=0), "top_p"),
    (dict(top_p=1.1), "top_p"),
    (dict(top_k=-2), "top_k"),
    (dict(max_tokens=0), "max_tokens"),
    (dict(max_tokens=-5), "max_tokens"),
    (dict(max_tokens=1.5), "max_tokens"),
    (dict(max_tokens=10**30), "max_tokens"),
    (dict(max_tokens=2048), "max_tokens"),
    (dict(n=0), "n"),
    (dict(n=129), "n"),
    (dict(n=100), "n"),  # more than slots and queue ever hold
    (dict(n=True), "n"),
    (dict(seed=2**63), "seed"),
    (dict(seed=0.5), "seed"),
    (dict(stop=[""]), "stop"),
    (dict(stop=["x"] * 17), "stop"),
    (dict(stop=["x" * 2000]), "stop"),
    (dict(stop={"x": 1}), "stop"),
    (dict(stream="yes"), "stream"),
    (dict(stream_options=dict(include_usage=True)), "stream_options"),
    (dict(logit_bias={"3": 1}), "logit_bias"),
    (dict(presence_penalty=0.5), "presence_penalty"),
    (dict(logprobs=3), "logprobs"),
    (dict(echo=True), "echo"),
    (dict(best_of=2), "best_of"),
    (dict(best_of=True), "best_of"),
    (dict(best_of=1.0), "best_of"),
    (dict(echo=0), "echo"),
    (dict(suffix="x"), "suffix"),
    (dict(model=7), "model"),
    (dict(temprature=0.5), "temprature"),
    (dict(prompt=""), "prompt"),
    (dict(prompt=[]), "prompt"),
    (dict(prompt=[[]]), "prompt"),
    (dict(prompt=[-1]), "prompt"),
    (dict(prompt=[4096]), "prompt"),
    (dict(prompt=[10**30]), "prompt"),
    (dict(prompt=["a", 3]), "prompt"),
    (dict(prompt=None), "prompt"),
    (dict(prompt={"a": 1}), "prompt"),
    (dict(prompt="a " * 3000), "prompt"),
    (dict(prompt="a" * 4_000_000), "prompt"),
    (dict(prompt=["x"] * 129), "prompt"),
    (dict(prompt=[[3]] * 129), "prompt"),
    (dict(prompt="\ud800"), "prompt"),
    (dict(prompt=["\ud800"]), "prompt"),
    (dict(stop="\ud800"), "stop"),
    (dict(stop=["a", "\ud800"]), "stop"),
    (dict(model="\ud800"), "model"),
    (dict(user="\ud800"), "user"),
    (dict(stream=True, stream_options={"\ud800": 1}), "stream_options"),
]


@pytest.mark.parametrize("change, field", BAD, ids=[f"{str(change)[:30]}" for change, _ in BAD])
def test_parameters(server, change, field):
    body = json.dumps(dict(prompt="x", max_tokens=2) | change)  # httpx would send no half surrogate
    found = error(server_post(server, "/v1/completions", body), 400)
    assert found["param"] == field and (field is None or found["message"].startswith(field))
    assert found["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": "\xff\xfe"}',
        b'{"prompt": "\\ud800"}',
        b'{"messages": [{"role": "user", "content": "\\udfff"}]}',
        b'{"messages": [{"role": "user", "content": [{"type": "text", "text": "\\udfff"}]}]}',
        b'{"messages": [{"role": "\\udfff", "content": "x"}]}',
        b'{"prompt": "keep quiet", "\\ud800": 1}',
        b'{"prompt": "keep quiet", "messages": [], "\\ud800": 1}',
        b'{"prompt": "keep quiet", "a\\nb": 1}',
        '{"prompt": "x"}'.encode("utf-16"),
        b'{"prompt": "x", "temperature": NaN}',
        b'{"prompt": "x", "temperature": 1e999}',
        b'{"prompt": "x"',
        b"[" * 100_000,
        b"[]",
        b"3",
        b"null",
        b"",
        b"\x00\x01\x02",
    ],
    ids=lambda body: repr(body[:30]),
)
def test_bodies(server, body):
    for path in ("/v1/completions", "/v1/chat/completions", "/invocations"):
        error(server_post(server, path, body), 400)
    assert "Traceback" not in server.log and "keep quiet" not in server.log


def server_post(server, path, content, **headers) -> httpx.Response:
    return server.client.post(path, content=content, headers={"Content-Type": "application/json"} | headers, timeout=30)


@pytest.mark.parametrize("given", ["text/plain", "application/x-www-form-urlencoded", "a" * 500, None], ids=str)
def test_another_content_type_is_said(server, given):
    for path in ("/v1/completions", "/v1/chat/completions", "/invocations"):
        answer = server.client.post(path, content=b'{"prompt": "x"}', headers={"Content-Type": given} if given else {})
        message = error(answer, 400)["message"]
        assert (given or "no Content-Type")[:60] in message and "application/json" in message


def test_what_a_client_says_comes_back_short(server):
    long = "x" * 100_000
    for body, status in ((dict(model=long), 404), ({long: 1}, 400), (dict(max_tokens=int("9" * 4000)), 400)):
        found = error(server.post("/v1/completions", dict(prompt="x") | body), status)
        assert len(found["param"]) < 80
    assert error(server.get(f"/v1/models/{long[:5000]}"), 404)


@pytest.mark.parametrize("path", ["/ping", "/health"])
def test_head_is_get_without_a_body(server, path):
    answer = server.client.head(path)
    assert answer.status_code == 200 and not answer.content
    assert server.client.head("/v1/completions").status_code == 405


@pytest.mark.parametrize("announced", [True, False])
def test_six_megabytes_are_the_limit(server, announced):
    body = b'{"prompt": "' + b"a" * 6_000_000 + b'"}'
    content = body if announced else (body[i : i + 65536] for i in range(0, len(body), 65536))
    found = error(server_post(server, "/invocations", content), 413)
    assert "6000000 bytes" in found["message"]


@pytest.mark.parametrize(
    "body",
    [
        '{"prompt": ["a"' + ", 3" * 1_800_000 + "]}",
        '{"prompt": [3' + ', "a"' * 1_100_000 + "]}",
        '{"prompt": [3' + ", 3" * 1_900_000 + "]}",
        '{"prompt": [[3]' + ", [-1]" * 900_000 + "]}",
        '{"messages": [{}' + ", {}" * 1_400_000 + "]}",
        "{" + ", ".join(f'"k{i}": 1' for i in range(350_000)) + "}",
    ],
    ids=lambda body: body[:24],
)
def test_a_million_mistakes_cost_no_more_than_one(server, body):
    before = server.resident_bytes
    for path in ("/v1/completions", "/v1/chat/completions", "/invocations"):
        started = time.perf_counter()
        error(server_post(server, path, body.encode()), 400)
        assert time.perf_counter() - started < 5
    assert server.resident_bytes - before < 400e6


@pytest.mark.parametrize(
    "body",
    [
        '{"prompt": [' + "[], " * 1_490_000 + "[]]}",
        '{"prompt": [' + "[[]], " * 990_000 + "[]]}",
        '{"prompt": [' + ("[" * 900 + "]" * 900 + ",") * 3300 + "[]]}",
        '{"prompt": "\\\\", "stop": [' + "[], " * 1_490_000 + "[]]}",
        '{"prompt": "\\"[", "stop": [' + "[], " * 1_490_000 + "[]]}",
        '{"messages": [' + '{"role":"user","content":""},' * 200_000 + "3]}",
        '{"messages": [{' + ",".join(f'"{i}":1' for i in range(500_000)) + "}]}",
    ],
    ids=lambda body: body[:24],
)
def test_six_megabytes_of_lists_or_objects_stop_nobody(server, body):
    for path in ("/v1/completions", "/v1/chat/completions", "/invocations"):
        started = time.perf_counter()
        assert "lists, objects and members" in error(server_post(server, path, body.encode()), 400)["message"]
        assert time.perf_counter() - started < 1


@pytest.mark.parametrize("item", ["3", '""'])
def test_more_values_than_any_prompts_have_are_not_read(server, item):
    body = '{"prompt": [' + f"{item}," * 1_900_000 + f"{item}]}}"
    started = time.perf_counter()
    assert "values" in error(server_post(server, "/v1/completions", body.encode()), 400)["message"]
    assert time.perf_counter() - started < 1


def test_brackets_in_a_text_are_no_lists(server):
    body = dict(prompt="x", user='[]{}:\\"' * 50_000, max_tokens=1)
    assert server.post("/v1/completions", body).status_code == 200


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [{"role": "user"}],
        [{"role": "tool", "content": "x"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}],
        "hello",
    ],
    ids=str,
)
def test_messages(server, messages):
    found = error(server.post("/v1/chat/completions", dict(messages=messages)), 400)
    assert found["param"] == "messages"


def test_what_the_engine_does_not_have_is_said(server):
    messages = [{"role": "user", "content": "x"}]
    strange = [dict(tools=[{"type": "function"}]), dict(tool_choice="auto"), dict(store=True), dict(top_logprobs=2)]
    strange += [dict(top_logprobs=False), dict(logprobs=0), dict(parallel_tool_calls=1), dict(store=0.0)]
    strange += [dict(logprobs=True), dict(response_format={"type": "json_object"}), dict(audio={}), dict(toolz=None)]
    for change in strange:
        found = error(server.post("/v1/chat/completions", dict(messages=messages) | change), 400)
        assert found["param"] in change


def test_what_says_nothing_is_as_good_as_absent(server):
    body = dict(messages=[{"role": "user", "content": "x"}], max_tokens=1)
    names = (
        "tools tool_choice functions function_call logit_bias top_logprobs logprobs store response_format metadata "
        "parallel_tool_calls modalities prediction reasoning_effort service_tier audio"
    )
    empty = dict(tools=[], tool_choice="none", logit_bias={}, store=False, top_logprobs=0)
    for said in (dict.fromkeys(names.split()), empty):
        answer = server.post("/v1/chat/completions", body | said)
        assert answer.status_code == 200, answer.text
    assert server.post("/v1/completions", dict(prompt="x", max_tokens=1, logit_bias=None)).status_code == 200


@pytest.mark.parametrize(
    "change, said",
    [
        (dict(messages=[{"role": "user", "content": [{"type": "text"}]}]), "messages.0.content.0.text is missing"),
        (dict(messages=[{"role": "user", "content": 3}]), "messages.0.content: give a text, or a list"),
        (dict(messages=[{"role": "user", "content": "x"}, {"role": "x", "content": "y"}]), "messages.1.role: input"),
        (dict(max_tokens=3, max_completion_tokens=7), "max_completion_tokens: 7 and max_tokens 3 differ"),
        (dict(max_completion_tokens=5000), "max_completion_tokens: 5000 and the prompt's"),
        (dict(tools=[3]), "tools is not supported here"),
    ],
    ids=str,
)
def test_the_sentence_begins_with_where_the_mistake_is(server, change, said):
    body = dict(messages=[{"role": "user", "content": "x"}]) | change
    for path in ("/v1/chat/completions", "/invocations"):
        found = error(server.post(path, body), 400)
        assert found["message"].startswith(said) and found["param"] == said.split(".")[0].split(":")[0].split()[0]


def test_two_numbers_of_tokens_may_be_the_same(server):
    body = dict(messages=[{"role": "user", "content": "x"}], max_tokens=2, max_completion_tokens=2)
    assert server.post("/v1/chat/completions", body).status_code == 200


def test_paths_and_methods(server):
    error(server.get("/v1/nothing"), 404)
    error(server.get("/v1/completions"), 405)
    error(server.get("/page/../../settings.py"), 404)
    error(server.get("/page/%2e%2e/settings.py"), 404)


def test_after_all_this_it_answers(server):
    assert server.post("/v1/completions", dict(prompt="x", max_tokens=2)).status_code == 200
    assert "Traceback" not in server.log
