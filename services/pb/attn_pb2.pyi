from services.pb import stall_pb2 as _stall_pb2
from services.pb import step_pb2 as _step_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class AttachRequest(_message.Message):
    __slots__ = ("weights_hash", "model_fingerprint", "dtype", "max_num_batched_tokens", "max_num_seqs", "gpu", "kv_cache_dtype", "key_scales", "value_scales", "sinks", "recurrences", "deterministic", "relative_bias", "num_lanes", "split_context", "takes_plan_link")
    WEIGHTS_HASH_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_BATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    GPU_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    KEY_SCALES_FIELD_NUMBER: _ClassVar[int]
    VALUE_SCALES_FIELD_NUMBER: _ClassVar[int]
    SINKS_FIELD_NUMBER: _ClassVar[int]
    RECURRENCES_FIELD_NUMBER: _ClassVar[int]
    DETERMINISTIC_FIELD_NUMBER: _ClassVar[int]
    RELATIVE_BIAS_FIELD_NUMBER: _ClassVar[int]
    NUM_LANES_FIELD_NUMBER: _ClassVar[int]
    SPLIT_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    TAKES_PLAN_LINK_FIELD_NUMBER: _ClassVar[int]
    weights_hash: str
    model_fingerprint: str
    dtype: str
    max_num_batched_tokens: int
    max_num_seqs: int
    gpu: str
    kv_cache_dtype: str
    key_scales: _containers.RepeatedScalarFieldContainer[float]
    value_scales: _containers.RepeatedScalarFieldContainer[float]
    sinks: _containers.RepeatedScalarFieldContainer[float]
    recurrences: _containers.RepeatedCompositeFieldContainer[RecurrenceWeights]
    deterministic: bool
    relative_bias: _containers.RepeatedScalarFieldContainer[float]
    num_lanes: int
    split_context: bool
    takes_plan_link: bool
    def __init__(self, weights_hash: _Optional[str] = ..., model_fingerprint: _Optional[str] = ..., dtype: _Optional[str] = ..., max_num_batched_tokens: _Optional[int] = ..., max_num_seqs: _Optional[int] = ..., gpu: _Optional[str] = ..., kv_cache_dtype: _Optional[str] = ..., key_scales: _Optional[_Iterable[float]] = ..., value_scales: _Optional[_Iterable[float]] = ..., sinks: _Optional[_Iterable[float]] = ..., recurrences: _Optional[_Iterable[_Union[RecurrenceWeights, _Mapping]]] = ..., deterministic: _Optional[bool] = ..., relative_bias: _Optional[_Iterable[float]] = ..., num_lanes: _Optional[int] = ..., split_context: _Optional[bool] = ..., takes_plan_link: _Optional[bool] = ...) -> None: ...

class RecurrenceWeights(_message.Message):
    __slots__ = ("layer", "conv", "a_log", "dt_bias", "conv_bias", "d", "a_logs")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    CONV_FIELD_NUMBER: _ClassVar[int]
    A_LOG_FIELD_NUMBER: _ClassVar[int]
    DT_BIAS_FIELD_NUMBER: _ClassVar[int]
    CONV_BIAS_FIELD_NUMBER: _ClassVar[int]
    D_FIELD_NUMBER: _ClassVar[int]
    A_LOGS_FIELD_NUMBER: _ClassVar[int]
    layer: int
    conv: bytes
    a_log: _containers.RepeatedScalarFieldContainer[float]
    dt_bias: _containers.RepeatedScalarFieldContainer[float]
    conv_bias: bytes
    d: _containers.RepeatedScalarFieldContainer[float]
    a_logs: bytes
    def __init__(self, layer: _Optional[int] = ..., conv: _Optional[bytes] = ..., a_log: _Optional[_Iterable[float]] = ..., dt_bias: _Optional[_Iterable[float]] = ..., conv_bias: _Optional[bytes] = ..., d: _Optional[_Iterable[float]] = ..., a_logs: _Optional[bytes] = ...) -> None: ...

class LaneHandle(_message.Message):
    __slots__ = ("lane", "kind", "handle")
    LANE_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    lane: int
    kind: str
    handle: bytes
    def __init__(self, lane: _Optional[int] = ..., kind: _Optional[str] = ..., handle: _Optional[bytes] = ...) -> None: ...

class AttachReply(_message.Message):
    __slots__ = ("epoch", "attachment_id", "lanes", "block_size", "num_blocks", "num_free_blocks", "open_seq_ids", "open_num_blocks", "window", "num_sink_tokens", "max_model_len", "layer_window", "max_num_sequences", "shared_memory", "is_empty", "plan_link", "prefix_generation", "num_host_blocks")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ATTACHMENT_ID_FIELD_NUMBER: _ClassVar[int]
    LANES_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    OPEN_SEQ_IDS_FIELD_NUMBER: _ClassVar[int]
    OPEN_NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    NUM_SINK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    LAYER_WINDOW_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    SHARED_MEMORY_FIELD_NUMBER: _ClassVar[int]
    IS_EMPTY_FIELD_NUMBER: _ClassVar[int]
    PLAN_LINK_FIELD_NUMBER: _ClassVar[int]
    PREFIX_GENERATION_FIELD_NUMBER: _ClassVar[int]
    NUM_HOST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    attachment_id: int
    lanes: _containers.RepeatedCompositeFieldContainer[LaneHandle]
    block_size: int
    num_blocks: int
    num_free_blocks: int
    open_seq_ids: _containers.RepeatedScalarFieldContainer[int]
    open_num_blocks: _containers.RepeatedScalarFieldContainer[int]
    window: int
    num_sink_tokens: int
    max_model_len: int
    layer_window: int
    max_num_sequences: int
    shared_memory: str
    is_empty: bool
    plan_link: str
    prefix_generation: int
    num_host_blocks: int
    def __init__(self, epoch: _Optional[int] = ..., attachment_id: _Optional[int] = ..., lanes: _Optional[_Iterable[_Union[LaneHandle, _Mapping]]] = ..., block_size: _Optional[int] = ..., num_blocks: _Optional[int] = ..., num_free_blocks: _Optional[int] = ..., open_seq_ids: _Optional[_Iterable[int]] = ..., open_num_blocks: _Optional[_Iterable[int]] = ..., window: _Optional[int] = ..., num_sink_tokens: _Optional[int] = ..., max_model_len: _Optional[int] = ..., layer_window: _Optional[int] = ..., max_num_sequences: _Optional[int] = ..., shared_memory: _Optional[str] = ..., is_empty: _Optional[bool] = ..., plan_link: _Optional[str] = ..., prefix_generation: _Optional[int] = ..., num_host_blocks: _Optional[int] = ...) -> None: ...

class SequenceOpened(_message.Message):
    __slots__ = ("seq_id", "num_cached_tokens", "num_pinned_blocks", "num_held_blocks", "num_freed_blocks", "error", "has_extra_rows", "num_recovered_tokens")
    SEQ_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PINNED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_HELD_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_FREED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    HAS_EXTRA_ROWS_FIELD_NUMBER: _ClassVar[int]
    NUM_RECOVERED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    seq_id: int
    num_cached_tokens: int
    num_pinned_blocks: int
    num_held_blocks: int
    num_freed_blocks: int
    error: str
    has_extra_rows: bool
    num_recovered_tokens: int
    def __init__(self, seq_id: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ..., num_pinned_blocks: _Optional[int] = ..., num_held_blocks: _Optional[int] = ..., num_freed_blocks: _Optional[int] = ..., error: _Optional[str] = ..., has_extra_rows: _Optional[bool] = ..., num_recovered_tokens: _Optional[int] = ...) -> None: ...

class SequenceError(_message.Message):
    __slots__ = ("seq_id", "message")
    SEQ_ID_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    seq_id: int
    message: str
    def __init__(self, seq_id: _Optional[int] = ..., message: _Optional[str] = ...) -> None: ...

class PlanAnswer(_message.Message):
    __slots__ = ("step_id", "num_freed_blocks", "num_free_blocks", "errors", "is_leaving", "opened")
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_FREED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    ERRORS_FIELD_NUMBER: _ClassVar[int]
    IS_LEAVING_FIELD_NUMBER: _ClassVar[int]
    OPENED_FIELD_NUMBER: _ClassVar[int]
    step_id: int
    num_freed_blocks: int
    num_free_blocks: int
    errors: _containers.RepeatedCompositeFieldContainer[SequenceError]
    is_leaving: bool
    opened: SequenceOpened
    def __init__(self, step_id: _Optional[int] = ..., num_freed_blocks: _Optional[int] = ..., num_free_blocks: _Optional[int] = ..., errors: _Optional[_Iterable[_Union[SequenceError, _Mapping]]] = ..., is_leaving: _Optional[bool] = ..., opened: _Optional[_Union[SequenceOpened, _Mapping]] = ...) -> None: ...

class ReadBlocksRequest(_message.Message):
    __slots__ = ("identity", "digests")
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    identity: str
    digests: bytes
    def __init__(self, identity: _Optional[str] = ..., digests: _Optional[bytes] = ...) -> None: ...

class BlockPart(_message.Message):
    __slots__ = ("content", "checksums")
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    content: bytes
    checksums: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, content: _Optional[bytes] = ..., checksums: _Optional[_Iterable[int]] = ...) -> None: ...

class ForgetPrefixesRequest(_message.Message):
    __slots__ = ("generation",)
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    generation: int
    def __init__(self, generation: _Optional[int] = ...) -> None: ...

class ForgetPrefixesReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AttentionStatus(_message.Message):
    __slots__ = ("epoch", "num_blocks", "num_free_blocks", "num_cached_blocks", "num_sequences", "num_steps", "num_computed_tokens", "num_cached_tokens", "resident_bytes", "stall", "block_size", "num_copied_tokens")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    STALL_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_COPIED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    num_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    num_sequences: int
    num_steps: int
    num_computed_tokens: int
    num_cached_tokens: int
    resident_bytes: int
    stall: _stall_pb2.Stall
    block_size: int
    num_copied_tokens: int
    def __init__(self, epoch: _Optional[int] = ..., num_blocks: _Optional[int] = ..., num_free_blocks: _Optional[int] = ..., num_cached_blocks: _Optional[int] = ..., num_sequences: _Optional[int] = ..., num_steps: _Optional[int] = ..., num_computed_tokens: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ..., resident_bytes: _Optional[int] = ..., stall: _Optional[_Union[_stall_pb2.Stall, _Mapping]] = ..., block_size: _Optional[int] = ..., num_copied_tokens: _Optional[int] = ...) -> None: ...
