"""`Vocabulary`: what llguidance has to know of a model's tokenizer, read without loading the tokenizer itself."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from services.common.tokenizer_files import has_tokenizer
from services.grammar.byte_tokenizer import byte_tokenizer
from services.grammar.grammar_error import GrammarError

if TYPE_CHECKING:
    from llguidance import LLTokenizer

_END = "<|end of the form|>"  # stands for EOS where the model has none

# Parts of the vocabulary, by regular expressions. Where a form allows all texts that one of them matches, as in a
# string of JSON, its tokens need not be looked at one by one. llguidance's own parts have no lengths below 10: so near
# the end of a string with a `maxLength` a mask takes a hundred times as long as elsewhere in it.
_LENGTHS = (2, 4, 6, 8, 10, 14, 20, 30)  # of the characters that a token may have
_CHARACTER = r'[^"\\\x00-\x1F\x7F]'
SLICES = [r"[\x20\x0A\x0D\x09]+", *(f"{_CHARACTER}{{1,{length}}}" for length in _LENGTHS), f"{_CHARACTER}+"]


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens of a model."""

    tokenizer_json: str  # as in tokenizer.json, all added tokens included
    num_tokens: int  # of the model or of the tokenizer, whichever is more
    eos_token_ids: tuple[int, ...]  # at least one
    special_tokens: Mapping[str, int]

    def load(self) -> LLTokenizer:
        """Holds the interpreter lock for a third of a second for 128,000 tokens.

        Raises `GrammarError` for a tokenizer that llguidance cannot read.
        """
        from llguidance import LLTokenizer

        try:
            return LLTokenizer(
                self.tokenizer_json, n_vocab=self.num_tokens, eos_token=list(self.eos_token_ids), slices=SLICES
            )
        except ValueError as error:
            text = f"structured output is not possible with the tokenizer of this model: {error}"
            raise GrammarError(text) from error


def read_vocabulary(
    path: Path, vocab_size: int, eos_token_ids: Collection[int], is_optional: bool = False
) -> Vocabulary:
    """The vocabulary of a model directory; `vocab_size`: number of logits.

    `is_optional`: a directory without a tokenizer gets one token per byte. Raises `ModelError` if it has none.
    """
    tokenizer = json.loads(_read_tokenizer_json(path, is_optional))
    tokenizer["truncation"] = tokenizer["padding"] = None
    added = tokenizer["added_tokens"]
    tokens: dict[str, int] = {each["content"]: each["id"] for each in added}
    for token_id, token in _tokens_of_config(path):
        if token["content"] not in tokens:
            tokens[token["content"]] = token_id
            added.append({"id": token_id, **token})
    vocab = tokenizer["model"]["vocab"]
    token_ids = set(tokens.values()) | set(vocab.values() if isinstance(vocab, dict) else range(len(vocab)))
    known = tuple(each for each in eos_token_ids if each in token_ids)
    if not known:
        known = (max(token_ids) + 1,)
        token_ids.update(known)
        added.append(_special_token(known[0], _END))
    added.sort(key=lambda token: token["id"])
    special_tokens = {each["content"]: each["id"] for each in added if each["special"] or _is_tag(each["content"])}
    return Vocabulary(json.dumps(tokenizer), max(vocab_size, max(token_ids) + 1), known, special_tokens)


def _read_tokenizer_json(path: Path, is_optional: bool) -> str:
    if (path / "tokenizer.json").is_file():
        return (path / "tokenizer.json").read_text(encoding="utf-8")
    if is_optional and not has_tokenizer(path):
        return byte_tokenizer().to_str()
    from services.grammar.hf_tokenizer import load_hf_tokenizer  # takes seconds: it converts the model's own files

    return load_hf_tokenizer(path).backend_tokenizer.to_str()


def _tokens_of_config(path: Path) -> Iterable[tuple[int, dict[str, Any]]]:
    """Added tokens that transformers reads from tokenizer_config.json, in addition to those of tokenizer.json."""
    config = path / "tokenizer_config.json"
    if config.is_file():
        for token_id, token in json.loads(config.read_text(encoding="utf-8")).get("added_tokens_decoder", {}).items():
            yield int(token_id), {**_special_token(int(token_id), ""), **token}


def _is_tag(content: str) -> bool:
    """Whether llguidance takes an added token for special because of its name: its characters are no text then."""
    return content.startswith("<") and content.endswith(">")


def _special_token(token_id: int, content: str) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token_id, "content": content, **flags, "special": True}
