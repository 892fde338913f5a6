"""Converts bodies of Cohere's chats to gRPC messages, where all limits are checked."""

from __future__ import annotations

from typing import Any

from pydantic_core import to_json

from services.gateway.apis.cohere.schema import (
    CohereChatRequest,
    CohereMessage,
    Document,
    DocumentContent,
    ImageContent,
    TextContent,
    ThinkingContent,
)
from services.gateway.apis.shared.structured_output import json_structure
from services.gateway.apis.shared.to_message import json_text, message_with, thinking_variables
from services.gateway.http.headers import REQUEST_ID_HEADER
from services.gateway.request.sampling_defaults import SamplingDefaults
from services.pb import gateway_pb2

PARAM_NAMES = {
    "chat": "messages",
    "chat_template_kwargs": "documents",
    "max_reasoning_tokens": "thinking.token_budget",
    "prompt": "messages",
    "request_id": REQUEST_ID_HEADER,
    "stop": "stop_sequences",
    "structured_output": "response_format",
    "top_k": "k",
    "top_p": "p",
}
CHOICES = {"REQUIRED": "required", "NONE": "none"}


def cohere_message(
    body: CohereChatRequest, request_id: str, defaults: SamplingDefaults, *, reasons: bool
) -> gateway_pb2.GenerateRequest:
    """The message of a chat. `reasons`: whether the model does."""
    message = message_with(
        defaults,
        temperature=body.temperature,
        top_k=body.k,
        top_p=body.p,
        frequency_penalty=body.frequency_penalty,
        presence_penalty=body.presence_penalty,
        seed=body.seed,
        stop=body.stop_sequences,
        priority=body.priority,
    )
    message.request_id = request_id
    message.model = body.model
    message.chat.CopyFrom(_chat_of(body))
    if body.max_tokens is not None:
        message.max_tokens = body.max_tokens
    given = body.response_format
    if given is not None and given.type == "json_object":
        schema = given.schema_ if given.json_schema is None else given.json_schema
        message.sampling.structured_output.CopyFrom(json_structure(schema, "response_format"))
    if body.logprobs:
        message.logprobs = 0
    if reasons and body.thinking is not None and body.thinking.token_budget is not None:
        message.chat.max_reasoning_tokens = body.thinking.token_budget
    return message


def _chat_of(body: CohereChatRequest) -> gateway_pb2.Chat:
    kwargs: dict[str, Any] = {}
    if body.thinking is not None:
        kwargs |= thinking_variables(body.thinking.type == "enabled")
    if body.documents:
        kwargs["documents"] = [_document(each) for each in body.documents]
    return gateway_pb2.Chat(
        messages=[_message_of(each) for each in body.messages],
        add_generation_prompt=True,
        tools=json_text([_tool(each, body) for each in body.tools or ()]),
        tool_choice=CHOICES[body.tool_choice] if body.tool_choice is not None else "",
        chat_template_kwargs=json_text(kwargs),
    )


def _tool(tool: Any, body: CohereChatRequest) -> Any:
    """What is no tool is refused where tools are read."""
    if not body.strict_tools or not isinstance(tool, dict) or not isinstance(tool.get("function"), dict):
        return tool
    return {**tool, "function": {**tool["function"], "strict": True}}


def _document(given: str | Document) -> dict[str, Any]:
    if isinstance(given, str):
        return {"text": given}
    return {"text": given.data} if isinstance(given.data, str) else given.data


def _message_of(each: CohereMessage) -> gateway_pb2.ChatMessage:
    message = gateway_pb2.ChatMessage(role=each.role, tool_call_id=each.tool_call_id or "")
    texts, reasoning = [each.tool_plan or ""], list[str]()  # joined once: a message may have a thousand parts
    position = len(texts[0])
    for part in [each.content] if isinstance(each.content, str) else each.content or ():
        if isinstance(part, ThinkingContent):
            reasoning.append(part.thinking)
        elif isinstance(part, ImageContent):
            image = part.image_url
            message.pictures.add(position=position, url=image.url, detail=image.detail or "")
        else:
            texts.append(_text_of(part))
            position += len(texts[-1])
    message.content, message.reasoning = "".join(texts), "".join(reasoning)
    for call in each.tool_calls or ():
        message.tool_calls.add(id=call.id, name=call.function.name, arguments=call.function.arguments or "")
    return message


def _text_of(part: str | TextContent | DocumentContent) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, TextContent):
        return part.text
    data = part.document.data
    return data if isinstance(data, str) else to_json(data).decode()
