"""Answers of Cohere's chats: the whole message, or its events."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from services.common.token_logprobs import TokenLogprobs
from services.gateway.apis.cohere.conversion import PARAM_NAMES
from services.gateway.apis.cohere.schema import (
    CallObject,
    CohereAnswer,
    CohereAnswerMessage,
    CohereChatRequest,
    CohereUsage,
    LogprobItem,
)
from services.gateway.apis.shared.answer import DONE, Format
from services.gateway.apis.shared.logprobs import LEAST_LOGPROB
from services.gateway.core.chunks import Chunk, Completion, Finish, Prompt
from services.gateway.core.request_service import RequestService
from services.gateway.http.errors import error_text
from services.gateway.http.json_pieces import LazyList
from services.gateway.link.journal_entry import FinishReason
from services.gateway.text.deltas import CallArguments, CallBegin, CallEnd, ContentDelta, Delta, ReasoningDelta


class CohereFormat(Format):
    """The `Format` of these chats. It belongs to one request, because it keeps which part of the answer is open."""

    has_event_names = True
    end_of_stream = DONE
    param_names = PARAM_NAMES

    def __init__(self, service: RequestService, body: CohereChatRequest, request_id: str) -> None:
        self._tokenizer = service.tokenizer
        self._has_logprobs = bool(body.logprobs)
        self._request_id = request_id
        self._open: str | None = None  # the kind of the block that grows: text or thinking
        self._num_blocks = 0  # that have begun
        self._finish: Finish | None = None

    def opening(self) -> Sequence[Any]:
        """The empty message."""
        message = {"role": "assistant", "content": [], "tool_plan": "", "tool_calls": [], "citations": []}
        return [{"type": "message-start", "id": self._request_id, "delta": {"message": message}}]

    def chunk(self, prompt_index: int, chunk: Chunk) -> Sequence[Any]:
        self._finish = chunk.finish
        events = list(self._events(chunk.all_deltas()))
        if self._has_logprobs and chunk.token_ids:
            deltas = [event for event in events if event["type"] == "content-delta"]
            if not deltas:  # a token without text belongs to the block that is open, or to none
                deltas = [self._content("content-delta", {}, self._num_blocks - 1 if self._open else 0)]
                events += deltas
            items = list(self._logprobs(chunk.token_ids, chunk.logprobs or ()))
            deltas[-1]["logprobs"] = {
                "text": "".join(each["text"] for each in items),
                "token_ids": [token_id for each in items for token_id in each["token_ids"]],
                "logprobs": [logprob for each in items for logprob in each["logprobs"]],
            }
        return events

    def closing(self) -> Sequence[Any]:
        """The end of the message, with reason and counts."""
        assert self._finish is not None, "the stream has ended"
        delta = {"finish_reason": _reason(self._finish), "usage": _usage(self._finish)}
        return [*self._end_block(), {"type": "message-end", "id": self._request_id, "delta": delta}]

    def failure(self, error: Exception) -> Sequence[Any]:
        delta = {"finish_reason": "ERROR", "error": error_text(error)}
        return [{"type": "message-end", "id": self._request_id, "delta": delta}]

    def whole(self, answers: Sequence[tuple[Sequence[Completion], Prompt | None]]) -> CohereAnswer:
        [([completion], _)] = answers
        finish, text = completion.finish, completion.text
        assert finish is not None
        content: list[Any] = []
        calls: list[CallObject] = []
        if completion.parts is not None:
            if reasoning := completion.parts.reasoning():
                content.append({"type": "thinking", "thinking": reasoning})
            calls = [_call(each.call_id, each.name, each.arguments) for each in completion.parts.calls]
        if text or not (content or calls):
            content.append({"type": "text", "text": text})
        message: CohereAnswerMessage = {"role": "assistant"}
        if content:
            message["content"] = content
        if calls:
            message["tool_calls"] = calls
        answer: CohereAnswer = {
            "id": self._request_id,
            "finish_reason": _reason(finish),
            "message": message,
            "usage": _usage(finish),
        }
        if self._has_logprobs:
            answer["logprobs"] = LazyList(lambda: self._logprobs(completion.token_ids, completion.logprobs))  # type: ignore[typeddict-item]
        return answer

    def _events(self, deltas: Iterable[Delta]) -> Iterator[dict[str, Any]]:
        for delta in deltas:
            if isinstance(delta, ContentDelta | ReasoningDelta):
                kind = "text" if isinstance(delta, ContentDelta) else "thinking"
                if self._open != kind:
                    yield from self._end_block()
                    self._open = kind
                    self._num_blocks += 1
                    yield self._content("content-start", {"type": kind, kind: ""}, self._num_blocks - 1)
                yield self._content("content-delta", {kind: delta.text}, self._num_blocks - 1)
            elif isinstance(delta, CallBegin):
                yield from self._end_block()
                call = _call(delta.call_id, delta.name, "")
                yield {"type": "tool-call-start", "index": delta.index, "delta": {"message": {"tool_calls": call}}}
            elif isinstance(delta, CallArguments):
                piece = {"function": {"arguments": delta.text}}
                yield {"type": "tool-call-delta", "index": delta.index, "delta": {"message": {"tool_calls": piece}}}
            elif isinstance(delta, CallEnd):
                yield {"type": "tool-call-end", "index": delta.index}

    def _end_block(self) -> Sequence[dict[str, Any]]:
        is_open, self._open = self._open is not None, None
        return [{"type": "content-end", "index": self._num_blocks - 1}] if is_open else ()

    def _content(self, kind: str, content: dict[str, str], index: int) -> dict[str, Any]:
        return {"type": kind, "index": index, "delta": {"message": {"content": content}}}

    def _logprobs(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> Iterator[LogprobItem]:
        for token_id, each in zip(token_ids, logprobs, strict=True):
            logprob = max(each.logprob, LEAST_LOGPROB)
            yield {"text": self._tokenizer.text_of(token_id), "token_ids": [token_id], "logprobs": [logprob]}


def _call(call_id: str, name: str, arguments: str) -> CallObject:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _reason(finish: Finish) -> Any:
    if finish.reason is FinishReason.LENGTH:
        return "MAX_TOKENS"
    if finish.reason is not FinishReason.STOP:
        return "ERROR"
    if finish.stop_string is not None:
        return "STOP_SEQUENCE"
    return "TOOL_CALL" if finish.num_calls else "COMPLETE"


def _usage(finish: Finish) -> CohereUsage:
    counts: Any = {"input_tokens": finish.num_prompt_tokens, "output_tokens": finish.num_output_tokens}
    return {"billed_units": counts, "tokens": counts, "cached_tokens": finish.num_cached_tokens}
