"""Tokenizers whose class is code that comes with the model: ChatGLM, Qwen 1, Baichuan, InternLM and others."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from services.common.config import EMBEDDED_MODEL
from services.common.errors import ModelError
from services.grammar.hf_tokenizer import load_hf_tokenizer
from tests.support.dense.family_models import make_family_model

TEXT = "Once upon a time, 12 dogs."


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """As the files of InternLM are: a SentencePiece model, and a Python file that would say that it ran."""
    config = json.loads((EMBEDDED_MODEL / "tokenizer_config.json").read_text())
    own = {"auto_map": {"AutoTokenizer": ["tokenization_own.OwnTokenizer", None]}, "tokenizer_class": "OwnTokenizer"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | own))
    (tmp_path / "tokenizer.model").write_bytes(b"\x0a\x05")
    (tmp_path / "tokenization_own.py").write_text("raise AssertionError('this code has run')")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "internlm"}))
    return tmp_path


def test_code_is_refused_with_what_to_do(path: Path) -> None:
    message = "code that comes with the model, which is never run: put a tokenizer.json with the same vocabulary there"
    with pytest.raises(ModelError, match=message):
        load_hf_tokenizer(path)
    (path / "tokenizer.model").unlink()  # as Qwen 1, which has a file of tiktoken
    with pytest.raises(ModelError, match=message):
        load_hf_tokenizer(path, is_optional=True)


def test_a_tokenizer_json_takes_the_place_of_code(path: Path) -> None:
    for name in ("tokenizer.json", "chat_template.jinja"):
        shutil.copy(EMBEDDED_MODEL / name, path)
    found, expected = load_hf_tokenizer(path), load_hf_tokenizer(EMBEDDED_MODEL)
    assert found.encode(TEXT) == expected.encode(TEXT)
    assert found.decode(found.encode(TEXT), skip_special_tokens=True) == TEXT
    assert found.chat_template == expected.chat_template
    assert found.eos_token_id == expected.eos_token_id


def test_a_model_that_transformers_cannot_read_has_its_tokenizer_all_the_same(tmp_path: Path) -> None:
    """As Replit Code 1.5, an MPT with grouped heads."""
    make_family_model(tmp_path, "mpt-grouped")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED_MODEL / name, tmp_path)
    found, expected = load_hf_tokenizer(tmp_path), load_hf_tokenizer(EMBEDDED_MODEL)
    assert found.encode(TEXT) == expected.encode(TEXT) and type(found) is type(expected)
