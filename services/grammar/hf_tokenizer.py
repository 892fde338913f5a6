"""Loads a model's tokenizer, as gateway and dense worker read it."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from services.common.errors import ModelError
from services.grammar.byte_tokenizer import TOKENIZER_FILES, byte_tokenizer


def load_hf_tokenizer(path: Path, is_optional: bool = False) -> PreTrainedTokenizerFast:
    """The tokenizer of a Hugging Face directory, without network access.

    `is_optional`: a directory without tokenizer files gets one token per UTF-8 byte (for dummy weights).
    Raises `ModelError` if there is none, or if it cannot be read or is not a fast one.
    """
    if not any((path / name).exists() for name in TOKENIZER_FILES):
        if is_optional:
            return PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer())
        raise ModelError(f"model directory {path} has no tokenizer (none of {', '.join(TOKENIZER_FILES)})")
    try:
        hf_tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            path, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # transformers, tokenizers and JSON errors have no common base
        raise ModelError(f"the tokenizer in {path} cannot be read: {error}") from error
    if not isinstance(hf_tokenizer, PreTrainedTokenizerFast):
        raise ModelError(f"the tokenizer in {path} is a {type(hf_tokenizer).__name__}, a fast one is needed")
    return hf_tokenizer
