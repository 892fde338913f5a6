from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Source(_message.Message):
    __slots__ = ("tokens", "log_mel", "picture", "example")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOG_MEL_FIELD_NUMBER: _ClassVar[int]
    PICTURE_FIELD_NUMBER: _ClassVar[int]
    EXAMPLE_FIELD_NUMBER: _ClassVar[int]
    tokens: SourceTokens
    log_mel: bytes
    picture: bytes
    example: bool
    def __init__(self, tokens: _Optional[_Union[SourceTokens, _Mapping]] = ..., log_mel: _Optional[bytes] = ..., picture: _Optional[bytes] = ..., example: _Optional[bool] = ...) -> None: ...

class SourceTokens(_message.Message):
    __slots__ = ("ids", "pictures")
    IDS_FIELD_NUMBER: _ClassVar[int]
    PICTURES_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    pictures: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, ids: _Optional[_Iterable[int]] = ..., pictures: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Alignment(_message.Message):
    __slots__ = ("first_token", "num_rows", "heads", "filter_width")
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    HEADS_FIELD_NUMBER: _ClassVar[int]
    FILTER_WIDTH_FIELD_NUMBER: _ClassVar[int]
    first_token: int
    num_rows: int
    heads: _containers.RepeatedCompositeFieldContainer[AlignmentHead]
    filter_width: int
    def __init__(self, first_token: _Optional[int] = ..., num_rows: _Optional[int] = ..., heads: _Optional[_Iterable[_Union[AlignmentHead, _Mapping]]] = ..., filter_width: _Optional[int] = ...) -> None: ...

class AlignmentHead(_message.Message):
    __slots__ = ("layer", "head")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    layer: int
    head: int
    def __init__(self, layer: _Optional[int] = ..., head: _Optional[int] = ...) -> None: ...
