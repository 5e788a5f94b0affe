"""A checkpoint that is not whole is refused with its reason and exit code 2; nothing random is ever served."""

import json
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from serve_process import TINY

from expertile.errors import UnsupportedProblem
from expertile.serve.model import LanguageModel
from expertile.serve.settings import Settings

INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def tensors():
    return {name: each for path in TINY.glob("*.safetensors") for name, each in load_file(path).items()}


@pytest.fixture
def folder(tmp_path):
    """tiny-moe, to be spoilt."""
    shutil.copytree(TINY, tmp_path / "model")
    return tmp_path / "model"


def save_as_one(folder, tensors):
    for path in [*folder.glob("*.safetensors"), folder / INDEX]:
        path.unlink()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def configure(folder, **fields):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def refusal(folder) -> str:
    with pytest.raises(UnsupportedProblem) as caught:
        LanguageModel.load(Settings(folder, max_seqs=1))
    said = str(caught.value)
    assert "\n" not in said and len(said) < 700
    return said


@pytest.mark.parametrize(
    "gone, named",
    [
        ("model.layers.1.input_layernorm.weight", "tensors are missing"),
        ("model.embed_tokens.weight", "lm_head.weight, model.embed_tokens.weight"),
        ("model.layers.0.mlp.experts", "model.layers.0.mlp.experts.down_proj"),
        (
            "model.layers.0.mlp.experts.15.",
            "model.layers.0.mlp.experts.down_proj is [15, 256, 128], not [16, 256, 128]",
        ),
        ("model.layers.0.mlp.experts.3.up_proj", "conversion of the weights"),
        ("model.layers.", ", ... ("),
    ],
)
def test_a_checkpoint_with_missing_tensors_is_refused(folder, tensors, gone, named):
    save_as_one(folder, {name: each for name, each in tensors.items() if not name.startswith(gone)})
    assert named in refusal(folder)


def test_a_shard_without_what_the_index_lists_is_refused(folder, tensors):
    name = "model.layers.0.mlp.experts.3.up_proj.weight"
    shard = json.loads((folder / INDEX).read_text())["weight_map"][name]
    held = load_file(folder / shard)
    save_file({each: held[each] for each in held if each != name}, folder / shard, metadata={"format": "pt"})
    assert f"{shard} lacks tensors that {INDEX} lists: {name}" in refusal(folder)


def test_tied_weights_are_not_missing_and_tensors_too_many_are_no_reason(folder, tensors, caplog):
    assert "lm_head.weight" not in tensors
    save_as_one(folder, tensors | {"of.something.else": torch.ones(3)})
    LanguageModel.load(Settings(folder, max_seqs=1))
    assert ["of.something.else" in each.message for each in caplog.records if each.name == "expertile.serve"] == [True]
    configure(folder, tie_word_embeddings=False)
    assert "lm_head.weight" in refusal(folder)


@pytest.mark.parametrize(
    "fields, said",
    [
        (dict(hidden_size=128), "model.embed_tokens.weight is [4096, 256], not [4096, 128]"),
        (dict(num_hidden_layers=7), "model.layers.6.input_layernorm.weight"),
        (dict(num_hidden_layers=5), "beyond num_hidden_layers of config.json: model.layers.5."),
        (dict(num_attention_heads=0), "num_attention_heads=0 in"),
        (dict(hidden_size="wide"), "'hidden_size' expected int, got str"),
        (dict(num_experts_per_tok=99), "num_experts_per_tok=99 in"),
        (dict(num_experts_per_tok=0), "1 to 16 of its 16 experts"),
        (dict(max_position_embeddings=-5), "max_position_embeddings=-5"),
        (dict(hidden_act="nope"), "hidden_act='nope' in"),
        (dict(dtype="nope"), "AttributeError"),
        (dict(model_type=[]), "TypeError"),
    ],
    ids=str,
)
def test_a_configuration_that_does_not_fit_is_refused(folder, fields, said):
    configure(folder, **fields)
    assert said in refusal(folder)


def test_layers_that_predict_further_tokens_may_follow(folder):
    configure(folder, num_hidden_layers=5, num_nextn_predict_layers=1)
    LanguageModel.load(Settings(folder, max_seqs=1))


def test_a_chat_template_that_is_no_jinja_is_refused(folder):
    path = folder / "chat_template.jinja"
    path.write_text("{% for message in messages %}{{ message.content }}{% endfor")
    assert f"the chat template in {folder} is no Jinja" in refusal(folder)
    path.write_text("{% generation %}{{ raise_exception('only later') }}{% endgeneration %}")
    LanguageModel.load(Settings(folder, max_seqs=1))


@pytest.mark.parametrize("left", [(), ("tokenizer_config.json",)], ids=["nothing", "tokenizer_config.json"])
def test_a_folder_without_a_tokenizer_is_refused(folder, left):
    for name in {"tokenizer.json", "tokenizer_config.json"} - set(left):
        (folder / name).unlink()
    assert "tokenizer" in refusal(folder)


@pytest.mark.parametrize(
    "name, content, said",
    [
        ("config.json", b"[]", "holds no JSON object"),
        ("config.json", b"\xff{", "cannot be read"),
        ("config.json", b"{", "cannot be read"),
        ("tokenizer.json", b'{"model"', "cannot be read"),
        ("tokenizer.json", b"{}", "the tokenizer in"),
        ("generation_config.json", b"3", "holds no JSON object"),
        (INDEX, b'{"weight_map": 3}', "has no weight_map"),
        (INDEX, b'{"weight_map": {"a": "gone.safetensors"}}', "gone.safetensors is not there"),
        ("model-00001-of-00002.safetensors", b"", "is not whole"),
        ("model-00002-of-00002.safetensors", None, "is not whole"),
    ],
)
def test_a_file_that_is_not_whole_is_named(folder, name, content, said):
    path = folder / name
    path.write_bytes(path.read_bytes()[:-1000] if content is None else content)
    found = refusal(folder)
    assert said in found and (name in found or content == b"{}" or "gone" in found)


def test_the_command_ends_with_one_line_and_exit_code_2(folder):
    path = folder / "model-00002-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    command = [sys.executable, "-m", "expertile.cli", "serve", str(folder), "--engine", "embedded", "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith(f"expertile: {path} is not whole")
