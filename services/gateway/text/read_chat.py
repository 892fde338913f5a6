"""Reads and checks the `Chat` of a gRPC message before its template runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from pydantic_core import from_json

from services.common.errors import ConfigError, InvalidRequest
from services.common.shorten import quote
from services.gateway.resources.heavy_work import MAX_INLINE_BYTES
from services.gateway.text.chat_message import Message, MessageCall
from services.gateway.text.chat_template import Chat
from services.gateway.text.chat_vectors import ChatVectors, content_of
from services.gateway.text.harmony import REASONING_EFFORTS
from services.gateway.text.parsing import ChatFormats
from services.gateway.text.tokenizer import Tokenizer
from services.gateway.text.tools.tool import NAME, depth_of, read_tools
from services.pb import gateway_pb2

MAX_NAME_CHARACTERS = 64  # of a speaker's name, a role, an id of a call, a reasoning effort
MAX_CALLS = 128  # of tools in one message
MAX_TEMPLATE_KWARGS_BYTES = 16 * 2**10  # as JSON
MAX_TEMPLATE_KWARGS_DEPTH = 8
MAX_TEMPLATE_BYTES = 64 * 2**10  # of a client's chat template


def read_chat(
    chat: gateway_pb2.Chat, formats: ChatFormats, default_kwargs: Mapping[str, Any] = MappingProxyType({})
) -> Chat:
    """The chat of a message. Raises `InvalidRequest` for the first error, also if the model cannot be given tools.

    default_kwargs: variables of the template that the chat may set itself.
    """
    if not chat.messages:
        raise InvalidRequest("chat has no messages, at least 1 is required", "messages")
    vectors: list[ChatVectors] = []
    messages = [_read_message(each, i, formats, vectors) for i, each in enumerate(chat.messages)]
    is_parallel = not chat.HasField("parallel_tool_calls") or chat.parallel_tool_calls
    tools = read_tools(chat.tools, chat.tool_choice, is_parallel)
    formats.check(tools)
    max_reasoning_tokens = chat.max_reasoning_tokens if chat.HasField("max_reasoning_tokens") else None
    if max_reasoning_tokens is not None and formats.reasoning is None:
        raise InvalidRequest(
            f"max_reasoning_tokens is {max_reasoning_tokens}, but this model is not known to reason: its chat template "
            "has no markers of reasoning, and gateway.reasoning_parser names none",
            "max_reasoning_tokens",
        )
    template_kwargs = {**default_kwargs, **_read_template_kwargs(chat)}
    if formats.is_harmony and (effort := template_kwargs.get("reasoning_effort", "medium")) not in REASONING_EFFORTS:
        known = ", ".join(REASONING_EFFORTS)
        raise InvalidRequest(f"reasoning_effort is {quote(str(effort))}, this model knows {known}", "reasoning_effort")
    if chat.keeps_reasoning and formats.is_harmony:
        reason = "cannot be false with this model: what it writes in Harmony is no text without being told apart"
        raise InvalidRequest(f"separate_reasoning {reason}", "separate_reasoning")
    num_bytes = len(chat.chat_template.encode())
    if num_bytes > MAX_TEMPLATE_BYTES:
        raise InvalidRequest(
            f"chat_template has {num_bytes} bytes, at most {MAX_TEMPLATE_BYTES} allowed", "chat_template"
        )
    continues = chat.continue_final_message
    return Chat(
        messages,
        chat.add_generation_prompt if chat.HasField("add_generation_prompt") else not continues,
        continues,
        template_kwargs,
        tools,
        max_reasoning_tokens,
        chat.chat_template or None,
        vectors,
        chat.keeps_reasoning,
    )


def use_template_kwargs(tokenizer: Tokenizer, text: str) -> None:
    """Gives chats the variables in the JSON of `gateway.chat_template_kwargs`. Raises `ConfigError`."""
    try:
        tokenizer.use_template_kwargs(read_template_kwargs(text))
    except InvalidRequest as error:
        raise ConfigError(f"gateway.{error}") from error


async def read_chat_in_turn(chat: gateway_pb2.Chat, tokenizer: Tokenizer) -> Chat:
    """Does the same as `read_chat`, in a turn of `HeavyWork` if the chat is large. Raises `InvalidRequest`."""
    if chat.ByteSize() > MAX_INLINE_BYTES:
        await tokenizer.heavy_work.turn()
    return read_chat(chat, tokenizer.chat_formats, tokenizer.template_kwargs)


def _read_message(
    each: gateway_pb2.ChatMessage, i: int, formats: ChatFormats, vectors: list[ChatVectors]
) -> Message:
    role, content, name, call_id = each.role, each.content, each.name, each.tool_call_id
    calls, given_vectors, pictures = each.tool_calls, each.vectors, each.pictures
    if not role:
        raise InvalidRequest(f"messages[{i}].role is empty", f"messages[{i}].role")
    if max(len(role), len(name), len(call_id)) > MAX_NAME_CHARACTERS:
        for field in ("role", "name", "tool_call_id"):
            _check_length(getattr(each, field), f"messages[{i}].{field}")
    if role == "tool" and not call_id:
        field = f"messages[{i}].tool_call_id"
        raise InvalidRequest(f"{field} is missing: a message of the role tool answers a call", field)
    if calls and role != "assistant":
        field = f"messages[{i}].tool_calls"
        raise InvalidRequest(f"{field} has {len(calls)} calls, but only the assistant may call tools", field)
    return Message(
        role,
        content_of(each, vectors) if given_vectors else content,
        name,
        _read_calls(calls, f"messages[{i}].tool_calls", formats) if calls else (),
        _template_id(call_id, formats),
        each.reasoning,
        _read_positions(each, i) if pictures else (),
    )


def _read_positions(each: gateway_pb2.ChatMessage, i: int) -> tuple[int, ...]:
    """Where pictures stand in a message."""
    if each.pictures and each.vectors:
        raise InvalidRequest(f"messages[{i}] has vectors and pictures, of which it may have one kind", f"messages[{i}]")
    positions = [picture.position for picture in each.pictures]
    if positions != sorted(positions) or any(position > len(each.content) for position in positions):
        raise InvalidRequest(
            f"messages[{i}] has pictures at {positions}, which must ascend up to its {len(each.content)} characters",
            f"messages[{i}]",
        )
    return tuple(positions)


def _read_calls(calls: Sequence[gateway_pb2.ToolCall], path: str, formats: ChatFormats) -> tuple[MessageCall, ...]:
    if len(calls) > MAX_CALLS:
        raise InvalidRequest(f"{path} has {len(calls)} elements, at most {MAX_CALLS} allowed", path)
    read = []
    for j, call in enumerate(calls):
        _check_length(call.id, f"{path}[{j}].id")
        if not NAME.fullmatch(call.name):
            field = f"{path}[{j}].function.name"
            raise InvalidRequest(f"{field} is {quote(call.name)}, must be 1 to 64 letters, digits, _ and -", field)
        read.append(MessageCall(_template_id(call.id, formats), call.name, _read_arguments(call.arguments)))
    return tuple(read)


def _read_arguments(text: str) -> Any:
    """The arguments of an earlier call as templates expect them. Text that is no JSON object stays a text.

    A model may have written it, and the conversation must be able to go on.
    """
    try:
        value = from_json(text or "{}", allow_inf_nan=False)
    except ValueError:
        return text
    return value if isinstance(value, dict) else text


def _template_id(call_id: str, formats: ChatFormats) -> str:
    return call_id if not call_id or formats.tools is None else formats.tools.call_id(call_id)


def _check_length(name: str, field: str) -> None:
    if len(name) > MAX_NAME_CHARACTERS:
        raise InvalidRequest(f"{field} has {len(name)} characters, at most {MAX_NAME_CHARACTERS} allowed", field)


def _read_template_kwargs(chat: gateway_pb2.Chat) -> dict[str, Any]:
    _check_length(chat.reasoning_effort, "reasoning_effort")
    effort = {"reasoning_effort": chat.reasoning_effort} if chat.reasoning_effort else {}
    return effort | (read_template_kwargs(chat.chat_template_kwargs) if chat.chat_template_kwargs else {})


def read_template_kwargs(text: str) -> dict[str, Any]:
    """Variables of a template, from the JSON object in `chat_template_kwargs`. Raises `InvalidRequest`."""
    field, num_bytes = "chat_template_kwargs", len(text.encode())
    if num_bytes > MAX_TEMPLATE_KWARGS_BYTES:
        raise InvalidRequest(f"{field} has {num_bytes} bytes, at most {MAX_TEMPLATE_KWARGS_BYTES} allowed", field)
    try:
        values = from_json(text, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequest(f"{field} is not JSON: {error}", field) from error
    if not isinstance(values, dict):
        raise InvalidRequest(f"{field} is not a JSON object", field)
    if (depth := depth_of(values)) > MAX_TEMPLATE_KWARGS_DEPTH:
        raise InvalidRequest(f"{field} is nested {depth} deep, at most {MAX_TEMPLATE_KWARGS_DEPTH} allowed", field)
    return values
