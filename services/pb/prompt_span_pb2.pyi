from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class PromptSpan(_message.Message):
    __slots__ = ("start", "num_tokens", "hash", "grid_rows", "grid_columns")
    START_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HASH_FIELD_NUMBER: _ClassVar[int]
    GRID_ROWS_FIELD_NUMBER: _ClassVar[int]
    GRID_COLUMNS_FIELD_NUMBER: _ClassVar[int]
    start: int
    num_tokens: int
    hash: bytes
    grid_rows: int
    grid_columns: int
    def __init__(self, start: _Optional[int] = ..., num_tokens: _Optional[int] = ..., hash: _Optional[bytes] = ..., grid_rows: _Optional[int] = ..., grid_columns: _Optional[int] = ...) -> None: ...
