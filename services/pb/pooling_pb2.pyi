from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class PoolingRequest(_message.Message):
    __slots__ = ("second_segment", "all_tokens")
    SECOND_SEGMENT_FIELD_NUMBER: _ClassVar[int]
    ALL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    second_segment: int
    all_tokens: bool
    def __init__(self, second_segment: _Optional[int] = ..., all_tokens: _Optional[bool] = ...) -> None: ...
