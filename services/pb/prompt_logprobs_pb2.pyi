from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class PromptLogprobsRequest(_message.Message):
    __slots__ = ("num_likeliest",)
    NUM_LIKELIEST_FIELD_NUMBER: _ClassVar[int]
    num_likeliest: int
    def __init__(self, num_likeliest: _Optional[int] = ...) -> None: ...
