"""Incremental detokenization: the text that each new token adds, in whole characters.

Used by the gateway's event loop, one `Detokenizer` per output. For most tokenizers each token adds its own bytes to the
text: a table that all outputs share maps tokens to bytes, and bytes become characters once complete. For the other
tokenizers a sliding window of tokens is decoded.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Sequence

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
CONTEXT_TOKENS = 4  # tokens before the new one that may influence its text, in a window
MAX_HELD_TOKENS = 8  # tokens held back in a window; a character has at most 4 bytes, hence 4 tokens
MAX_HELD_BYTES = 3

_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")
# Decoders (as named by `tokenizers`) in which the text of a token does not depend on the tokens before it, except that
# the first token of a text may lose a space.
_TOKEN_BY_TOKEN_TYPES = ("ByteLevel", "Metaspace", "WordPiece")  # Llama 3 and Qwen, T5, BERT
_LLAMA_2_STEPS = [
    {"type": "Replace", "pattern": {"String": "\N{LOWER ONE EIGHTH BLOCK}"}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
    {"type": "Strip", "content": " ", "start": 1, "stop": 0},  # Gemma's decoder does not have this step
]


class Detokenizer:
    """Turns the output tokens of one request into text, piece by piece.

    The pieces of `append`, and of `flush` at the end, together are the text that `decode(prompt + output)` adds to
    `decode(prompt)` (without cleaning up spaces), for any token ids and any division into calls. So a space between
    prompt and output appears, although `decode(output)` would drop it. There are two exceptions:

    - The output completes a character that the prompt began: the text starts with that character.
    - A tokenizer with byte fallback decodes a run of byte tokens that is not UTF-8 to replacement characters only, and
      so replaces characters that were complete. Here complete characters stay, and each other byte of the run becomes
      one replacement character.

    At most 3 bytes of an incomplete character are held back. With a tokenizer that needs windows (see `_token_table`),
    at most 8 tokens are held back, and the text is exact if further tokens only append to it and depend on at most 4
    tokens before them.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        prompt_token_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
        kept_special_tokens: frozenset[str] = frozenset(),
    ) -> None:
        """`kept_special_tokens`: the text has these even if special tokens are skipped."""
        table = _token_table(tokenizer, skip_special_tokens, kept_special_tokens)
        self._stream: _ByteStream | _WindowStream
        if table is not None:
            self._stream = _ByteStream(table, prompt_token_ids)
        else:
            self._stream = _WindowStream(tokenizer, prompt_token_ids, skip_special_tokens, kept_special_tokens)
        self.append = self._stream.append  # the text that these tokens complete; called for every token

    def flush(self) -> str:
        """The text that was held back. Call it after the last token."""
        return self._stream.flush()


def token_bytes(
    tokenizer: PreTrainedTokenizerBase, token_id: int, *, skip_special_tokens: bool = False, is_first: bool = False
) -> bytes:
    """The UTF-8 bytes of one token within a text, maybe an incomplete character; of a special token its name.

    `is_first`: the token is at the start of a text, where some decoders remove a space.
    """
    table = _token_table(tokenizer, skip_special_tokens)
    if table is not None:
        return table.first_piece(token_id) if is_first and not table.is_skipped(token_id) else table[token_id]
    return tokenizer.decode(
        [token_id], skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
    ).encode()


class _ByteStream:
    """Collects the bytes of tokens and decodes complete characters."""

    __slots__ = ("_held", "_is_at_start", "_num_prompt_replacements", "_table")

    def __init__(self, table: _TokenTable, prompt_token_ids: Sequence[int]) -> None:
        self._table = table
        self._is_at_start = True  # whether all tokens so far were skipped
        self._held = b""  # bytes of an incomplete character, at most MAX_HELD_BYTES
        self._num_prompt_replacements = 0  # at the end of the decoded prompt, for its incomplete character
        self._begin_with(prompt_token_ids)

    def append(self, token_ids: Sequence[int]) -> str:
        is_within = not (self._held or self._is_at_start or self._num_prompt_replacements)
        if is_within and len(token_ids) == 1 and (text := self._table.texts[token_ids[0]]) is not None:
            return text
        pieces = [self._table[token_id] for token_id in token_ids]
        if self._is_at_start:
            self._replace_first_piece(pieces, token_ids)
        try:
            text = (self._held + b"".join(pieces)).decode()
            self._held = b""
        except UnicodeDecodeError:
            text = "".join([self._decode_damaged(piece) for piece in pieces])
        return self._without_prompt_replacements(text) if self._num_prompt_replacements else text

    def flush(self) -> str:
        text = self._decode_damaged(b"", is_last=True)
        return self._without_prompt_replacements(text)

    def _begin_with(self, prompt_token_ids: Sequence[int]) -> None:
        """Reads only the end of the prompt: an incomplete character lies within its last bytes."""
        start, num_bytes = len(prompt_token_ids), 0
        while start > 0 and num_bytes < MAX_HELD_BYTES:
            start -= 1
            num_bytes += len(self._table[prompt_token_ids[start]])
        self.append(prompt_token_ids[start:])
        self._num_prompt_replacements = self._num_replacements(len(self._held))

    def _replace_first_piece(self, pieces: list[bytes], token_ids: Sequence[int]) -> None:
        for index, token_id in enumerate(token_ids):
            if not self._table.is_skipped(token_id):
                pieces[index] = self._table.first_piece(token_id)
                self._is_at_start = False
                return

    def _decode_damaged(self, piece: bytes, is_last: bool = False) -> str:
        data, text = self._held + piece, ""
        while True:
            try:
                text += data.decode()
                self._held = b""
                return text
            except UnicodeDecodeError as error:
                text += data[: error.start].decode()
                if error.reason == "unexpected end of data" and not is_last:
                    self._held = data[error.start :]
                    return text
                text += REPLACEMENT * self._num_replacements(error.end - error.start)
                data = data[error.end :]

    def _num_replacements(self, num_invalid_bytes: int) -> int:
        return num_invalid_bytes if self._table.has_byte_fallback else min(num_invalid_bytes, 1)

    def _without_prompt_replacements(self, text: str) -> str:
        """Drops replacement characters that `decode(prompt)` already has, unless they became a character."""
        if not text:
            return text
        num_dropped, self._num_prompt_replacements = self._num_prompt_replacements, 0
        return text[:num_dropped].lstrip(REPLACEMENT) + text[num_dropped:]


class _TokenTable(dict[int, bytes]):
    """The UTF-8 bytes that each token id adds within a text; filled when an id first occurs."""

    def __init__(
        self,
        backend: Tokenizer,
        anchor: int | None,
        has_byte_fallback: bool,
        skip_special_tokens: bool,
        kept_special_tokens: frozenset[str],
    ) -> None:
        """`anchor`: a word that precedes a token when it is decoded; None for byte-level tokens."""
        super().__init__()
        self.has_byte_fallback = has_byte_fallback
        self.texts = _Texts(self)
        self._backend = backend
        self._anchor = anchor
        self._anchor_text = "" if anchor is None else self._decode(anchor)
        self._byte_values = _byte_level_values() if anchor is None else None
        added_tokens = backend.get_added_tokens_decoder().values()
        special_tokens = {token.content for token in added_tokens if token.special}
        self._skipped_tokens = special_tokens - kept_special_tokens if skip_special_tokens else set()

    def __missing__(self, token_id: int) -> bytes:
        self[token_id] = piece = self._piece(token_id)
        return piece

    def is_skipped(self, token_id: int) -> bool:
        """Whether the token adds no text: it is special and special tokens are skipped, or its id is unknown."""
        token = self._backend.id_to_token(token_id)
        return token is None or token in self._skipped_tokens

    def first_piece(self, token_id: int) -> bytes:
        """The bytes of a token at the start of a text, where some decoders remove a space."""
        piece = self[token_id]
        is_part_of_character = len(piece) == 1 and not piece.isascii()
        if self._byte_values is not None or is_part_of_character:
            return piece
        return self._decode(token_id).encode()

    def _piece(self, token_id: int) -> bytes:
        if self.is_skipped(token_id):
            return b""
        token = self._backend.id_to_token(token_id)
        if self._byte_values is not None:
            values = [self._byte_values.get(character) for character in token]
            return token.encode() if None in values else bytes(values)
        if self.has_byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(match[1])
        return self._decode(self._anchor, token_id).removeprefix(self._anchor_text).encode()

    def _decode(self, *token_ids: int) -> str:
        return self._backend.decode(token_ids, skip_special_tokens=False)


class _Texts(dict[int, str | None]):
    """The text of each token that is whole characters; None for the others. Filled when an id first occurs."""

    def __init__(self, table: _TokenTable) -> None:
        super().__init__()
        self._table = table

    def __missing__(self, token_id: int) -> str | None:
        try:
            self[token_id] = text = self._table[token_id].decode()
        except UnicodeDecodeError:
            self[token_id] = text = None
        return text


class _WindowStream:
    """Decodes the last tokens together with each new one and returns the added text."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        prompt_token_ids: Sequence[int],
        skip_special_tokens: bool,
        kept_special_tokens: frozenset[str],
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped: set[int] = set()
        if skip_special_tokens:
            added_tokens = tokenizer.added_tokens_decoder.items()
            self._skipped.update(tokenizer.all_special_ids, (i for i, token in added_tokens if token.special))
            self._skipped.difference_update(i for i, token in added_tokens if token.content in kept_special_tokens)
        prompt = [token_id for token_id in prompt_token_ids if token_id not in self._skipped]
        self._context = prompt[-CONTEXT_TOKENS:]
        self._context_text = self._decode(self._context)
        self._held: list[int] = []

    def append(self, token_ids: Sequence[int]) -> str:
        return "".join([self._append(token_id) for token_id in token_ids if token_id not in self._skipped])

    def flush(self) -> str:
        return self._take(self._decode(self._context + self._held))

    def _append(self, token_id: int) -> str:
        self._held.append(token_id)
        text = self._decode(self._context + self._held)
        is_certain = text != self._context_text and not text.endswith(REPLACEMENT)
        return self._take(text) if is_certain or len(self._held) == MAX_HELD_TOKENS else ""

    def _take(self, text: str) -> str:
        num_known = len(self._context_text)
        while not text.startswith(self._context_text[:num_known]):
            num_known -= 1  # an incomplete character was completed
        self._context = (self._context + self._held)[-CONTEXT_TOKENS:]
        self._context_text = self._decode(self._context)
        self._held = []
        return text[num_known:]

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, clean_up_tokenization_spaces=False)


@functools.lru_cache(maxsize=8)
def _token_table(
    tokenizer: PreTrainedTokenizerBase, skip_special_tokens: bool, kept_special_tokens: frozenset[str] = frozenset()
) -> _TokenTable | None:
    """The table of a tokenizer; None if the text of a token may depend on other tokens."""
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        return None
    own_class, plain_class = type(tokenizer), PreTrainedTokenizerFast
    if own_class.decode is not plain_class.decode or own_class._decode is not plain_class._decode:
        return None
    backend = tokenizer.backend_tokenizer
    if backend.decoder is None:
        return None
    decoder = json.loads(backend.decoder.__getstate__())
    is_byte_level = decoder["type"] == "ByteLevel"
    is_llama_2 = decoder.get("decoders") in (_LLAMA_2_STEPS, _LLAMA_2_STEPS[:-1])
    if decoder["type"] not in _TOKEN_BY_TOKEN_TYPES and not is_llama_2:
        return None
    anchor = None if is_byte_level else _find_word(backend)
    if anchor is None and not is_byte_level:
        return None
    return _TokenTable(backend, anchor, is_llama_2, skip_special_tokens, kept_special_tokens)


def _find_word(backend: Tokenizer) -> int | None:
    """The lowest id of a token that is a plain word; None if there is none."""
    vocab = backend.get_vocab(with_added_tokens=False)
    return min((i for token, i in vocab.items() if token.isascii() and token.isalpha()), default=None)


def _byte_level_values() -> dict[str, int]:
    """Byte value of each character of the byte-level alphabet (Radford et al., GPT-2, 2019).

    Printable bytes are their own characters; the others, in order, are the characters from 256 on.
    """
    printed = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(0x100)) - set(printed))
    return {chr(value): value for value in printed} | {chr(256 + i): value for i, value in enumerate(others)}
