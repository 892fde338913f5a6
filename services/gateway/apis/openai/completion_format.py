"""Answers to requests for completions as OpenAI's objects."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

from services.common.token_logprobs import TokenLogprobs
from services.gateway.apis.openai.completion_schema import (
    CompletionChoice,
    CompletionObject,
    CompletionRequest,
    LegacyLogprobs,
)
from services.gateway.apis.openai.format import OpenAIFormat
from services.gateway.apis.openai.logprobs import LegacyLogprobsBuilder
from services.gateway.core.chunks import Chunk, Completion, Prompt
from services.gateway.core.request_service import RequestService


class CompletionFormat(OpenAIFormat):
    """The `Format` of completions."""

    def __init__(self, service: RequestService, body: CompletionRequest, request_id: str) -> None:
        length = "max_tokens" if body.n_predict is None else "n_predict"
        names = {"prompt_token_ids": "prompt", "request_id": body.source_of(request_id), "max_tokens": length}
        self.param_names: Mapping[str, str] = names
        super().__init__(service, body, "text_completion", f"cmpl-{request_id}")
        self._body = body
        self._num_answers = body.n or 1  # to each prompt
        self.repeats_prompt = bool(body.echo) and body.logprobs is not None and self._num_answers > 1
        self._begun: set[int] = set()  # indexes of choices that had a chunk, if the token ids of prompts are requested
        self._logprobs: dict[int, LegacyLogprobsBuilder] = {}  # by index of the choice

    def chunk(self, prompt_index: int, chunk: Chunk) -> Sequence[CompletionObject | bytes]:
        index = prompt_index * self._num_answers + chunk.index
        if self._is_plain and chunk.text and chunk.finish is None and chunk.prompt is None:
            return (self._text_objects.event(index, chunk.text),)
        choice = _piece(index, chunk.text)
        if self._body.logprobs is not None and (chunk.token_ids or chunk.prompt is not None):
            choice["logprobs"] = self._legacy_logprobs(index, chunk.token_ids, chunk.logprobs or (), chunk.prompt)
        if self._body.return_token_ids:
            choice["token_ids"] = chunk.token_ids
            if index not in self._begun:
                self._begun.add(index)
                choice["prompt_token_ids"] = self._prompts[prompt_index]
        if self._body.prompt_logprobs is not None and chunk.prompt is not None and not chunk.index:
            choice["prompt_logprobs"] = self._prompt_logprobs(chunk.prompt)
        if chunk.finish is not None:
            self._usage.add(prompt_index, chunk.finish)
            choice["finish_reason"] = chunk.finish.reason.value
            choice |= self._end_fields(chunk.finish)  # type: ignore[typeddict-item]
            reports = {name: (part,) for name, part in chunk.reports.items()}
            choice |= self._reported(reports, chunk.finish)  # type: ignore[typeddict-item]
        if not (chunk.text or self._has_usage) and choice["logprobs"] is None and len(choice) == 4:
            return ()  # the token is an incomplete character; who counts tokens also measures when they come
        whole = self._object(choice)
        if self._has_running_usage:
            whole["usage"] = self._running_usage(prompt_index, chunk.num_output_tokens)
        return (whole,)

    def whole(self, answers: Sequence[tuple[Sequence[Completion], Prompt | None]]) -> CompletionObject:
        for prompt_index, (completions, _) in enumerate(answers):
            for completion in completions:
                assert completion.finish is not None
                self._usage.add(prompt_index, completion.finish)
        choices = (
            self._choice(prompt_index, completion, prompt)
            for prompt_index, (completions, prompt) in enumerate(answers)
            for completion in completions
        )
        return {**self.head, "choices": choices, "usage": self._usage.usage()}

    def _text_object(self, index: int, text: str) -> CompletionObject:
        return self._object(_piece(index, text))

    def _object(self, choice: CompletionChoice) -> CompletionObject:
        whole: CompletionObject = {**self.head, "choices": [choice]}
        if self._has_usage:
            whole["usage"] = None
        return whole

    def _choice(self, prompt_index: int, completion: Completion, prompt: Prompt | None) -> CompletionChoice:
        index = prompt_index * self._num_answers + completion.index
        choice: CompletionChoice = {
            "index": index,
            "text": completion.text,
            "logprobs": None,
            "finish_reason": completion.finish.reason.value,
            **self._end_fields(completion.finish),  # type: ignore[typeddict-item]
            **self._reported(completion.reports, completion.finish),  # type: ignore[typeddict-item]
            "prompt_logprobs": None,
            "token_ids": None,
            "prompt_token_ids": None,
        }
        if self._body.logprobs is not None:
            choice["logprobs"] = self._legacy_logprobs(index, completion.token_ids, completion.logprobs, prompt)
        if self._body.return_token_ids:
            choice["token_ids"] = completion.token_ids
            choice["prompt_token_ids"] = self._prompts[prompt_index]
        if self._body.prompt_logprobs is not None:  # all answers to a prompt have the same: only the first shows them
            choice["prompt_logprobs"] = None if completion.index else self._prompt_logprobs(prompt)
        return choice

    def _legacy_logprobs(
        self, index: int, token_ids: Sequence[int], logprobs: Iterable[TokenLogprobs], prompt: Prompt | None
    ) -> LegacyLogprobs:
        """Log-probabilities of new tokens; with `echo`, the first call includes the prompt's."""
        builder = self._logprobs.get(index)
        if builder is None:
            builder = LegacyLogprobsBuilder(
                self._tokenizer,
                skip_special_tokens=self._body.skip_special_tokens is not False,
                is_echo=bool(self._body.echo),
                has_ids=bool(self._body.return_tokens_as_token_ids),
            )
            self._logprobs[index] = builder
        if self._body.echo and prompt is not None:
            num_prompt_tokens = len(prompt.token_ids)
            token_ids = [*prompt.token_ids, *token_ids]
            return builder.append(token_ids, _Echoed(prompt, logprobs), num_prompt_tokens)
        return builder.append(token_ids, logprobs)


def _piece(index: int, text: str) -> CompletionChoice:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": None}


class _Echoed:
    """The log-probabilities of a prompt, whose first token has none, and then those of new tokens."""

    def __init__(self, prompt: Prompt, logprobs: Iterable[TokenLogprobs]) -> None:
        self._prompt = prompt
        self._logprobs = logprobs

    def __iter__(self) -> Iterator[TokenLogprobs | None]:
        yield None
        yield from self._prompt.logprobs or itertools.repeat(None, len(self._prompt.token_ids) - 1)
        yield from self._logprobs
