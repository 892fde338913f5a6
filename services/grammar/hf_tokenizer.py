"""Loads a model's tokenizer, as gateway and dense worker read it."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from services.common.errors import ModelError
from services.common.json_files.read_json import read_json
from services.common.tokenizer_files import check_tokenizer, has_tokenizer
from services.grammar.byte_tokenizer import byte_tokenizer


def load_hf_tokenizer(path: Path, is_optional: bool = False) -> PreTrainedTokenizerFast:
    """The tokenizer of a Hugging Face directory, without network access.

    `is_optional`: a directory without tokenizer files gets one token per UTF-8 byte (for dummy weights).
    Code that comes with a model is never run: a tokenizer.json takes its place. Raises `ModelError` if there is none,
    or if it cannot be read or is not a fast one.
    """
    needs_code = _needs_code(path)
    if needs_code and not (path / "tokenizer.json").exists():
        raise ModelError(
            f"the tokenizer in {path} is code that comes with the model, which is never run: put a tokenizer.json with"
            " the same vocabulary there"
        )
    if is_optional and not has_tokenizer(path):
        return PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer())
    check_tokenizer(path)
    try:
        if needs_code:  # `AutoTokenizer` would refuse the code rather than read tokenizer.json
            return PreTrainedTokenizerFast.from_pretrained(path, local_files_only=True)
        hf_tokenizer = _read(path)
    except Exception as error:  # transformers, tokenizers and JSON errors have no common base
        raise ModelError(f"the tokenizer in {path} cannot be read: {error}") from error
    if not isinstance(hf_tokenizer, PreTrainedTokenizerFast):
        raise ModelError(f"the tokenizer in {path} is a {type(hf_tokenizer).__name__}, a fast one is needed")
    return hf_tokenizer


def _read(path: Path) -> PreTrainedTokenizerBase:
    """With the class that transformers has for the model's type.

    It reads config.json for the type, and refuses fields that its own class of the model lacks, as Replit's MPT has
    them. Then the type alone is read.
    """
    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except StrictDataclassError:
        config = PreTrainedConfig.from_pretrained(path, local_files_only=True)
        return AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False, config=config)


def _needs_code(path: Path) -> bool:
    """Whether the tokenizer's class is in a Python file of the directory or of its repository."""
    config = read_json(path / "tokenizer_config.json") or {}
    return isinstance(config.get("auto_map"), dict) and "AutoTokenizer" in config["auto_map"]
