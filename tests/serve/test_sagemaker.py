"""SageMaker AI's contract, with the process as SageMaker starts it: no argument, everything in the environment."""

import json
import os
import subprocess
import sys
import threading
import time

import openai
import pytest
from serve_process import COMMAND, TINY, Server

from expertile.serve import container

KEY = "not-for-invocations"


@pytest.mark.parametrize(
    "environment, arguments",
    [
        ({"SM_EXPERTILE_MAX_SEQS": "64"}, ["--max-seqs", "64"]),
        ({"SM_EXPERTILE_JSON_LOGS": "true"}, ["--json-logs"]),
        ({"SM_EXPERTILE_JSON_LOGS": "True"}, ["--json-logs"]),
        ({"SM_EXPERTILE_JSON_LOGS": "false", "SM_EXPERTILE_X": "FALSE", "SM_EXPERTILE_Y": " "}, []),
        ({"SM_EXPERTILE_MODEL": "/m", "SM_EXPERTILE_PORT": "1", "SM_VLLM_X": "1", "PATH": "x"}, []),
        ({"SM_EXPERTILE_B": "2", "SM_EXPERTILE_A": '["x", 3]'}, ["--a", "x", "3", "--b", "2"]),
        ({"SM_EXPERTILE_C": '{"a": [1]}', "SM_EXPERTILE_D": "[oops"}, ["--c", '{"a": [1]}', "--d", "[oops"]),
    ],
)
def test_variables_become_arguments(environment, arguments):
    assert container.arguments(environment, container.PREFIX) == arguments


def test_the_model_is_where_the_environment_says():
    assert container.model_path({}) == "/opt/ml/model"
    assert container.model_path({"SAGEMAKER_MODEL_PATH": "/a"}) == "/a"
    assert container.model_path({"SAGEMAKER_MODEL_PATH": "/a", "SM_VLLM_MODEL": "/b"}) == "/b"
    assert container.model_path({"SM_EXPERTILE_MODEL": "/c", "SM_VLLM_MODEL": "/b"}) == "/c"


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory):
    """Started with no argument at all, as SageMaker does; only the port is another where 8080 is taken."""
    artefact = tmp_path_factory.mktemp("artefact")
    for each in TINY.iterdir():
        (artefact / each.name).symlink_to(each)
    (artefact / "model.py").write_text("raise SystemExit('code of the artefact was run')\n")
    environment = {
        "SAGEMAKER_MODEL_PATH": str(artefact),
        "SM_EXPERTILE_MAX_SEQS": "2",
        "SM_EXPERTILE_SERVED_MODEL_NAME": "tiny",
        "SM_EXPERTILE_TRUST_REMOTE_CODE": "false",
        "EXPERTILE_API_KEY": KEY,
    }
    with Server(environment=environment, port=container.PORT) as server:
        server.statuses = server.statuses_until_ready()
        if server.process.poll() is not None and "address already in use" in server.log:
            pytest.skip("port 8080 is taken on this machine")
        yield server


def test_ping_is_503_before_200(endpoint):
    assert endpoint.statuses[-1] == 200 and set(endpoint.statuses) == {503, 200}, endpoint.log


def test_invocations_take_both_kinds_of_bodies(endpoint):
    completion = endpoint.post("/invocations", dict(prompt="import os", max_tokens=3, temperature=0))
    assert completion.status_code == 200 and completion.json()["object"] == "text_completion"
    chat = endpoint.post("/invocations", dict(messages=[dict(role="user", content="hi")], max_tokens=3))
    assert chat.json()["object"] == "chat.completion" and chat.json()["model"] == "tiny"


def test_invocations_stream(endpoint):
    body = dict(prompt="import os", max_tokens=5, stream=True)
    with endpoint.client.stream("POST", "/invocations", json=body) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in answer.iter_lines() if line]
    assert len(lines) > 2 and lines[-1] == "data: [DONE]"


def test_invocations_need_no_key_but_the_openai_paths_do(endpoint):
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{endpoint.url}/v1", api_key="x", max_retries=0).models.list()
    client = openai.OpenAI(base_url=f"{endpoint.url}/v1", api_key=KEY, max_retries=0)
    assert client.models.list().data[0].id == "tiny"


def test_every_line_of_the_log_is_json(endpoint):
    assert endpoint.post("/invocations", dict(prompt=7)).status_code == 400
    lines = [json.loads(line) for line in endpoint.log.splitlines()]
    assert {"time", "level", "logger", "message"} <= set(lines[0])
    assert any(line.get("path") == "/invocations" and line.get("status") == 400 for line in lines)


def test_neither_key_nor_prompt_is_ever_logged(endpoint):
    body = dict(prompt="a prompt to keep quiet", max_tokens=2)
    endpoint.post(f"/v1/completions?key={KEY}", body, headers={"Authorization": f"Bearer {KEY}"})
    endpoint.post("/v1/completions", body, headers={"Authorization": f"Bearer {KEY}x"})
    assert endpoint.post("/invocations", body | dict(n=-1)).status_code == 400
    assert KEY not in endpoint.log and "keep quiet" not in endpoint.log


def test_sigterm_answers_what_is_under_way_and_ends_clean(endpoint):
    body = dict(prompt="import os", max_tokens=60, ignore_eos=True)
    pieces, answers = [], []

    def stream():
        with endpoint.client.stream("POST", "/invocations", json=body | dict(stream=True)) as got:
            pieces.extend(line for line in got.iter_lines() if line)

    threads = [threading.Thread(target=stream)]
    threads += [threading.Thread(target=lambda: answers.append(endpoint.post("/invocations", body))) for _ in range(3)]
    for each in threads:
        each.start()
    deadline = time.monotonic() + 10
    while endpoint.metric("expertile_serve_waiting") < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert endpoint.terminate() == 0
    for each in threads:
        each.join()
    assert pieces[-1] == "data: [DONE]"
    assert json.loads(pieces[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
    assert [answer.json()["usage"]["completion_tokens"] for answer in answers] == [60] * 3
    assert "Traceback" not in endpoint.log and KEY not in endpoint.log


def ended_by(*arguments, **environment) -> str:
    """The sentence that a start ends with."""
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, *arguments], capture_output=True, text=True, timeout=60,
        env=os.environ | environment,
    )  # fmt: skip
    assert done.returncode == 1
    return done.stderr.splitlines()[-1]


def test_a_folder_without_a_model_ends_it_with_a_sentence(tmp_path):
    assert "config.json is not there" in ended_by(SAGEMAKER_MODEL_PATH=str(tmp_path))


def test_a_variable_nobody_knows_ends_it_with_its_name():
    said = ended_by(SAGEMAKER_MODEL_PATH=str(TINY), SM_EXPERTILE_MAX_SEQ="3")
    assert "SM_EXPERTILE_MAX_SEQ=3: only vLLM knows this" in said


@pytest.mark.parametrize(
    "variable, value, allowed",
    [
        ("TRUST_REMOTE_CODE", "maybe", "give true or false"),
        ("MAX_SEQS", "abc", "give a whole number"),
        ("MAX_SEQS", "true", "give a whole number"),
        ("MAX_SEQS", "0", "give at least 1"),
        ("QUANT", "true", "give the value of --quant"),
        ("QUANT", "int3", "use one of none"),
        ("ENGINE", "best", "use one of auto"),
    ],
)
def test_a_variable_with_a_value_that_cannot_be_is_named(variable, value, allowed):
    said = ended_by(SAGEMAKER_MODEL_PATH=str(TINY), **{f"SM_EXPERTILE_{variable}": value})
    assert f"SM_EXPERTILE_{variable}={value}: " in said and allowed in said
