"""The config of all services: one TOML file, its sections and defaults, and the environment variables.

It is read once at start and immutable; each constructor gets only its section. Unknown sections, unknown keys,
wrong types and impossible combinations raise a `ConfigError` before anything starts. The comment of each key is its
documentation: docs/configuration.md is generated from these comments (`make docs`).
"""

from __future__ import annotations

import difflib
import json
import os
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import pydantic
from pydantic import Field

from services.common.addresses import check_address, check_proxy, check_target, check_tcp_address
from services.common.errors import ConfigError

API_KEYS_VARIABLE = "TWOSTROKE_API_KEYS"  # read by the gateway
API_KEY_VARIABLE = "TWOSTROKE_API_KEY"  # read by clients
MAX_MODEL_NAME_CHARACTERS = 256  # of a name that clients use for the model
MAX_SECONDS = 1e9  # 31 years; gRPC treats a deadline that is too far away as expired
MAX_MESSAGE_BYTES = 2**31 - 1  # the limit of gRPC
MAX_PROMPTS = 1024  # the limit in the schema of HTTP requests
MAX_ATTENTION_WORKERS = 32  # of one dense worker: on a GPU a thread of one warp handles each one's flag
MAX_LANES = 8  # of a pipeline: one for each stage. Otherwise 2, one for each of the two strokes
MAX_INPUTS = 16_384  # the same of inputs for vectors
SPECULATION_WITH_HEADS = ("medusa", "eagle3")
SERVICES = ("attn_worker", "dense_worker", "gateway")
EMBEDDED_MODEL = Path(__file__).parents[2] / "deploy" / "models" / "tiny-llama"

Seconds = Annotated[float, Field(gt=0, le=MAX_SECONDS)]
Address = Annotated[str, pydantic.AfterValidator(check_address)]
Target = Annotated[str, pydantic.AfterValidator(check_target)]
Proxy = Annotated[str, pydantic.AfterValidator(check_proxy)]
TcpAddress = Annotated[str, pydantic.AfterValidator(check_tcp_address)]  # scrapers do not support Unix sockets
# As browsers send it: lower case, without a path, without the default port. Files and sandboxes have origin "null".
Origin = Annotated[str, Field(pattern=r"^(\*|null|[a-z][a-z0-9+.-]*://[^/\sA-Z]*)$")]
HostName = Annotated[str, Field(pattern=r"^(\*|[^\s/:\[\]]+|\[[0-9a-fA-F:.]+\])$")]  # without a port
RootPath = Annotated[str, Field(pattern=r"^(/[A-Za-z0-9._~-]+)*$")]  # such as /llm
ZmqEndpoint = Annotated[str, Field(pattern=r"^(tcp://(\*|[^\s:/*]+|\[[0-9a-fA-F:.]+\]):\d{1,5}|ipc://.+)$")]
SocketAddress = Annotated[str, Field(pattern="^unix:.")]
Device = Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$")]
Gpu = Annotated[str, Field(pattern=r"^cuda:\d+$")]
Count = Annotated[int, Field(ge=1)]
LoraModule = Annotated[str, Field(pattern=rf"^[^=]{{1,{MAX_MODEL_NAME_CHARACTERS}}}=.")]
SamplingOverride = Annotated[str, Field(pattern="^[^=]+=.")]
ModelName = Annotated[str, Field(min_length=1, max_length=MAX_MODEL_NAME_CHARACTERS)]
MessageBytes = Annotated[int, Field(ge=1, le=MAX_MESSAGE_BYTES)]


class Section(pydantic.BaseModel):
    """A section of the configuration: values that cannot be changed, without unknown keys."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class ModelSection(Section):
    """The model that is served."""

    path: Path = EMBEDDED_MODEL  # a Hugging Face model directory
    name: ModelName | None = None  # the name for clients; none: the directory's name. See gateway.served_model_names
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # auto: float32 on a CPU, else the model's type
    load_format: Literal["safetensors", "dummy"] = "safetensors"  # dummy: random weights; needs only config.json
    num_layers: Count | None = None  # run only this many first layers; none: all
    max_model_len: Count | None = None  # tokens of prompt and output together; none: the model's own limit
    dummy_seed: int = 0  # seed of the random weights
    # pooling: makes vectors of inputs, also where the checkpoint is one that generates, which it then does, too;
    # generate: makes none; auto: if the checkpoint is made for it
    runner: Literal["auto", "generate", "pooling"] = "auto"
    # two tokens, such as "no" and "yes": the model scores inputs by how much likelier the second is to follow; one: by
    # its logit
    classifier_from_token: tuple[str, ...] = ()
    # qwen3, gemma: the model is Qwen3-Reranker or bge-reranker-v2-gemma, whose template is written around pairs of
    # texts; auto: qwen3 if config.json has is_original_qwen3_reranker
    reranker: Literal["auto", "none", "qwen3", "gemma"] = "auto"
    images: bool = True  # false: of a model that sees pictures only the text part is loaded


class GatewaySection(Section):
    """The gateway, which clients reach, and the limits of their requests."""

    address: Address = "127.0.0.1:50051"  # of the gRPC API
    max_message_bytes: MessageBytes = 3 * 2**19  # size of one gRPC message of a client; parsing 1.5 MiB may take 15 ms
    # gRPC messages that may arrive at the same time; beyond it the oldest of the client with most is dropped, if it is
    # not complete 0.25 s later
    max_receiving: Count = 64
    http_address: Address = "127.0.0.1:8080"  # of the HTTP API
    root_path: RootPath = ""  # prefix of all HTTP routes, for a proxy that passes it on; routes without it work, too
    cors_origins: tuple[Origin, ...] = ()  # origins of web pages that may use the HTTP API from a browser; "*": all
    # names that the Host header of HTTP requests may have, in addition to this machine's local names; "*": all.
    # Empty: all, but with a loopback http_address only local names, as protection against DNS rebinding
    allowed_hosts: tuple[HostName, ...] = ()
    served_model_names: tuple[ModelName, ...] = ()  # names that clients may use; the first replaces model.name
    accept_any_model_name: bool = False  # whether this model also answers requests for any other model name
    max_n: Count = 16  # maximum number of answers to one prompt
    max_images: Count = 16  # maximum number of pictures in one request, of models that see pictures
    max_image_pixels: Count = 2**25  # of a picture as it is sent; it is made smaller for the model
    max_image_bytes: Count = 20 * 2**20  # of a picture's file
    # pixels that are kept, so that a picture which comes again, as in each turn of a chat, is not decoded again
    image_cache_bytes: Annotated[int, Field(ge=0)] = 128 * 2**20
    # hosts from which pictures are fetched by URL, if their addresses are public; "*": all. Empty: from none
    image_hosts: tuple[HostName, ...] = ()
    image_timeout_s: Seconds = 5.0  # longest time to fetch a picture
    # maximum number of most likely tokens whose log-probabilities a request may get for each output token; an answer
    # keeps 12 bytes for each of them until it ends
    max_logprobs: Annotated[int, Field(ge=0, le=1024)] = 20
    request_metrics: bool = False  # whether completions and chats tell how long they took, in vLLM's field `metrics`
    strict_max_tokens: bool = False  # whether max_tokens beyond the rest of the context is an error; else it is lowered
    max_answers: Count = 256  # maximum number of answers to all prompts of one HTTP request
    # maximum number of log-probabilities in all answers to one request: tokens times (1 + most likely, named or all
    # tokens for each); 128 k tokens with 20 most likely tokens each make 2.8 million
    max_request_logprobs: Count = 4_000_000
    # memory that all open requests together may take for bodies, embeddings, compiled forms, log-probabilities,
    # logits and hidden states; beyond it requests wait. docs/operations.md says what counts how much
    max_held_bytes: Count = 512 * 2**20
    max_held_wait_s: Seconds = 5.0  # how long a request waits for memory while none of its client gets any
    max_held_waiting: Count = 2048  # requests that may wait for memory at the same time; further ones are refused
    max_num_waiting: Count = 4_000  # answers that have not started yet; further requests are refused
    max_num_waiting_tokens: Count = 4_000_000  # the same limit in prompt tokens; each takes about 100 bytes
    queue_timeout_s: Seconds = 600.0  # longest time that a request waits for its first step
    tls_certificate: Path | None = None  # PEM file, for gRPC and HTTP; read at start; none: no TLS
    tls_key: Path | None = None  # PEM file; the key of tls_certificate
    tls_client_ca: Path | None = None  # PEM file; if set, clients must present a certificate signed by this CA
    local_address: SocketAddress | None = None  # gRPC without TLS, for this machine's probes, launcher and gateways
    # time that running requests have to finish after SIGTERM; SIGINT ends them at once
    drain_timeout_s: Annotated[float, Field(ge=0, le=MAX_SECONDS)] = 30.0
    api_keys_file: Path | None = None  # TOML file, read again when it changes; see services/gateway/access/api_keys.py
    # addresses or networks ("10.0.0.0/8") of proxies whose header X-Forwarded-For names the client; "unix": whatever
    # connects by Unix socket. Clients with the same API key, or without keys, get equal shares by address
    trusted_proxies: tuple[Proxy, ...] = ()
    metrics_address: TcpAddress | None = None  # address of /metrics for Prometheus; usually 127.0.0.1:9100
    # size of the body of one HTTP request; none: 2 MiB, and 16 MiB of models that see pictures
    max_body_bytes: Count | None = None
    max_audio_bytes: Count = 25 * 2**20  # size of a file of sound that is uploaded to be transcribed
    max_audio_seconds: Count = 1_800  # length of its sound
    max_body_values: Count = 400_000  # JSON values, such as token ids, in one body; parsing this many takes 20 ms
    max_header_bytes: Count = 32 * 2**10  # size of the headers of one HTTP request, at most 256 of them
    max_prompts: Annotated[int, Field(ge=1, le=MAX_PROMPTS)] = 64  # prompts in one HTTP request for completions
    # inputs of one request for embeddings, scores or classes
    max_inputs: Annotated[int, Field(ge=1, le=MAX_INPUTS)] = 2048
    max_connections: Count = 4096  # HTTP connections; lowered if the process may not open enough files
    max_grpc_connections: Count = 1024  # gRPC connections, lowered likewise; a further connection is closed at once
    max_grpc_streams: Count = 4096  # open calls of one gRPC connection; further calls wait in the client
    # time from connecting to the last header of an HTTP request, after that it gets a 408; for gRPC, of the handshake
    header_timeout_s: Seconds = 10.0
    body_timeout_s: Seconds = 60.0  # time from the last header to the end of the body, or of a gRPC call's message
    keep_alive_timeout_s: Seconds = 30.0  # an idle HTTP connection is closed after this time
    grpc_idle_timeout_s: Seconds = 300.0  # a gRPC connection without a call is closed after this time
    slow_reader_timeout_s: Seconds = 30.0  # how long a client may leave a full buffer unread before its request ends
    first_token_timeout_s: Seconds = 1.0  # longest wait for a token or an error before a streamed answer's status line
    # what OpenAI's APIs, /v1/messages and /v2/chat sample with where a request says nothing. model: as the checkpoint's
    # generation_config.json says; none: from the model's own distribution
    sampling_defaults: Literal["model", "none"] = "model"
    # what they sample with in place of that, each as "NAME=NUMBER", with the NAME temperature, top_k, top_p, min_p or
    # repetition_penalty
    sampling_overrides: tuple[SamplingOverride, ...] = ()
    tokenizer_info: bool = False  # whether GET /tokenizer_info gives clients the chat template and special tokens
    # how the model writes calls of tools. auto: as its chat template says; none: requests with tools are refused
    tool_parser: Literal["auto", "none", "harmony", "hermes", "llama3_json", "mistral", "pythonic", "qwen3_coder"] = (
        "auto"
    )
    # how the model marks its reasoning. auto: as its chat template says; none: reasoning is part of the content
    reasoning_parser: Literal["auto", "none", "deepseek_r1", "harmony", "qwen3"] = "auto"
    # a file with a chat template in Jinja, in place of the model's own; read at start. tool_parser and reasoning_parser
    # look at it, too
    chat_template: Path | None = None
    # a JSON object: variables of the chat template for chats that do not set them, such as {"enable_thinking": false}
    chat_template_kwargs: str = "{}"
    # adapters (LoRA, prompt tuning) served from the start, each as "NAME=DIRECTORY"; they need dense.max_loras
    lora_modules: tuple[LoraModule, ...] = ()
    # directory below which clients may load adapters by /v1/load_lora_adapter; none: they may not
    lora_directory: Path | None = None
    # names of API keys whose adapters are shared by all callers, and which may replace and unload those of
    # lora_modules. Adapters of any other key belong to it: no other key can use, replace or unload them
    adapter_admins: tuple[str, ...] = ()
    # directory below which models must lie that clients may serve by /admin/weights; none: they may not
    weights_directory: Path | None = None
    # names of API keys that may do so, and flush the prefix cache; without API keys all clients may
    weights_admins: tuple[str, ...] = ()
    # whether clients may send prompts as embeddings (docs/prompt-embeddings.md), not with dense.backend="tensorrt"
    enable_prompt_embeds: bool = False
    # whether requests may have a chat_template of their own; one process renders them, one at a time, with limits of
    # 1 s of CPU time and 1 GiB, so a client can make others with templates wait, but not their streams
    trust_request_chat_template: bool = False
    # whether answers of /v1/responses are kept, in the memory of the one gateway process, for previous_response_id and
    # GET /v1/responses/{id}, unless a request has "store": false; not with several launch.gateway_processes
    store_responses: bool = False
    # most responses of one API key, or without keys of one address; then the least recently used ones are dropped
    max_stored_responses: Count = 1024
    max_stored_response_bytes: Count = 32 * 2**20  # of one API key or address; each has its whole conversation
    max_all_stored_response_bytes: Count = 256 * 2**20  # of all together
    # of all of SGLang's sessions (/open_session) together, in the memory of the one gateway process: not with several
    # launch.gateway_processes. One API key, or without keys one address, may have a quarter. 0: there are no sessions
    max_session_bytes: Annotated[int, Field(ge=0)] = 0
    # whether a client that names its request may come back for the rest of its answer, also after the death of this
    # process if the launcher has started it. Such a request goes on without its client and keeps what it has sent;
    # docs/operations.md says what it costs
    resume: bool = False
    resume_timeout_s: Seconds = 30.0  # how long such a client may be away; then its request is cancelled
    # most resumable requests, those included that have ended within resume_timeout_s; these make room first
    max_resumable: Count = 1024
    num_dense_streams: Count = 1  # streams to dense workers; at most this many replicas are used


class DenseSection(Section):
    """The dense worker, which holds the weights."""

    address: Target = "127.0.0.1:50052"  # in the gateway's config it may name several replicas
    backend: Literal["auto", "torch", "tensorrt"] = "auto"  # auto: TensorRT where it runs and is faster, else torch
    device: Device = "auto"  # auto: the first GPU if there is one; cuda:1 is the second
    # ranks: each has a part of each layer, and the KV cache of its heads; docs/several-gpus.md says what runs so
    tensor_parallel_size: Annotated[int, Field(ge=1, le=64)] = 1
    # stages: ranks of which each has some layers as a whole, and their KV cache
    pipeline_parallel_size: Annotated[int, Field(ge=1, le=64)] = 1
    # fp8: linear layers of an unquantized model, and of the layers of Qwen's towers, become FP8 while they load;
    # checkpoint: weights as they are stored
    quantization: Literal["checkpoint", "fp8"] = "checkpoint"
    num_threads: Count | None = None  # CPU threads of one step; none: all cores but one
    # true: the logits of a token are the same to the last bit whatever else is computed beside it, and however; both
    # workers must be told. docs/determinism.md says for which models, and what it costs
    deterministic: bool = False
    # auto: build missing TensorRT plans at start; never: refuse to start, or with the backend auto use torch
    build: Literal["auto", "never"] = "auto"
    plan_dir: Path = Path("~/.cache/twostroke/plans")  # for TensorRT plans; models, GPUs and workers may share it
    # true: capture each CUDA graph when a step first needs it, which delays that step; false: also whenever nobody
    # has a request, so that soon after the start there are all; ranks, stages and lanes: all at start
    captures_lazily: bool = False
    # numbers of tokens that TensorRT is tuned for, each with a plan, which runs smaller ones padded; or ranges of them
    profiles: str = "1,32,64,128,256,384,512,513-8192"
    max_loras: Annotated[int, Field(ge=0, le=64)] = 0  # LoRA adapters in memory at the same time; 0: none are served
    # most rows that an encoder computes between two steps, such as patches of pictures; one input may have more
    max_encoder_rows: Count = 8192
    encoder_cache_bytes: Count = 256 * 2**20  # of outputs of encoders, which are kept for further prompts
    max_lora_rank: Annotated[int, Field(ge=1, le=256)] = 64  # of an adapter; on a GPU each has memory for this rank
    metrics_address: TcpAddress | None = None  # address of /metrics for Prometheus; usually 127.0.0.1:9101
    step_log: Path | None = None  # file to which every step appends a line of JSON of about 300 bytes

    @property
    def num_ranks(self) -> int:
        """Pairs of a dense shard and an attention worker that together run the model."""
        return self.tensor_parallel_size * self.pipeline_parallel_size


class SchedulerSection(Section):
    """The size of a step, and the order of sequences."""

    max_num_seqs: Count = 64  # maximum number of sequences in one step
    # maximum number of tokens in one step; on a CPU prompts beside streams get fewer: it should take 0.15 s
    max_num_batched_tokens: Count = 512
    # micro-batches in flight. 2: while one half of the sequences is in its attention stroke, the other half is in its
    # dense stroke; for workers on different GPUs or different CPU cores. With dense.pipeline_parallel_size, as many as
    # there are stages: then all of them work at the same time (docs/several-gpus.md)
    num_lanes: Annotated[int, Field(ge=1, le=MAX_LANES)] = 1
    # guaranteed_no_evict: a sequence starts when there are blocks for all tokens that it may get, or for those that it
    # keeps at a time if all layers have windows. max_utilization: a sequence starts when there are blocks for the
    # tokens it has; when blocks run out, the last sequence gives up its blocks and is computed again later. take_turns:
    # a sequence starts when the KV cache and attention.host_kv_bytes together hold all tokens that it may get; those
    # that wait have their blocks in host memory, and take turns with those that run
    policy: Literal["guaranteed_no_evict", "max_utilization", "take_turns"] = "guaranteed_no_evict"
    max_num_waiting: Count = 10_000  # maximum number of waiting sequences that never ran, of all gateways together
    max_num_waiting_tokens: Count = 10_000_000  # the same limit in prompt tokens
    priority_ageing_s: Annotated[float, Field(ge=0)] = 1.0  # seconds of waiting that make up for one priority
    # by how many seconds a request is put ahead of others for each token that it may get (max_tokens). 0: requests
    # begin in the order in which they come; 0.05: about the time of a token, so that of a batch of requests the longest
    # begin first, and it ends earlier. For requests whose max_tokens is about what they will get
    head_start_s: Annotated[float, Field(ge=0, le=1)] = 0.0
    max_beam_width: Count = 16  # maximum number of beams of a search; also at most max_num_seqs
    # ngram: a sequence's next tokens are copied from its own text; suffix: also from earlier answers to its client;
    # medusa, eagle3: by heads that were trained for the model; draft_model: by a smaller model
    speculation: Literal["off", "ngram", "suffix", "medusa", "eagle3", "draft_model"] = "off"
    speculation_model: Path | None = None  # medusa, eagle3: directory of the heads' config.json and safetensors
    draft_model: Path | None = None  # draft_model: a Hugging Face model directory, of a model with the same vocabulary
    draft_cache_bytes: Count = 2**30  # draft_model, eagle3: most memory of its KV cache; no room, no drafts
    num_speculative_tokens: Annotated[int, Field(ge=1, le=64)] = 7  # most draft tokens of a sequence in one step
    prompt_lookup_min: Annotated[int, Field(ge=1, le=16)] = 3  # ngram: fewest equal tokens before a draft
    prompt_lookup_max: Annotated[int, Field(ge=1, le=16)] = 5  # ngram: equal tokens beyond which no longer match counts
    suffix_cached_tokens: Annotated[int, Field(ge=16384)] = 2**20  # suffix: of earlier answers; 30 bytes for each


class AttentionSection(Section):
    """The attention worker, which holds the KV cache."""

    address: Address = "127.0.0.1:50053"  # address of its gRPC API, which the dense worker calls
    # attention workers that the launcher starts, for one dense worker; each has some of the sequences
    workers: Annotated[int, Field(ge=1, le=MAX_ATTENTION_WORKERS)] = 1
    elastic: bool = False  # whether more may be added while clients are served; with several workers they may anyway
    # whether a sequence larger than the KV cache of one worker is split along its context over several, so that the
    # longest one grows with their number; see docs/several-gpus.md
    split_context: bool = False
    # where several attention workers are that others than this launcher have started; in the dense worker's config.
    # With a *, such as unix:/run/twostroke/attention-*.sock: those that are there, and those that come later. Empty:
    # there is one, at address, or there are those that the launcher starts
    addresses: tuple[Address, ...] = ()
    device: Device = "auto"  # auto: the first GPU if there is one; cuda:1 is the second
    # the GPUs of several attention workers that the launcher starts, dealt in turn, as in ["cuda:0", "cuda:1"]; empty:
    # all are on device
    devices: tuple[Gpu, ...] = ()
    num_threads: Count | None = None  # CPU threads of one step; none: all cores but one
    block_size: Count = 16  # tokens of one KV cache block
    # how keys and values are stored. model: in the model's dtype; auto: fp8 if the checkpoint says so, else model
    kv_cache_dtype: Literal["auto", "model", "fp8", "int8"] = "auto"
    kv_cache_skip_layers: tuple[Annotated[int, Field(ge=0)], ...] = ()  # layers that stay in the model's dtype, from 0
    num_blocks: Count | None = None  # blocks of the KV cache; none: as many as fit into the memory below
    kv_cache_bytes: Count = 256 * 2**20  # memory of the KV cache on a CPU
    # on a GPU: size of the KV cache as a fraction of the memory that the weights leave free
    kv_cache_memory_fraction: Annotated[float, Field(gt=0, le=1)] = 0.9
    enable_prefix_cache: bool = True  # whether requests with the same prefix share blocks
    # memory of the host tier, which has copies of blocks: a new attention worker reads them instead of computing them,
    # and prompts find blocks there that the KV cache has evicted; 0: no such copies. docs/operations.md says more
    host_kv_bytes: Annotated[int, Field(ge=0)] = 0
    # the file of the host tier, if there is one, which is kept when all services end; none: shared memory that is
    # removed then, and that a worker without the launcher loses when it ends
    host_kv_path: Path | None = None
    # StreamingLLM: each token attends to the first sink_tokens and the last window tokens alone, at their places among
    # these. Then texts may be longer than those that the model was trained with; see docs/models.md. None: to all
    window: Count | None = None
    sink_tokens: Annotated[int, Field(ge=0)] = 0  # belongs to window; 4 are enough for most models
    # where the worker tells which blocks its prefix cache has, for routers that look at prefixes (docs/kv-events.md);
    # as in vLLM, "tcp://*:5557" and "ipc://FILE" are listened at, "tcp://HOST:5557" is connected to; none: it does not
    kv_events: ZmqEndpoint | None = None
    kv_events_replay: ZmqEndpoint | None = None  # where it can be asked for what it told before; usually tcp://*:5558
    kv_events_topic: str = ""  # of these messages; llm-d expects "kv@POD@MODEL"
    # true: capture each CUDA graph when a step first needs it, which delays that step; false: also whenever nobody
    # has a request, so that soon after the start there are all; lanes: all at start
    captures_lazily: bool = False
    metrics_address: TcpAddress | None = None  # address of /metrics for Prometheus; usually 127.0.0.1:9102

    @pydantic.model_validator(mode="after")
    def _check_host_tier(self) -> AttentionSection:
        if self.host_kv_bytes and not self.enable_prefix_cache:
            raise ValueError(
                f"attention.host_kv_bytes is {self.host_kv_bytes}, but blocks are found only with"
                " attention.enable_prefix_cache"
            )
        return self

    @pydantic.model_validator(mode="after")
    def _check_kv_events(self) -> AttentionSection:
        if self.kv_events is None and self.kv_events_replay is not None:
            raise ValueError(f"attention.kv_events_replay {self.kv_events_replay!r} needs attention.kv_events")
        if self.kv_events is not None and not self.enable_prefix_cache:
            raise ValueError(
                f"attention.kv_events is {self.kv_events!r}, but blocks are found only with"
                " attention.enable_prefix_cache"
            )
        return self

    @pydantic.model_validator(mode="after")
    def _check_window(self) -> AttentionSection:
        window, num_sinks = self.window, self.sink_tokens
        if (window is None) != (num_sinks == 0):
            raise ValueError(f"attention.window {window} and attention.sink_tokens {num_sinks} belong together")
        if window is not None and window < self.block_size:
            raise ValueError(f"attention.window is {window}, less than a block of {self.block_size} tokens")
        if window is not None and num_sinks > window:
            raise ValueError(f"attention.sink_tokens is {num_sinks}, more than attention.window {window}")
        return self


class ChannelSection(Section):
    """The shared memory through which the two workers meet."""

    wait_timeout_s: Seconds = 60.0  # longest wait for the other worker within a step


class WatchdogSection(Section):
    """When a service counts as stalled. Each layer of a step is progress; loading and capturing are never stalls."""

    # time with work but without progress, or of a worker without an answer to a health check
    stall_timeout_s: Seconds = 30.0
    # time of a gateway without an answer to a health check: it never computes for long
    gateway_timeout_s: Seconds = 5.0


class PeerSection(Section):
    """Calls between the services."""

    # how long a service waits at start for the services it needs; a gateway, since the last progress of a worker
    # that loads, but for one of several behind a name (dns:, ipv4:), which gRPC hides until it serves. As long a
    # request waits that several attention workers hold together, if one of them has died
    connect_timeout_s: Seconds = 120.0
    rpc_timeout_s: Seconds = 10.0  # time limit of one unary call between services
    max_message_bytes: MessageBytes = 64 * 2**20  # size of one gRPC message between services
    tls_certificate: Path | None = None  # PEM file; if set, the services use TLS, and each must present a certificate
    tls_key: Path | None = None  # PEM file; the key of tls_certificate
    tls_ca: Path | None = None  # PEM file; the CA that has signed the certificates of the other services
    tls_server_name: str | None = None  # the name in the workers' certificates; none: the host of their address


class LaunchSection(Section):
    """The launcher, which starts and watches all services on one machine."""

    # those that it runs. Others are elsewhere, such as in containers of their own, with launchers of their own or none
    services: tuple[Literal["attn_worker", "dense_worker", "gateway"], ...] = SERVICES
    start_timeout_s: Seconds = 300.0  # longest time of a start until the gateway serves, or without progress of loading
    stop_grace_s: Seconds = 4.0  # time from SIGTERM to SIGKILL, for all services together
    max_restarts: Annotated[int, Field(ge=0)] = 5  # restarts of one service in restart_window_s; then all services stop
    restart_window_s: Seconds = 60.0  # the period in which restarts are counted
    mps: Literal["auto", "on", "off"] = "auto"  # whether to start an MPS daemon; auto: when both workers share a GPU
    restart_delay_s: Seconds = 0.2  # wait before the first restart; doubles with each further restart in the window
    metrics_address: TcpAddress | None = None  # address of /metrics for Prometheus; usually 127.0.0.1:9103
    # second processes that take over when a worker dies. imports: with modules, device and kernels ready; loaded: with
    # the weights, too; auto: the most for which there is memory, and none at a TCP address; see
    # docs/operations.md
    standby_dense: Literal["auto", "off", "imports", "loaded"] = "auto"
    standby_attention: Literal["auto", "off", "imports"] = "auto"  # its KV cache is allocated when it takes over
    # at the same ports, where limits of the section gateway and of API keys hold for all together. auto: one for four
    # cores, at most 4; 1 without a GPU, and where several cannot be or not be watched; docs/operations.md says more
    gateway_processes: Count | Literal["auto"] = 1

    @pydantic.field_validator("services")
    @classmethod
    def _check_services(cls, services: tuple[str, ...]) -> tuple[str, ...]:
        if not services or len(set(services)) < len(services):
            raise ValueError(f"it must name services, each once, of {', '.join(SERVICES)}")
        return services

    @property
    def runs_all(self) -> bool:
        """Whether this launcher runs all services."""
        return len(self.services) == len(SERVICES)


class LogSection(Section):
    """The logs that services write to standard error."""

    level: Literal["debug", "info", "warning", "error"] = "info"  # least severe level that is written
    # of the log lines; auto: short lines at a terminal, else logfmt; json: the launcher logs its addresses, too
    format: Literal["auto", "logfmt", "json"] = "auto"
    access: bool = False  # whether the gateway logs each answer that has ended, at level info; at level debug it does


class MetricsSection(Section):
    """The names of metrics; each service has an address for its own."""

    # vllm, sglang: the gateway's metrics also have that server's names, for routers, autoscalers and dashboards that
    # look for them
    compat: Literal["none", "vllm", "sglang"] = "none"


class TracingSection(Section):
    """OpenTelemetry spans of requests, sent in batches over OTLP/gRPC."""

    endpoint: Annotated[str, Field(pattern=r"^https?://[^/]+:\d+$")] | None = None  # of a collector; none: no traces
    sample_ratio: Annotated[float, Field(ge=0, le=1)] = 1.0  # fraction of requests traced, if the client leaves it open


class Config(Section):
    """The whole config, by section."""

    model: ModelSection = ModelSection()
    gateway: GatewaySection = GatewaySection()
    dense: DenseSection = DenseSection()
    scheduler: SchedulerSection = SchedulerSection()
    attention: AttentionSection = AttentionSection()
    channel: ChannelSection = ChannelSection()
    watchdog: WatchdogSection = WatchdogSection()
    peers: PeerSection = PeerSection()
    launch: LaunchSection = LaunchSection()
    log: LogSection = LogSection()
    metrics: MetricsSection = MetricsSection()
    tracing: TracingSection = TracingSection()

    def with_values(self, section: str, **values: object) -> Config:
        """The config with these values in a section; they are not checked."""
        return self.model_copy(update={section: getattr(self, section).model_copy(update=values)})

    @pydantic.model_validator(mode="after")
    def _check_combinations(self) -> Config:
        scheduler, model, peers = self.scheduler, self.model, self.peers
        if scheduler.max_num_seqs > scheduler.max_num_batched_tokens:
            raise ValueError(
                f"scheduler.max_num_seqs is {scheduler.max_num_seqs}, more than scheduler.max_num_batched_tokens "
                f"{scheduler.max_num_batched_tokens}: a step could not give every sequence a token"
            )
        if scheduler.policy == "take_turns":
            _check_turns(self.attention)
        _check_lookup_lengths(scheduler.prompt_lookup_min, scheduler.prompt_lookup_max)
        _check_speculation_model(scheduler.speculation, scheduler.speculation_model, self.dense.backend)
        _check_draft_model(scheduler.speculation, scheduler.draft_model)
        if (self.gateway.tls_certificate is None) != (self.gateway.tls_key is None):
            raise ValueError("gateway.tls_certificate and gateway.tls_key belong together")
        if self.gateway.tls_client_ca is not None and self.gateway.tls_certificate is None:
            raise ValueError("gateway.tls_client_ca needs gateway.tls_certificate and gateway.tls_key")
        if len({file is None for file in (peers.tls_certificate, peers.tls_key, peers.tls_ca)}) > 1:
            raise ValueError("peers.tls_certificate, peers.tls_key and peers.tls_ca belong together")
        if (self.gateway.lora_modules or self.gateway.lora_directory) and not self.dense.max_loras:
            needed = "need dense.max_loras of at least 1 (--enable-lora)"
            raise ValueError(f"gateway.lora_modules and gateway.lora_directory {needed}")
        if self.gateway.enable_prompt_embeds and self.dense.backend == "tensorrt":
            raise ValueError("gateway.enable_prompt_embeds: TensorRT takes no embeddings: set dense.backend to torch")
        for key in ("store_responses", "max_session_bytes"):
            if getattr(self.gateway, key) and self.launch.gateway_processes not in (1, "auto"):
                raise ValueError(
                    f"gateway.{key}: launch.gateway_processes is {self.launch.gateway_processes}, must be 1, for "
                    "a gateway would not find what another one has stored"
                )
        if self.gateway.lora_directory is not None and not self.gateway.lora_directory.is_dir():
            raise ValueError(f"gateway.lora_directory {str(self.gateway.lora_directory)!r} is not a directory")
        if self.gateway.weights_directory is not None and not self.gateway.weights_directory.is_dir():
            raise ValueError(f"gateway.weights_directory {str(self.gateway.weights_directory)!r} is not a directory")
        if not model.path.is_dir():
            raise ValueError(f"model.path {str(model.path)!r} is not a directory")
        addresses = [self.gateway.address, self.gateway.http_address, self.dense.address, self.attention.address]
        chosen = [each for each in addresses if not each.endswith(":0")]  # port 0: each gets another one that is free
        if len(set(chosen)) != len(chosen):
            raise ValueError(f"gateway, HTTP, dense and attention addresses must differ: {', '.join(addresses)}")
        return self


def _check_turns(attention: AttentionSection) -> None:
    """Raises ValueError unless sequences can take turns in the KV cache."""
    if not attention.host_kv_bytes:
        raise ValueError("scheduler.policy is take_turns, but attention.host_kv_bytes is 0: blocks that wait need room")
    if attention.workers > 1 or attention.elastic or attention.addresses:
        raise ValueError("scheduler.policy is take_turns, which is for one attention worker: choose another policy")


def _check_lookup_lengths(shortest: int, longest: int) -> None:
    """The lengths of the n-grams that are looked up."""
    if shortest > longest:
        raise ValueError(f"scheduler.prompt_lookup_min is {shortest}, more than prompt_lookup_max {longest}")


def _check_speculation_model(method: str, model: Path | None, dense_backend: str) -> None:
    """A method with heads needs their directory, and a backend that gives hidden states."""
    if model is None:
        if method in SPECULATION_WITH_HEADS:
            raise ValueError(f"scheduler.speculation {method!r} needs scheduler.speculation_model, a directory")
        return
    if method not in SPECULATION_WITH_HEADS:
        named = " or ".join(map(repr, SPECULATION_WITH_HEADS))
        raise ValueError(f"scheduler.speculation_model {str(model)!r} belongs to {named}, speculation is {method!r}")
    if not model.is_dir():
        raise ValueError(f"scheduler.speculation_model {str(model)!r} is not a directory")
    if dense_backend == "tensorrt":
        raise ValueError(
            f"scheduler.speculation {method!r}: TensorRT gives no hidden states: set dense.backend to torch"
        )


def _check_draft_model(method: str, model: Path | None) -> None:
    """The method 'draft_model' needs a model."""
    if model is None:
        if method == "draft_model":
            raise ValueError("scheduler.speculation 'draft_model' needs scheduler.draft_model, a model's directory")
        return
    if method != "draft_model":
        raise ValueError(f"scheduler.draft_model {str(model)!r} belongs to 'draft_model', speculation is {method!r}")
    if not model.is_dir():
        raise ValueError(f"scheduler.draft_model {str(model)!r} is not a directory")


def load_config(file: Path | None, overrides: Sequence[str] = ()) -> Config:
    """Reads a TOML file (or none) and applies `section.key=value` overrides; the last one of a key wins.

    A value that does not parse as TOML is a plain string: `model.dtype=float16` needs no quotes.
    """
    document: dict[str, object] = {}
    if file is not None:
        try:
            document = tomllib.loads(file.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"config file {str(file)!r} cannot be read: {error.strerror}") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"config file {str(file)!r} is not TOML: {error}") from error
        for name, value in document.items():
            if not isinstance(value, dict):
                raise ConfigError(f"config file {str(file)!r}: {_describe_outside(name)}")
    for override in overrides:
        _apply_override(document, override)
    return _validated(document)


def with_values(config: Config, values: Mapping[str, object]) -> Config:
    """The config with other values of some keys, `section.key`. Raises `ConfigError` if they do not fit the others."""
    document = config.model_dump(exclude_unset=True)
    for key, value in values.items():
        section, _, name = key.partition(".")
        document.setdefault(section, {})[name] = value
    return _validated(document)


def _validated(document: dict[str, object]) -> Config:
    try:
        return Config.model_validate(document)
    except pydantic.ValidationError as error:
        raise ConfigError("; ".join(map(_describe, error.errors()))) from error


class ServiceManagerEnvironment(NamedTuple):
    """What systemd tells a service that it starts, see sd_notify(3) and sd_watchdog_enabled(3)."""

    notify_socket: str | None  # where it wants to be told; None: it does not
    watchdog_usec: int | None  # longest time between two signs of life, in microseconds; None: it wants none
    watchdog_pid: int | None  # of the process that it wants them from; None: of any


def service_manager_of_environment() -> ServiceManagerEnvironment:
    """What systemd has said. Raises `ConfigError` for what is no number."""
    numbers: list[int | None] = []
    for name in ("WATCHDOG_USEC", "WATCHDOG_PID"):
        text = os.environ.get(name)
        if text is not None and not (text.isascii() and text.isdigit() and int(text) > 0):
            raise ConfigError(f"{name} is {text!r}, not a number above 0")
        numbers.append(None if text is None else int(text))
    return ServiceManagerEnvironment(os.environ.get("NOTIFY_SOCKET") or None, *numbers)


class ListenEnvironment(NamedTuple):
    """What systemd tells a service about the sockets that it passes on, see sd_listen_fds_with_names(3)."""

    pid: int | None  # of the process that they are for; None: of none
    num_sockets: int
    names: tuple[str, ...] | None  # as many; None: they have no names


def take_listen_environment() -> ListenEnvironment:
    """What systemd has said; removes it, as it is for no child. Raises `ConfigError` for what is no number."""
    pid, number, names = (os.environ.pop(name, None) for name in ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"))
    for name, text in (("LISTEN_PID", pid), ("LISTEN_FDS", number)):
        if text is not None and not (text.isascii() and text.isdigit()):
            raise ConfigError(f"{name} is {text!r}, not a number")
    return ListenEnvironment(
        None if pid is None else int(pid), int(number or 0), None if names is None else tuple(names.split(":"))
    )


def api_keys_of_environment() -> str:
    """`NAME=KEY,NAME=KEY`: API keys that no file should hold; may be empty. See gateway/access/api_keys.py."""
    return os.environ.get(API_KEYS_VARIABLE, "")


def add_api_key(name: str, key: str) -> None:
    """Adds an API key to the environment of the gateways that this process starts."""
    pairs = api_keys_of_environment()
    os.environ[API_KEYS_VARIABLE] = f"{pairs},{name}={key}" if pairs else f"{name}={key}"


def api_key_of_environment() -> str | None:
    """The key that a client sends by default."""
    return os.environ.get(API_KEY_VARIABLE)


def dump_config(config: Config) -> str:
    """TOML that `load_config` reads back to an equal config."""
    lines = []
    for name, section in config:
        lines.append(f"[{name}]")
        for key, value in section:
            if value is not None:  # TOML has no null; an absent key means the default, which is None
                lines.append(f"{key} = {toml_value(value)}")
    return "\n".join(lines) + "\n"


def _apply_override(document: dict[str, object], override: str) -> None:
    key, separator, text = override.partition("=")
    section, dot, name = key.strip().partition(".")
    if not separator or not dot:
        raise ConfigError(f"--set {override!r} is not of the form section.key=value")
    try:
        value: object = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    values = document.setdefault(section, {})
    assert isinstance(values, dict), "`load_config` has looked at those of the file"
    values[name] = value


def _describe_outside(name: str) -> str:
    """What is wrong with a value that a file has in no section."""
    if name in Config.model_fields:
        return f"{name} is a value, must be a section: [{name}]"
    hint = f": did you mean {nearest}?" if (nearest := _nearest_key(None, name)) else ""
    return f"{name} is in no section{hint}"


def _describe(error: pydantic.ErrorDict) -> str:
    key = ".".join(map(str, error["loc"]))
    if error["type"] == "extra_forbidden":
        section, _, name = key.partition(".")
        if not name and isinstance(error["input"], dict):  # the section is unknown
            name = next(iter(error["input"]), "")
        nearest = _nearest_key(section, name)
        return f"unknown config key {key}" + (f": did you mean {nearest}?" if nearest else "")
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "tuple_type":
        message = 'Input should be a list, such as ["a", "b"]'
    return f"{key} = {error['input']!r}: {message}" if key else message


# Which of the gateway's addresses is meant by names that others have for parts of them: not found by spelling.
_ADDRESS_PARTS = {
    **dict.fromkeys(["host", "port", "http_host", "http_port"], "http_address"),
    **dict.fromkeys(["grpc_address", "grpc_host", "grpc_port"], "address"),
}


def _nearest_key(section: str | None, name: str) -> str | None:
    """The key that may have been meant: one of the section, or of the one that is spelt like it, or else of any.

    section: None if there is none; name: empty if there is a section alone
    """
    sections = {each: [*field.annotation.model_fields] for each, field in Config.model_fields.items()}  # type: ignore[union-attr]
    own = section if section in sections else next(iter(_nearest(section or "", sections)), None)
    if own == "gateway" and name in _ADDRESS_PARTS:
        return f"gateway.{_ADDRESS_PARTS[name]}"
    if own is not None and (found := _nearest(name, sections[own])):
        return f"{own}.{found[0]}"
    keys = {key: each for each, names in sections.items() for key in names}
    found = _nearest(name, keys, 0.8)
    if found and sum(found[0] in names for names in sections.values()) == 1:
        return f"{keys[found[0]]}.{found[0]}"
    return own if own != section else None


def _nearest(word: str, words: Iterable[str], least: float = 0.6) -> list[str]:
    """The one of the words that is spelt most like `word`, if any is."""
    return difflib.get_close_matches(word, words, 1, least)


def toml_value(value: object) -> str:
    """A value in TOML syntax. A path becomes a string."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, tuple):
        return f"[{', '.join(map(toml_value, value))}]"
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")  # which JSON does not escape
