"""`FillInMiddle`: the prompt that makes a model write what stands between two texts.

Models that were trained for it have control tokens before the prefix, the suffix and the middle. All families here get
them in this order (Bavarian et al., "Efficient Training of Language Models to Fill in the Middle", 2022, "PSM").
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerFast

from services.common.errors import InvalidRequest

# A character that no vocabulary joins with others: where a tokenizer puts a space before the first word, it puts it
# before this one, and the text behind it is tokenized as it stands.
_GUARD = "☺"


@dataclass(frozen=True, slots=True)
class Markers:
    """The tokens of one family of models, by their names."""

    prefix: str
    suffix: str
    middle: str
    ends: tuple[str, ...]  # end the middle like EOS, if the tokenizer has them


FAMILIES = (
    # Qwen2.5-Coder, CodeGemma
    Markers("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", ("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>")),
    Markers("<fim_prefix>", "<fim_suffix>", "<fim_middle>", ("<fim_pad>", "<file_sep>")),  # StarCoder
    Markers("▁<PRE>", "▁<SUF>", "▁<MID>", ("▁<EOT>",)),  # CodeLlama
    Markers("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>", ()),  # DeepSeek
)


class FillInMiddle:
    """The tokens of one tokenizer, if it has them. `encode` may run on any thread."""

    def __init__(self, hf_tokenizer: PreTrainedTokenizerFast) -> None:
        backend = self._backend = hf_tokenizer.backend_tokenizer
        self._markers: tuple[int, int, int] | None = None
        self.end_token_ids: tuple[int, ...] = ()  # that end an answer, beside EOS
        for each in FAMILIES:
            names = (each.prefix, each.suffix, each.middle, *each.ends)
            prefix, suffix, middle, *ends = map(backend.token_to_id, names)
            if prefix is not None and suffix is not None and middle is not None:
                self._markers = prefix, suffix, middle
                self.end_token_ids = tuple(token_id for token_id in ends if token_id is not None)
                break
        encoding = backend.encode("a")
        is_added = zip(encoding.ids, encoding.special_tokens_mask, strict=True)
        self._front = [token_id for token_id, _ in itertools.takewhile(lambda pair: pair[1], is_added)]
        self._num_guards = len(self._encode(_GUARD))

    def check(self) -> None:
        """Raises `InvalidRequest` if the model lacks the tokens."""
        if self._markers is None:
            known = ", ".join(each.prefix for each in FAMILIES)
            raise InvalidRequest(
                f"suffix cannot be used with this model: its tokenizer has none of the tokens ({known}) that begin the "
                "prompt of a model which fills in the middle",
                "suffix",
            )

    def encode(
        self, prefix: str | Sequence[int], suffix: str, middle: str, add_special_tokens: bool
    ) -> list[int]:
        """Token ids of the prompt; call `check` before. The answer continues `middle`, the beginning of the middle.

        As in CodeLlama's code, a text in front of which the tokenizer writes a space gets it only as a prefix.
        """
        assert self._markers is not None
        before, after, between = self._markers
        return [
            *(self._front if add_special_tokens else ()),
            before,
            *(self._encode(prefix) if isinstance(prefix, str) else prefix),
            after,
            *self._encode(_GUARD + suffix)[self._num_guards :],
            between,
            *self._encode(_GUARD + middle)[self._num_guards :],
        ]

    def _encode(self, text: str) -> list[int]:
        [encoding] = self._backend.encode_batch_fast([text], add_special_tokens=False)
        return encoding.ids
