"""Converts plans and answers to messages and back; see `protos/step.proto` and `protos/attn.proto`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence, Sized

import numpy as np

from services.common.errors import InvalidRequest
from services.pb import attn_pb2, step_pb2
from services.step.plan import Fork, NewSequence, PlanEntries, StepPlan, TokenColumns
from services.step.prompt_span import decode_spans, encode_spans
from services.step.result import PlanAccepted, SequenceOpened

# Of the columns of entries and tokens: little-endian arrays in bytes, which move without a Python object per row.
_SEQ_ID, _COUNT = np.dtype("<u8"), np.dtype("<i8")


def encode_plan(plan: StepPlan) -> step_pb2.StepPlan:
    """The plan as a message, its entries and tokens as columns."""
    entries, sampled = plan.entries, plan.sampled
    message = step_pb2.StepPlan(
        step_id=plan.step_id,
        lane=plan.lane,
        new_sequences=map(_encode_new_sequence, plan.new_sequences),
        seq_ids=_encode_column(entries.seq_ids, _SEQ_ID),
        positions=_encode_column(entries.positions, _COUNT),
        num_tokens=_encode_column(entries.num_tokens, _COUNT),
        num_logits=_encode_column(entries.num_logits, _COUNT),
        close_seq_ids=plan.close_seq_ids,
        kept_seq_ids=plan.kept_seq_ids,
        sampled_seq_ids=_encode_column(sampled.seq_ids, _SEQ_ID),
        sampled_token_ids=_encode_column(sampled.token_ids, _COUNT),
        evicts_blocks=plan.evicts_blocks,
    )
    if entries.drafts:
        drafts = [entries.drafts.get(index, ()) for index in range(len(entries))]
        message.num_drafts.extend(map(len, drafts))
        message.draft_token_ids.extend(itertools.chain.from_iterable(drafts))
    for fork in plan.forks:
        message.fork_parents.append(fork.parent_seq_id)
        message.fork_children.append(fork.child_seq_id)
        message.fork_positions.append(fork.position)
    for seq_id, token_id in plan.forced:
        message.forced_seq_ids.append(seq_id)
        message.forced_token_ids.append(token_id)
    for seq_id, num_rows in plan.extra_rows:
        message.extra_rows_seq_ids.append(seq_id)
        message.num_extra_rows.append(num_rows)
    return message


def decode_plan(message: step_pb2.StepPlan) -> StepPlan:
    """The plan of a message. Raises `InvalidRequest` when columns that belong together differ in length."""
    forks = (message.fork_parents, message.fork_children, message.fork_positions)
    entries = PlanEntries(
        _decode_column(message, "seq_ids", _SEQ_ID),
        _decode_column(message, "positions", _COUNT),
        _decode_column(message, "num_tokens", _COUNT),
        _decode_column(message, "num_logits", _COUNT),
        _decode_drafts(message) if message.num_drafts else {},
    )
    sampled = TokenColumns(
        _decode_column(message, "sampled_seq_ids", _SEQ_ID),
        _decode_column(message, "sampled_token_ids", _COUNT),
    )
    columns = [entries.seq_ids, entries.positions, entries.num_tokens, entries.num_logits]
    if message.num_drafts:
        columns.append(message.num_drafts)
    _check_lengths(message, "entries", columns)
    _check_lengths(message, "sampled tokens", (sampled.seq_ids, sampled.token_ids))
    _check_lengths(message, "forced tokens", (message.forced_seq_ids, message.forced_token_ids))
    _check_lengths(message, "forks", forks)
    _check_lengths(message, "extra rows", (message.extra_rows_seq_ids, message.num_extra_rows))
    return StepPlan(
        step_id=message.step_id,
        entries=entries,
        close_seq_ids=tuple(message.close_seq_ids),
        kept_seq_ids=tuple(message.kept_seq_ids),
        sampled=sampled,
        forks=tuple(itertools.starmap(Fork, zip(*forks, strict=True))),
        new_sequences=tuple(map(_decode_new_sequence, message.new_sequences)),
        forced=tuple(zip(message.forced_seq_ids, message.forced_token_ids, strict=True)),
        lane=message.lane,
        evicts_blocks=message.evicts_blocks,
        extra_rows=tuple(zip(message.extra_rows_seq_ids, message.num_extra_rows, strict=True)),
    )


def encode_opened(opened: SequenceOpened) -> attn_pb2.PlanAnswer:
    """The answer to one new sequence."""
    return attn_pb2.PlanAnswer(
        opened=attn_pb2.SequenceOpened(
            seq_id=opened.seq_id,
            num_cached_tokens=opened.num_cached_tokens,
            num_pinned_blocks=opened.num_pinned_blocks,
            num_held_blocks=opened.num_held_blocks,
            num_freed_blocks=opened.num_freed_blocks,
            num_recovered_tokens=opened.num_recovered_tokens,
            error=opened.error,
            has_extra_rows=opened.has_extra_rows,
        )
    )


def encode_accepted(accepted: PlanAccepted) -> attn_pb2.PlanAnswer:
    """The answer to one plan."""
    errors = (accepted.errors or {}).items()
    return attn_pb2.PlanAnswer(
        step_id=accepted.step_id,
        num_freed_blocks=accepted.num_freed_blocks,
        num_free_blocks=accepted.num_free_blocks,
        errors=[attn_pb2.SequenceError(seq_id=seq_id, message=message) for seq_id, message in errors],
    )


def decode_answer(answer: attn_pb2.PlanAnswer) -> SequenceOpened | PlanAccepted:
    """The answer of a message: to a new sequence if `opened` is set, else to a plan."""
    if not answer.HasField("opened"):
        errors = {error.seq_id: error.message for error in answer.errors}
        return PlanAccepted(answer.step_id, answer.num_freed_blocks, answer.num_free_blocks, errors)
    opened = answer.opened
    return SequenceOpened(
        seq_id=opened.seq_id,
        num_cached_tokens=opened.num_cached_tokens,
        num_pinned_blocks=opened.num_pinned_blocks,
        num_held_blocks=opened.num_held_blocks,
        num_freed_blocks=opened.num_freed_blocks,
        num_recovered_tokens=opened.num_recovered_tokens,
        error=opened.error if opened.HasField("error") else None,
        has_extra_rows=opened.has_extra_rows,
    )


def _encode_new_sequence(sequence: NewSequence) -> step_pb2.NewSequence:
    return step_pb2.NewSequence(
        seq_id=sequence.seq_id,
        request_id=sequence.request_id,
        token_ids=sequence.token_ids,
        num_prompt_tokens=sequence.num_prompt_tokens,
        prefix_key=sequence.prefix_key,
        ignores_prefix_cache=sequence.ignores_prefix_cache,
        traceparent=sequence.traceparent,
        max_cached_tokens=sequence.max_cached_tokens,
        num_extra_rows=sequence.num_extra_rows,
        leaves_address=sequence.leaves_address,
        spans=encode_spans(sequence.spans) if sequence.spans else (),
        first_token=0 if sequence.part is None else sequence.part.start,
        end_token=0 if sequence.part is None else sequence.part.stop,
        starts_empty=sequence.starts_empty,
        prefix_generation=sequence.prefix_generation,
    )


def _decode_new_sequence(message: step_pb2.NewSequence) -> NewSequence:
    return NewSequence(
        seq_id=message.seq_id,
        request_id=message.request_id,
        token_ids=tuple(message.token_ids),
        num_prompt_tokens=message.num_prompt_tokens,
        prefix_key=message.prefix_key,
        ignores_prefix_cache=message.ignores_prefix_cache,
        traceparent=message.traceparent,
        max_cached_tokens=message.max_cached_tokens if message.HasField("max_cached_tokens") else None,
        num_extra_rows=message.num_extra_rows,
        leaves_address=message.leaves_address,
        spans=decode_spans(message.spans) if message.spans else (),
        part=range(message.first_token, message.end_token) if message.end_token else None,
        starts_empty=message.starts_empty,
        prefix_generation=message.prefix_generation,
    )


def _encode_column(values: np.ndarray, wire_type: np.dtype) -> bytes:
    return values.astype(wire_type, copy=False).tobytes()


def _decode_column(message: step_pb2.StepPlan, name: str, wire_type: np.dtype) -> np.ndarray:
    """A view of the message's bytes, which cannot be written to."""
    data = getattr(message, name)
    if len(data) % wire_type.itemsize:
        raise InvalidRequest(
            f"column {name} of plan {message.step_id} has {len(data)} bytes, no multiple of {wire_type.itemsize}"
        )
    return np.frombuffer(data, wire_type)


def _check_lengths(message: step_pb2.StepPlan, what: str, columns: Sequence[Sized]) -> None:
    if len({*map(len, columns)}) > 1:
        found = ", ".join(str(len(each)) for each in columns)
        raise InvalidRequest(f"columns of plan {message.step_id} differ in length: those of its {what} have {found}")


def _decode_drafts(message: step_pb2.StepPlan) -> dict[int, tuple[int, ...]]:
    if sum(message.num_drafts) != len(message.draft_token_ids):
        raise InvalidRequest(
            f"plan {message.step_id} counts {sum(message.num_drafts)} drafts and has {len(message.draft_token_ids)}"
        )
    token_ids: Iterator[int] = iter(message.draft_token_ids)
    return {index: tuple(itertools.islice(token_ids, n)) for index, n in enumerate(message.num_drafts) if n}
