"""`SequenceSpec`: what was asked for of one sequence. It is written once, by the gateway; everybody else holds it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from services.common.beams.options import BeamSearchOptions, decode_beam_search, encode_beam_search
from services.common.fairness import Client
from services.common.sampling_messages import decode_sampling, encode_sampling
from services.common.sampling_params import SamplingParams
from services.lora.adapter import Adapter, decode_adapter, encode_adapter
from services.pb import sequence_pb2
from services.step.prompt_span import PromptSpan, decode_spans, encode_spans

# Features that a spec asks for by a field of its own, or by an option: none of them reads a message in `features`.
FEATURES_BY_FIELD = frozenset({"adapter", "prompt_embeds", "structured_output"})


@dataclass(frozen=True, slots=True)
class PromptEmbedsRef:
    """Vectors in place of the embeddings of tokens: token id `first_token_id + i` of the prompt stands for row i."""

    hash: str  # of everything else and of the values, hexadecimal
    num_rows: int
    hidden_size: int  # numbers in a row
    dtype: str  # of the values: float32, float16 or bfloat16
    first_token_id: int  # the number of token ids of the model's vocabulary


@dataclass(frozen=True, slots=True)
class SourceRef:
    """The input of the encoder whose output the sequence reads: tokens, or the features of sound."""

    hash: str  # of the input, hexadecimal
    num_rows: int  # of the encoder's output


@dataclass(frozen=True, slots=True)
class SequenceSpec:
    """One prompt and how to answer it. It never changes, so journal, scheduler and runner hold the same object.

    The list of prompt tokens belongs to it.
    """

    request_id: str  # of the client's request, for messages and logs
    prompt_token_ids: Sequence[int]  # at least one
    sampling: SamplingParams
    max_tokens: int  # output tokens, at least 1
    stop_token_ids: tuple[int, ...] = ()  # ascending; the sequence ends when one of them is sampled
    cache_salt: str = ""  # only sequences of equal salt share blocks
    num_logprobs: int | None = None  # report this many most likely tokens with each output token; None: nothing
    priority: int = 0  # lower numbers go first
    tenant: int = 0  # number of the API key; tenants share evenly
    client: int = 0  # number of the client's address; the clients of a tenant share evenly
    traceparent: str = ""  # W3C trace context of the gateway's span; empty without tracing
    adapter: Adapter | None = None  # computes all its tokens; None: the model alone
    prompt_embeds: PromptEmbedsRef | None = None  # vectors for some of its prompt tokens; None: it has tokens only
    beam_search: BeamSearchOptions | None = None  # None: its tokens are sampled
    source: SourceRef | None = None  # None: the model has no encoder
    # What is asked for of features, by their names; each is a message that its feature alone reads.
    features: Mapping[str, bytes] = field(default_factory=dict)
    spans: tuple[PromptSpan, ...] = ()  # prompt tokens that stand for something else than themselves, in order

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def client_id(self) -> Client:
        """Whose it is where clients take turns, or share something."""
        return self.tenant, self.client

    @property
    def asked_features(self) -> set[str]:
        """The names of the features that it asks for: by a message, a field of its own, or an option."""
        asked = set(self.features)
        if self.adapter is not None:
            asked.add("adapter")
        if self.prompt_embeds is not None:
            asked.add("prompt_embeds")
        if self.source is not None:
            asked.add("source")
        if self.sampling.structured_output is not None:
            asked.add("structured_output")
        return asked

    @property
    def prefix_key(self) -> bytes:
        """What sequences that share blocks have in common besides their tokens: salt, adapter, vectors, and source."""
        key = self.cache_salt.encode()
        # No text in UTF-8 has these bytes, and the hashes have fixed lengths: equal keys mean that all are equal.
        if self.adapter is not None:
            key = b"\xff" + bytes.fromhex(self.adapter.hash) + key
        if self.prompt_embeds is not None:
            key = b"\xfe" + bytes.fromhex(self.prompt_embeds.hash) + key
        if self.source is not None:
            key = b"\xfd" + bytes.fromhex(self.source.hash) + key
        return key


def encode_spec(spec: SequenceSpec) -> sequence_pb2.SequenceSpec:
    """The message. A long prompt takes a millisecond."""
    table, beams = spec.prompt_embeds, spec.beam_search
    return sequence_pb2.SequenceSpec(
        request_id=spec.request_id,
        prompt_token_ids=spec.prompt_token_ids,
        sampling=encode_sampling(spec.sampling),
        max_tokens=spec.max_tokens,
        stop_token_ids=spec.stop_token_ids,
        cache_salt=spec.cache_salt,
        num_logprobs=spec.num_logprobs,
        priority=spec.priority,
        tenant=spec.tenant,
        client=spec.client,
        traceparent=spec.traceparent,
        adapter=spec.adapter and encode_adapter(spec.adapter),
        prompt_embeds=table
        and sequence_pb2.PromptEmbedsRef(
            hash=table.hash,
            num_rows=table.num_rows,
            hidden_size=table.hidden_size,
            dtype=table.dtype,
            first_token_id=table.first_token_id,
        ),
        beam_search=beams
        and sequence_pb2.BeamSearchSpec(
            num_beams=beams.num_beams,
            num_answers=beams.num_answers,
            options=encode_beam_search(beams),
            reads_logprob_rows=True,
        ),
        features=spec.features or None,
        source=spec.source and sequence_pb2.SourceRef(hash=spec.source.hash, num_rows=spec.source.num_rows),
        spans=encode_spans(spec.spans) if spec.spans else (),
    )


def decode_spec(message: sequence_pb2.SequenceSpec) -> SequenceSpec:
    """The spec of a message, which the gateway has validated. Raises `InvalidRequest` for what no gateway writes."""
    table, beams = message.prompt_embeds, message.beam_search
    return SequenceSpec(
        request_id=message.request_id,
        prompt_token_ids=list(message.prompt_token_ids),
        sampling=decode_sampling(message.sampling),
        max_tokens=message.max_tokens,
        stop_token_ids=tuple(message.stop_token_ids),
        cache_salt=message.cache_salt,
        num_logprobs=message.num_logprobs if message.HasField("num_logprobs") else None,
        priority=message.priority,
        tenant=message.tenant,
        client=message.client,
        traceparent=message.traceparent,
        adapter=decode_adapter(message.adapter) if message.HasField("adapter") else None,
        prompt_embeds=PromptEmbedsRef(
            table.hash, table.num_rows, table.hidden_size, table.dtype, table.first_token_id
        )
        if message.HasField("prompt_embeds")
        else None,
        beam_search=decode_beam_search(beams.options, beams.num_beams, beams.num_answers)
        if message.HasField("beam_search")
        else None,
        features=dict(message.features),
        source=SourceRef(message.source.hash, message.source.num_rows) if message.HasField("source") else None,
        spans=decode_spans(message.spans) if message.spans else (),
    )
