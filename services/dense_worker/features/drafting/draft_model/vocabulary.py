"""Compares the vocabulary of a draft model with that of the served model."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from services.common.errors import ModelError

_FILE = "tokenizer.json"


def check_vocabulary(draft: Path, draft_size: int, model: Path, model_size: int) -> None:
    """Raises `ModelError` if a token id means different texts to the models in the directories `draft` and `model`.

    It names both sizes and, if both have a tokenizer.json, the first token that differs. Special tokens may differ: to
    have other names for the same purpose is usual.
    """
    sizes = f"the draft model {draft} has a vocabulary of {draft_size} tokens, the model {model} one of {model_size}"
    difference = _first_difference(draft / _FILE, model / _FILE)
    if difference is not None:
        raise ModelError(f"{sizes}, and {difference}")
    if draft_size != model_size:
        raise ModelError(f"{sizes}; they must be the same")


def _first_difference(draft: Path, model: Path) -> str | None:
    """None: there is none, or one of the files is missing."""
    if not (draft.is_file() and model.is_file()):
        return None
    of_draft, of_model = _read(draft), _read(model)
    special = _special_ids(of_draft) & _special_ids(of_model)
    for token_id in range(max(of_draft.get_vocab_size(), of_model.get_vocab_size())):
        texts = of_draft.id_to_token(token_id), of_model.id_to_token(token_id)
        if texts[0] != texts[1] and token_id not in special:
            return f"token {token_id} is {texts[0]!r} there and {texts[1]!r} here"
    return None


def _read(file: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises nothing more specific
        raise ModelError(f"{file} cannot be read: {error}") from error


def _special_ids(tokenizer: Tokenizer) -> set[int]:
    return {token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special}
