"""Answers to chats, as OpenAI's objects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from services.gateway.frontend import Frontend
from services.gateway.generation import Chunk, Completion, Prompt
from services.gateway.http.head import UsageCounter, head, stop_reason
from services.gateway.http.logprobs import chat_logprobs, prompt_logprobs
from services.gateway.http.request_id import REQUEST_ID_HEADER
from services.gateway.http.schemas.chat import ChatChoice, ChatChunkObject, ChatObject, ChatRequest, ChunkChoice


class ChatFormat:
    """See `Format`. A chat is one prompt."""

    param_names: ClassVar[Mapping[str, str]] = {
        "chat": "messages",
        "logprobs": "top_logprobs",
        "prompt": "messages",
        "prompt_token_ids": "messages",
        "request_id": REQUEST_ID_HEADER,
    }

    def __init__(self, frontend: Frontend, body: ChatRequest, request_id: str) -> None:
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        self._head = head(frontend, kind, f"chatcmpl-{request_id}")
        self._tokenizer = frontend.tokenizer
        self._eos_token_ids = frontend.eos_token_ids
        self._body = body
        self._has_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
        self._usage = UsageCounter()

    def opening(self) -> Sequence[ChatChunkObject]:
        """The role of every answer."""
        delta = {"role": "assistant", "content": ""}
        choices = range(self._body.n or 1)
        return [self._object({"index": i, "delta": delta, "logprobs": None, "finish_reason": None}) for i in choices]

    def chunk(self, place: int, chunk: Chunk) -> Sequence[ChatChunkObject]:
        objects = []
        choice: ChunkChoice = {
            "index": chunk.index,
            "delta": {"content": chunk.text},
            "logprobs": None,
            "finish_reason": None,
        }
        if self._body.logprobs and chunk.token_ids:
            choice["logprobs"] = chat_logprobs(self._tokenizer, chunk.token_ids, chunk.logprobs or ())
        if self._body.return_token_ids:
            choice["token_ids"] = chunk.token_ids
        if chunk.text or choice["logprobs"] or self._body.return_token_ids:
            objects.append(self._object(choice))
        if chunk.prompt is not None and chunk.prompt.logprobs is not None:
            entries = prompt_logprobs(self._tokenizer, chunk.prompt.token_ids, chunk.prompt.logprobs)
            objects.append({**self._head, "choices": [], "prompt_logprobs": entries})
        if chunk.finish is not None:
            self._usage.add(place, chunk.finish)
            objects.append(
                self._object(
                    {
                        "index": chunk.index,
                        "delta": {},
                        "logprobs": None,
                        "finish_reason": chunk.finish.reason.value,
                        "stop_reason": stop_reason(chunk.finish, self._eos_token_ids),
                    }
                )
            )
        return objects

    def closing(self) -> Sequence[ChatChunkObject]:
        return [{**self._head, "choices": [], "usage": self._usage.usage()}] if self._has_usage else ()

    def whole(self, answers: Sequence[tuple[Sequence[Completion], Prompt | None]]) -> ChatObject:
        [(completions, prompt)] = answers
        choices = []
        for completion in completions:
            assert completion.finish is not None
            self._usage.add(0, completion.finish)
            choices.append(self._choice(completion))
        whole: ChatObject = {**self._head, "choices": choices, "usage": self._usage.usage()}
        if prompt is not None and prompt.logprobs is not None:
            whole["prompt_logprobs"] = prompt_logprobs(self._tokenizer, prompt.token_ids, prompt.logprobs)
        return whole

    def _choice(self, completion: Completion) -> ChatChoice:
        choice: ChatChoice = {
            "index": completion.index,
            "message": {"role": "assistant", "content": completion.text, "refusal": None},
            "logprobs": None,
            "finish_reason": completion.finish.reason.value,
            "stop_reason": stop_reason(completion.finish, self._eos_token_ids),
        }
        if self._body.logprobs:
            choice["logprobs"] = chat_logprobs(self._tokenizer, completion.token_ids, completion.logprobs)
        if self._body.return_token_ids:
            choice["token_ids"] = completion.token_ids
        return choice

    def _object(self, choice: ChunkChoice) -> ChatChunkObject:
        whole: ChatChunkObject = {**self._head, "choices": [choice]}
        if self._has_usage:
            whole["usage"] = None
        return whole
