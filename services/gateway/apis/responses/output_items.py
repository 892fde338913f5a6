"""`OutputItems`: from the deltas of an answer to output items and the events that build them up in a client."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic_core import from_json

from services.common.token_logprobs import LogprobRows
from services.gateway.apis.responses.tool_conversion import OfferedTool, ToolKind
from services.gateway.apis.shared.logprobs import chat_logprobs
from services.gateway.http.json_pieces import LazyList
from services.gateway.text.deltas import CallArguments, CallBegin, CallEnd, ContentDelta, Delta, ReasoningDelta
from services.gateway.text.tokenizer import Tokenizer

Event = dict[str, Any]
PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "custom_tool_call": "ctc"}


class OutputItems:
    """Call `add` for the deltas in order, then `end`. `items` has all items that have ended.

    Events have no sequence number yet. Items of custom tools and of the local shell are sent when they are whole.
    """

    def __init__(self, response_id: str, tools: Mapping[str, OfferedTool], tokenizer: Tokenizer) -> None:
        """`tools`: those of the request, by the name that the model sees."""
        self.items: list[dict[str, Any]] = []
        self._id = response_id
        self._tools = tools
        self._open: dict[str, Any] | None = None  # the item that grows, as in its first event
        self._kind = ToolKind.FUNCTION  # of the open item, if it is a call
        self._pieces: list[str] = []  # of its text or arguments
        self._tokenizer = tokenizer
        self._token_ids: list[int] = []  # of its text, if log-probabilities are requested
        self._logprobs = LogprobRows()  # of these tokens
        self._num_sent = 0  # log-probabilities that have been sent with a piece of the text

    def add(
        self, deltas: Iterable[Delta], token_ids: Sequence[int] = (), logprobs: LogprobRows | None = None
    ) -> list[Event]:
        """The events for these deltas. `logprobs`: of `token_ids`, the tokens of a text; they may come before it."""
        events: list[Event] = []
        if logprobs is not None:
            self._token_ids += token_ids
            self._logprobs.extend(logprobs)
        for delta in deltas:
            if isinstance(delta, ContentDelta):
                if self._open is None or self._open["type"] != "message":
                    events += self._begin_text({"type": "message", "role": "assistant"}, _text_part(""))
                events.append(self._grow("response.output_text.delta", delta.text, logprobs=self._take_logprobs()))
            elif isinstance(delta, ReasoningDelta):
                if self._open is None or self._open["type"] != "reasoning":
                    events += self._begin_text({"type": "reasoning", "summary": []}, _reasoning_part(""))
                events.append(self._grow("response.reasoning_text.delta", delta.text))
            elif isinstance(delta, CallBegin):
                events += self.end()
                events += self._begin_call(delta)
            elif isinstance(delta, CallArguments):
                if self._kind is not ToolKind.FUNCTION:
                    self._pieces.append(delta.text)
                elif delta.text:
                    events.append(self._grow("response.function_call_arguments.delta", delta.text))
            elif isinstance(delta, CallEnd):
                events += self.end(is_cut=not delta.is_complete)
        return events

    def end(self, *, is_cut: bool = False) -> list[Event]:
        """The events that end the last item. `is_cut`: it is not complete."""
        if self._open is None:
            return []
        item, joined = self._open, "".join(self._pieces)
        events: list[Event] = []
        if item["type"] == "message":
            self._num_sent = 0
            events += self._end_text("response.output_text.done", _text_part(joined, self._take_logprobs()))
            self._token_ids, self._logprobs, self._num_sent = [], LogprobRows(), 0
        elif item["type"] == "reasoning":
            events += self._end_text("response.reasoning_text.done", _reasoning_part(joined))
        elif self._kind is ToolKind.FUNCTION:
            item["arguments"] = joined
            events.append(self._event("response.function_call_arguments.done", arguments=joined))
        else:
            events += self._end_other_call(joined)
        item["status"] = "incomplete" if is_cut else "completed"
        events.append(self._item_event("response.output_item.done"))
        self.items.append(item)
        self._open, self._pieces = None, []
        return events

    def _begin_text(self, fields: dict[str, Any], part: dict[str, Any]) -> list[Event]:
        events = self.end()
        self._open = self._new_item({**fields, "content": []})
        events.append(self._item_event("response.output_item.added"))
        events.append(self._event("response.content_part.added", content_index=0, part=part))
        return events

    def _end_text(self, kind: str, part: dict[str, Any]) -> list[Event]:
        assert self._open is not None
        self._open["content"] = [part]
        given = {name: value for name, value in part.items() if name in ("text", "logprobs")}
        return [
            self._event(kind, content_index=0, **given),
            self._event("response.content_part.done", content_index=0, part=part),
        ]

    def _begin_call(self, begin: CallBegin) -> list[Event]:
        tool = self._tools.get(begin.name)
        self._kind = ToolKind.FUNCTION if tool is None else tool.kind
        name = {"name": begin.name if tool is None else tool.name}
        if tool is not None and tool.namespace is not None:
            name["namespace"] = tool.namespace
        if self._kind is ToolKind.FUNCTION:
            self._open = self._new_item({"type": "function_call", "call_id": begin.call_id, **name, "arguments": ""})
            return [self._item_event("response.output_item.added")]
        if self._kind is ToolKind.CUSTOM:
            self._open = self._new_item({"type": "custom_tool_call", "call_id": begin.call_id, **name, "input": ""})
            return [self._item_event("response.output_item.added")]
        self._open = self._new_item({"type": "local_shell_call", "call_id": begin.call_id, "action": {}})
        return []

    def _end_other_call(self, arguments: str) -> list[Event]:
        assert self._open is not None
        values = from_json(arguments, allow_partial="trailing-strings") if arguments else {}  # it may be cut off
        if self._kind is ToolKind.CUSTOM:
            self._open["input"] = text = str(values.get("input", ""))
            return [
                self._event("response.custom_tool_call_input.delta", delta=text),
                self._event("response.custom_tool_call_input.done", input=text),
            ]
        command = values.get("command", [])
        self._open["action"] = {
            "type": "exec",
            "command": [str(each) for each in command] if isinstance(command, list) else ["sh", "-c", str(command)],
            "env": {},
            "working_directory": values.get("working_directory"),
            "timeout_ms": values.get("timeout_ms"),
            "user": None,
        }
        return [self._item_event("response.output_item.added")]

    def _new_item(self, fields: dict[str, Any]) -> dict[str, Any]:
        prefix = PREFIXES.get(fields["type"], "lsh")
        return {"id": f"{prefix}_{self._id}_{len(self.items)}", "status": "in_progress", **fields}

    def _grow(self, kind: str, piece: str, **fields: Any) -> Event:
        self._pieces.append(piece)
        return self._event(kind, delta=piece, **fields, **({} if "arguments" in kind else {"content_index": 0}))

    def _take_logprobs(self) -> LazyList | list[Any]:
        """Those that have not been sent yet, as OpenAI has them."""
        token_ids, rows = self._token_ids[self._num_sent :], self._logprobs[self._num_sent :]
        self._num_sent += len(rows)
        if not rows:
            return []
        return LazyList(lambda: chat_logprobs(self._tokenizer, token_ids, rows, has_ids=False)["content"])

    def _event(self, kind: str, **fields: Any) -> Event:
        assert self._open is not None
        return {"type": kind, "item_id": self._open["id"], "output_index": len(self.items), **fields}

    def _item_event(self, kind: str) -> Event:
        assert self._open is not None
        return {"type": kind, "output_index": len(self.items), "item": dict(self._open)}


def _text_part(text: str, logprobs: LazyList | list[Any] | None = None) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs or []}


def _reasoning_part(text: str) -> dict[str, Any]:
    return {"type": "reasoning_text", "text": text}
