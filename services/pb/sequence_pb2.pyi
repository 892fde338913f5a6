from services.pb import adapter_pb2 as _adapter_pb2
from services.pb import prompt_span_pb2 as _prompt_span_pb2
from services.pb import sampling_pb2 as _sampling_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SequenceSpec(_message.Message):
    __slots__ = ("request_id", "prompt_token_ids", "sampling", "max_tokens", "stop_token_ids", "cache_salt", "num_logprobs", "priority", "tenant", "client", "traceparent", "adapter", "prompt_embeds", "beam_search", "features", "source", "spans")
    class FeaturesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: bytes
        def __init__(self, key: _Optional[str] = ..., value: _Optional[bytes] = ...) -> None: ...
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    NUM_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    PROMPT_EMBEDS_FIELD_NUMBER: _ClassVar[int]
    BEAM_SEARCH_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: _sampling_pb2.SamplingParams
    max_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    cache_salt: str
    num_logprobs: int
    priority: int
    tenant: int
    client: int
    traceparent: str
    adapter: _adapter_pb2.Adapter
    prompt_embeds: PromptEmbedsRef
    beam_search: BeamSearchSpec
    features: _containers.ScalarMap[str, bytes]
    source: SourceRef
    spans: _containers.RepeatedCompositeFieldContainer[_prompt_span_pb2.PromptSpan]
    def __init__(self, request_id: _Optional[str] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_sampling_pb2.SamplingParams, _Mapping]] = ..., max_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., cache_salt: _Optional[str] = ..., num_logprobs: _Optional[int] = ..., priority: _Optional[int] = ..., tenant: _Optional[int] = ..., client: _Optional[int] = ..., traceparent: _Optional[str] = ..., adapter: _Optional[_Union[_adapter_pb2.Adapter, _Mapping]] = ..., prompt_embeds: _Optional[_Union[PromptEmbedsRef, _Mapping]] = ..., beam_search: _Optional[_Union[BeamSearchSpec, _Mapping]] = ..., features: _Optional[_Mapping[str, bytes]] = ..., source: _Optional[_Union[SourceRef, _Mapping]] = ..., spans: _Optional[_Iterable[_Union[_prompt_span_pb2.PromptSpan, _Mapping]]] = ...) -> None: ...

class PromptEmbedsRef(_message.Message):
    __slots__ = ("hash", "num_rows", "hidden_size", "dtype", "first_token_id")
    HASH_FIELD_NUMBER: _ClassVar[int]
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_SIZE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    hash: str
    num_rows: int
    hidden_size: int
    dtype: str
    first_token_id: int
    def __init__(self, hash: _Optional[str] = ..., num_rows: _Optional[int] = ..., hidden_size: _Optional[int] = ..., dtype: _Optional[str] = ..., first_token_id: _Optional[int] = ...) -> None: ...

class SourceRef(_message.Message):
    __slots__ = ("hash", "num_rows")
    HASH_FIELD_NUMBER: _ClassVar[int]
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    hash: str
    num_rows: int
    def __init__(self, hash: _Optional[str] = ..., num_rows: _Optional[int] = ...) -> None: ...

class BeamSearchSpec(_message.Message):
    __slots__ = ("num_beams", "num_answers", "options", "reads_logprob_rows")
    NUM_BEAMS_FIELD_NUMBER: _ClassVar[int]
    NUM_ANSWERS_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    READS_LOGPROB_ROWS_FIELD_NUMBER: _ClassVar[int]
    num_beams: int
    num_answers: int
    options: _sampling_pb2.BeamSearch
    reads_logprob_rows: bool
    def __init__(self, num_beams: _Optional[int] = ..., num_answers: _Optional[int] = ..., options: _Optional[_Union[_sampling_pb2.BeamSearch, _Mapping]] = ..., reads_logprob_rows: _Optional[bool] = ...) -> None: ...
