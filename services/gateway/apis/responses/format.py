"""Answers of the Responses API: the whole response, or its events."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic_core import from_json, to_json

from services.gateway.apis.responses.answer_objects import ResponseError, ResponseObject, ResponseUsage
from services.gateway.apis.responses.event_log import EventLog
from services.gateway.apis.responses.output_items import Event, OutputItems
from services.gateway.apis.responses.raw_messages import RawMessages
from services.gateway.apis.responses.response_store import StoredResponse
from services.gateway.apis.responses.schema import ResponsesRequest
from services.gateway.apis.responses.stored_record import ResponseRecord
from services.gateway.apis.responses.tool_conversion import OfferedTool
from services.gateway.apis.shared.answer import Format
from services.gateway.apis.shared.timings import TimingsSoFar, prompt_progress, timings
from services.gateway.apis.shared.to_message import sampling_options
from services.gateway.core.chunks import Chunk, Completion, Finish, Prompt
from services.gateway.core.request_service import RequestService
from services.gateway.http.errors import describe
from services.gateway.http.json_pieces import LazyList
from services.gateway.link.journal_entry import FinishReason
from services.gateway.resources.repeatable import created_at
from services.gateway.text.deltas import Delta

PARAM_NAMES = {
    "chat": "input",
    "logprobs": "top_logprobs",
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "prompt": "input",
    "reasoning_effort": "reasoning.effort",
}


class ResponsesFormat(Format):
    """The `Format` of responses. A response is the only answer to a single prompt."""

    has_event_names = True

    def __init__(
        self,
        service: RequestService,
        body: ResponsesRequest,
        request_id: str,
        tools: Mapping[str, OfferedTool],
        record: ResponseRecord | None = None,
    ) -> None:
        """`tools`: those of the request, by the name that the model sees. `record`: keeps the response."""
        paths = {f"tools[{i}].function": tool.path for i, tool in enumerate(tools.values())}
        self.param_names: Mapping[str, str] = PARAM_NAMES | paths | {"request_id": body.source_of(request_id)}
        self._has_logprobs = body.has_logprobs
        self._timings = TimingsSoFar() if body.timings_per_token else None
        self._raw = RawMessages(service.tokenizer) if body.enable_response_messages else None
        named = {name: replace(tool, parameters=None) for name, tool in tools.items()}  # an answer has no schemas
        self._items = OutputItems(request_id, named, service.tokenizer)
        self._finish: Finish | None = None
        self._error: ResponseError | None = None
        self._num_events = 0
        self._record = record
        self._head = _head(service, body, request_id, is_stored=record is not None and body.store is not False)

    @property
    def response_id(self) -> str:
        """Of the response."""
        return self._head["id"]

    async def begin(self, prompts: Sequence[list[int]]) -> None:
        if self._timings is not None:
            self._timings.begin(prompts)
        if self._raw is not None:
            await self._raw.begin(prompts[0])

    def opening(self) -> Sequence[Event]:
        response = self.response("in_progress")
        kinds = ("response.created", "response.in_progress")
        return self._numbered([{"type": kind, "response": response} for kind in kinds])

    def chunk(self, prompt_index: int, chunk: Chunk) -> Sequence[Event]:
        events: list[Event] = []
        for progress in prompt_progress(chunk.reports):
            response = self.response("in_progress")
            events.append({"type": "response.in_progress", "response": response, "prompt_progress": progress})
        self._finish = chunk.finish
        events += self._add(chunk.all_deltas(), chunk)
        if self._timings is not None and (chunk.token_ids or chunk.finish is not None):
            found = self._timings.of(prompt_index, chunk)
            events = [{**each, "timings": found} for each in events]
        return self._numbered(events)

    def closing(self) -> Sequence[Event]:
        status = self._end_status()
        events = self._items.end(is_cut=status == "incomplete")
        last: Event = {"type": f"response.{status}", "response": self.kept(status)}
        if self._timings is not None and self._finish is not None:
            last["timings"] = timings(self._finish)
        return self._numbered([*events, last])

    def whole(self, answers: Sequence[tuple[Sequence[Completion], Prompt | None]]) -> ResponseObject:
        [([completion], _)] = answers
        self._finish = completion.finish
        self._add(completion.all_deltas(), completion)
        status = self._end_status()
        self._items.end(is_cut=status == "incomplete")
        return self.kept(status)

    def failure(self, error: Exception) -> Sequence[Event]:
        """The response has failed; the items that were complete remain."""
        status, body = describe(error)
        code = body["error"]["code"] if status < 500 else None
        self._error = {"code": code or "server_error", "message": body["error"]["message"]}
        return self._numbered([{"type": "response.failed", "response": self.response("failed")}])

    def _end_status(self) -> Any:
        assert self._finish is not None
        return "incomplete" if self._finish.reason is FinishReason.LENGTH else "completed"

    def _add(self, deltas: Iterable[Delta], answer: Chunk | Completion) -> list[Event]:
        if self._raw is not None:
            self._raw.add(answer.token_ids, is_last=answer.finish is not None)
        if self._has_logprobs and answer.logprobs:
            return self._items.add(deltas, answer.token_ids, answer.logprobs)
        return self._items.add(deltas)

    def _numbered(self, events: list[Event]) -> list[Event]:
        for event in events:
            event["sequence_number"] = self._num_events
            self._num_events += 1
        return events

    def kept(self, status: Any) -> ResponseObject:
        """The response as it is now, which is kept where responses are stored."""
        rest = self._rest(status)
        if self._record is not None:
            self._record.keep(self._head, rest)
        return {**self._head, **rest}  # type: ignore[typeddict-item]

    @property
    def stored(self) -> StoredResponse:
        """The response as it was kept last."""
        assert self._record is not None and self._record.kept is not None, "it was kept"
        return self._record.kept

    def keep_events(self, events: EventLog) -> None:
        """Keeps the events of a response that was kept, too."""
        if self._record is not None:
            self._record.keep_events(events)

    def running(self) -> StoredResponse:
        """The response as a client finds it while it runs in the background. Raises `InvalidRequest`."""
        assert self._record is not None, "only stored responses run in the background"
        return self._record.running(self._head, self._rest("in_progress"))

    def queued(self) -> StoredResponse:
        """The response as its client gets it when it has begun to run in the background."""
        assert self._record is not None, "only stored responses run in the background"
        return self._record.as_stored(self._head, self._rest("queued"))

    def response(self, status: Any) -> ResponseObject:
        """The response as it is now."""
        return {**self._head, **self._rest(status)}  # type: ignore[typeddict-item]

    def _rest(self, status: Any) -> dict[str, Any]:
        """The fields that may change while the answer grows."""
        is_open = status in ("queued", "in_progress")
        rest = {
            "status": status,
            "completed_at": int(time.time()) if status == "completed" else None,
            "error": self._error,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": [] if is_open else self._items.items,
            "usage": None if self._finish is None else _usage(self._finish),
        }
        if self._timings is not None and self._finish is not None:
            rest["timings"] = timings(self._finish)
        if self._raw is not None:
            rest |= self._raw.lists(is_open=is_open)
        return rest


def _head(service: RequestService, body: ResponsesRequest, request_id: str, *, is_stored: bool) -> dict[str, Any]:
    """The fields that do not change while the answer grows."""

    def given(value: Any) -> Any:
        return value.model_dump(exclude_none=True, by_alias=True) if hasattr(value, "model_dump") else value

    reasoning, text = body.reasoning, body.text
    sampling = {"temperature": 1.0, "top_p": 1.0} | sampling_options(body, service.local_model.sampling_defaults)
    return {
        "id": f"resp_{request_id.removeprefix('resp_')}",  # with vLLM request_id is the whole id
        "object": "response",
        "created_at": created_at(),
        "background": bool(body.background),
        "frequency_penalty": body.frequency_penalty or 0.0,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": body.model or service.names.first,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "presence_penalty": body.presence_penalty or 0.0,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": reasoning and reasoning.effort, "summary": reasoning and reasoning.summary},
        "store": is_stored,
        "temperature": sampling["temperature"],
        "text": {"format": given(text.format) if text is not None and text.format is not None else {"type": "text"}},
        "tool_choice": "auto" if body.tool_choice is None else given(body.tool_choice),
        "tools": _kept([given(tool) for tool in body.tools or ()]),
        "top_logprobs": body.top_logprobs or 0,
        "top_p": sampling["top_p"],
        "truncation": body.truncation or "disabled",
        "user": body.user,
    }


def _kept(tools: list[Any]) -> list[Any] | LazyList:
    """The same, as JSON while the answer grows: schemas are thousands of objects, all of which each full collection of
    garbage looks at.
    """
    encoded = to_json(tools)
    return LazyList(lambda: from_json(encoded)) if tools else tools


def _usage(finish: Finish) -> ResponseUsage:
    return {
        "input_tokens": finish.num_prompt_tokens,
        "input_tokens_details": {"cached_tokens": finish.num_cached_tokens, "cache_write_tokens": 0},
        "output_tokens": finish.num_output_tokens,
        "output_tokens_details": {"reasoning_tokens": finish.num_reasoning_tokens or 0},
        "total_tokens": finish.num_prompt_tokens + finish.num_output_tokens,
        "prompt_tokens": finish.num_prompt_tokens,
        "completion_tokens": finish.num_output_tokens,
    }
