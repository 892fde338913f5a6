"""A plain client of the dense worker's stream, so that tests see the messages that a gateway gets."""

from __future__ import annotations

import queue
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from services.common.token_logprobs import encode_logprobs
from services.pb import dense_pb2, dense_pb2_grpc, sampling_pb2, sequence_pb2
from tests.support.reports import prompt_logprobs, read_prompt_logprobs

TIMEOUT_S = 60.0
EOS = 2  # of the embedded model


@dataclass
class ReceivedSequence:
    """Everything that the dense worker has sent about one sequence."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[sampling_pb2.TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: dict[int, sampling_pb2.TokenLogprobs] = field(default_factory=dict)  # by index in the prompt
    start: dense_pb2.SequenceStart | None = None
    end: dense_pb2.SequenceEnd | None = None


def submit(seq_id: int, prompt: list[int], max_tokens: int, **options: object) -> dense_pb2.Submit:
    """A greedy request that ends at `max_tokens` or EOS.

    `options` are fields of `SamplingParams`, `SequenceSpec` or `Submit`, or `num_prompt_logprobs`.
    """
    names = set(sampling_pb2.SamplingParams.DESCRIPTOR.fields_by_name)
    sampling = {"temperature": 0.0, "seed": 1} | {name: options.pop(name) for name in names & options.keys()}
    own = {name: options.pop(name) for name in dense_pb2.Submit.DESCRIPTOR.fields_by_name.keys() & options.keys()}
    spec = sequence_pb2.SequenceSpec(
        request_id=f"test-{seq_id}",
        prompt_token_ids=prompt,
        sampling=sampling_pb2.SamplingParams(**sampling),
        max_tokens=max_tokens,
        features=prompt_logprobs(options.pop("num_prompt_logprobs", None)),
        **{"stop_token_ids": [EOS]} | options,
    )
    return dense_pb2.Submit(seq_id=seq_id, spec=spec, **own)


def stream_steps(
    stub: dense_pb2_grpc.DenseWorkerStub, submits: Iterable[dense_pb2.Submit], received: dict[int, ReceivedSequence]
) -> Iterator[None]:
    """Collects the results in `received`, by seq_id, until every sequence has ended or the stream breaks."""
    outbox: queue.SimpleQueue[dense_pb2.GatewayMessage | None] = queue.SimpleQueue()
    for each in submits:
        received[each.seq_id] = ReceivedSequence()
        outbox.put(dense_pb2.GatewayMessage(submit=each))
    call = stub.Connect(iter(outbox.get, None), timeout=TIMEOUT_S)
    try:
        for step in call:
            _take(received, step)
            yield
            if all(each.end is not None for each in received.values()):
                return
    finally:
        outbox.put(None)
        call.cancel()


def run_all(stub: dense_pb2_grpc.DenseWorkerStub, submits: Iterable[dense_pb2.Submit]) -> dict[int, ReceivedSequence]:
    """Runs every sequence to its end; returns the results by seq_id."""
    received: dict[int, ReceivedSequence] = {}
    for _ in stream_steps(stub, submits, received):
        pass
    return received


def _take(received: dict[int, ReceivedSequence], step: dense_pb2.StepOutput) -> None:
    for start in step.started:
        received[start.seq_id].start = start
    for report in step.reports:
        tokens = map(encode_logprobs, read_prompt_logprobs(report.num_tokens, report.values))
        received[report.seq_id].prompt_logprobs.update(enumerate(tokens, report.start))
    for seq_id, token_id in zip(step.seq_ids, step.token_ids, strict=True):
        received[seq_id].token_ids.append(token_id)
    for logprobs in step.logprobs:
        each = received[logprobs.seq_id]
        each.logprobs.append(logprobs.token)
        assert len(each.logprobs) == len(each.token_ids), "a token's log-probabilities come with it"
    for end in step.ended:
        received[end.seq_id].end = end
