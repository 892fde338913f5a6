from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class PoolingRequest(_message.Message):
    __slots__ = ("second_segment",)
    SECOND_SEGMENT_FIELD_NUMBER: _ClassVar[int]
    second_segment: int
    def __init__(self, second_segment: _Optional[int] = ...) -> None: ...
