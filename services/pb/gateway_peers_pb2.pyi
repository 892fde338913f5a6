from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Owner(_message.Message):
    __slots__ = ("key_name", "client")
    KEY_NAME_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    key_name: str
    client: int
    def __init__(self, key_name: _Optional[str] = ..., client: _Optional[int] = ...) -> None: ...

class AbortHereRequest(_message.Message):
    __slots__ = ("owner", "request_id")
    OWNER_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    owner: Owner
    request_id: str
    def __init__(self, owner: _Optional[_Union[Owner, _Mapping]] = ..., request_id: _Optional[str] = ...) -> None: ...

class AbortHereResponse(_message.Message):
    __slots__ = ("was_running",)
    WAS_RUNNING_FIELD_NUMBER: _ClassVar[int]
    was_running: bool
    def __init__(self, was_running: _Optional[bool] = ...) -> None: ...

class StopHereRequest(_message.Message):
    __slots__ = ("owner", "id")
    OWNER_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    owner: Owner
    id: str
    def __init__(self, owner: _Optional[_Union[Owner, _Mapping]] = ..., id: _Optional[str] = ...) -> None: ...

class StopHereResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PeerAdapter(_message.Message):
    __slots__ = ("owner", "name", "path", "hash")
    OWNER_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    HASH_FIELD_NUMBER: _ClassVar[int]
    owner: str
    name: str
    path: str
    hash: str
    def __init__(self, owner: _Optional[str] = ..., name: _Optional[str] = ..., path: _Optional[str] = ..., hash: _Optional[str] = ...) -> None: ...

class StageAdapterResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class UnstageAdapterRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class UnstageAdapterResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ServeAdapterResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ForgetAdapterRequest(_message.Message):
    __slots__ = ("owner", "name")
    OWNER_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    owner: str
    name: str
    def __init__(self, owner: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class ForgetAdapterResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
