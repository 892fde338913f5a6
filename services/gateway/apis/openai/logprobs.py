"""Log-probabilities of completions in aligned lists, and those of prompts as vLLM has them."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator, Sequence

from services.common.token_logprobs import TokenLogprobs
from services.gateway.apis.openai.answer_objects import PromptLogprob
from services.gateway.apis.openai.completion_schema import LegacyLogprobs
from services.gateway.apis.shared.logprobs import LEAST_LOGPROB, token_name
from services.gateway.http.json_pieces import MAX_PIECE_VALUES, LazyObject
from services.gateway.text.detokenizer import token_bytes
from services.gateway.text.tokenizer import Tokenizer


class LegacyLogprobsBuilder:
    """The log-probabilities of one completion, piece by piece. It counts where the text of each token begins."""

    def __init__(
        self, tokenizer: Tokenizer, *, skip_special_tokens: bool, is_echo: bool, has_ids: bool = False
    ) -> None:
        """`has_ids`: name tokens by their ids."""
        self._tokenizer = tokenizer
        self._has_ids = has_ids
        self._skip_special_tokens = skip_special_tokens
        self._is_at_start = is_echo  # whether the text is still empty
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0  # characters of the text so far

    def append(
        self, token_ids: Sequence[int], logprobs: Iterable[TokenLogprobs | None], num_prompt_tokens: int = 0
    ) -> LegacyLogprobs:
        """The lists for new tokens. None stands for a token without log-probabilities, such as a prompt's first.

        The first `num_prompt_tokens` are the prompt's. Each of them stands before the most likely tokens, as in vLLM.
        The log-probabilities are iterated once for each list of them, when it is encoded.
        """
        return {
            "tokens": [token_name(self._tokenizer, token_id, self._has_ids) for token_id in token_ids],
            "token_logprobs": (None if each is None else max(each.logprob, LEAST_LOGPROB) for each in logprobs),
            "top_logprobs": (
                None if each is None else self._top(token_id, each, i < num_prompt_tokens)
                for i, (token_id, each) in enumerate(zip(token_ids, logprobs, strict=True))
            ),
            "text_offset": [self._next_offset(token_id) for token_id in token_ids],
        }

    def _next_offset(self, token_id: int) -> int:
        """The offset of a token's text; counts its characters for the next one."""
        offset = self._offset
        data = token_bytes(
            self._tokenizer.hf_tokenizer,
            token_id,
            skip_special_tokens=self._skip_special_tokens,
            is_first=self._is_at_start,
        )
        self._is_at_start = self._is_at_start and not data
        self._offset += len(self._decoder.decode(data))
        return offset

    def _top(self, token_id: int, each: TokenLogprobs, is_of_prompt: bool) -> dict[str, float]:
        """The most likely tokens and always this one: first if it is the prompt's, else where it is not among them."""
        own = (token_id, each.logprob)
        top: dict[str, float] = {}
        for other_id, logprob in (own, *each.top) if is_of_prompt else (*each.top, own):
            top.setdefault(token_name(self._tokenizer, other_id, self._has_ids), max(logprob, LEAST_LOGPROB))
        return top


def prompt_logprobs(
    tokenizer: Tokenizer, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], num_named: int = 0
) -> Iterator[dict[str, PromptLogprob] | LazyObject | None]:
    """The log-probabilities of a prompt in vLLM's format: by token id, the prompt's own token first, with ranks.

    A position may have a whole vocabulary, which is made while it is encoded.
    The last `num_named` tokens of each position, which the request names, have no rank.
    """

    def described(ranked: tuple[int, tuple[float, int | None]]) -> tuple[str, PromptLogprob]:
        token_id, (logprob, rank) = ranked
        name = tokenizer.name_of(token_id)
        return str(token_id), {"logprob": max(logprob, LEAST_LOGPROB), "rank": rank, "decoded_token": name}

    yield None
    for token_id, each in zip(token_ids[1:], logprobs, strict=True):
        ranked = {token_id: (each.logprob, each.rank)}  # where it is one of the most likely, it keeps its place
        num_top = len(each.top) - num_named
        ranked.update((other_id, (logprob, rank)) for rank, (other_id, logprob) in enumerate(each.top[:num_top], 1))
        for other_id, logprob in each.top[num_top:]:
            ranked.setdefault(other_id, (logprob, None))
        members = map(described, ranked.items())
        yield LazyObject(members) if len(ranked) > MAX_PIECE_VALUES else dict(members)
