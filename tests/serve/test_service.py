"""Loading, readiness and refusal, inside this process."""

import asyncio

import pytest
import torch
from fastapi.testclient import TestClient
from serve_process import TINY

from expertile.errors import ExpertileError, UnsupportedProblem
from expertile.serve.app import create_app
from expertile.serve.model import LanguageModel
from expertile.serve.service import Service
from expertile.serve.settings import Settings


def refuse(settings):
    raise UnsupportedProblem("this model cannot be served")


def test_before_it_is_ready_requests_get_503_and_health_says_so():
    client = TestClient(create_app(Service(Settings(TINY))))  # not started: it stays in its first state
    answer = client.post("/v1/completions", json=dict(prompt="x"))
    assert answer.status_code == 503 and answer.headers["Retry-After"]
    assert answer.json()["error"] | {"message": ""} == dict(
        message="", type="server_error", param=None, code="not_ready"
    )
    assert client.get("/ping").status_code == client.get("/health").status_code == 503
    assert client.get("/status").json()["state"] == "loading"
    assert "expertile_serve_ready 0.0" in client.get("/metrics").text


def test_a_model_that_cannot_be_loaded_fails_the_service_with_its_reason():
    service, failed = Service(Settings(TINY), load=refuse), []

    async def run():
        ended = asyncio.Event()
        service.start(asyncio.get_running_loop(), lambda: (failed.append(True), ended.set()))
        await asyncio.wait_for(ended.wait(), 10)

    asyncio.run(run())
    assert failed and service.state == "failed" and not service.ready
    client = TestClient(create_app(service))
    assert client.get("/ping").status_code == client.post("/v1/completions", json=dict(prompt="x")).status_code == 503
    assert client.get("/status").json()["why"] == "this model cannot be served"


def test_the_key_guards_everything_that_computes_or_tells():
    client = TestClient(create_app(Service(Settings(TINY, api_key="secret"))))
    paths = ("/v1/models", "/v1/models/x", "/status")
    for headers in (
        {},
        {"Authorization": "secret"},
        {"Authorization": "Bearer secretx"},
        {"Authorization": "Bearer"},
        {"Authorization": "Basic secret"},
    ):
        assert {client.get(path, headers=headers).status_code for path in paths} == {401}
        for path in ("/v1/completions", "/v1/chat/completions", "/invocations"):
            answer = client.post(path, json=dict(prompt="x"), headers=headers)
            assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
    assert client.get("/status", headers={"Authorization": "Bearer secret"}).status_code == 200
    for scheme in ("Bearer", "bearer", "BEARER"):
        headers = {"Authorization": f"{scheme} secret"}
        assert client.post("/invocations", json=dict(prompt="x"), headers=headers).status_code == 503
    assert client.get("/").status_code == client.get("/metrics").status_code == 200
    assert "secret" not in repr(Settings(TINY, api_key="secret"))


@pytest.mark.parametrize(
    "change, said",
    [
        (dict(dtype="int8"), "dtype='int8' is not known"),
        (dict(quant="int4"), "quant='int4' is not known"),
        (dict(guard="loud"), "guard='loud' is not known"),
        (dict(max_seqs=0), "max_seqs=0: give at least 1"),
        (dict(max_seqs=257), "max_seqs=257: the embedded engine takes at most 256"),
        (dict(port=70000), "port=70000"),
        (dict(api_key=""), "API key"),
        (dict(api_key=" "), "API key"),
    ],
)
def test_settings_that_make_no_sense(change, said):
    with pytest.raises(ExpertileError, match=said):
        Settings(TINY, **change)


def copy_without_weights(folder):
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).symlink_to(TINY / name)


def test_pickled_weights_are_never_read(tmp_path):
    copy_without_weights(tmp_path)
    torch.save({"model.norm.weight": torch.ones(256)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(UnsupportedProblem, match="cannot be loaded"):
        LanguageModel.load(Settings(tmp_path))


def test_a_longer_context_than_the_models_is_refused():
    with pytest.raises(UnsupportedProblem, match="the model's context is 2048 tokens"):
        LanguageModel.load(Settings(TINY, max_len=4096))


def test_a_model_without_experts_is_refused(tmp_path):
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=4096
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(TINY).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedProblem, match="no experts"):
        LanguageModel.load(Settings(tmp_path))
