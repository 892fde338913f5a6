"""Converts bodies of Anthropic's Messages API to gRPC messages, where all limits are checked."""

from __future__ import annotations

from typing import Any

from pydantic_core import to_json

from services.common.errors import InvalidRequest
from services.gateway.apis.anthropic.blocks import (
    AssistantMessage,
    ImageBlock,
    TextBlock,
    Texts,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    UserMessage,
)
from services.gateway.apis.anthropic.schema import CountTokensRequest, MessagesRequest, ToolChoiceObject
from services.gateway.apis.shared.conversation import ASSISTANT, SYSTEM, USER, Conversation
from services.gateway.apis.shared.structured_output import json_structure
from services.gateway.apis.shared.to_message import json_text, sampling_options, thinking_variables
from services.gateway.request.read_request import MAX_USER_CHARACTERS
from services.gateway.request.sampling_defaults import SamplingDefaults
from services.gateway.text.tools.tool import FUNCTION_PREFIX
from services.pb import gateway_pb2, sampling_pb2

# Claude Code begins its system prompt with a line that differs in every request, and would defeat the prefix cache.
BILLING_LINE = "x-anthropic-billing-header:"
TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def anthropic_message(
    body: MessagesRequest, request_id: str, defaults: SamplingDefaults, *, reasons: bool
) -> gateway_pb2.GenerateRequest:
    """The message of a request for an answer. `reasons`: whether the model does. Raises `InvalidRequest`."""
    sampling = sampling_options(body, defaults)
    configured = body.output_config and body.output_config.format
    output_format = configured or body.output_format
    if output_format is not None:
        field_name = "output_config.format" if configured else "output_format"
        sampling["structured_output"] = json_structure(output_format.schema_, field_name)
    user_id = (body.metadata and body.metadata.user_id) or ""
    message = gateway_pb2.GenerateRequest(
        request_id=request_id,
        chat=anthropic_chat(body),
        sampling=sampling_pb2.SamplingParams(**sampling),
        max_tokens=body.max_tokens,
        stop=body.stop_sequences,
        model=body.model,
        user=user_id[:MAX_USER_CHARACTERS],
    )
    if reasons and body.thinking is not None and body.thinking.budget_tokens is not None:
        message.chat.max_reasoning_tokens = body.thinking.budget_tokens
    return message


def anthropic_chat(body: CountTokensRequest) -> gateway_pb2.Chat:
    """The chat part of a message: everything that becomes the prompt. Raises `InvalidRequest`."""
    conversation = Conversation()
    for text in _system_texts(body.system):
        conversation.add_text(SYSTEM, text, "system")
    for i, message in enumerate(body.messages):
        path = f"messages[{i}].content"
        if isinstance(message, UserMessage):
            _add_user(conversation, message, path)
        elif isinstance(message, AssistantMessage):
            _add_assistant(conversation, message, path)
        else:
            for text in _system_texts(message.content):
                conversation.add_text(SYSTEM, text, path)
    if conversation.last_role is None:
        raise InvalidRequest("messages and system have no text, at least one is required", "messages")
    if conversation.ends_with_calls:
        field = f"messages[{len(body.messages) - 1}].content"
        raise InvalidRequest(f"{field} has a tool_use block, and no message with its tool_result follows", field)
    choice = body.tool_choice
    if choice is not None and choice.type in ("any", "tool") and not body.tools:
        raise InvalidRequest(f"tool_choice.type is {choice.type!r}, but there are no tools", "tool_choice")
    is_continued = conversation.last_role == ASSISTANT
    is_parallel = not (choice is not None and choice.disable_parallel_tool_use)
    return gateway_pb2.Chat(
        messages=conversation.messages(),
        add_generation_prompt=not is_continued,
        continue_final_message=is_continued,
        chat_template_kwargs=_template_kwargs(body),
        tools=json_text(_functions(body)),
        tool_choice=_choice_text(choice) if body.tools else "",
        parallel_tool_calls=is_parallel,
        reasoning_effort=(body.output_config and body.output_config.effort) or "",
    )


def _system_texts(system: Texts | None) -> list[str]:
    """The texts without Claude Code's billing line."""
    if system is None:
        return []
    texts = [system] if isinstance(system, str) else [block.text for block in system]
    return [text for each in texts if (text := _without_billing_line(each))]


def _without_billing_line(text: str) -> str:
    return text.partition("\n")[2] if text.startswith(BILLING_LINE) else text


def _add_user(conversation: Conversation, message: UserMessage, path: str) -> None:
    if isinstance(message.content, str):
        conversation.add_text(USER, message.content, path)
        return
    for i, block in enumerate(message.content):
        if isinstance(block, ToolResultBlock):
            conversation.add_result(block.tool_use_id, _result_parts(block), f"{path}[{i}].tool_use_id")
        elif isinstance(block, ImageBlock):
            conversation.add_picture(USER, block.source.url)
        else:
            conversation.add_text(USER, block.text, f"{path}[{i}].text")


def _result_parts(block: ToolResultBlock) -> list[str | gateway_pb2.MessagePicture]:
    content = block.content or ""
    parts: list[str | gateway_pb2.MessagePicture] = [content] if isinstance(content, str) else []
    for each in [] if isinstance(content, str) else content:
        is_picture = isinstance(each, ImageBlock)
        parts.append(gateway_pb2.MessagePicture(url=each.source.url) if is_picture else each.text)
    if block.is_error:
        text = parts.pop(0) if parts and isinstance(parts[0], str) else ""
        parts.insert(0, f"Error: {text}")
    return parts


def _add_assistant(conversation: Conversation, message: AssistantMessage, path: str) -> None:
    if isinstance(message.content, str):
        conversation.add_reply(message.content)
        return
    for i, block in enumerate(message.content):
        if isinstance(block, TextBlock):
            conversation.add_reply(block.text)
        elif isinstance(block, ThinkingBlock):
            conversation.add_reasoning(block.thinking)
        elif isinstance(block, ToolUseBlock):
            conversation.add_call(block.id, block.name, to_json(block.input).decode(), f"{path}[{i}].id")


def _template_kwargs(body: CountTokensRequest) -> str:
    thinking = {} if body.thinking is None else thinking_variables(body.thinking.type != "disabled")
    return json_text({**thinking, **(body.chat_template_kwargs or {})})


def _functions(body: CountTokensRequest) -> list[dict[str, Any]]:
    """The tools in the form of chat completions, which templates expect."""
    functions = []
    for tool in body.tools or ():
        function: dict[str, Any] = {"name": tool.name}
        if tool.description is not None:
            function["description"] = tool.description
        function["parameters"] = tool.input_schema
        if tool.strict is not None:
            function["strict"] = tool.strict
        functions.append({"type": "function", "function": function})
    return functions


def _choice_text(choice: ToolChoiceObject | None) -> str:
    if choice is None:
        return ""
    return FUNCTION_PREFIX + (choice.name or "") if choice.type == "tool" else TOOL_CHOICES[choice.type]
