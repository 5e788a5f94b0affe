"""The OpenAI surface with OpenAI's own client, several clients at once, against transformers' generate()."""

from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
import torch

PROMPTS = ["The :mod:`json` module", "Return a new list", "def main():\n", "import os", "class Foo", "The function"]
TOKENS = 40


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def greedy(tiny):
    """Prompt -> what generate() writes behind it."""
    model, tokenizer = tiny

    def text(prompt, tokens=TOKENS):
        ids = torch.tensor([tokenizer(prompt)["input_ids"]])
        whole = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False)
        return tokenizer.decode(whole[0, ids.shape[1] :], skip_special_tokens=True)

    return text


def complete(client, prompt, **options):
    return client.completions.create(
        **dict(model="tiny-moe", prompt=prompt, temperature=0, max_tokens=TOKENS) | options
    )


def test_greedy_text_of_several_clients_at_once_is_that_of_generate(client, greedy):
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        answers = list(pool.map(lambda prompt: complete(client, prompt), PROMPTS))
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert answer.choices[0].text == greedy(prompt)
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage.completion_tokens == TOKENS


def test_a_prompt_of_many_chunks_is_answered_as_by_generate(client, greedy):
    prompt = "".join(f"def function_{i}(x):\n    return x + {i}\n\n" for i in range(40))
    answer = complete(client, prompt, max_tokens=24)
    assert answer.usage.prompt_tokens > 5 * 64
    assert answer.choices[0].text == greedy(prompt, 24)


def test_a_stream_is_the_answer_in_pieces_with_usage(client, greedy):
    chunks = list(complete(client, PROMPTS[0], stream=True, stream_options={"include_usage": True}))
    *pieces, last = chunks
    assert "".join(chunk.choices[0].text for chunk in pieces) == greedy(PROMPTS[0])
    assert len(pieces) > TOKENS / 2 and {chunk.id for chunk in chunks} == {chunks[0].id}
    assert pieces[-1].choices[0].finish_reason == "length"
    assert last.choices == [] and last.usage.completion_tokens == TOKENS
    assert last.usage.total_tokens == last.usage.prompt_tokens + TOKENS


@pytest.mark.parametrize("at", [5, 12, 30])
@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_that_straddle_tokens(client, greedy, at, stream):
    whole = greedy(PROMPTS[5])
    stop = whole[at : at + 7]
    answer = complete(client, PROMPTS[5], stop=[stop, "never there"], stream=stream)
    choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
    assert "".join(choice.text for choice in choices) == whole[: whole.index(stop)]
    assert choices[-1].finish_reason == "stop"


def test_the_end_of_text_token_stops_unless_it_is_ignored(client, tiny):
    prompt = "<|endoftext|>"  # read as the special token
    assert complete(client, prompt, max_tokens=1).usage.prompt_tokens == 1
    answer = complete(client, PROMPTS[0], max_tokens=300, temperature=1.5, seed=5, extra_body={"ignore_eos": True})
    assert answer.usage.completion_tokens == 300


def test_the_same_seed_gives_the_same_choices_whoever_else_is_there(client):
    def ask(seed):
        found = complete(client, PROMPTS[3], temperature=1.0, top_p=0.95, n=3, seed=seed, max_tokens=16)
        return [choice.text for choice in sorted(found.choices, key=lambda choice: choice.index)]

    alone = ask(11)
    with ThreadPoolExecutor(3) as pool:
        among = list(pool.map(ask, (11, 12, 11)))
    assert len(set(alone)) == 3
    assert among[0] == among[2] == alone != among[1]


def test_several_prompts_of_text_or_tokens_in_one_request(client, greedy, tiny):
    ids = [tiny[1](prompt)["input_ids"] for prompt in PROMPTS[:2]]
    for prompts in (PROMPTS[:2], ids):
        answer = complete(client, prompts)
        assert [choice.text for choice in answer.choices] == [greedy(prompt) for prompt in PROMPTS[:2]]
        assert answer.usage.prompt_tokens == sum(map(len, ids))


def test_chat_without_a_template_is_plain_lines(client, greedy):
    messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "What is json?"}]
    written = greedy("system: Be short.\nuser: What is json?\nassistant:")
    wanted = written.partition("\nuser:")[0]  # where the model begins to write the other's part
    options = dict(model="tiny-moe", messages=messages, temperature=0, max_tokens=TOKENS)
    answer = client.chat.completions.create(**options)
    assert answer.choices[0].message.content == wanted
    chunks = list(client.chat.completions.create(**options, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == wanted
    assert chunks[-1].choices[0].finish_reason == ("length" if wanted == written else "stop")


def test_models_are_listed(client):
    [model] = client.models.list().data
    assert (model.id, model.max_model_len) == ("tiny-moe", 2048)
    assert client.models.retrieve("tiny-moe").id == "tiny-moe"
    with pytest.raises(openai.NotFoundError, match="'gpt-4' is not served here"):
        client.models.retrieve("gpt-4")


def test_errors_are_what_the_client_understands(client):
    with pytest.raises(openai.BadRequestError) as caught:
        complete(client, "x", temperature=-1)
    assert caught.value.param == "temperature" and caught.value.type == "invalid_request_error"
    with pytest.raises(openai.NotFoundError, match="'gpt-4' is not served here"):
        complete(client, "x", model="gpt-4")
    with pytest.raises(openai.BadRequestError) as caught:
        complete(client, "x " * 3000)
    assert caught.value.code == "context_length_exceeded"


def test_metrics_count_what_was_asked(server, client):
    before = server.metric("expertile_serve_generated_tokens_total")
    prompts = server.metric("expertile_serve_prompt_tokens_total")
    ok = server.metric("expertile_serve_requests_total", path="/v1/completions", status="200")
    complete(client, PROMPTS[0], max_tokens=7)
    assert server.metric("expertile_serve_generated_tokens_total") == before + 7
    assert server.metric("expertile_serve_prompt_tokens_total") == prompts + 8
    assert server.metric("expertile_serve_requests_total", path="/v1/completions", status="200") == ok + 1
    assert server.metric("expertile_serve_ttft_seconds_count") > 0 < server.metric("expertile_serve_tpot_seconds_count")
    assert server.metric("expertile_serve_ready") == 1
    assert server.metric("expertile_serve_compiles_after_ready") == 0
    assert server.metric("expertile_serve_plan_info", tokens="1", backend="torch") == 1


def test_the_page_and_what_it_shows(server):
    page = server.get("/")
    assert page.status_code == 200 and "page/page.js" in page.text
    for name in ("page.js", "style.css"):
        assert server.get(f"/page/{name}").status_code == 200
    status = server.get("/status").json()
    assert (status["model"], status["state"], status["slots"]) == ("tiny-moe", "ready", 4)
    plan = status["plans"][0]
    assert (plan["layers"], plan["count"], plan["backend"]) == ("model.layers.*.mlp.experts", 6, "torch")
    assert "no triton: needs compute capability 9.0" in plan["reasons"]
