from services.pb import gateway_peers_pb2 as _gateway_peers_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class AttachMessage(_message.Message):
    __slots__ = ("process", "claim", "release", "forget")
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    CLAIM_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    FORGET_FIELD_NUMBER: _ClassVar[int]
    process: str
    claim: Claim
    release: _gateway_peers_pb2.ResumableName
    forget: _gateway_peers_pb2.ResumableName
    def __init__(self, process: _Optional[str] = ..., claim: _Optional[_Union[Claim, _Mapping]] = ..., release: _Optional[_Union[_gateway_peers_pb2.ResumableName, _Mapping]] = ..., forget: _Optional[_Union[_gateway_peers_pb2.ResumableName, _Mapping]] = ...) -> None: ...

class Claim(_message.Message):
    __slots__ = ("name", "fingerprint", "record", "instead_of")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    INSTEAD_OF_FIELD_NUMBER: _ClassVar[int]
    name: _gateway_peers_pb2.ResumableName
    fingerprint: bytes
    record: ResumableRecord
    instead_of: str
    def __init__(self, name: _Optional[_Union[_gateway_peers_pb2.ResumableName, _Mapping]] = ..., fingerprint: _Optional[bytes] = ..., record: _Optional[_Union[ResumableRecord, _Mapping]] = ..., instead_of: _Optional[str] = ...) -> None: ...

class AttachReply(_message.Message):
    __slots__ = ("claim", "taken")
    CLAIM_FIELD_NUMBER: _ClassVar[int]
    TAKEN_FIELD_NUMBER: _ClassVar[int]
    claim: ClaimReply
    taken: _gateway_peers_pb2.ResumableName
    def __init__(self, claim: _Optional[_Union[ClaimReply, _Mapping]] = ..., taken: _Optional[_Union[_gateway_peers_pb2.ResumableName, _Mapping]] = ...) -> None: ...

class ClaimReply(_message.Message):
    __slots__ = ("running_at", "again", "new_is_kept", "is_unknown", "is_other")
    RUNNING_AT_FIELD_NUMBER: _ClassVar[int]
    AGAIN_FIELD_NUMBER: _ClassVar[int]
    NEW_IS_KEPT_FIELD_NUMBER: _ClassVar[int]
    IS_UNKNOWN_FIELD_NUMBER: _ClassVar[int]
    IS_OTHER_FIELD_NUMBER: _ClassVar[int]
    running_at: str
    again: ResumableRecord
    new_is_kept: bool
    is_unknown: bool
    is_other: bool
    def __init__(self, running_at: _Optional[str] = ..., again: _Optional[_Union[ResumableRecord, _Mapping]] = ..., new_is_kept: _Optional[bool] = ..., is_unknown: _Optional[bool] = ..., is_other: _Optional[bool] = ...) -> None: ...

class ResumableRecord(_message.Message):
    __slots__ = ("fingerprint", "request_id", "entropy", "created", "message")
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ENTROPY_FIELD_NUMBER: _ClassVar[int]
    CREATED_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    fingerprint: bytes
    request_id: str
    entropy: bytes
    created: float
    message: bytes
    def __init__(self, fingerprint: _Optional[bytes] = ..., request_id: _Optional[str] = ..., entropy: _Optional[bytes] = ..., created: _Optional[float] = ..., message: _Optional[bytes] = ...) -> None: ...
