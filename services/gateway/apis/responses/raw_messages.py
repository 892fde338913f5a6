"""`RawMessages`: what the model was given and what it has written, as vLLM's `enable_response_messages` gives it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from typing_extensions import TypedDict

from services.gateway.text.detokenizer import Detokenizer
from services.gateway.text.tokenizer import Tokenizer


class RawMessage(TypedDict):
    """A text with its special tokens, and its token ids."""

    type: Literal["raw_message_tokens"]
    message: str
    tokens: Sequence[int]


class RawMessageLists(TypedDict):
    """The fields of a response."""

    input_messages: list[RawMessage]
    output_messages: list[RawMessage]


class RawMessages:
    """Of one answer. Call `begin`, then `add` for its tokens in order."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._prompt: RawMessage | None = None
        self._token_ids: list[int] = []
        self._pieces: list[str] = []

    async def begin(self, prompt_token_ids: Sequence[int]) -> None:
        """Takes the prompt."""
        text = await self._tokenizer.write_text(prompt_token_ids, False)
        self._prompt = {"type": "raw_message_tokens", "message": text, "tokens": prompt_token_ids}
        self._detokenizer = Detokenizer(self._tokenizer.hf_tokenizer, prompt_token_ids, skip_special_tokens=False)

    def add(self, token_ids: Sequence[int], *, is_last: bool) -> None:
        """Takes new tokens of the answer."""
        self._token_ids += token_ids
        self._pieces.append(self._detokenizer.append(token_ids) + (self._detokenizer.flush() if is_last else ""))

    def lists(self, *, is_open: bool) -> RawMessageLists:
        """What a response shows. `is_open`: the answer has not ended, and is not shown."""
        answer: RawMessage = {
            "type": "raw_message_tokens",
            "message": "".join(self._pieces),
            "tokens": self._token_ids,
        }
        prompt = [] if self._prompt is None else [self._prompt]
        return {"input_messages": prompt, "output_messages": [] if is_open else [answer]}
