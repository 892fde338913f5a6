"""Converts bodies of Ollama's routes to gRPC messages, where all limits are checked."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping
from typing import Any

from pydantic_core import to_json

from services.gateway.apis.ollama.schema import (
    RANDOM_SEED,
    OllamaChatRequest,
    OllamaFields,
    OllamaGenerateRequest,
    OllamaMessage,
    OllamaOptions,
)
from services.gateway.apis.shared.structured_output import json_structure
from services.gateway.apis.shared.to_message import json_text, message_with, thinking_variables
from services.gateway.request.model_limits import ModelNames
from services.pb import gateway_pb2

DEFAULTS = {"temperature": 0.8, "top_k": 40, "top_p": 0.9}  # as with Ollama
TAG = ":latest"  # which Ollama adds to a model's name without one
NO_CALL = "call_0"  # what a result without a call answers
SAME_OPTIONS = ("min_p", "presence_penalty", "frequency_penalty")
PARAM_NAMES = {
    "chat": "messages",
    "logprobs": "top_logprobs",
    "max_tokens": "options.num_predict",
    "repetition_penalty": "options.repeat_penalty",
    "structured_output": "format",
    **{name: f"options.{name}" for name in (*DEFAULTS, *SAME_OPTIONS, "seed", "stop")},
}


def name_without_tag(name: str, served: ModelNames) -> str:
    """The name by which a model is served here, if it is served without Ollama's tag."""
    is_served = name in served.names or name in served.adapters
    return name if is_served else name.removesuffix(TAG)


def param_names(body: OllamaFields) -> Mapping[str, str]:
    """The client's names of fields."""
    if isinstance(body, OllamaChatRequest):
        return PARAM_NAMES
    given = "context" if isinstance(body, OllamaGenerateRequest) and body.context else "prompt"
    return {**PARAM_NAMES, **dict.fromkeys(("chat", "messages"), "prompt"), "prompt": given, "prompt_token_ids": given}


def chat_message(body: OllamaChatRequest, request_id: str, names: ModelNames) -> gateway_pb2.GenerateRequest:
    """The message of a chat."""
    message = _common_message(body, request_id, names)
    message.chat.CopyFrom(_chat_of(body, body.messages or ()))
    message.chat.tools = json_text(body.tools)
    return message


def generate_message(
    body: OllamaGenerateRequest, request_id: str, names: ModelNames, *, has_template: bool
) -> gateway_pb2.GenerateRequest:
    """The message for a text. `has_template`: whether the model has a chat template, in which the text is put. Pictures
    are always part of a chat: a model without a template refuses it.
    """
    message = _common_message(body, request_id, names)
    if (has_template or body.images) and not body.raw and not body.suffix:
        message.chat.CopyFrom(generate_chat(body))
        return message
    message.prompt = "\n\n".join(filter(None, ("" if body.raw else body.system, body.prompt)))
    if body.suffix:
        message.suffix = body.suffix
    return message


def generate_chat(body: OllamaGenerateRequest) -> gateway_pb2.Chat:
    """The text as a chat."""
    messages = [OllamaMessage(role="user", content=body.prompt, images=body.images)]
    if body.system:
        messages.insert(0, OllamaMessage(role="system", content=body.system))
    return _chat_of(body, messages)


def _common_message(body: OllamaFields, request_id: str, names: ModelNames) -> gateway_pb2.GenerateRequest:
    options = body.options or OllamaOptions()
    fields: dict[str, Any] = {name: getattr(options, name) for name in SAME_OPTIONS}
    for name, default in DEFAULTS.items():
        given = getattr(options, name)
        fields[name] = default if given is None else given
    _bring_into_range(fields)
    fields["repetition_penalty"] = options.repeat_penalty
    if options.repeat_last_n == 0:
        fields |= dict.fromkeys(("repetition_penalty", "presence_penalty", "frequency_penalty"))
    fields["seed"] = None if options.seed == RANDOM_SEED else options.seed
    fields["stop"] = options.stop
    message = message_with(**fields)
    message.request_id = request_id
    message.model = name_without_tag(body.model, names)
    if options.num_predict is not None and options.num_predict > 0:
        message.max_tokens = options.num_predict
    if body.format:
        schema = None if body.format == "json" else body.format
        message.sampling.structured_output.CopyFrom(json_structure(schema, "format"))
    if body.logprobs:
        message.logprobs = body.top_logprobs or 0
    return message


def _bring_into_range(fields: dict[str, Any]) -> None:
    """As Ollama does, instead of refusing them. A `top_p` of 0 leaves the most likely token."""
    fields["temperature"] = max(0.0, fields["temperature"])
    fields["top_k"] = max(0, fields["top_k"])
    if fields["min_p"] is not None:
        fields["min_p"] = min(max(0.0, fields["min_p"]), 1.0)
    if fields["top_p"] <= 0:
        fields["top_k"] = 1
    if not 0 < fields["top_p"] <= 1:
        fields["top_p"] = 1.0


def _chat_of(body: OllamaFields, messages: Any) -> gateway_pb2.Chat:
    calls = _Calls()
    chat = gateway_pb2.Chat(messages=[_message_of(each, calls) for each in messages], add_generation_prompt=True)
    if body.think is not None:
        chat.chat_template_kwargs = json_text(thinking_variables(body.think is not False))
    if isinstance(body.think, str):
        chat.reasoning_effort = body.think
    return chat


class _Calls:
    """The calls of a conversation: Ollama's may lack ids, and results are then in the order of the calls."""

    def __init__(self) -> None:
        self._num_calls = 0
        self._open: set[str] = set()  # ids of calls without a result
        self._ids = defaultdict[str | None, deque[str]](deque)  # of calls of a tool, and under None of all; some closed

    def begin(self, call_id: str | None, name: str) -> str:
        """The id of the next call."""
        self._num_calls += 1
        call_id = call_id or f"call_{self._num_calls}"
        self._open.add(call_id)
        self._ids[name].append(call_id)
        self._ids[None].append(call_id)
        return call_id

    def end(self, call_id: str | None, name: str | None) -> str:
        """The id of the call with this result: the given one, else the oldest open one of this tool, or of any."""
        call_id = call_id or self._oldest(name) or self._oldest(None) or NO_CALL
        self._open.discard(call_id)
        return call_id

    def _oldest(self, name: str | None) -> str | None:
        ids = self._ids[name]
        while ids and ids[0] not in self._open:
            ids.popleft()
        return ids[0] if ids else None


def _message_of(each: OllamaMessage, calls: _Calls) -> gateway_pb2.ChatMessage:
    message = gateway_pb2.ChatMessage(role=each.role, content=each.content or "", reasoning=each.thinking or "")
    for call in each.tool_calls or ():
        function = call.function
        arguments = to_json(function.arguments or {}).decode()
        message.tool_calls.add(id=calls.begin(call.id, function.name), name=function.name, arguments=arguments)
    if each.role == "tool":
        message.tool_call_id = calls.end(each.tool_call_id, each.tool_name)
        message.name = each.tool_name or ""
    for image in each.images or ():
        message.pictures.add(url=image if image.startswith("data:") else f"data:image/any;base64,{image}")
    return message
