from services.pb import adapter_pb2 as _adapter_pb2
from services.pb import attn_pb2 as _attn_pb2
from services.pb import step_pb2 as _step_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class JoinRequest(_message.Message):
    __slots__ = ("weights_hash", "rank", "num_ranks", "attachment_id", "seam", "store_port")
    WEIGHTS_HASH_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    NUM_RANKS_FIELD_NUMBER: _ClassVar[int]
    ATTACHMENT_ID_FIELD_NUMBER: _ClassVar[int]
    SEAM_FIELD_NUMBER: _ClassVar[int]
    STORE_PORT_FIELD_NUMBER: _ClassVar[int]
    weights_hash: str
    rank: int
    num_ranks: int
    attachment_id: int
    seam: _attn_pb2.AttachReply
    store_port: int
    def __init__(self, weights_hash: _Optional[str] = ..., rank: _Optional[int] = ..., num_ranks: _Optional[int] = ..., attachment_id: _Optional[int] = ..., seam: _Optional[_Union[_attn_pb2.AttachReply, _Mapping]] = ..., store_port: _Optional[int] = ...) -> None: ...

class JoinReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ShardCommand(_message.Message):
    __slots__ = ("step", "further_rows")
    STEP_FIELD_NUMBER: _ClassVar[int]
    FURTHER_ROWS_FIELD_NUMBER: _ClassVar[int]
    step: ShardStep
    further_rows: FurtherRows
    def __init__(self, step: _Optional[_Union[ShardStep, _Mapping]] = ..., further_rows: _Optional[_Union[FurtherRows, _Mapping]] = ...) -> None: ...

class ShardStep(_message.Message):
    __slots__ = ("plan", "num_rows", "num_sampled", "row_slots", "vectors")
    PLAN_FIELD_NUMBER: _ClassVar[int]
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    NUM_SAMPLED_FIELD_NUMBER: _ClassVar[int]
    ROW_SLOTS_FIELD_NUMBER: _ClassVar[int]
    VECTORS_FIELD_NUMBER: _ClassVar[int]
    plan: _step_pb2.StepPlan
    num_rows: int
    num_sampled: int
    row_slots: _containers.RepeatedScalarFieldContainer[int]
    vectors: StepVectors
    def __init__(self, plan: _Optional[_Union[_step_pb2.StepPlan, _Mapping]] = ..., num_rows: _Optional[int] = ..., num_sampled: _Optional[int] = ..., row_slots: _Optional[_Iterable[int]] = ..., vectors: _Optional[_Union[StepVectors, _Mapping]] = ...) -> None: ...

class StepVectors(_message.Message):
    __slots__ = ("rows", "size", "num_deep")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_DEEP_FIELD_NUMBER: _ClassVar[int]
    rows: _containers.RepeatedScalarFieldContainer[int]
    size: int
    num_deep: int
    def __init__(self, rows: _Optional[_Iterable[int]] = ..., size: _Optional[int] = ..., num_deep: _Optional[int] = ...) -> None: ...

class FurtherRows(_message.Message):
    __slots__ = ("rows", "lane")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    LANE_FIELD_NUMBER: _ClassVar[int]
    rows: _containers.RepeatedScalarFieldContainer[int]
    lane: int
    def __init__(self, rows: _Optional[_Iterable[int]] = ..., lane: _Optional[int] = ...) -> None: ...

class ShardAnswer(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LoadAdapterRequest(_message.Message):
    __slots__ = ("attachment_id", "slot", "adapter")
    ATTACHMENT_ID_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    attachment_id: int
    slot: int
    adapter: _adapter_pb2.Adapter
    def __init__(self, attachment_id: _Optional[int] = ..., slot: _Optional[int] = ..., adapter: _Optional[_Union[_adapter_pb2.Adapter, _Mapping]] = ...) -> None: ...

class LoadAdapterReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetShardStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ShardStatus(_message.Message):
    __slots__ = ("is_attached", "device_bytes", "loading")
    IS_ATTACHED_FIELD_NUMBER: _ClassVar[int]
    DEVICE_BYTES_FIELD_NUMBER: _ClassVar[int]
    LOADING_FIELD_NUMBER: _ClassVar[int]
    is_attached: bool
    device_bytes: int
    loading: str
    def __init__(self, is_attached: _Optional[bool] = ..., device_bytes: _Optional[int] = ..., loading: _Optional[str] = ...) -> None: ...
