from services.pb import adapter_pb2 as _adapter_pb2
from services.pb import sampling_pb2 as _sampling_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class NewSequence(_message.Message):
    __slots__ = ("seq_id", "request_id", "token_ids", "num_prompt_tokens", "cache_salt", "sampling", "stop_token_ids", "num_logprobs", "num_prompt_logprobs", "traceparent", "token_report", "return_generation_logits", "adapter", "prompt_table_hash", "has_chosen_tokens")
    SEQ_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_REPORT_FIELD_NUMBER: _ClassVar[int]
    RETURN_GENERATION_LOGITS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TABLE_HASH_FIELD_NUMBER: _ClassVar[int]
    HAS_CHOSEN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    seq_id: int
    request_id: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_prompt_tokens: int
    cache_salt: str
    sampling: _sampling_pb2.SamplingParams
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_logprobs: int
    num_prompt_logprobs: int
    traceparent: str
    token_report: _sampling_pb2.TokenReport
    return_generation_logits: bool
    adapter: _adapter_pb2.Adapter
    prompt_table_hash: str
    has_chosen_tokens: bool
    def __init__(self, seq_id: _Optional[int] = ..., request_id: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., num_prompt_tokens: _Optional[int] = ..., cache_salt: _Optional[str] = ..., sampling: _Optional[_Union[_sampling_pb2.SamplingParams, _Mapping]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., num_logprobs: _Optional[int] = ..., num_prompt_logprobs: _Optional[int] = ..., traceparent: _Optional[str] = ..., token_report: _Optional[_Union[_sampling_pb2.TokenReport, str]] = ..., return_generation_logits: _Optional[bool] = ..., adapter: _Optional[_Union[_adapter_pb2.Adapter, _Mapping]] = ..., prompt_table_hash: _Optional[str] = ..., has_chosen_tokens: _Optional[bool] = ...) -> None: ...

class StepPlan(_message.Message):
    __slots__ = ("step_id", "lane", "new_sequences", "seq_ids", "positions", "num_tokens", "num_logits", "num_drafts", "draft_token_ids", "close_seq_ids", "confirmed_seq_ids", "confirmed_token_ids", "fork_parents", "fork_children", "fork_positions", "drops_blocks", "chosen_seq_ids", "chosen_token_ids")
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
    CONFIRMED_SEQ_IDS_FIELD_NUMBER: _ClassVar[int]
    CONFIRMED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FORK_PARENTS_FIELD_NUMBER: _ClassVar[int]
    FORK_CHILDREN_FIELD_NUMBER: _ClassVar[int]
    FORK_POSITIONS_FIELD_NUMBER: _ClassVar[int]
    DROPS_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CHOSEN_SEQ_IDS_FIELD_NUMBER: _ClassVar[int]
    CHOSEN_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
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
    confirmed_seq_ids: bytes
    confirmed_token_ids: bytes
    fork_parents: _containers.RepeatedScalarFieldContainer[int]
    fork_children: _containers.RepeatedScalarFieldContainer[int]
    fork_positions: _containers.RepeatedScalarFieldContainer[int]
    drops_blocks: bool
    chosen_seq_ids: _containers.RepeatedScalarFieldContainer[int]
    chosen_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, step_id: _Optional[int] = ..., lane: _Optional[int] = ..., new_sequences: _Optional[_Iterable[_Union[NewSequence, _Mapping]]] = ..., seq_ids: _Optional[bytes] = ..., positions: _Optional[bytes] = ..., num_tokens: _Optional[bytes] = ..., num_logits: _Optional[bytes] = ..., num_drafts: _Optional[_Iterable[int]] = ..., draft_token_ids: _Optional[_Iterable[int]] = ..., close_seq_ids: _Optional[_Iterable[int]] = ..., confirmed_seq_ids: _Optional[bytes] = ..., confirmed_token_ids: _Optional[bytes] = ..., fork_parents: _Optional[_Iterable[int]] = ..., fork_children: _Optional[_Iterable[int]] = ..., fork_positions: _Optional[_Iterable[int]] = ..., drops_blocks: _Optional[bool] = ..., chosen_seq_ids: _Optional[_Iterable[int]] = ..., chosen_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...
