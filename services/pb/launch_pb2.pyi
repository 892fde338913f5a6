from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ReplaceDenseRequest(_message.Message):
    __slots__ = ("overrides", "drop_caches", "keep_caches", "open_requests", "wait_timeout_ms")
    class OpenRequests(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        OPEN_REQUESTS_UNSPECIFIED: _ClassVar[ReplaceDenseRequest.OpenRequests]
        KEEP: _ClassVar[ReplaceDenseRequest.OpenRequests]
        WAIT: _ClassVar[ReplaceDenseRequest.OpenRequests]
        ABORT: _ClassVar[ReplaceDenseRequest.OpenRequests]
    OPEN_REQUESTS_UNSPECIFIED: ReplaceDenseRequest.OpenRequests
    KEEP: ReplaceDenseRequest.OpenRequests
    WAIT: ReplaceDenseRequest.OpenRequests
    ABORT: ReplaceDenseRequest.OpenRequests
    OVERRIDES_FIELD_NUMBER: _ClassVar[int]
    DROP_CACHES_FIELD_NUMBER: _ClassVar[int]
    KEEP_CACHES_FIELD_NUMBER: _ClassVar[int]
    OPEN_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    WAIT_TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    overrides: _containers.RepeatedScalarFieldContainer[str]
    drop_caches: bool
    keep_caches: bool
    open_requests: ReplaceDenseRequest.OpenRequests
    wait_timeout_ms: int
    def __init__(self, overrides: _Optional[_Iterable[str]] = ..., drop_caches: _Optional[bool] = ..., keep_caches: _Optional[bool] = ..., open_requests: _Optional[_Union[ReplaceDenseRequest.OpenRequests, str]] = ..., wait_timeout_ms: _Optional[int] = ...) -> None: ...

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

class AddAttentionRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AddAttentionReply(_message.Message):
    __slots__ = ("name", "pid")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    name: str
    pid: int
    def __init__(self, name: _Optional[str] = ..., pid: _Optional[int] = ...) -> None: ...

class DrainAttentionRequest(_message.Message):
    __slots__ = ("name", "timeout_ms")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    name: str
    timeout_ms: int
    def __init__(self, name: _Optional[str] = ..., timeout_ms: _Optional[int] = ...) -> None: ...

class DrainAttentionReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ServiceStatus(_message.Message):
    __slots__ = ("role", "pid", "num_restarts", "last_end", "name")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    NUM_RESTARTS_FIELD_NUMBER: _ClassVar[int]
    LAST_END_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    role: str
    pid: int
    num_restarts: int
    last_end: str
    name: str
    def __init__(self, role: _Optional[str] = ..., pid: _Optional[int] = ..., num_restarts: _Optional[int] = ..., last_end: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class StandbyStatus(_message.Message):
    __slots__ = ("role", "state", "reason", "pid", "has_weights", "host_bytes", "device_bytes", "num_take_overs", "name")
    class State(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        STATE_UNSPECIFIED: _ClassVar[StandbyStatus.State]
        OFF: _ClassVar[StandbyStatus.State]
        STARTING: _ClassVar[StandbyStatus.State]
        READY: _ClassVar[StandbyStatus.State]
    STATE_UNSPECIFIED: StandbyStatus.State
    OFF: StandbyStatus.State
    STARTING: StandbyStatus.State
    READY: StandbyStatus.State
    ROLE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    HAS_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    HOST_BYTES_FIELD_NUMBER: _ClassVar[int]
    DEVICE_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_TAKE_OVERS_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    role: str
    state: StandbyStatus.State
    reason: str
    pid: int
    has_weights: bool
    host_bytes: int
    device_bytes: int
    num_take_overs: int
    name: str
    def __init__(self, role: _Optional[str] = ..., state: _Optional[_Union[StandbyStatus.State, str]] = ..., reason: _Optional[str] = ..., pid: _Optional[int] = ..., has_weights: _Optional[bool] = ..., host_bytes: _Optional[int] = ..., device_bytes: _Optional[int] = ..., num_take_overs: _Optional[int] = ..., name: _Optional[str] = ...) -> None: ...

class LauncherStatus(_message.Message):
    __slots__ = ("services", "standbys")
    SERVICES_FIELD_NUMBER: _ClassVar[int]
    STANDBYS_FIELD_NUMBER: _ClassVar[int]
    services: _containers.RepeatedCompositeFieldContainer[ServiceStatus]
    standbys: _containers.RepeatedCompositeFieldContainer[StandbyStatus]
    def __init__(self, services: _Optional[_Iterable[_Union[ServiceStatus, _Mapping]]] = ..., standbys: _Optional[_Iterable[_Union[StandbyStatus, _Mapping]]] = ...) -> None: ...
