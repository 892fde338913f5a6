from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TokenHead(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TOKEN_HEAD_UNSPECIFIED: _ClassVar[TokenHead]
    TOKEN_HEAD_SPARSE: _ClassVar[TokenHead]
    TOKEN_HEAD_COLBERT: _ClassVar[TokenHead]
TOKEN_HEAD_UNSPECIFIED: TokenHead
TOKEN_HEAD_SPARSE: TokenHead
TOKEN_HEAD_COLBERT: TokenHead

class PoolingRequest(_message.Message):
    __slots__ = ("second_segment", "all_tokens", "token_head")
    SECOND_SEGMENT_FIELD_NUMBER: _ClassVar[int]
    ALL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_HEAD_FIELD_NUMBER: _ClassVar[int]
    second_segment: int
    all_tokens: bool
    token_head: TokenHead
    def __init__(self, second_segment: _Optional[int] = ..., all_tokens: _Optional[bool] = ..., token_head: _Optional[_Union[TokenHead, str]] = ...) -> None: ...
