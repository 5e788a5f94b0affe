"""schemathesis against the served OpenAPI: no answer that the document does not allow, and never a 500."""

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from serve_process import TINY, Server

schemathesis = pytest.importorskip("schemathesis")
from schemathesis.specs.openapi.checks import positive_data_acceptance  # noqa: E402

PATHS = {
    "GET /health", "GET /metrics", "GET /ping", "GET /status", "GET /v1/models", "GET /v1/models/{name}",
    "POST /invocations", "POST /v1/chat/completions", "POST /v1/completions",
}  # fmt: skip


@pytest.fixture(scope="module")
def small():
    """With a context of 24 tokens, so that no generated request takes long."""
    with Server(str(TINY), "--max-seqs", "4", "--max-queue", "200", "--max-len", "24") as server:
        yield server.wait_ready()


@pytest.fixture(scope="module")
def document(small):
    return schemathesis.openapi.from_url(f"{small.url}/openapi.json")


def test_every_path_is_documented(document):
    assert {each.ok().label for each in document.get_all_operations()} == PATHS


@pytest.mark.parametrize("mode", list(schemathesis.GenerationMode), ids=str)
@pytest.mark.parametrize("label", sorted(PATHS))
def test_answers_are_as_documented(document, label, mode):
    operation = document.find_operation_by_label(label)

    @settings(
        max_examples=settings().max_examples // 6,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def check(case):
        case.call_and_validate(timeout=30, excluded_checks=[positive_data_acceptance])  # it knows no context

    if mode is schemathesis.GenerationMode.POSITIVE or operation.body:  # a GET has nothing to be wrong
        check()


def test_it_is_still_well(small):
    assert small.idle() and "Traceback" not in small.log
    assert small.post("/v1/completions", dict(prompt="x", max_tokens=2)).status_code == 200
