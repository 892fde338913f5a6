from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ReplaceDenseRequest(_message.Message):
    __slots__ = ("overrides", "drop_caches", "keep_caches")
    OVERRIDES_FIELD_NUMBER: _ClassVar[int]
    DROP_CACHES_FIELD_NUMBER: _ClassVar[int]
    KEEP_CACHES_FIELD_NUMBER: _ClassVar[int]
    overrides: _containers.RepeatedScalarFieldContainer[str]
    drop_caches: bool
    keep_caches: bool
    def __init__(self, overrides: _Optional[_Iterable[str]] = ..., drop_caches: _Optional[bool] = ..., keep_caches: _Optional[bool] = ...) -> None: ...

class ReplaceDenseReply(_message.Message):
    __slots__ = ("pid", "pause_ms", "backend", "has_other_weights")
    PID_FIELD_NUMBER: _ClassVar[int]
    PAUSE_MS_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    HAS_OTHER_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    pid: int
    pause_ms: float
    backend: str
    has_other_weights: bool
    def __init__(self, pid: _Optional[int] = ..., pause_ms: _Optional[float] = ..., backend: _Optional[str] = ..., has_other_weights: _Optional[bool] = ...) -> None: ...

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ServiceStatus(_message.Message):
    __slots__ = ("role", "pid", "num_restarts", "last_end")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    NUM_RESTARTS_FIELD_NUMBER: _ClassVar[int]
    LAST_END_FIELD_NUMBER: _ClassVar[int]
    role: str
    pid: int
    num_restarts: int
    last_end: str
    def __init__(self, role: _Optional[str] = ..., pid: _Optional[int] = ..., num_restarts: _Optional[int] = ..., last_end: _Optional[str] = ...) -> None: ...

class LauncherStatus(_message.Message):
    __slots__ = ("services",)
    SERVICES_FIELD_NUMBER: _ClassVar[int]
    services: _containers.RepeatedCompositeFieldContainer[ServiceStatus]
    def __init__(self, services: _Optional[_Iterable[_Union[ServiceStatus, _Mapping]]] = ...) -> None: ...
