"""Encodes sequences for the stream to a dense worker, and adds a step's output to its sequences."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from services.common.errors import (
    CapacityError,
    InvalidRequest,
    NotFound,
    PeerError,
    QueueTimeout,
    RequestAborted,
    TwostrokeError,
)
from services.gateway.link.journal_entry import FinishReason, JournalEntry, StreamSequences
from services.pb import dense_pb2
from services.step.sequence_spec import encode_spec

FINISH_REASONS = {
    dense_pb2.SequenceEnd.STOP: FinishReason.STOP,
    dense_pb2.SequenceEnd.LENGTH: FinishReason.LENGTH,
}
SEQUENCE_ERRORS: dict[int, type[TwostrokeError]] = {
    error_class.status_code.value[0]: error_class
    for error_class in (InvalidRequest, CapacityError, NotFound, PeerError, QueueTimeout, RequestAborted)
}

STEPS_OF_TURNS = 32  # about as many later, a sequence is the first one of a large step again


def encode_submit(entry: JournalEntry) -> dense_pb2.GatewayMessage:
    """The message that starts a sequence or continues it after its tokens. A long prompt takes a millisecond.

    What a search has found so far may take a second: then call it in a thread.
    """
    message = dense_pb2.GatewayMessage(
        submit=dense_pb2.Submit(
            seq_id=entry.seq_id,
            output_token_ids=entry.output_token_ids,
            num_reported={name: record.num_reported for name, record in entry.records.items()} or None,
            queue_timeout_ms=entry.queue_timeout_ms,
            num_crashes=entry.num_crashes,
            search=_encode_search(entry),
            group_id=_group_id(entry),
        )
    )
    message.submit.spec.CopyFrom(encode_spec(entry.spec))  # as an argument it would be copied twice
    return message


def _encode_search(entry: JournalEntry) -> dense_pb2.BeamProgress | None:
    if entry.search is None:
        return None
    beams, ended = entry.search.encode()
    return dense_pb2.BeamProgress(has_run=entry.queue_s is not None, beams=beams, ended=ended)


def _group_id(entry: JournalEntry) -> int:
    request = entry.request
    return entry.seq_id - entry.index if request.num_sequences > 1 and request.spec.beam_search is None else 0


def keep_reports(sequences: StreamSequences, output: dense_pb2.StepOutput) -> None:
    """Adds what features report, which comes before the tokens, to its sequences."""
    for each in output.reports:
        entry = sequences.get(each.seq_id)
        if entry is not None:
            entry.keep_report(each.feature, each.start, each.num_tokens, each.values)


def keep_output(sequences: StreamSequences, output: dense_pb2.StepOutput) -> None:
    """Adds a step's tokens and ends to their sequences; sequences closed meanwhile are ignored."""
    find, now = sequences.get, time.monotonic()
    for start in output.started:
        entry = find(start.seq_id)
        if entry is not None:
            entry.start(start.queue_us / 1e6, start.num_cached_tokens)
    for each in output.logprobs:
        entry = find(each.seq_id)
        if entry is not None:
            entry.logprobs.append(each.token)
    for seq_id, token_id in _in_turn(output):
        entry = find(seq_id)
        if entry is not None:
            entry.append(token_id, now)
    for step in output.searches:
        entry = find(step.seq_id)
        if entry is not None:
            entry.add_search_step(step)
    for end in output.ended:
        entry = find(end.seq_id)
        if entry is None or entry.is_ended:
            continue
        if end.answers:
            _keep_answers(entry, end.answers, now)
            continue
        finish_reason = FINISH_REASONS.get(end.reason)
        if finish_reason is not None:
            entry.finish(finish_reason)
        else:
            entry.fail(SEQUENCE_ERRORS.get(end.status_code, TwostrokeError)(end.message, end.param or None))


def _in_turn(output: dense_pb2.StepOutput) -> Iterator[tuple[int, int]]:
    """The seq_ids and tokens of a step, beginning with another sequence each time: who comes last waits longest."""
    seq_ids, token_ids = list(output.seq_ids), list(output.token_ids)
    count = len(seq_ids)
    start = output.step_id * max(1, count // STEPS_OF_TURNS) % count if count else 0
    while start and seq_ids[start - 1] == seq_ids[start]:
        start -= 1  # the tokens of one sequence stay in order
    return zip(seq_ids[start:] + seq_ids[:start], token_ids[start:] + token_ids[:start], strict=True)


def _keep_answers(entry: JournalEntry, answers: Sequence[dense_pb2.BeamAnswer], now: float) -> None:
    """Gives each answer of a beam search to its entry, or fails it if they have not the log-probabilities asked for."""
    has_logprobs = entry.spec.num_logprobs is not None
    if has_logprobs and any(answer.token_ids and not answer.logprob_rows for answer in answers):
        entry.fail(
            PeerError(
                "the dense worker has sent no log-probabilities of a beam search as this gateway reads them: it is of "
                "another version"
            )
        )
        return
    for each, answer in zip((entry, *entry.followers), answers, strict=True):
        each.beam_score = answer.score
        if has_logprobs:
            each.logprobs.extend_encoded(answer.logprob_rows, len(answer.token_ids))
        for token_id in answer.token_ids:
            each.append(token_id, now)
        each.finish(FINISH_REASONS[answer.reason])
