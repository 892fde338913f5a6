from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class Stall(_message.Message):
    __slots__ = ("role", "step_id", "layer", "request_ids", "waits_for", "stalled_s")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    WAITS_FOR_FIELD_NUMBER: _ClassVar[int]
    STALLED_S_FIELD_NUMBER: _ClassVar[int]
    role: str
    step_id: int
    layer: int
    request_ids: _containers.RepeatedScalarFieldContainer[str]
    waits_for: str
    stalled_s: float
    def __init__(self, role: _Optional[str] = ..., step_id: _Optional[int] = ..., layer: _Optional[int] = ..., request_ids: _Optional[_Iterable[str]] = ..., waits_for: _Optional[str] = ..., stalled_s: _Optional[float] = ...) -> None: ...
