"""Protobuf messages encoded by hand that no generated class would write, such as a million empty fields."""

from __future__ import annotations

from google.protobuf.message import Message

LENGTH_DELIMITED = 2


def varint(value: int) -> bytes:
    """Encodes a non-negative number."""
    data = bytearray()
    while value > 0x7F:
        data.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes(data) + bytes([value])


def field(kind: type[Message], name: str, content: bytes) -> bytes:
    """A string, bytes, map entry or message as the field `name` of a message of that kind."""
    number = kind.DESCRIPTOR.fields_by_name[name].number
    return varint(number << 3 | LENGTH_DELIMITED) + varint(len(content)) + content


def repeated(kind: type[Message], name: str, content: bytes, num_bytes: int) -> bytes:
    """The same field, repeated up to the limit."""
    one = field(kind, name, content)
    return one * (num_bytes // len(one))
