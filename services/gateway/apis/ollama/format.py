"""Answers of Ollama's /api/chat and /api/generate: a stream is lines of JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

from pydantic_core import from_json

from services.common.token_logprobs import TokenLogprobs
from services.gateway.apis.ollama.conversion import param_names
from services.gateway.apis.ollama.errors import OllamaErrorBody, ollama_error
from services.gateway.apis.ollama.schema import CallObject, MessageObject, OllamaAnswer, OllamaChatRequest, OllamaFields
from services.gateway.apis.shared.answer import Format
from services.gateway.apis.shared.logprobs import chat_logprobs
from services.gateway.core.chunks import Chunk, Completion, Finish, Prompt
from services.gateway.core.request_service import RequestService
from services.gateway.text.deltas import CallArguments, CallBegin, CallEnd, ContentDelta, Delta, ReasoningDelta

NS_PER_S = 1e9


class OllamaFormat(Format):
    """The `Format` of these answers. It belongs to one request, because it keeps calls until they are complete."""

    is_lines = True

    def __init__(self, service: RequestService, body: OllamaFields, *, has_context: bool) -> None:
        """`has_context`: whether the last object has the token ids of prompt and answer."""
        self.param_names = param_names(body)
        self._tokenizer = service.tokenizer
        self._model, self._has_logprobs, self._shows_thinking = body.model, bool(body.logprobs), body.think is not False
        self._is_chat = isinstance(body, OllamaChatRequest)
        self._has_context = has_context
        self._context: list[int] = []
        self._calls: dict[int, tuple[CallBegin, list[str]]] = {}  # those that have begun, with their arguments' text

    async def begin(self, prompts: Sequence[list[int]]) -> None:
        if self._has_context:
            self._context = list(prompts[0])

    def chunk(self, prompt_index: int, chunk: Chunk) -> Sequence[OllamaAnswer]:
        if self._has_context:
            self._context += chunk.token_ids
        objects = []
        piece = self._piece(chunk.all_deltas())
        if self._has_logprobs and chunk.token_ids:
            piece["logprobs"] = self._logprobs(chunk.token_ids, chunk.logprobs or ())
        if not _says_nothing(piece):
            objects.append(self._object(piece))
        if chunk.finish is not None:
            objects.append(self._object(self._piece(()), chunk.finish))
        return objects

    def failure(self, error: Exception) -> Sequence[OllamaErrorBody]:
        return [ollama_error(error)]

    def whole(self, answers: Sequence[tuple[Sequence[Completion], Prompt | None]]) -> OllamaAnswer:
        [([completion], _)] = answers
        if self._has_context:
            self._context += completion.token_ids
        piece = self._piece(completion.all_deltas())
        if self._has_logprobs:
            piece["logprobs"] = self._logprobs(completion.token_ids, completion.logprobs)
        return self._object(piece, completion.finish)

    def _object(self, piece: dict[str, Any], finish: Finish | None = None) -> OllamaAnswer:
        whole: OllamaAnswer = {**answer_head(self._model), **piece, "done": finish is not None}  # type: ignore[typeddict-item]
        if finish is not None:
            whole |= {"done_reason": finish.reason.value, **_times(finish)}  # type: ignore[typeddict-item]
            if self._has_context:
                whole["context"] = self._context
        return whole

    def _piece(self, deltas: Iterable[Delta]) -> dict[str, Any]:
        """What is new of the answer, in the fields of an object."""
        message: MessageObject = {"role": "assistant", "content": ""}
        thinking, calls = "", []
        for delta in deltas:
            if isinstance(delta, ContentDelta):
                message["content"] += delta.text
            elif isinstance(delta, ReasoningDelta):
                thinking += delta.text
            elif isinstance(delta, CallBegin):
                self._calls[delta.index] = delta, []
            elif isinstance(delta, CallArguments):
                self._calls[delta.index][1].append(delta.text)
            else:
                text, call = self._ended(delta)
                message["content"] += text
                calls += call
        if thinking and self._shows_thinking:
            message["thinking"] = thinking
        if calls:
            message["tool_calls"] = calls
        if self._is_chat:
            return {"message": message}
        return {"response": message["content"], **({"thinking": message["thinking"]} if "thinking" in message else {})}

    def _ended(self, end: CallEnd) -> tuple[str, list[CallObject]]:
        """A call that is complete, or the text of one that is none. Of one that was cut off there is nothing."""
        begin, pieces = self._calls.pop(end.index)
        if not end.is_complete:
            return end.malformed or "", []
        arguments = from_json("".join(pieces))
        return "", [{"id": begin.call_id, "function": {"index": end.index, "name": begin.name, "arguments": arguments}}]

    def _logprobs(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> Any:
        return chat_logprobs(self._tokenizer, token_ids, logprobs, has_ids=False)["content"]


def answer_head(model: str) -> dict[str, str]:
    """The first fields of each object."""
    return {"model": model, "created_at": timestamp(datetime.now(UTC))}


def timestamp(time: datetime) -> str:
    """A time of UTC as Go's clients parse it."""
    return time.isoformat(timespec="microseconds").replace("+00:00", "Z")


def _says_nothing(piece: dict[str, Any]) -> bool:
    """Whether a piece adds nothing to the answer: its token is an incomplete character, or a part of a marker."""
    return piece in ({"message": {"role": "assistant", "content": ""}}, {"response": ""})


def _times(finish: Finish) -> dict[str, int]:
    """Counts of tokens, and durations in nanoseconds; none is 0, which Ollama's clients take for a missing one."""
    times = finish.timings
    queue_s = times.queue_s or 0.0
    first_token_s = times.total_s if times.first_token_s is None else times.first_token_s
    seconds = {
        "total_duration": times.total_s,
        "load_duration": queue_s,
        "prompt_eval_duration": first_token_s - queue_s,
        "eval_duration": times.total_s - first_token_s,
    }
    counts = {"prompt_eval_count": finish.num_prompt_tokens, "eval_count": finish.num_output_tokens}
    return {**counts, **{name: max(1, round(NS_PER_S * each)) for name, each in seconds.items()}}
