"""Answers of Text Generation Inference's routes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from services.common.errors import AbortedByCaller
from services.common.token_logprobs import TokenLogprobs
from services.gateway.apis.shared.answer import Format
from services.gateway.apis.tgi.conversion import PARAM_NAMES
from services.gateway.apis.tgi.errors import TgiErrorBody, tgi_error
from services.gateway.apis.tgi.schema import TgiAnswer, TgiEvent, TgiRequest, TgiSequence, TgiToken
from services.gateway.core.chunks import Chunk, Completion, Finish, Prompt
from services.gateway.core.request_service import RequestService
from services.gateway.http.json_pieces import LazyList
from services.gateway.link.journal_entry import FinishReason
from services.gateway.text.detokenizer import Detokenizer

ABORTED = "the request was aborted: its text is not complete"


class TgiFormat(Format):
    """The `Format` of these answers. It belongs to one request, because it keeps the text of a stream."""

    param_names = PARAM_NAMES

    def __init__(self, service: RequestService, body: TgiRequest, *, is_list: bool) -> None:
        """`is_list`: the whole answer is in a list, as at /."""
        self._tokenizer = service.tokenizer
        self._special_ids = frozenset(service.tokenizer.hf_tokenizer.all_special_ids)
        self._parameters = body.parameters
        self._is_list = is_list
        self._prompt: Sequence[int] = ()
        self._texts: list[str] = []  # of the streamed answer
        self._num_sent = 0  # tokens
        self._detokenizer: Detokenizer | None = None  # of the stream

    async def begin(self, prompts: Sequence[list[int]]) -> None:
        [self._prompt] = prompts
        self._detokenizer = self._new_detokenizer()

    def chunk(self, prompt_index: int, chunk: Chunk) -> Sequence[TgiEvent | TgiErrorBody]:
        assert self._detokenizer is not None
        self._texts.append(chunk.text)
        tokens = list(self._tokens(chunk.token_ids, chunk.logprobs or (), self._detokenizer, chunk.finish is not None))
        events: list[TgiEvent] = []
        for token, each in zip(tokens, chunk.logprobs or (), strict=True):
            self._num_sent += 1
            event: TgiEvent = {"index": self._num_sent, "token": token, "generated_text": None, "details": None}
            if self._parameters.top_n_tokens:
                event["top_tokens"] = LazyList(lambda each=each: self._top(each))  # type: ignore[typeddict-item]
            events.append(event)
        if chunk.finish is None:
            return events
        if not events or chunk.finish.reason is FinishReason.ABORT:
            return [*events, tgi_error(AbortedByCaller(ABORTED))]
        events[-1]["generated_text"] = "".join(self._texts)
        events[-1]["details"] = {
            "finish_reason": _reason(chunk.finish),
            "generated_tokens": chunk.finish.num_output_tokens,
            "seed": self._seed(chunk.finish),
            "input_length": len(self._prompt),
        }
        return events

    def failure(self, error: Exception) -> Sequence[TgiErrorBody]:
        return [tgi_error(error)]

    def whole(self, answers: Sequence[tuple[Sequence[Completion], Prompt | None]]) -> Any:
        """Raises `AbortedByCaller`: the object has no word for an end that was not the text's."""
        [(completions, prompt)] = answers
        if any(each.finish is not None and each.finish.reason is FinishReason.ABORT for each in completions):
            raise AbortedByCaller(ABORTED)
        best, *others = sorted(completions, key=_mean_logprob, reverse=True)
        answer: TgiAnswer = {"generated_text": best.text}
        if self._parameters.details or self._parameters.decoder_input_details:
            answer["details"] = {**self._sequence(best, prompt)}
            if others:
                answer["details"]["best_of_sequences"] = [
                    {"generated_text": each.text, **self._sequence(each, prompt)} for each in others
                ]
        return [answer] if self._is_list else answer

    def _sequence(self, completion: Completion, prompt: Prompt | None) -> TgiSequence:
        finish, is_shown = completion.finish, bool(self._parameters.details)
        assert finish is not None
        sequence: TgiSequence = {
            "finish_reason": _reason(finish),
            "generated_tokens": finish.num_output_tokens,
            "seed": self._seed(finish),
            "prefill": LazyList(lambda: self._prefill(prompt)),  # type: ignore[typeddict-item]
            "tokens": LazyList(lambda: self._whole_tokens(completion) if is_shown else ()),  # type: ignore[typeddict-item]
        }
        if self._parameters.top_n_tokens and is_shown:
            sequence["top_tokens"] = LazyList(lambda: map(self._top, completion.logprobs))  # type: ignore[typeddict-item]
        return sequence

    def _prefill(self, prompt: Prompt | None) -> Iterator[dict[str, Any]]:
        if prompt is None or prompt.logprobs is None or not self._parameters.decoder_input_details:
            return
        for token_id, each in zip(prompt.token_ids, [None, *prompt.logprobs], strict=True):
            logprob = None if each is None else each.logprob
            yield {"id": token_id, "text": self._tokenizer.text_of(token_id), "logprob": logprob}

    def _whole_tokens(self, completion: Completion) -> Iterator[TgiToken]:
        return self._tokens(completion.token_ids, completion.logprobs, self._new_detokenizer(), is_last=True)

    def _tokens(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], detokenizer: Detokenizer, is_last: bool
    ) -> Iterator[TgiToken]:
        """The tokens, each with the text that it adds: all but the special ones are the answer's."""
        for number, (token_id, each) in enumerate(zip(token_ids, logprobs, strict=True), start=1):
            is_special = token_id in self._special_ids
            text = self._tokenizer.text_of(token_id) if is_special else detokenizer.append([token_id])
            if is_last and number == len(token_ids) and not is_special:
                text += detokenizer.flush()
            yield {"id": token_id, "text": text, "logprob": each.logprob, "special": is_special}

    def _top(self, each: TokenLogprobs) -> list[TgiToken]:
        return [
            {
                "id": token_id,
                "text": self._tokenizer.text_of(token_id),
                "logprob": logprob,
                "special": token_id in self._special_ids,
            }
            for token_id, logprob in each.top
        ]

    def _new_detokenizer(self) -> Detokenizer:
        return Detokenizer(self._tokenizer.hf_tokenizer, self._prompt)

    def _seed(self, finish: Finish) -> int | None:
        return finish.seed if self._parameters.samples else None


def _reason(finish: Finish) -> Literal["length", "eos_token", "stop_sequence"]:
    if finish.reason is not FinishReason.STOP:
        return "length"
    return "eos_token" if finish.stop_string is None else "stop_sequence"


def _mean_logprob(completion: Completion) -> float:
    own = completion.logprobs.own
    return math.fsum(own) / len(own) if own else -math.inf
