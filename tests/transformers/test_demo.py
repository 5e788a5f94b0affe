"""tiny-moe, as the demo runs it: the losses that transformers' own experts have, and what fp8 may cost."""

from pathlib import Path

import pytest

pytest.importorskip("transformers")
torch = pytest.importorskip("torch")

from expertile import demo  # noqa: E402
from expertile.errors import ExpertileError  # noqa: E402

FOLDER = Path(__file__).parents[2] / "models" / "tiny-moe"
WINDOWS = 4


@pytest.fixture(scope="module")
def loaded():
    return demo.load(FOLDER)


@pytest.fixture(scope="module")
def losses(loaded):
    model, tokenizer = loaded
    text = (FOLDER / "eval.txt").read_text(encoding="utf-8")
    ids = torch.tensor(tokenizer(text[:20000], verbose=False)["input_ids"], device=model.device)
    windows = ids[: WINDOWS * demo.WINDOW].view(WINDOWS, demo.WINDOW)
    return demo.measure_losses(model, windows, (demo.STOCK, *demo.OURS), lambda done: None)


def test_the_tokenizer_needs_no_network_and_knows_its_end(loaded):
    _, tokenizer = loaded
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, len(tokenizer)) == (0, 0, 4096)
    text = "def f(x):\n    return x ** 2  # naïve\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_the_model_is_loaded_with_our_experts(loaded):
    model, _ = loaded
    assert model.config._experts_implementation == "expertile" and model.dtype == torch.bfloat16


def test_the_loss_in_bf16_is_that_of_transformers(losses):
    stock, ours = losses[demo.STOCK], losses["expertile"]
    assert 3.5 < stock.per_token < 4.2  # the first windows are harder than the rest; knowing nothing would be 8.3
    assert ours.tokens == stock.tokens == WINDOWS * (demo.WINDOW - 1)
    assert abs(ours.per_token - stock.per_token) < 0.005


@pytest.mark.parametrize("name", demo.OURS[1:])
def test_fp8_experts_cost_little_but_are_really_quantised(losses, name):
    difference = losses[name].per_token - losses["expertile"].per_token
    assert 0 < abs(difference) < 0.03


def test_greedy_text_is_the_same_as_with_transformers_experts(loaded):
    model, tokenizer = loaded
    ids = tokenizer(demo.PROMPTS[0], return_tensors="pt").to(model.device)
    texts = []
    for name in (demo.STOCK, "expertile"):
        model.set_experts_implementation(name)
        texts.append(model.generate(**ids, max_new_tokens=8, do_sample=False)[0].tolist())
    assert texts[0] == texts[1]


def test_a_folder_without_a_model_is_named(tmp_path):
    with pytest.raises(ExpertileError, match=str(tmp_path)):
        demo.run(tmp_path)


def test_too_few_tokens_are_refused():
    with pytest.raises(ExpertileError, match="eval_tokens=5"):
        demo.run(FOLDER, 5)
