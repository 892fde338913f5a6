"""Answers of token ids as vLLM's objects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from services.common.token_logprobs import TokenLogprobs
from services.gateway.apis.openai.format import UsageCounter
from services.gateway.apis.openai.logprobs import prompt_logprobs
from services.gateway.apis.openai.token_answer_schema import TokenAnswerObject, TokenAnswerRequest, TokenChoice
from services.gateway.apis.shared.answer import DONE, Format
from services.gateway.apis.shared.logprobs import chat_logprobs
from services.gateway.core.chunks import Chunk, Completion, Prompt
from services.gateway.core.request_service import RequestService

PARAM_NAMES = {"prompt": "token_ids", "prompt_token_ids": "token_ids"}


class TokenAnswerFormat(Format):
    """The `Format` of answers of token ids to one prompt."""

    param_names: Mapping[str, str] = PARAM_NAMES
    end_of_stream = DONE

    def __init__(self, service: RequestService, body: TokenAnswerRequest, request_id: str) -> None:
        self._tokenizer = service.tokenizer
        self._body = body
        self._has_logprobs = body.sampling_params.has_logprobs
        self._name = f"generate-tokens-{request_id}"
        self._num_prompt_tokens = 0
        self._usage = UsageCounter()

    async def begin(self, prompts: Sequence[list[int]]) -> None:
        self._num_prompt_tokens = len(prompts[0])

    def chunk(self, prompt_index: int, chunk: Chunk) -> Sequence[TokenAnswerObject]:
        if chunk.finish is not None:
            self._usage.add(prompt_index, chunk.finish)
        elif not chunk.token_ids:
            return ()
        choice: TokenChoice = {
            "index": chunk.index,
            "logprobs": self._logprobs(chunk.token_ids, chunk.logprobs or ()),  # type: ignore[typeddict-item]
            "finish_reason": None if chunk.finish is None else chunk.finish.reason.value,
            "token_ids": chunk.token_ids,
        }
        event: TokenAnswerObject = {"request_id": self._name, "choices": [choice]}
        if self._body.has_running_usage:
            event["usage"] = {
                "prompt_tokens": self._num_prompt_tokens,
                "completion_tokens": chunk.num_output_tokens,
                "total_tokens": self._num_prompt_tokens + chunk.num_output_tokens,
            }
        return (event,)

    def closing(self) -> Sequence[TokenAnswerObject]:
        if not self._body.has_usage:
            return ()
        return ({"request_id": self._name, "choices": [], "usage": self._usage.usage()},)

    def whole(self, answers: Sequence[tuple[Sequence[Completion], Prompt | None]]) -> TokenAnswerObject:
        [(completions, prompt)] = answers
        choices: list[TokenChoice] = []
        for each in completions:
            assert each.finish is not None
            self._usage.add(0, each.finish)
            choices.append(
                {
                    "index": each.index,
                    "logprobs": self._logprobs(each.token_ids, each.logprobs),  # type: ignore[typeddict-item]
                    "finish_reason": each.finish.reason.value,
                    "token_ids": each.token_ids,
                }
            )
        whole: TokenAnswerObject = {
            "request_id": self._name,
            "choices": choices,
            "prompt_logprobs": None,
            "usage": self._usage.usage(),
        }
        if prompt is not None and prompt.logprobs is not None:
            num_named = self._body.sampling_params.num_named
            whole["prompt_logprobs"] = prompt_logprobs(  # type: ignore[typeddict-item]
                self._tokenizer, prompt.token_ids, prompt.logprobs, num_named
            )
        return whole

    def _logprobs(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> object:
        """As in chats; where no likely tokens are asked for, as in vLLM the token itself stands for them."""
        if not self._has_logprobs or not token_ids:
            return None
        with_own = [
            each if each.top else replace(each, top=((token_id, each.logprob),))
            for token_id, each in zip(token_ids, logprobs, strict=True)
        ]
        return chat_logprobs(self._tokenizer, token_ids, with_own, has_ids=True)
