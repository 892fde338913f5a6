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

class ResumableName(_message.Message):
    __slots__ = ("owner", "kind", "name")
    OWNER_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    owner: Owner
    kind: str
    name: str
    def __init__(self, owner: _Optional[_Union[Owner, _Mapping]] = ..., kind: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class ReadResumableRequest(_message.Message):
    __slots__ = ("name", "fingerprint", "num_received", "digest")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    NUM_RECEIVED_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    name: ResumableName
    fingerprint: bytes
    num_received: int
    digest: int
    def __init__(self, name: _Optional[_Union[ResumableName, _Mapping]] = ..., fingerprint: _Optional[bytes] = ..., num_received: _Optional[int] = ..., digest: _Optional[int] = ...) -> None: ...

class ResumablePiece(_message.Message):
    __slots__ = ("head", "is_stream", "is_at_end", "item")
    HEAD_FIELD_NUMBER: _ClassVar[int]
    IS_STREAM_FIELD_NUMBER: _ClassVar[int]
    IS_AT_END_FIELD_NUMBER: _ClassVar[int]
    ITEM_FIELD_NUMBER: _ClassVar[int]
    head: bytes
    is_stream: bool
    is_at_end: bool
    item: bytes
    def __init__(self, head: _Optional[bytes] = ..., is_stream: _Optional[bool] = ..., is_at_end: _Optional[bool] = ..., item: _Optional[bytes] = ...) -> None: ...

class AbortHereRequest(_message.Message):
    __slots__ = ("owner", "request_id", "all", "with_batch")
    OWNER_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ALL_FIELD_NUMBER: _ClassVar[int]
    WITH_BATCH_FIELD_NUMBER: _ClassVar[int]
    owner: Owner
    request_id: str
    all: bool
    with_batch: bool
    def __init__(self, owner: _Optional[_Union[Owner, _Mapping]] = ..., request_id: _Optional[str] = ..., all: _Optional[bool] = ..., with_batch: _Optional[bool] = ...) -> None: ...

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

class MeasureRequest(_message.Message):
    __slots__ = ("has_metrics",)
    HAS_METRICS_FIELD_NUMBER: _ClassVar[int]
    has_metrics: bool
    def __init__(self, has_metrics: _Optional[bool] = ...) -> None: ...

class MeasureResponse(_message.Message):
    __slots__ = ("process_index", "num_open_requests", "metrics")
    PROCESS_INDEX_FIELD_NUMBER: _ClassVar[int]
    NUM_OPEN_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    process_index: int
    num_open_requests: int
    metrics: bytes
    def __init__(self, process_index: _Optional[int] = ..., num_open_requests: _Optional[int] = ..., metrics: _Optional[bytes] = ...) -> None: ...
