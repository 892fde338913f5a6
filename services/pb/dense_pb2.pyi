from services.pb import images_pb2 as _images_pb2
from services.pb import sampling_pb2 as _sampling_pb2
from services.pb import sequence_pb2 as _sequence_pb2
from services.pb import stall_pb2 as _stall_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GatewayMessage(_message.Message):
    __slots__ = ("submit", "cancel", "resumed", "prompt_embeds_part", "picture_part", "forget_prefixes", "announcement")
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    RESUMED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_EMBEDS_PART_FIELD_NUMBER: _ClassVar[int]
    PICTURE_PART_FIELD_NUMBER: _ClassVar[int]
    FORGET_PREFIXES_FIELD_NUMBER: _ClassVar[int]
    ANNOUNCEMENT_FIELD_NUMBER: _ClassVar[int]
    submit: Submit
    cancel: Cancel
    resumed: Resumed
    prompt_embeds_part: PromptEmbedsPart
    picture_part: _images_pb2.PicturePart
    forget_prefixes: ForgetPrefixes
    announcement: Announcement
    def __init__(self, submit: _Optional[_Union[Submit, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ..., resumed: _Optional[_Union[Resumed, _Mapping]] = ..., prompt_embeds_part: _Optional[_Union[PromptEmbedsPart, _Mapping]] = ..., picture_part: _Optional[_Union[_images_pb2.PicturePart, _Mapping]] = ..., forget_prefixes: _Optional[_Union[ForgetPrefixes, _Mapping]] = ..., announcement: _Optional[_Union[Announcement, _Mapping]] = ...) -> None: ...

class Announcement(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ForgetPrefixes(_message.Message):
    __slots__ = ("generation",)
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    generation: int
    def __init__(self, generation: _Optional[int] = ...) -> None: ...

class Resumed(_message.Message):
    __slots__ = ("gateway",)
    GATEWAY_FIELD_NUMBER: _ClassVar[int]
    gateway: int
    def __init__(self, gateway: _Optional[int] = ...) -> None: ...

class PromptEmbedsPart(_message.Message):
    __slots__ = ("hash", "values")
    HASH_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    hash: str
    values: bytes
    def __init__(self, hash: _Optional[str] = ..., values: _Optional[bytes] = ...) -> None: ...

class Submit(_message.Message):
    __slots__ = ("seq_id", "spec", "output_token_ids", "num_reported", "queue_timeout_ms", "num_crashes", "group_id", "search")
    class NumReportedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    SEQ_ID_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_REPORTED_FIELD_NUMBER: _ClassVar[int]
    QUEUE_TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    NUM_CRASHES_FIELD_NUMBER: _ClassVar[int]
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    SEARCH_FIELD_NUMBER: _ClassVar[int]
    seq_id: int
    spec: _sequence_pb2.SequenceSpec
    output_token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_reported: _containers.ScalarMap[str, int]
    queue_timeout_ms: int
    num_crashes: int
    group_id: int
    search: BeamProgress
    def __init__(self, seq_id: _Optional[int] = ..., spec: _Optional[_Union[_sequence_pb2.SequenceSpec, _Mapping]] = ..., output_token_ids: _Optional[_Iterable[int]] = ..., num_reported: _Optional[_Mapping[str, int]] = ..., queue_timeout_ms: _Optional[int] = ..., num_crashes: _Optional[int] = ..., group_id: _Optional[int] = ..., search: _Optional[_Union[BeamProgress, _Mapping]] = ...) -> None: ...

class BeamProgress(_message.Message):
    __slots__ = ("has_run", "beams", "ended")
    HAS_RUN_FIELD_NUMBER: _ClassVar[int]
    BEAMS_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    has_run: bool
    beams: _containers.RepeatedCompositeFieldContainer[Beam]
    ended: _containers.RepeatedCompositeFieldContainer[BeamAnswer]
    def __init__(self, has_run: _Optional[bool] = ..., beams: _Optional[_Iterable[_Union[Beam, _Mapping]]] = ..., ended: _Optional[_Iterable[_Union[BeamAnswer, _Mapping]]] = ...) -> None: ...

class Beam(_message.Message):
    __slots__ = ("token_ids", "logprobs", "score")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[_sampling_pb2.TokenLogprobs]
    score: float
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[_sampling_pb2.TokenLogprobs, _Mapping]]] = ..., score: _Optional[float] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ("seq_id",)
    SEQ_ID_FIELD_NUMBER: _ClassVar[int]
    seq_id: int
    def __init__(self, seq_id: _Optional[int] = ...) -> None: ...

class StepOutput(_message.Message):
    __slots__ = ("step_id", "seq_ids", "token_ids", "started", "ended", "logprobs", "admitted", "farewell", "reports", "prefix_generation", "searches")
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    SEQ_IDS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ADMITTED_FIELD_NUMBER: _ClassVar[int]
    FAREWELL_FIELD_NUMBER: _ClassVar[int]
    REPORTS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_GENERATION_FIELD_NUMBER: _ClassVar[int]
    SEARCHES_FIELD_NUMBER: _ClassVar[int]
    step_id: int
    seq_ids: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    started: _containers.RepeatedCompositeFieldContainer[SequenceStart]
    ended: _containers.RepeatedCompositeFieldContainer[SequenceEnd]
    logprobs: _containers.RepeatedCompositeFieldContainer[SequenceLogprobs]
    admitted: _containers.RepeatedScalarFieldContainer[int]
    farewell: Farewell
    reports: _containers.RepeatedCompositeFieldContainer[TokenReport]
    prefix_generation: int
    searches: _containers.RepeatedCompositeFieldContainer[BeamStep]
    def __init__(self, step_id: _Optional[int] = ..., seq_ids: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ..., started: _Optional[_Iterable[_Union[SequenceStart, _Mapping]]] = ..., ended: _Optional[_Iterable[_Union[SequenceEnd, _Mapping]]] = ..., logprobs: _Optional[_Iterable[_Union[SequenceLogprobs, _Mapping]]] = ..., admitted: _Optional[_Iterable[int]] = ..., farewell: _Optional[_Union[Farewell, _Mapping]] = ..., reports: _Optional[_Iterable[_Union[TokenReport, _Mapping]]] = ..., prefix_generation: _Optional[int] = ..., searches: _Optional[_Iterable[_Union[BeamStep, _Mapping]]] = ...) -> None: ...

class BeamStep(_message.Message):
    __slots__ = ("seq_id", "parents", "token_ids", "scores", "logprobs", "ended")
    SEQ_ID_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SCORES_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    seq_id: int
    parents: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    scores: _containers.RepeatedScalarFieldContainer[float]
    logprobs: _containers.RepeatedCompositeFieldContainer[_sampling_pb2.TokenLogprobs]
    ended: _containers.RepeatedCompositeFieldContainer[EndedBeam]
    def __init__(self, seq_id: _Optional[int] = ..., parents: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ..., scores: _Optional[_Iterable[float]] = ..., logprobs: _Optional[_Iterable[_Union[_sampling_pb2.TokenLogprobs, _Mapping]]] = ..., ended: _Optional[_Iterable[_Union[EndedBeam, _Mapping]]] = ...) -> None: ...

class EndedBeam(_message.Message):
    __slots__ = ("parent", "token_id", "score", "logprobs")
    PARENT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    parent: int
    token_id: int
    score: float
    logprobs: _sampling_pb2.TokenLogprobs
    def __init__(self, parent: _Optional[int] = ..., token_id: _Optional[int] = ..., score: _Optional[float] = ..., logprobs: _Optional[_Union[_sampling_pb2.TokenLogprobs, _Mapping]] = ...) -> None: ...

class Farewell(_message.Message):
    __slots__ = ("is_crash", "reason", "running")
    IS_CRASH_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    is_crash: bool
    reason: str
    running: _containers.RepeatedCompositeFieldContainer[SequenceSpan]
    def __init__(self, is_crash: _Optional[bool] = ..., reason: _Optional[str] = ..., running: _Optional[_Iterable[_Union[SequenceSpan, _Mapping]]] = ...) -> None: ...

class SequenceSpan(_message.Message):
    __slots__ = ("seq_id", "start", "end")
    SEQ_ID_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    seq_id: int
    start: int
    end: int
    def __init__(self, seq_id: _Optional[int] = ..., start: _Optional[int] = ..., end: _Optional[int] = ...) -> None: ...

class SequenceStart(_message.Message):
    __slots__ = ("seq_id", "num_cached_tokens", "queue_us")
    SEQ_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_US_FIELD_NUMBER: _ClassVar[int]
    seq_id: int
    num_cached_tokens: int
    queue_us: int
    def __init__(self, seq_id: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ..., queue_us: _Optional[int] = ...) -> None: ...

class SequenceLogprobs(_message.Message):
    __slots__ = ("seq_id", "token")
    SEQ_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    seq_id: int
    token: _sampling_pb2.TokenLogprobs
    def __init__(self, seq_id: _Optional[int] = ..., token: _Optional[_Union[_sampling_pb2.TokenLogprobs, _Mapping]] = ...) -> None: ...

class TokenReport(_message.Message):
    __slots__ = ("seq_id", "feature", "start", "num_tokens", "values")
    SEQ_ID_FIELD_NUMBER: _ClassVar[int]
    FEATURE_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    seq_id: int
    feature: str
    start: int
    num_tokens: int
    values: bytes
    def __init__(self, seq_id: _Optional[int] = ..., feature: _Optional[str] = ..., start: _Optional[int] = ..., num_tokens: _Optional[int] = ..., values: _Optional[bytes] = ...) -> None: ...

class SequenceEnd(_message.Message):
    __slots__ = ("seq_id", "reason", "status_code", "message", "param", "answers")
    class Reason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        REASON_UNSPECIFIED: _ClassVar[SequenceEnd.Reason]
        STOP: _ClassVar[SequenceEnd.Reason]
        LENGTH: _ClassVar[SequenceEnd.Reason]
        ERROR: _ClassVar[SequenceEnd.Reason]
    REASON_UNSPECIFIED: SequenceEnd.Reason
    STOP: SequenceEnd.Reason
    LENGTH: SequenceEnd.Reason
    ERROR: SequenceEnd.Reason
    SEQ_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    STATUS_CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    PARAM_FIELD_NUMBER: _ClassVar[int]
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    seq_id: int
    reason: SequenceEnd.Reason
    status_code: int
    message: str
    param: str
    answers: _containers.RepeatedCompositeFieldContainer[BeamAnswer]
    def __init__(self, seq_id: _Optional[int] = ..., reason: _Optional[_Union[SequenceEnd.Reason, str]] = ..., status_code: _Optional[int] = ..., message: _Optional[str] = ..., param: _Optional[str] = ..., answers: _Optional[_Iterable[_Union[BeamAnswer, _Mapping]]] = ...) -> None: ...

class BeamAnswer(_message.Message):
    __slots__ = ("token_ids", "logprobs", "logprob_rows", "score", "reason")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_ROWS_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[_sampling_pb2.TokenLogprobs]
    logprob_rows: bytes
    score: float
    reason: SequenceEnd.Reason
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[_sampling_pb2.TokenLogprobs, _Mapping]]] = ..., logprob_rows: _Optional[bytes] = ..., score: _Optional[float] = ..., reason: _Optional[_Union[SequenceEnd.Reason, str]] = ...) -> None: ...

class GetInfoRequest(_message.Message):
    __slots__ = ("wait_ms", "example")
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    EXAMPLE_FIELD_NUMBER: _ClassVar[int]
    wait_ms: int
    example: _images_pb2.MemoryFile
    def __init__(self, wait_ms: _Optional[int] = ..., example: _Optional[_Union[_images_pb2.MemoryFile, _Mapping]] = ...) -> None: ...

class DenseInfo(_message.Message):
    __slots__ = ("family", "dtype", "vocab_size", "num_layers", "max_model_len", "weights_hash", "backend", "device", "epoch", "max_beam_width", "max_num_seqs", "hidden_size", "continues_sequences", "reads_memory_files", "offers_socket", "rehearses", "num_example_rows")
    FAMILY_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_HASH_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    MAX_BEAM_WIDTH_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_SIZE_FIELD_NUMBER: _ClassVar[int]
    CONTINUES_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    READS_MEMORY_FILES_FIELD_NUMBER: _ClassVar[int]
    OFFERS_SOCKET_FIELD_NUMBER: _ClassVar[int]
    REHEARSES_FIELD_NUMBER: _ClassVar[int]
    NUM_EXAMPLE_ROWS_FIELD_NUMBER: _ClassVar[int]
    family: str
    dtype: str
    vocab_size: int
    num_layers: int
    max_model_len: int
    weights_hash: str
    backend: str
    device: str
    epoch: int
    max_beam_width: int
    max_num_seqs: int
    hidden_size: int
    continues_sequences: bool
    reads_memory_files: bool
    offers_socket: bool
    rehearses: bool
    num_example_rows: int
    def __init__(self, family: _Optional[str] = ..., dtype: _Optional[str] = ..., vocab_size: _Optional[int] = ..., num_layers: _Optional[int] = ..., max_model_len: _Optional[int] = ..., weights_hash: _Optional[str] = ..., backend: _Optional[str] = ..., device: _Optional[str] = ..., epoch: _Optional[int] = ..., max_beam_width: _Optional[int] = ..., max_num_seqs: _Optional[int] = ..., hidden_size: _Optional[int] = ..., continues_sequences: _Optional[bool] = ..., reads_memory_files: _Optional[bool] = ..., offers_socket: _Optional[bool] = ..., rehearses: _Optional[bool] = ..., num_example_rows: _Optional[int] = ...) -> None: ...

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DenseStatus(_message.Message):
    __slots__ = ("num_waiting", "num_running", "num_steps", "num_preemptions", "resident_bytes", "state", "stall", "weights_hash", "loading", "device_bytes", "attention_workers")
    class State(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        STATE_UNSPECIFIED: _ClassVar[DenseStatus.State]
        LOADING: _ClassVar[DenseStatus.State]
        STANDBY: _ClassVar[DenseStatus.State]
        ATTACHING: _ClassVar[DenseStatus.State]
        SERVING: _ClassVar[DenseStatus.State]
    STATE_UNSPECIFIED: DenseStatus.State
    LOADING: DenseStatus.State
    STANDBY: DenseStatus.State
    ATTACHING: DenseStatus.State
    SERVING: DenseStatus.State
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    STALL_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_HASH_FIELD_NUMBER: _ClassVar[int]
    LOADING_FIELD_NUMBER: _ClassVar[int]
    DEVICE_BYTES_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_WORKERS_FIELD_NUMBER: _ClassVar[int]
    num_waiting: int
    num_running: int
    num_steps: int
    num_preemptions: int
    resident_bytes: int
    state: DenseStatus.State
    stall: _stall_pb2.Stall
    weights_hash: str
    loading: str
    device_bytes: int
    attention_workers: _containers.RepeatedCompositeFieldContainer[AttentionWorkerStatus]
    def __init__(self, num_waiting: _Optional[int] = ..., num_running: _Optional[int] = ..., num_steps: _Optional[int] = ..., num_preemptions: _Optional[int] = ..., resident_bytes: _Optional[int] = ..., state: _Optional[_Union[DenseStatus.State, str]] = ..., stall: _Optional[_Union[_stall_pb2.Stall, _Mapping]] = ..., weights_hash: _Optional[str] = ..., loading: _Optional[str] = ..., device_bytes: _Optional[int] = ..., attention_workers: _Optional[_Iterable[_Union[AttentionWorkerStatus, _Mapping]]] = ...) -> None: ...

class AttentionWorkerStatus(_message.Message):
    __slots__ = ("address", "num_sequences", "num_blocks", "num_free_blocks")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    NUM_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    address: str
    num_sequences: int
    num_blocks: int
    num_free_blocks: int
    def __init__(self, address: _Optional[str] = ..., num_sequences: _Optional[int] = ..., num_blocks: _Optional[int] = ..., num_free_blocks: _Optional[int] = ...) -> None: ...

class AddAttentionWorkerRequest(_message.Message):
    __slots__ = ("address", "timeout_ms")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    address: str
    timeout_ms: int
    def __init__(self, address: _Optional[str] = ..., timeout_ms: _Optional[int] = ...) -> None: ...

class AddAttentionWorkerReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RemoveAttentionWorkerRequest(_message.Message):
    __slots__ = ("address", "timeout_ms")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    address: str
    timeout_ms: int
    def __init__(self, address: _Optional[str] = ..., timeout_ms: _Optional[int] = ...) -> None: ...

class RemoveAttentionWorkerReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LeaveRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LeaveReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("timeout_ms",)
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    timeout_ms: int
    def __init__(self, timeout_ms: _Optional[int] = ...) -> None: ...

class DrainReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TakeOverRequest(_message.Message):
    __slots__ = ("returns_at_once",)
    RETURNS_AT_ONCE_FIELD_NUMBER: _ClassVar[int]
    returns_at_once: bool
    def __init__(self, returns_at_once: _Optional[bool] = ...) -> None: ...

class TakeOverReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
