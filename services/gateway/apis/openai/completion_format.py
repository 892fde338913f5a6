"""Answers to requests for completions as OpenAI's objects."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from services.common.token_logprobs import TokenLogprobs
from services.gateway.apis.openai.completion_schema import (
    CompletionChoice,
    CompletionObject,
    CompletionRequest,
    LegacyLogprobs,
)
from services.gateway.apis.openai.head import UsageCounter, head, running_usage, stop_fields
from services.gateway.apis.openai.logprobs import LegacyLogprobsBuilder, prompt_logprobs
from services.gateway.apis.shared.answer import DONE
from services.gateway.apis.shared.text_objects import TextObjects
from services.gateway.core.chunks import Chunk, Completion, Prompt
from services.gateway.core.request_service import RequestService
from services.gateway.http.errors import ErrorBody, describe
from services.gateway.http.request_id import REQUEST_ID_HEADER


class CompletionFormat:
    """The `Format` of completions. It belongs to one request, because it counts the characters of each answer."""

    has_event_names = False
    end_of_stream = DONE

    def __init__(self, service: RequestService, body: CompletionRequest, request_id: str) -> None:
        length = "max_tokens" if body.n_predict is None else "n_predict"
        names = {"prompt_token_ids": "prompt", "request_id": REQUEST_ID_HEADER, "max_tokens": length}
        self.param_names: Mapping[str, str] = names
        self._head = head(service, "text_completion", f"cmpl-{request_id}", body.model)
        self._tokenizer = service.tokenizer
        self._eos_token_ids = service.eos_token_ids
        self._body = body
        self._num_answers = body.n or 1  # to each prompt
        self._has_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
        self._has_running_usage = body.stream_options is not None and body.stream_options.has_running_usage
        self._usage = UsageCounter()
        # Whether an object of a stream may have nothing of its own but its text.
        self._is_plain = body.logprobs is None and not (
            body.return_token_ids or self._has_running_usage or body.timings_per_token
        )
        self._text_objects = TextObjects(lambda index, text: self._object(_piece(index, text)))
        self.text_frame = self._text_objects.first_frame if self._is_plain else None
        self._prompts: Sequence[list[int]] = ()
        self._begun: set[int] = set()  # indexes of choices that had a chunk, if the token ids of prompts are requested
        self._logprobs: dict[int, LegacyLogprobsBuilder] = {}  # by index of the choice

    async def begin(self, prompts: Sequence[list[int]]) -> None:
        self._prompts = prompts
        if self._body.stream and self._is_plain:
            self._text_objects.first_frame()  # is made ahead of the first text

    def opening(self) -> Sequence[CompletionObject]:
        return ()

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
            choice |= stop_fields(chunk.finish, self._eos_token_ids)  # type: ignore[typeddict-item]
            if chunk.finish.beam_score is not None:
                choice["beam_score"] = chunk.finish.beam_score
        if not (chunk.text or self._has_usage) and choice["logprobs"] is None and len(choice) == 4:
            return ()  # the token is an incomplete character; who counts tokens also measures when they come
        whole = self._object(choice)
        if self._has_running_usage:
            whole["usage"] = running_usage(len(self._prompts[prompt_index]), chunk.num_output_tokens)
        return (whole,)

    def closing(self) -> Sequence[CompletionObject]:
        return [{**self._head, "choices": [], "usage": self._usage.usage()}] if self._has_usage else ()

    def failure(self, error: Exception) -> Sequence[ErrorBody]:
        return [describe(error)[1]]

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
        return {**self._head, "choices": choices, "usage": self._usage.usage()}

    def _object(self, choice: CompletionChoice) -> CompletionObject:
        whole: CompletionObject = {**self._head, "choices": [choice]}
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
            **stop_fields(completion.finish, self._eos_token_ids),  # type: ignore[typeddict-item]
            "prompt_logprobs": None,
        }
        if completion.finish.beam_score is not None:
            choice["beam_score"] = completion.finish.beam_score
        if self._body.logprobs is not None:
            choice["logprobs"] = self._legacy_logprobs(index, completion.token_ids, completion.logprobs, prompt)
        if self._body.return_token_ids:
            choice["token_ids"] = completion.token_ids
            choice["prompt_token_ids"] = self._prompts[prompt_index]
        if self._body.prompt_logprobs is not None:  # all answers to a prompt have the same: only the first shows them
            choice["prompt_logprobs"] = None if completion.index or prompt is None else self._prompt_logprobs(prompt)
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

    def _prompt_logprobs(self, prompt: Prompt) -> Any:
        return None if prompt.logprobs is None else prompt_logprobs(
            self._tokenizer, prompt.token_ids, prompt.logprobs, self._body.num_named
        )


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
