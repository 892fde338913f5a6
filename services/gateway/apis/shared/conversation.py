"""`Conversation`: makes the messages of a chat from the blocks or items in which other APIs write them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate

from services.common.errors import InvalidRequest
from services.common.shorten import quote
from services.gateway.text.read_chat import MAX_CALLS
from services.pb import gateway_pb2

SYSTEM, USER, ASSISTANT, TOOL = "system", "user", "assistant", "tool"
SEPARATOR = "\n"  # between texts of adjacent messages; what the assistant wrote is joined without


@dataclass(slots=True)
class _Message:
    role: str
    texts: list[str] = field(default_factory=list)
    pictures: list[tuple[int, gateway_pb2.MessagePicture]] = field(default_factory=list)  # and the texts before each
    reasoning: list[str] = field(default_factory=list)
    calls: list[gateway_pb2.ToolCall] = field(default_factory=list)
    call_id: str = ""  # of the call that a tool's message answers


class Conversation:
    """Collects messages, oldest first. Adjacent messages of one role become one, since many templates demand it.

    `path` is the place of a text or call in the client's body, for errors.
    """

    def __init__(self) -> None:
        self._messages: list[_Message] = []
        self._is_answered: dict[str, bool] = {}  # by id of a call

    @property
    def last_role(self) -> str | None:
        """The role of the last message; None if there is none."""
        return self._messages[-1].role if self._messages else None

    @property
    def ends_with_calls(self) -> bool:
        """Whether the last message has calls that nothing answers."""
        return bool(self._messages and self._messages[-1].calls)

    def add_text(self, role: str, text: str, path: str) -> None:
        """A text of the system or the user. Raises `InvalidRequest` if it is empty."""
        if not text:
            raise InvalidRequest(f"{path} is empty", path)
        self._open(role).texts.append(text)

    def add_picture(self, role: str, url: str, detail: str = "") -> None:
        """A picture behind the texts so far; url: data:image/...;base64,... or where it is."""
        message = self._open(role)
        message.pictures.append((len(message.texts), gateway_pb2.MessagePicture(url=url, detail=detail)))

    def add_reply(self, text: str) -> None:
        """A text of the assistant; may be empty."""
        self._open(ASSISTANT).texts.append(text)

    def add_reasoning(self, text: str) -> None:
        """Reasoning of the assistant, which precedes its next text or call."""
        self._open(ASSISTANT).reasoning.append(text)

    def add_call(self, call_id: str, name: str, arguments: str, path: str) -> None:
        """A call of the assistant; `arguments` is JSON text.

        Raises `InvalidRequest` if its id is not new, or if it is one call too many.
        """
        if call_id in self._is_answered:
            raise InvalidRequest(f"{path} is {quote(call_id)}, which is the id of an earlier call, too", path)
        self._is_answered[call_id] = False
        calls = self._open(ASSISTANT).calls
        if len(calls) == MAX_CALLS:
            raise InvalidRequest(f"{path}: a message has more than {MAX_CALLS} calls", path)
        calls.append(gateway_pb2.ToolCall(id=call_id, name=name, arguments=arguments))

    def add_result(self, call_id: str, parts: Iterable[str | gateway_pb2.MessagePicture], path: str) -> None:
        """What a tool returned: texts and pictures in their order.

        Raises `InvalidRequest` unless it is the only result of an earlier call.
        """
        is_answered = self._is_answered.get(call_id)
        if is_answered is None:
            raise InvalidRequest(f"{path} is {quote(call_id)}, which is the id of no earlier call", path)
        if is_answered:
            raise InvalidRequest(f"{path} is {quote(call_id)}, a call that has a result already", path)
        self._is_answered[call_id] = True
        message = _Message(TOOL, call_id=call_id)
        for part in parts:
            if isinstance(part, str):
                message.texts.append(part)
            else:
                message.pictures.append((len(message.texts), part))
        self._messages.append(message)

    def messages(self) -> list[gateway_pb2.ChatMessage]:
        """All messages."""
        return [_encode(each) for each in self._messages]

    def _open(self, role: str) -> _Message:
        """The last message if it has this role, else a new one."""
        if self.last_role != role:
            self._messages.append(_Message(role))
        return self._messages[-1]


def _encode(message: _Message) -> gateway_pb2.ChatMessage:
    separator = "" if message.role == ASSISTANT else SEPARATOR
    encoded = gateway_pb2.ChatMessage(
        role=message.role,
        content=separator.join(message.texts),
        reasoning="".join(message.reasoning),
        tool_calls=message.calls,
        tool_call_id=message.call_id,
    )
    # Where the texts end: behind the first none, one, two...
    ends = [0, *accumulate(len(text) + len(separator) for text in message.texts)]
    for num_texts, picture in message.pictures:
        picture.position = max(0, ends[num_texts] - len(separator))
        encoded.pictures.append(picture)
    return encoded
