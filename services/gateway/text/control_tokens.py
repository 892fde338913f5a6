"""Keeps special tokens of a chat template apart from the same characters in a message, which are plain text.

Before the template runs, names of special tokens in the client's strings are replaced by placeholders. In the rendered
text, the remaining names come from the template: they are replaced by stand-ins, and then the placeholders are turned
back into the names. A second tokenizer knows the stand-ins as its special tokens, and to it the names are plain text.
The whole text is tokenized in one call, so that the text around special tokens is split as usual. Chats without special
tokens, which are nearly all, need none of this. A special token of which the template writes one part and a message the
other part is still found.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as RustTokenizer
from transformers import PreTrainedTokenizerFast

NONCE_DIGITS = 24  # enough that nobody guesses them; digits, because no filter of a template changes digits
INDEX_DIGITS = 6  # of the name's index, after the nonce


class ControlTokens:
    """The control tokens of one tokenizer. Its methods may run on several threads at once."""

    def __init__(self, hf_tokenizer: PreTrainedTokenizerFast) -> None:
        backend = hf_tokenizer.backend_tokenizer
        added = backend.get_added_tokens_decoder()
        # Not special, but the model's author wants them protected; older releases of transformers do not have this.
        also = set(getattr(hf_tokenizer, "chat_control_tokens", None) or ())
        # Tokens that match only whole words are treated as words, since a match depends on the characters beside them.
        found = [token for token in added.values() if not token.single_word]
        names = [token.content for token in found if token.special or token.content in also]
        self._names = sorted(names, key=len, reverse=True)  # the longest first, as in the tokenizer
        self._first_characters = {name[0] for name in names}
        # Whether normalization may turn other texts into special tokens, as NFKC does with ＜/s＞.
        self.are_normalized = backend.normalizer is not None and any(token.normalized for token in found)
        self._nonce = new_nonce()
        self._backend, self._ids = self._second_tokenizer(backend, added)

    def marked(self, value: Any, nonce: str) -> Any:
        """The JSON `value` with placeholders for control tokens in all strings; equal if there are none.

        Keys are strings, too: a template writes out the names of a tool's parameters.
        """
        if isinstance(value, str):
            return self._replaced(value, nonce)
        if isinstance(value, Mapping):
            return {self._replaced(key, nonce): self.marked(each, nonce) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [self.marked(each, nonce) for each in value]
        return value

    def unmarked(self, text: str, nonce: str) -> str:
        """`text` with placeholders turned back into the names of the tokens."""
        return re.sub(f"{nonce}([0-9]{{{INDEX_DIGITS}}})", lambda match: self._names[int(match[1])], text)

    def encode(self, text: str, nonce: str, add_special_tokens: bool) -> list[int]:
        """Token ids of a rendered text that may contain placeholders."""
        plain = self.unmarked(self._replaced(text, self._nonce), nonce)
        [encoding] = self._backend.encode_batch_fast([plain], add_special_tokens=add_special_tokens)
        ids = self._ids
        return [ids.get(token_id, token_id) for token_id in encoding.ids]

    def _replaced(self, text: str, nonce: str) -> str:
        """Replaces names by stand-ins. A regular expression would hold the interpreter lock for seconds."""
        if any(character in text for character in self._first_characters):
            for index, name in enumerate(self._names):
                text = text.replace(name, _stand_in(nonce, index))
        return text

    def _second_tokenizer(
        self, backend: RustTokenizer, added: Mapping[int, AddedToken]
    ) -> tuple[RustTokenizer, dict[int, int]]:
        """A tokenizer of the same model with stand-ins for control tokens, and a map from its ids to the first's."""
        stand_ins = {name: _stand_in(self._nonce, index) for index, name in enumerate(self._names)}
        second = RustTokenizer(backend.model)  # shares its memory
        for part in ("normalizer", "pre_tokenizer", "post_processor"):
            if getattr(backend, part) is not None:
                setattr(second, part, getattr(backend, part))
        if any(
            backend.token_to_id(name) in second.encode(name, add_special_tokens=False).ids for name in self._names
        ):  # the model's vocabulary itself turns text into control tokens
            second = _renamed(backend, stand_ins)
        ids: dict[int, int] = {}
        for token_id, token in sorted(added.items()):
            content = stand_ins.get(token.content, token.content)
            copy = AddedToken(
                content,
                single_word=token.single_word,
                lstrip=token.lstrip,
                rstrip=token.rstrip,
                normalized=token.normalized,
                special=token.special,
            )
            (second.add_special_tokens if token.special else second.add_tokens)([copy])
            ids[second.token_to_id(content)] = token_id
        return second, ids


def _renamed(backend: RustTokenizer, names: Mapping[str, str]) -> RustTokenizer:
    """A copy without added tokens, with the given tokens renamed in its vocabulary, so that no text becomes them."""
    state = json.loads(backend.to_str())
    model = state["model"]
    if isinstance(model["vocab"], list):  # Unigram: pairs of piece and score
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in model["vocab"]]
    else:
        model["vocab"] = {names.get(piece, piece): token_id for piece, token_id in model["vocab"].items()}
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    if "merges" in model:
        pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
        model["merges"] = [pair for pair in pairs if not {*pair, "".join(pair)} & names.keys()]
    return RustTokenizer.from_str(json.dumps({**state, "added_tokens": []}))


def new_nonce() -> str:
    """A random nonce for the placeholders of one chat."""
    return f"{secrets.randbelow(10**NONCE_DIGITS):0{NONCE_DIGITS}d}"


def _stand_in(nonce: str, index: int) -> str:
    return f"{nonce}{index:0{INDEX_DIGITS}d}"
