"""Answers to chats as OpenAI's objects."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from services.common.token_logprobs import TokenLogprobs
from services.gateway.apis.openai.answer_objects import FinishReasonName
from services.gateway.apis.openai.chat_schema import (
    AnswerMessage,
    ChatChoice,
    ChatChunkObject,
    ChatLogprobs,
    ChatObject,
    ChatRequest,
    ChunkChoice,
    Delta,
)
from services.gateway.apis.openai.format import OpenAIFormat
from services.gateway.apis.openai.tool_schema import AnswerToolCall, NamedToolChoice, ToolCallDeltaObject
from services.gateway.apis.shared.logprobs import chat_logprobs
from services.gateway.core.chunks import Chunk, Completion, Finish, Prompt
from services.gateway.core.request_service import RequestService
from services.gateway.http.headers import REQUEST_ID_HEADER
from services.gateway.link.journal_entry import FinishReason
from services.gateway.text.answer_parts import AnswerParts, ToolCall
from services.gateway.text.deltas import CallArguments, CallBegin, ContentDelta, ReasoningDelta
from services.gateway.text.deltas import Delta as AnswerDelta

PARAM_NAMES = {
    "chat": "messages",
    "logprobs": "top_logprobs",
    "prompt": "messages",
    "prompt_embedding_table": "messages",
    "prompt_token_ids": "messages",
    "request_id": REQUEST_ID_HEADER,
}


class ChatFormat(OpenAIFormat):
    """The `Format` of chats. A chat is a single prompt, so `prompt_index` is always 0."""

    def __init__(self, service: RequestService, body: ChatRequest, request_id: str) -> None:
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        super().__init__(service, body, kind, f"chatcmpl-{request_id}")
        self._body = body
        self.param_names = _param_names(body) | {"request_id": body.source_of(request_id)}
        self._lead = _last_of_assistant(body) if body.echo else ""
        self._is_named = isinstance(body.tool_choice, NamedToolChoice)
        self._must_call = self._is_named or body.tool_choice in ("required", "any")
        self._held_reasoning: dict[int, list[str]] = {}  # of streams, by index
        self._has_reasoning = service.tokenizer.chat_formats.has_reasoning and body.include_reasoning is not False

    def opening(self) -> Sequence[ChatChunkObject]:
        """Objects with the role of every answer and, for `echo`, the text that the answer continues."""
        deltas: list[Delta] = [{"role": "assistant", "content": "", "reasoning_content": None}]
        if self._lead:
            deltas.append({"content": self._lead, "reasoning_content": None})
        objects = [
            self._object(_piece(i, delta), 0)
            for delta in deltas
            for i in range(self._body.n or 1)
        ]
        if self._body.return_token_ids:
            objects[0]["prompt_token_ids"] = self._prompts[0]
        return objects

    def chunk(self, prompt_index: int, chunk: Chunk) -> Sequence[ChatChunkObject | bytes]:
        if self._is_plain and chunk.text and not chunk.deltas and chunk.finish is None and chunk.prompt is None:
            return (self._text_objects.event(chunk.index, chunk.text),)
        deltas = chunk.all_deltas()
        if self._body.stream_reasoning is False:
            deltas = self._with_whole_reasoning(chunk.index, deltas, is_last=chunk.finish is not None)
        delta = _delta_object(deltas, has_reasoning=self._has_reasoning)
        choice = _piece(chunk.index, delta)
        if self._body.logprobs and chunk.token_ids:
            choice["logprobs"] = self._logprobs(chunk.token_ids, chunk.logprobs or ())
        if self._body.return_token_ids:
            choice["token_ids"] = chunk.token_ids
        prompt_logprobs = self._prompt_logprobs(chunk.prompt)
        has_text = len(delta) > 1  # beside the reasoning, which may be null
        choices = [choice]
        if chunk.finish is not None:
            self._usage.add(prompt_index, chunk.finish)
            if has_text:  # as with OpenAI, the delta beside the reason has no text
                choices.append(_piece(chunk.index, _delta_object((), has_reasoning=False)))
            choices[-1]["finish_reason"] = _finish_reason(chunk.finish, self._is_named)
            choices[-1] |= self._end_fields(chunk.finish)  # type: ignore[typeddict-item]
            reports = {name: (part,) for name, part in chunk.reports.items()}
            choices[-1]["delta"] |= self._reported(reports, chunk.finish)  # type: ignore[typeddict-item]
        elif not has_text and choice["logprobs"] is None and len(choice) == 4 and prompt_logprobs is None:
            if not self._has_usage:
                return ()  # the token is an incomplete character, or a part of a marker
            delta["content"] = ""  # who counts tokens also measures when they come
        objects = [self._object(each, chunk.num_output_tokens) for each in choices]
        if prompt_logprobs is not None:
            objects[0]["prompt_logprobs"] = prompt_logprobs
        return objects

    def _with_whole_reasoning(
        self, index: int, deltas: Sequence[AnswerDelta], *, is_last: bool
    ) -> Sequence[AnswerDelta]:
        """Holds reasoning back until something else follows it, or nothing."""
        held = self._held_reasoning.setdefault(index, [])
        held += [each.text for each in deltas if isinstance(each, ReasoningDelta)]
        others = [each for each in deltas if not isinstance(each, ReasoningDelta)]
        if not held or not (others or is_last):
            return others
        whole = ReasoningDelta("".join(held))
        held.clear()
        return [whole, *others]

    def whole(self, answers: Sequence[tuple[Sequence[Completion], Prompt | None]]) -> ChatObject:
        [(completions, prompt)] = answers
        choices = []
        for completion in completions:
            assert completion.finish is not None
            self._usage.add(0, completion.finish)
            choices.append(self._choice(completion))
        whole: ChatObject = {
            **self.head,
            "choices": choices,
            "usage": self._usage.usage(),
            "prompt_logprobs": self._prompt_logprobs(prompt),
            "prompt_token_ids": self._prompts[0] if self._body.return_token_ids else None,
        }
        return whole

    def _choice(self, completion: Completion) -> ChatChoice:
        message: AnswerMessage = {
            "role": "assistant",
            "content": self._lead + completion.text,
            "refusal": None,
            "reasoning": None,
            "reasoning_content": None,
        }
        if completion.parts is not None:
            _add_parts(message, completion.parts, has_reasoning=self._has_reasoning)
        if self._must_call:
            message["content"] = message["content"] or ""  # as with vLLM
        choice: ChatChoice = {
            "index": completion.index,
            "message": message,
            "logprobs": None,
            "finish_reason": _finish_reason(completion.finish, self._is_named),
            **self._end_fields(completion.finish),  # type: ignore[typeddict-item]
            **self._reported(completion.reports, completion.finish),  # type: ignore[typeddict-item]
            "token_ids": completion.token_ids if self._body.return_token_ids else None,
        }
        if self._body.logprobs:
            choice["logprobs"] = self._logprobs(completion.token_ids, completion.logprobs)
        if self._body.return_prompt_token_ids:
            choice["prompt_token_ids"] = self._prompts[0]
        return choice

    def _logprobs(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> ChatLogprobs:
        has_ids = bool(self._body.return_tokens_as_token_ids)
        return chat_logprobs(self._tokenizer, token_ids, logprobs, has_ids=has_ids, shows_own=self._num_named > 0)

    def _text_object(self, index: int, text: str) -> ChatChunkObject:
        return self._object(_piece(index, _delta_object([ContentDelta(text)], has_reasoning=self._has_reasoning)), 0)

    def _object(self, choice: ChunkChoice, num_output_tokens: int) -> ChatChunkObject:
        whole: ChatChunkObject = {**self.head, "choices": [choice]}
        if self._has_running_usage:
            whole["usage"] = self._running_usage(0, num_output_tokens)
        elif self._has_usage:
            whole["usage"] = None
        return whole


class BatchChatFormat(ChatFormat):
    """The `Format` of several chats with one answer each: the index of a choice is that of its conversation."""

    def whole(self, answers: Sequence[tuple[Sequence[Completion], Prompt | None]]) -> ChatObject:
        choices = []
        for index, ([completion], _) in enumerate(answers):
            assert completion.finish is not None
            self._usage.add(index, completion.finish)
            choice = self._choice(completion)
            choice["index"] = index
            if self._body.return_token_ids or self._body.return_prompt_token_ids:
                choice["prompt_token_ids"] = self._prompts[index]
            choices.append(choice)
        return {**self.head, "choices": choices, "usage": self._usage.usage()}


def _piece(index: int, delta: Delta) -> ChunkChoice:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def _param_names(body: ChatRequest) -> dict[str, str]:
    """Some fields have two names, of which the request has one."""
    names = dict(PARAM_NAMES)
    if body.max_completion_tokens is not None:
        names["max_tokens"] = "max_completion_tokens"
    elif body.max_tokens is None:
        names["max_tokens"] = "n_predict"
    if body.max_reasoning_tokens is None:
        names["max_reasoning_tokens"] = "thinking_token_budget"
    return names


def _last_of_assistant(body: ChatRequest) -> str:
    """The text of the last message if it is the assistant's, else an empty string."""
    last = body.messages[-1]
    return last.text if last.role == "assistant" else ""


def _finish_reason(finish: Finish, is_named: bool) -> FinishReasonName:
    """`tool_calls` if the answer has calls. As with OpenAI, not if the request named the tool to call."""
    if finish.reason is FinishReason.STOP and finish.num_calls and not is_named:
        return "tool_calls"
    return finish.reason.value


def _delta_object(pieces: Iterable[AnswerDelta], *, has_reasoning: bool) -> Delta:
    """The new part of an answer. `has_reasoning`: whether to show reasoning.

    `reasoning_content` is always there, because SGLang's clients read it from every delta.
    """
    content, reasoning = [], []
    calls: dict[int, ToolCallDeltaObject] = {}
    for piece in pieces:
        if isinstance(piece, ContentDelta):
            content.append(piece.text)
        elif isinstance(piece, ReasoningDelta):
            reasoning.append(piece.text)
        elif isinstance(piece, CallBegin):
            calls[piece.index] = {
                "index": piece.index,
                "id": piece.call_id,
                "type": "function",
                "function": {"name": piece.name, "arguments": ""},
            }
        elif isinstance(piece, CallArguments):
            call = calls.setdefault(piece.index, {"index": piece.index, "function": {"arguments": ""}})
            call["function"]["arguments"] += piece.text
    delta: Delta = {"reasoning_content": None}
    if reasoning and has_reasoning:
        delta["reasoning"] = delta["reasoning_content"] = "".join(reasoning)
    if content:
        delta["content"] = "".join(content)
    if calls:
        delta["tool_calls"] = list(calls.values())
    return delta


def _add_parts(message: AnswerMessage, parts: AnswerParts, *, has_reasoning: bool) -> None:
    """Adds reasoning and calls to a whole message. Its content becomes null if it is empty."""
    message["content"] = message["content"] or None
    if has_reasoning:
        message["reasoning"] = message["reasoning_content"] = parts.reasoning() or None
    if calls := parts.calls:
        message["tool_calls"] = [_call_object(call) for call in calls]


def _call_object(call: ToolCall) -> AnswerToolCall:
    return {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
