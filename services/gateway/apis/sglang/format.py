"""Answers to SGLang's /generate."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from services.common.errors import InvalidRequest
from services.common.token_logprobs import TokenLogprobs
from services.gateway.apis.sglang.schema import FinishObject, GenerateBody, GenerateObject, LogprobTriple, MetaInfo
from services.gateway.apis.sglang.sessions import Turn
from services.gateway.apis.shared.answer import DONE, Format
from services.gateway.apis.shared.feature_fields import report_objects
from services.gateway.core.chunks import Chunk, Completion, Finish, Prompt
from services.gateway.core.request_service import RequestService
from services.gateway.link.journal_entry import FinishReason

# Each event repeats all text so far. After n characters, events come only every n / 1024 characters: else a long answer
# would take a number of bytes that grows with its square. Log-probabilities take more: events with them come only when
# there are an eighth more tokens, so that all together take about nine times the last one. Those of a prompt are in the
# first and in the last event of its answer alone: clients read the one or the other.
MAX_REPEATS = 1024
MAX_LOGPROB_REPEATS = 8
PARAM_NAMES = {
    "logprob_token_ids": "token_ids_logprob",
    "logprobs": "top_logprobs_num",
    "max_tokens": "sampling_params.max_new_tokens",
    "min_tokens": "sampling_params.min_new_tokens",
    "model": "lora_path",
    "request_id": "rid",
}


class GenerateFormat(Format):
    """The `Format` of SGLang's answers. It belongs to one request, because it keeps the text of each answer."""

    end_of_stream = DONE

    def __init__(
        self, service: RequestService, body: GenerateBody, request_id: str, turn: Turn | None = None
    ) -> None:
        """`turn`: of a session, which keeps the answer."""
        prompt = "text" if body.input_ids is None else "input_ids"
        self.param_names: Mapping[str, str] = {"prompt": prompt, "prompt_token_ids": prompt, **PARAM_NAMES}
        self._tokenizer = service.tokenizer
        self._weight_version = service.model.weights_hash
        self._body = body
        self._request_id = request_id
        self._turn = turn
        self._each = each = body.each  # of the prompts
        self._num_answers = next((one.sampling_params.n or 1 for one in each), 1)  # to each prompt
        self.repeats_prompt = any(one.shows_prompt_logprobs for one in each)
        self.repeats_logprobs = any(one.return_logprob for one in each)
        self._is_list = body.is_batch or self._num_answers > 1
        self._prompts: Sequence[list[int]] = ()
        self._answers: dict[int, Completion] = {}  # so far, by index
        self._shown_prompts: dict[int, Prompt] = {}  # with log-probabilities, by index of their answers
        self._num_sent: dict[int, tuple[int, int]] = {}  # characters and tokens in the last event, by index

    async def begin(self, prompts: Sequence[list[int]]) -> None:
        self._prompts = prompts
        for body, prompt in zip(self._each, prompts, strict=True):
            start = body.logprob_start_len or 0
            if body.return_logprob and start >= len(prompt):
                message = f"logprob_start_len is {start}, the prompt has {len(prompt)} tokens: use a smaller one"
                raise InvalidRequest(message, "logprob_start_len")

    def chunk(self, prompt_index: int, chunk: Chunk) -> Sequence[Any]:
        index, body = prompt_index * self._num_answers + chunk.index, self._each[prompt_index]
        answer = self._answers.setdefault(index, Completion(chunk.index))
        answer.append(chunk)
        if chunk.prompt is not None and chunk.prompt.logprobs is not None and body.shows_prompt_logprobs:
            self._shown_prompts[index] = chunk.prompt
        is_first = index not in self._num_sent
        num_characters, num_tokens = self._num_sent.get(index, (0, 0))
        num_new, length = len(answer.text) - num_characters, len(answer.text)
        if not num_new:  # such as ids beyond the tokenizer
            num_new, length = len(answer.token_ids) - num_tokens, len(answer.token_ids)
        if body.return_logprob:
            is_due = len(answer.token_ids) - num_tokens > num_tokens // MAX_LOGPROB_REPEATS
        else:
            is_due = num_new > length // MAX_REPEATS
        if chunk.finish is None and not is_due:
            return ()
        self._num_sent[index] = len(answer.text), len(answer.token_ids)
        shown = self._shown_prompts.get(index) if is_first or chunk.finish is not None else None
        described = self._describe(prompt_index, answer, shown)
        return [{**described, "index": index} if self._is_list else described]

    def whole(self, answers: Sequence[tuple[Sequence[Completion], Prompt | None]]) -> Any:
        described = (
            self._describe(prompt_index, completion, prompt)
            for prompt_index, (completions, prompt) in enumerate(answers)
            for completion in completions
        )
        return described if self._is_list else next(described)

    def _describe(self, prompt_index: int, answer: Completion, prompt: Prompt | None) -> GenerateObject:
        finish, index = answer.finish, prompt_index * self._num_answers + answer.index
        body = self._each[prompt_index]
        about: MetaInfo = {
            "id": self._name(prompt_index, index),
            "finish_reason": None if finish is None else _finish_reason(finish),
            "prompt_tokens": len(self._prompts[prompt_index]),
            "completion_tokens": len(answer.token_ids),
        }
        if finish is not None:
            about |= {
                "cached_tokens": finish.num_cached_tokens,
                "e2e_latency": finish.timings.total_s,
                "weight_version": self._weight_version,
            }
        if body.return_logprob:
            start, write = body.logprob_start_len, partial(self._logprobs, body)
            about |= write("output", answer.token_ids, answer.logprobs)
            if prompt is not None and prompt.logprobs is not None and body.shows_prompt_logprobs:
                first = [None] if start == 0 else []  # nothing precedes a prompt's first token
                about |= write("input", prompt.token_ids[start:], prompt.logprobs[max(0, start - 1) :], first)
            else:
                about |= write("input", [], [])
        if finish is not None and self._turn is not None:
            self._turn.end(self._prompts[prompt_index], answer.token_ids)
        if finish is not None:
            about |= report_objects(body, answer.reports, finish.num_prompt_tokens)
        text = "" if body.sampling_params.hides_prompt else answer.text
        described: GenerateObject = {"text": text, "output_ids": answer.token_ids, "meta_info": about}
        if body.return_prompt_token_ids:
            described["prompt_token_ids"] = self._prompts[prompt_index]
        return described

    def _name(self, prompt_index: int, index: int) -> str:
        if isinstance(self._body.rid, list):
            name = self._body.name_of(prompt_index, self._request_id)
            return name if self._num_answers == 1 else f"{name}-{index % self._num_answers}"
        return f"{self._request_id}-{index}" if self._is_list else self._request_id

    def _logprobs(
        self,
        body: GenerateBody,
        kind: str,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs],
        first: Sequence[None] = (),
    ) -> dict[str, Any]:
        """Lists of [log-probability, token id, text]: of the tokens, of the most likely ones, and of named ones.

        `first`: None for each token before those with log-probabilities.
        """
        pairs = zip(token_ids, itertools.chain(first, logprobs), strict=False)  # tokens after a stop were not asked for
        own = ((token_id, None if each is None else each.logprob) for token_id, each in pairs)
        found: dict[str, Any] = {f"{kind}_token_logprobs": self._triples(own)}
        if num_top := body.top_logprobs_num:
            found[f"{kind}_top_logprobs"] = (
                None if each is None else list(self._triples(each.top[:num_top]))
                for each in itertools.chain(first, logprobs)
            )
        if named := body.token_ids_logprob:
            found[f"{kind}_token_ids_logprobs"] = (
                None if each is None else self._of_named(each, named) for each in itertools.chain(first, logprobs)
            )
        return found

    def _of_named(self, each: TokenLogprobs, named: Sequence[int]) -> list[LogprobTriple]:
        logprobs = dict(each.top)
        return list(self._triples((token_id, logprobs[token_id]) for token_id in named))

    def _triples(self, values: Iterable[tuple[int, float | None]]) -> Iterator[LogprobTriple]:
        has_text = bool(self._body.return_text_in_logprobs)
        return (
            (logprob, token_id, self._tokenizer.text_of(token_id) if has_text else None)
            for token_id, logprob in values
        )


def _finish_reason(finish: Finish) -> FinishObject:
    if finish.reason is FinishReason.STOP:
        return {"type": "stop", "matched": finish.stop_token_id if finish.stop_string is None else finish.stop_string}
    if finish.reason is FinishReason.LENGTH:
        return {"type": "length", "length": finish.num_output_tokens}
    return {"type": "abort", "message": "the request was aborted"}
