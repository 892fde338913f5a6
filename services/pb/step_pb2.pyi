from services.pb import prompt_span_pb2 as _prompt_span_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class NewSequence(_message.Message):
    __slots__ = ("seq_id", "request_id", "token_ids", "num_prompt_tokens", "prefix_key", "ignores_prefix_cache", "max_cached_tokens", "spans", "traceparent", "num_extra_rows", "leaves_address", "first_token", "end_token", "starts_empty", "prefix_generation")
    SEQ_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_KEY_FIELD_NUMBER: _ClassVar[int]
    IGNORES_PREFIX_CACHE_FIELD_NUMBER: _ClassVar[int]
    MAX_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    NUM_EXTRA_ROWS_FIELD_NUMBER: _ClassVar[int]
    LEAVES_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    END_TOKEN_FIELD_NUMBER: _ClassVar[int]
    STARTS_EMPTY_FIELD_NUMBER: _ClassVar[int]
    PREFIX_GENERATION_FIELD_NUMBER: _ClassVar[int]
    seq_id: int
    request_id: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_prompt_tokens: int
    prefix_key: bytes
    ignores_prefix_cache: bool
    max_cached_tokens: int
    spans: _containers.RepeatedCompositeFieldContainer[_prompt_span_pb2.PromptSpan]
    traceparent: str
    num_extra_rows: int
    leaves_address: str
    first_token: int
    end_token: int
    starts_empty: bool
    prefix_generation: int
    def __init__(self, seq_id: _Optional[int] = ..., request_id: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., num_prompt_tokens: _Optional[int] = ..., prefix_key: _Optional[bytes] = ..., ignores_prefix_cache: _Optional[bool] = ..., max_cached_tokens: _Optional[int] = ..., spans: _Optional[_Iterable[_Union[_prompt_span_pb2.PromptSpan, _Mapping]]] = ..., traceparent: _Optional[str] = ..., num_extra_rows: _Optional[int] = ..., leaves_address: _Optional[str] = ..., first_token: _Optional[int] = ..., end_token: _Optional[int] = ..., starts_empty: _Optional[bool] = ..., prefix_generation: _Optional[int] = ...) -> None: ...

class StepPlan(_message.Message):
    __slots__ = ("step_id", "lane", "new_sequences", "seq_ids", "positions", "num_tokens", "num_logits", "num_drafts", "draft_token_ids", "close_seq_ids", "kept_seq_ids", "sampled_seq_ids", "sampled_token_ids", "fork_parents", "fork_children", "fork_positions", "evicts_blocks", "forced_seq_ids", "forced_token_ids", "extra_rows_seq_ids", "num_extra_rows")
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    LANE_FIELD_NUMBER: _ClassVar[int]
    NEW_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    SEQ_IDS_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_LOGITS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CLOSE_SEQ_IDS_FIELD_NUMBER: _ClassVar[int]
    KEPT_SEQ_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLED_SEQ_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FORK_PARENTS_FIELD_NUMBER: _ClassVar[int]
    FORK_CHILDREN_FIELD_NUMBER: _ClassVar[int]
    FORK_POSITIONS_FIELD_NUMBER: _ClassVar[int]
    EVICTS_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FORCED_SEQ_IDS_FIELD_NUMBER: _ClassVar[int]
    FORCED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    EXTRA_ROWS_SEQ_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_EXTRA_ROWS_FIELD_NUMBER: _ClassVar[int]
    step_id: int
    lane: int
    new_sequences: _containers.RepeatedCompositeFieldContainer[NewSequence]
    seq_ids: bytes
    positions: bytes
    num_tokens: bytes
    num_logits: bytes
    num_drafts: _containers.RepeatedScalarFieldContainer[int]
    draft_token_ids: _containers.RepeatedScalarFieldContainer[int]
    close_seq_ids: _containers.RepeatedScalarFieldContainer[int]
    kept_seq_ids: _containers.RepeatedScalarFieldContainer[int]
    sampled_seq_ids: bytes
    sampled_token_ids: bytes
    fork_parents: _containers.RepeatedScalarFieldContainer[int]
    fork_children: _containers.RepeatedScalarFieldContainer[int]
    fork_positions: _containers.RepeatedScalarFieldContainer[int]
    evicts_blocks: bool
    forced_seq_ids: _containers.RepeatedScalarFieldContainer[int]
    forced_token_ids: _containers.RepeatedScalarFieldContainer[int]
    extra_rows_seq_ids: _containers.RepeatedScalarFieldContainer[int]
    num_extra_rows: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, step_id: _Optional[int] = ..., lane: _Optional[int] = ..., new_sequences: _Optional[_Iterable[_Union[NewSequence, _Mapping]]] = ..., seq_ids: _Optional[bytes] = ..., positions: _Optional[bytes] = ..., num_tokens: _Optional[bytes] = ..., num_logits: _Optional[bytes] = ..., num_drafts: _Optional[_Iterable[int]] = ..., draft_token_ids: _Optional[_Iterable[int]] = ..., close_seq_ids: _Optional[_Iterable[int]] = ..., kept_seq_ids: _Optional[_Iterable[int]] = ..., sampled_seq_ids: _Optional[bytes] = ..., sampled_token_ids: _Optional[bytes] = ..., fork_parents: _Optional[_Iterable[int]] = ..., fork_children: _Optional[_Iterable[int]] = ..., fork_positions: _Optional[_Iterable[int]] = ..., evicts_blocks: _Optional[bool] = ..., forced_seq_ids: _Optional[_Iterable[int]] = ..., forced_token_ids: _Optional[_Iterable[int]] = ..., extra_rows_seq_ids: _Optional[_Iterable[int]] = ..., num_extra_rows: _Optional[_Iterable[int]] = ...) -> None: ...
