"""Draft models that cannot draft for the served model are refused at start, with the value and the limit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from services.common.config import EMBEDDED_MODEL, Config, DenseSection, ModelSection, SchedulerSection
from services.common.errors import ConfigError, ModelError
from services.common.resolve import ResolvedModel
from services.dense_worker.build import resolve_dense_model
from services.dense_worker.features.drafting.draft_model.load import load_draft_model
from services.dense_worker.features.drafting.draft_model.model import DraftModel
from services.dense_worker.features.drafting.kv_cache.draft_blocks import BLOCK_SIZE
from tests.support.dense.family_models import make_family_model
from tests.support.reference import VOCAB_SIZE, make_served_model

SIZES = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}
BLOCK_BYTES = BLOCK_SIZE * 2 * 2 * 2 * 16 * 4  # layers, keys and values, heads, dimensions, float32


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_served_model(tmp_path_factory.mktemp("draft"), "llama", **SIZES)


@pytest.fixture(scope="module")
def model() -> ResolvedModel:
    return resolve_dense_model(Config(dense=DenseSection(device="cpu")))


def load(draft: Path, model: ResolvedModel, load_format: str = "safetensors", **options: int) -> DraftModel:
    section = SchedulerSection(speculation="draft_model", draft_model=draft, **options)
    source = ModelSection(load_format=load_format)  # type: ignore[arg-type]
    loaded = load_draft_model(section, source, model)
    assert loaded is not None
    return loaded


def test_its_cache_has_room_for_all_sequences_but_no_more_than_it_may_have(draft: Path, model: ResolvedModel) -> None:
    assert load(draft, model).num_blocks == 1 + 64 * 512 // BLOCK_SIZE, "the draft model ends at 512 tokens"
    assert load(draft, model, max_num_seqs=2).num_blocks == 1 + 2 * 512 // BLOCK_SIZE
    assert load(draft, model, draft_cache_bytes=5 * BLOCK_BYTES + 1).num_blocks == 5
    assert load(draft, model).max_len == 512


def test_a_cache_without_room_for_a_token_is_refused(draft: Path, model: ResolvedModel) -> None:
    named = f"draft_cache_bytes is {2 * BLOCK_BYTES - 1}, .* at least {2 * BLOCK_BYTES}"
    with pytest.raises(ConfigError, match=named):
        load(draft, model, draft_cache_bytes=2 * BLOCK_BYTES - 1)
    assert load(draft, model, draft_cache_bytes=2 * BLOCK_BYTES).num_blocks == 2


def test_random_weights_need_no_files_but_the_config(draft: Path, model: ResolvedModel, tmp_path: Path) -> None:
    shutil.copy(draft / "config.json", tmp_path)
    assert load(tmp_path, model, "dummy").config.num_layers == 2
    with pytest.raises(ModelError, match="safetensors"):
        load(tmp_path, model)


def test_another_vocabulary_is_refused_with_both_sizes(model: ResolvedModel, tmp_path: Path) -> None:
    make_family_model(tmp_path, "mistral")
    with pytest.raises(ModelError, match=f"vocabulary of 96 tokens, the model .* one of {VOCAB_SIZE}; they must"):
        load(tmp_path, model)


def with_tokens(draft: Path, path: Path, texts: dict[str, str]) -> Path:
    """A copy in which these tokens have other texts."""
    shutil.copytree(draft, path)
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    for old, new in texts.items():
        if old in vocab:
            vocab[new] = vocab.pop(old)
        for token in tokenizer["added_tokens"]:
            if token["content"] == old:
                token["content"] = new
    tokenizer["model"]["merges"] = []
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    return path


def test_the_first_token_that_differs_is_named(draft: Path, model: ResolvedModel, tmp_path: Path) -> None:
    vocab = json.loads((EMBEDDED_MODEL / "tokenizer.json").read_text())["model"]["vocab"]
    by_id = {token_id: text for text, token_id in vocab.items()}
    path = with_tokens(draft, tmp_path / "other", {by_id[900]: "later", by_id[500]: "sooner"})
    with pytest.raises(ModelError) as raised:
        load(path, model)
    message = str(raised.value)
    assert f"token 500 is 'sooner' there and {by_id[500]!r} here" in message
    assert f"{path} has a vocabulary of {VOCAB_SIZE} tokens" in message


def test_special_tokens_may_have_other_names(draft: Path, model: ResolvedModel, tmp_path: Path) -> None:
    added = json.loads((EMBEDDED_MODEL / "tokenizer.json").read_text())["added_tokens"]
    special = next(token["content"] for token in added if token["special"])
    assert load(with_tokens(draft, tmp_path / "other", {special: "<|other|>"}), model)


def test_without_tokenizer_files_only_sizes_are_compared(draft: Path, model: ResolvedModel, tmp_path: Path) -> None:
    shutil.copytree(draft, tmp_path / "other")
    (tmp_path / "other" / "tokenizer.json").unlink()
    assert load(tmp_path / "other", model)


def test_a_tokenizer_that_cannot_be_read_is_named(draft: Path, model: ResolvedModel, tmp_path: Path) -> None:
    shutil.copytree(draft, tmp_path / "other")
    (tmp_path / "other" / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match=r"other/tokenizer\.json cannot be read"):
        load(tmp_path / "other", model)


@pytest.mark.parametrize(("variant", "lack"), [("mixtral", "a mixture of experts"), ("deepseek_v2", "experts")])
def test_unsupported_models_are_refused_by_family(
    variant: str, lack: str, model: ResolvedModel, tmp_path: Path
) -> None:
    path = make_family_model(tmp_path, variant, vocab_size=VOCAB_SIZE)
    with pytest.raises(ModelError, match=rf"\({variant}\) has .*{lack}.*, which draft models may not have"):
        load(path, model)


@pytest.mark.parametrize("text", [None, "{", '{"model_type": "no-such"}'])
def test_a_directory_without_a_model_is_refused(model: ResolvedModel, tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=str(tmp_path)):
        load(tmp_path, model)


def test_it_has_the_dtype_of_the_served_model(draft: Path, model: ResolvedModel) -> None:
    half = ResolvedModel(model.config, torch.bfloat16, model.device, model.max_model_len)
    loaded = load(draft, half, draft_cache_bytes=BLOCK_BYTES)
    assert loaded.num_blocks == 2, "keys and values have half the size"
