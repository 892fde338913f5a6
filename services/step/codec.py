"""Converts plans and answers to messages and back; see `protos/step.proto` and `protos/attn.proto`."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

from services.common.errors import InvalidRequest
from services.common.sampling_messages import decode_sampling, encode_sampling
from services.lora.adapter import decode_adapter, encode_adapter
from services.pb import attn_pb2, step_pb2
from services.step.answers import PlanAccepted, SequenceOpened
from services.step.plan import Fork, NewSequence, PlanEntry, StepPlan


def encode_plan(plan: StepPlan) -> step_pb2.StepPlan:
    """The plan as a message, its entries as columns."""
    entries = plan.entries
    drafts = [entry.draft_token_ids for entry in entries] if plan.has_drafts else []
    return step_pb2.StepPlan(
        step_id=plan.step_id,
        lane=plan.lane,
        new_sequences=map(_encode_new_sequence, plan.new_sequences),
        seq_ids=[entry.seq_id for entry in entries],
        positions=[entry.position for entry in entries],
        num_tokens=[entry.num_tokens for entry in entries],
        num_logits=[entry.num_logits for entry in entries],
        num_drafts=map(len, drafts),
        draft_token_ids=itertools.chain.from_iterable(drafts),
        close_seq_ids=plan.close_seq_ids,
        confirmed_seq_ids=[seq_id for seq_id, _ in plan.confirmed],
        confirmed_token_ids=[token_id for _, token_id in plan.confirmed],
        fork_parents=[fork.parent_seq_id for fork in plan.forks],
        fork_children=[fork.child_seq_id for fork in plan.forks],
        fork_positions=[fork.position for fork in plan.forks],
        drops_blocks=plan.drops_blocks,
        chosen_seq_ids=[seq_id for seq_id, _ in plan.chosen],
        chosen_token_ids=[token_id for _, token_id in plan.chosen],
    )


def decode_plan(message: step_pb2.StepPlan) -> StepPlan:
    """The plan of a message. Raises `InvalidRequest` when columns that belong together differ in length."""
    columns = [message.seq_ids, message.positions, message.num_tokens, message.num_logits]
    forks = (message.fork_parents, message.fork_children, message.fork_positions)
    if message.num_drafts:
        columns.append(_split_drafts(message))
    try:
        return StepPlan(
            step_id=message.step_id,
            entries=tuple(itertools.starmap(PlanEntry, zip(*columns, strict=True))),
            close_seq_ids=tuple(message.close_seq_ids),
            confirmed=tuple(zip(message.confirmed_seq_ids, message.confirmed_token_ids, strict=True)),
            forks=tuple(itertools.starmap(Fork, zip(*forks, strict=True))),
            new_sequences=tuple(map(_decode_new_sequence, message.new_sequences)),
            chosen=tuple(zip(message.chosen_seq_ids, message.chosen_token_ids, strict=True)),
            lane=message.lane,
            drops_blocks=message.drops_blocks,
        )
    except ValueError as error:
        raise InvalidRequest(f"columns of plan {message.step_id} differ in length: {error}") from error


def encode_opened(opened: SequenceOpened) -> attn_pb2.PlanAnswer:
    """The answer to one new sequence."""
    return attn_pb2.PlanAnswer(
        opened=attn_pb2.SequenceOpened(
            seq_id=opened.seq_id,
            num_cached_tokens=opened.num_cached_tokens,
            num_pinned_blocks=opened.num_pinned_blocks,
            num_held_blocks=opened.num_held_blocks,
            num_freed_blocks=opened.num_freed_blocks,
            error=opened.error,
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
        error=opened.error if opened.HasField("error") else None,
    )


def _encode_new_sequence(sequence: NewSequence) -> step_pb2.NewSequence:
    return step_pb2.NewSequence(
        seq_id=sequence.seq_id,
        request_id=sequence.request_id,
        token_ids=sequence.token_ids,
        num_prompt_tokens=sequence.num_prompt_tokens,
        cache_salt=sequence.cache_salt,
        sampling=encode_sampling(sequence.sampling),
        stop_token_ids=sequence.stop_token_ids,
        num_logprobs=sequence.num_logprobs,
        num_prompt_logprobs=sequence.num_prompt_logprobs,
        traceparent=sequence.traceparent,
        return_context_logits=sequence.return_context_logits,
        return_generation_logits=sequence.return_generation_logits,
        adapter=encode_adapter(sequence.adapter),
        prompt_table_hash=sequence.prompt_table_hash,
        has_chosen_tokens=sequence.has_chosen_tokens,
    )


def _decode_new_sequence(message: step_pb2.NewSequence) -> NewSequence:
    return NewSequence(
        seq_id=message.seq_id,
        request_id=message.request_id,
        token_ids=tuple(message.token_ids),
        num_prompt_tokens=message.num_prompt_tokens,
        sampling=decode_sampling(message.sampling),
        stop_token_ids=tuple(message.stop_token_ids),
        num_logprobs=message.num_logprobs if message.HasField("num_logprobs") else None,
        num_prompt_logprobs=message.num_prompt_logprobs if message.HasField("num_prompt_logprobs") else None,
        cache_salt=message.cache_salt,
        traceparent=message.traceparent,
        return_context_logits=message.return_context_logits,
        return_generation_logits=message.return_generation_logits,
        adapter=decode_adapter(message.adapter),
        prompt_table_hash=message.prompt_table_hash,
        has_chosen_tokens=message.has_chosen_tokens,
    )


def _split_drafts(message: step_pb2.StepPlan) -> Iterable[tuple[int, ...]]:
    if sum(message.num_drafts) != len(message.draft_token_ids):
        raise InvalidRequest(
            f"plan {message.step_id} counts {sum(message.num_drafts)} drafts and has {len(message.draft_token_ids)}"
        )
    drafts: Iterator[int] = iter(message.draft_token_ids)
    return [tuple(itertools.islice(drafts, count)) for count in message.num_drafts]
