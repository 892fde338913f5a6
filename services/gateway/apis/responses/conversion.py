"""Converts bodies of OpenAI's Responses API to gRPC messages, where all limits are checked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

from pydantic_core import to_json

from services.common.errors import InvalidRequest
from services.gateway.apis.responses.items import (
    CallOutputItem,
    CustomCallItem,
    FunctionCallItem,
    ImagePart,
    MessageItem,
    ReasoningItem,
    ShellCallItem,
    Texts,
)
from services.gateway.apis.responses.schema import ResponsesRequest
from services.gateway.apis.responses.tool_conversion import LOCAL_SHELL, OfferedTool, choice_text, function_name
from services.gateway.apis.shared.conversation import ASSISTANT, SYSTEM, Conversation
from services.gateway.apis.shared.structured_output import json_structure, of_structured_outputs
from services.gateway.apis.shared.to_message import add_logit_bias, json_text, sampling_options, thinking_variables
from services.gateway.request.sampling_defaults import SamplingDefaults
from services.pb import gateway_pb2, sampling_pb2

ROLES = {"developer": SYSTEM}


def responses_message(
    body: ResponsesRequest,
    request_id: str,
    offered: dict[str, OfferedTool],
    earlier: Sequence[Any],
    defaults: SamplingDefaults,
) -> gateway_pb2.GenerateRequest:
    """The message of a request. `offered`: its tools; `earlier`: items before its own. Raises `InvalidRequest`."""
    message = gateway_pb2.GenerateRequest(
        request_id=request_id,
        model=body.model,
        chat=_chat_of(body, offered, earlier),
        sampling=_sampling_of(body, defaults),
        max_tokens=body.max_output_tokens,
        user=body.user or "",
        cache_salt=body.cache_salt or "",
        priority=body.priority,
        truncate_prompt_tokens=0 if body.truncation == "auto" else None,  # 0: as many as fit
        stop=[body.stop] if isinstance(body.stop, str) else body.stop,
        ignore_eos=bool(body.ignore_eos),
        return_progress=bool(body.return_progress and body.stream),
    )
    add_logit_bias(message, body.logit_bias)
    if body.has_logprobs:
        message.logprobs = body.top_logprobs or 0
    return message


def _sampling_of(body: ResponsesRequest, defaults: SamplingDefaults) -> sampling_pb2.SamplingParams:
    sampling = sampling_options(body, defaults)
    form = None if body.text is None else body.text.format
    if (structure := of_structured_outputs(body.structured_outputs)) is not None:
        sampling["structured_output"] = structure
    elif form is not None and form.type in ("json_object", "json_schema"):
        schema = form.schema_ if form.type == "json_schema" else None
        sampling["structured_output"] = json_structure(schema, "text.format")
    return sampling_pb2.SamplingParams(**sampling)


def _chat_of(
    body: ResponsesRequest, offered: dict[str, OfferedTool], earlier: Sequence[Any]
) -> gateway_pb2.Chat:
    conversation = Conversation()
    if body.instructions:
        conversation.add_text(SYSTEM, body.instructions, "instructions")
    for item in earlier:
        _add(conversation, item, "previous_response_id")
    if isinstance(body.input, str):
        conversation.add_text("user", body.input, "input")
    else:
        for i, item in enumerate(body.input):
            _add(conversation, item, f"input[{i}]")
    if conversation.last_role is None:
        raise InvalidRequest("input has no text, at least one message is required", "input")
    reasoning = body.reasoning
    effort = (reasoning and reasoning.effort) or ""
    thinking = thinking_variables(False) if effort == "none" else {}
    return gateway_pb2.Chat(
        messages=conversation.messages(),
        chat_template_kwargs=json_text({**thinking, **(body.chat_template_kwargs or {})}),
        tools=json_text([tool.definition() for tool in offered.values()]),
        tool_choice=choice_text(body, offered),
        parallel_tool_calls=body.parallel_tool_calls,
        reasoning_effort=effort,
    )


def _add(conversation: Conversation, item: Any, path: str) -> None:
    if isinstance(item, MessageItem):
        role = ROLES.get(item.role, item.role)
        if item.images:
            _add_parts(conversation, role, item.content)
            return
        text = _text_of(item.content)
        if role == ASSISTANT:
            conversation.add_reply(text)
        else:
            conversation.add_text(role, text, f"{path}.content")
    elif isinstance(item, ReasoningItem):
        for part in item.content or ():
            conversation.add_reasoning(part.text)
    elif isinstance(item, FunctionCallItem):
        name = function_name(item.name, item.namespace)
        conversation.add_call(item.call_id, name, item.arguments, f"{path}.call_id")
    elif isinstance(item, CustomCallItem):
        name, arguments = function_name(item.name, item.namespace), to_json({"input": item.input}).decode()
        conversation.add_call(item.call_id, name, arguments, f"{path}.call_id")
    elif isinstance(item, ShellCallItem):
        given = {name: value for name, value in item.action.items() if name != "type" and value is not None}
        conversation.add_call(item.call_id, LOCAL_SHELL, to_json(given).decode(), f"{path}.call_id")
    elif isinstance(item, CallOutputItem):
        conversation.add_result(item.answered_id, _result_parts(item.output), f"{path}.call_id")


def _add_parts(conversation: Conversation, role: str, parts: Iterable[Any]) -> None:
    """Texts and pictures in their order."""
    for part in parts:
        if isinstance(part, ImagePart):
            conversation.add_picture(role, part.image_url, part.detail or "")
        elif part.text:
            conversation.add_text(role, part.text, "input")


def _result_parts(output: str | Sequence[Any]) -> list[str | gateway_pb2.MessagePicture]:
    """Texts without a picture between them become one."""
    if isinstance(output, str):
        return [output]
    parts: list[str | gateway_pb2.MessagePicture] = []
    for is_picture, group in groupby(output, lambda part: isinstance(part, ImagePart)):
        if is_picture:
            parts += [gateway_pb2.MessagePicture(url=part.image_url, detail=part.detail or "") for part in group]
        else:
            parts.append("".join([part.text for part in group]))
    return parts


def _text_of(content: Texts) -> str:
    return content if isinstance(content, str) else "".join([part.text for part in content])
