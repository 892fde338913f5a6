"""`FillInMiddle`: the prompt that makes a model write what stands between two texts.

Models that were trained for it have control tokens before the prefix, the suffix and the middle. All families here get
them in this order (Bavarian et al., "Efficient Training of Language Models to Fill in the Middle", 2022, "PSM").
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerFast

from services.common.errors import InvalidRequest

# A character that no vocabulary joins with others: where a tokenizer puts a space before the first word, it puts it
# before this one, and the text behind it is tokenized as it stands.
_GUARD = "☺"
# As llama.cpp writes them: names of a project and of the file to be filled, and what precedes a text without tokens.
_PROJECT, _FILE, _SNIPPET = "myproject\n", "filename\n", "\n\n--- snippet ---\n\n"


@dataclass(frozen=True, slots=True)
class Markers:
    """The tokens of one family of models, by their names."""

    prefix: str
    suffix: str
    middle: str
    ends: tuple[str, ...]  # end the middle like EOS, if the tokenizer has them
    project: str = ""  # before the project's name, if the tokenizer has it
    file: str = ""  # before the name of each of the project's files, likewise


FAMILIES = (
    # Qwen2.5-Coder, CodeGemma
    Markers(
        *("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
        ("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"),
        *("<|repo_name|>", "<|file_sep|>"),
    ),
    Markers(  # StarCoder
        *("<fim_prefix>", "<fim_suffix>", "<fim_middle>"), ("<fim_pad>", "<file_sep>"), "<repo_name>", "<file_sep>"
    ),
    Markers("▁<PRE>", "▁<SUF>", "▁<MID>", ("▁<EOT>",)),  # CodeLlama
    Markers("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>", ()),  # DeepSeek
)


class FillInMiddle:
    """The tokens of one tokenizer, if it has them. `encode` may run on any thread."""

    def __init__(self, hf_tokenizer: PreTrainedTokenizerFast) -> None:
        backend = self._backend = hf_tokenizer.backend_tokenizer
        self._markers: tuple[int, int, int] | None = None
        self._project: int | None = None
        self._file: int | None = None
        self.end_token_ids: tuple[int, ...] = ()  # that end an answer, beside EOS
        for each in FAMILIES:
            names = (each.prefix, each.suffix, each.middle, *each.ends)
            prefix, suffix, middle, *ends = map(backend.token_to_id, names)
            if prefix is not None and suffix is not None and middle is not None:
                self._markers = prefix, suffix, middle
                self._project, self._file = map(backend.token_to_id, (each.project, each.file))
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
        self,
        prefix: str | Sequence[int],
        suffix: str,
        middle: str,
        add_special_tokens: bool,
        excerpts: Sequence[tuple[str, str]] = (),
        room: Callable[[int], int] = lambda num_tokens: 0,
    ) -> list[int]:
        """Token ids of the prompt; call `check` before. The answer continues `middle`, the beginning of the middle.

        As in CodeLlama's code, a text in front of which the tokenizer writes a space gets it only as a prefix.
        excerpts: names and texts of other files of the project; of their tokens the last ones remain, as many as `room`
        says that there may be beside so many others.
        """
        assert self._markers is not None
        before, after, between = self._markers
        front = self._front if add_special_tokens else []
        gap = [
            before,
            *(self._encode(prefix) if isinstance(prefix, str) else prefix),
            after,
            *self._rest(suffix),
            between,
            *self._rest(middle),
        ]
        if not excerpts:
            return [*front, *gap]
        others = self._encode_excerpts(excerpts)
        return [*front, *others[max(0, len(others) - max(0, room(len(front) + len(gap)))) :], *gap]

    def _encode_excerpts(self, excerpts: Sequence[tuple[str, str]]) -> list[int]:
        token_ids = [] if self._project is None else [self._project, *self._rest(_PROJECT)]
        for name, text in excerpts:
            start = self._rest(_SNIPPET) if self._file is None else [self._file, *self._rest(f"{name}\n")]
            token_ids += [*start, *self._rest(text)]
        return token_ids if self._file is None else [*token_ids, self._file, *self._rest(_FILE)]

    def _rest(self, text: str) -> list[int]:
        """Token ids of a text that others precede."""
        return self._encode(_GUARD + text)[self._num_guards :]

    def _encode(self, text: str) -> list[int]:
        [encoding] = self._backend.encode_batch_fast([text], add_special_tokens=False)
        return encoding.ids
