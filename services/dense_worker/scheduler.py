"""`Scheduler`: which sequences advance by how many tokens. No torch, no gRPC, no asyncio; one engine thread.

There is no prefill or decode phase. A sequence has tokens and computed tokens, and a step lets some
sequences catch up, within a token budget; those that need a single token go first, so that a long prompt
cannot stall running streams. A plan is made while the step before it still runs: it needs that step's
lengths, not its tokens. Who goes first is `waiting_queue.py`'s to say.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Literal

from services.common.errors import CapacityError, InvalidRequest, TwostrokeError
from services.dense_worker.block_ledger import BlockLedger
from services.dense_worker.sequence import FinishReason, Sequence, SequenceOutput, SequenceStatus
from services.dense_worker.step_plan import PlanEntry, StepPlan
from services.dense_worker.suspects import Suspects
from services.dense_worker.waiting_queue import WaitingQueue, insert, remove

GATEWAY_SHIFT = 32  # of the gateway's number within a seq_id

Policy = Literal["guaranteed_no_evict", "max_utilization"]


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Bounds of every step and of the queue; see `SchedulerSection` for their meaning."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    max_num_waiting: int
    policy: Policy
    max_num_waiting_tokens: int = 10_000_000
    priority_ageing_s: float = 1.0


class Scheduler:
    """Continuous batching over one attention worker.

    `guaranteed_no_evict` admits a sequence only when the cache can hold its last token; `max_utilization`
    when it can hold the tokens it has now, and preempts the last one in order when blocks run out: that one is
    closed and later computed anew. Both lists share one order, which no sequence ever changes, so the first of
    all is never preempted: something always advances.

    Each plan goes through `schedule`, `accepted`, `update`, one ahead of another; all else may come at any time.
    """

    def __init__(self, limits: SchedulerLimits, ledger: BlockLedger) -> None:
        self.limits = limits
        self.ledger = ledger
        self.num_preemptions = 0
        self.num_opening = 0  # whose answer is still out, cancelled ones included
        self._sequences: dict[int, Sequence] = {}
        self._waiting = WaitingQueue(
            limits.max_num_waiting, limits.max_num_waiting_tokens, limits.priority_ageing_s
        )
        self._running: list[Sequence] = []  # in the same order
        self._suspects = Suspects()
        self._held_blocks: dict[int, int] = {}  # of sequences an earlier dense worker left open
        self._to_close: list[int] = []
        self._closing: set[int] = set()  # not to be opened again before the attention worker closed them
        self._is_short_of_blocks = False  # a running sequence could not grow: admit nobody
        self._num_closing_plans = 0  # published plans with closes whose result is still out
        self._confirmed: list[tuple[int, int]] = []
        self._next_step_id = 1

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_steps(self) -> int:
        """Plans made, in all."""
        return self._next_step_id - 1

    @property
    def num_running(self) -> int:
        return len(self._running)

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence; raises `CapacityError` or `InvalidRequest` when it can never run or not now."""
        if sequence.seq_id in self._sequences:
            raise InvalidRequest(f"sequence {sequence.seq_id:#x} is already open")
        num_tokens = sequence.num_prompt_tokens + sequence.max_tokens
        if num_tokens > self.limits.max_model_len:
            raise InvalidRequest(
                f"prompt has {sequence.num_prompt_tokens} tokens and max_tokens is {sequence.max_tokens}, "
                f"together {num_tokens}; max_model_len is {self.limits.max_model_len}"
            )
        num_blocks = self.ledger.blocks_for(sequence.max_num_cached_tokens)
        if num_blocks > self.ledger.num_blocks:
            raise CapacityError(
                f"{num_tokens} tokens need {num_blocks} KV cache blocks, the cache has {self.ledger.num_blocks}"
            )
        self._waiting.admit(sequence)
        self._sequences[sequence.seq_id] = sequence
        self._suspects.add(sequence)
        self._waiting.push(sequence)

    def cancel(self, seq_id: int) -> None:
        """Forgets a sequence; its blocks are closed by the next plan. Unknown ids are ignored."""
        sequence = self._sequences.get(seq_id)
        if sequence is not None:
            self._finish(sequence)

    def expire(self, now_s: float) -> list[SequenceOutput]:
        """Ends those that have waited for their first step as long as they may; `now_s` on the monotonic clock."""
        outputs = []
        for sequence, error in self._waiting.expired(now_s):
            self._finish(sequence)
            outputs.append(SequenceOutput(sequence, None, FinishReason.ERROR, error))
        return outputs

    def next_to_open(self) -> list[Sequence]:
        """Sequences, in order, that fit now: their blocks are reserved and they become OPENING.

        Those that hold blocks already, from before the attachment, come before all others: only they can make
        good use of these blocks, and the others may need them. Suspects come first of all, one at a time.
        """
        chosen: list[Sequence] = []
        if self._is_short_of_blocks or self._suspects.open() is not None:
            return chosen
        while self._waiting and self.num_opening + len(self._running) < self.limits.max_num_seqs:
            sequence = self._suspects.first() or self._waiting.first(self._held_blocks)
            if sequence.num_pending_tokens or sequence.seq_id in self._closing:
                break  # preempted a moment ago: its last token or its close is still on the way
            num_blocks = self._blocks_to_reserve(sequence, self._held_blocks.get(sequence.seq_id, 0))
            if num_blocks > self.ledger.num_available_blocks:
                if not self._running and not self.num_opening and not self._closing:
                    self._drop_held_blocks()  # nothing else can free any
                break  # nobody overtakes: a small sequence would starve a large one
            self._waiting.remove(sequence)
            self.ledger.reserve(num_blocks)
            sequence.num_reserved_blocks = num_blocks
            sequence.status = SequenceStatus.OPENING
            self.num_opening += 1
            chosen.append(sequence)
            if sequence.is_suspect:
                break
        return chosen

    def opened(
        self,
        sequence: Sequence,
        num_cached_tokens: int,
        num_pinned_blocks: int,
        num_held_blocks: int,
        num_freed_blocks: int,
    ) -> None:
        """The attention worker knows the sequence now, and holds `num_held_blocks` for it.

        `num_pinned_blocks` of these left the free pool; the others are shared with, or kept from, before.
        `num_freed_blocks` it held before and could not keep.
        """
        self.num_opening -= 1
        self._held_blocks.pop(sequence.seq_id, None)
        self._release_reservation(sequence)
        self.ledger.give_back(num_freed_blocks)
        self.ledger.take(num_pinned_blocks)  # among them what it may just have freed
        num_missing = self._blocks_to_reserve(sequence, num_held_blocks)
        sequence.num_reserved_blocks = min(num_missing, self.ledger.num_available_blocks)
        self.ledger.reserve(sequence.num_reserved_blocks)
        sequence.num_blocks = num_held_blocks
        sequence.num_computed_tokens = num_cached_tokens
        if sequence.num_cached_tokens is None:
            sequence.num_cached_tokens = num_cached_tokens
        if sequence.status is SequenceStatus.FINISHED:  # cancelled meanwhile
            self._close(sequence)
            return
        sequence.status = SequenceStatus.RUNNING
        insert(self._running, sequence)

    def open_failed(self, sequence: Sequence, error: TwostrokeError) -> SequenceOutput | None:
        """The attention worker refused the sequence: it ends with an error, unless it was cancelled."""
        self.num_opening -= 1
        was_cancelled = sequence.status is SequenceStatus.FINISHED
        self._release_reservation(sequence)
        self._closing.discard(sequence.seq_id)
        if was_cancelled:
            return None
        sequence.status = SequenceStatus.FINISHED
        del self._sequences[sequence.seq_id]
        self._suspects.clear(sequence)
        return SequenceOutput(sequence, None, FinishReason.ERROR, error)

    def schedule(self) -> StepPlan | None:
        """The next step, or None when there is nothing to do. Plans without entries only close sequences."""
        self._is_short_of_blocks = False
        budget = self.limits.max_num_batched_tokens
        entries: list[PlanEntry] = []
        scheduled: set[int] = set()
        prefills = []
        suspect = self._suspects.open()
        for sequence in list(self._running):
            if suspect is not None and sequence is not suspect:
                continue
            if sequence.num_remaining_tokens > 1:
                prefills.append(sequence)
            elif sequence.num_remaining_tokens == 1 and self._allocate(sequence, 1, scheduled):
                entries.append(self._advance(sequence, 1))
                scheduled.add(sequence.seq_id)
                budget -= 1
        for sequence in prefills:
            if budget == 0:
                break
            num_tokens = min(sequence.num_remaining_tokens, budget)
            if self._allocate(sequence, num_tokens, scheduled):
                entries.append(self._advance(sequence, num_tokens))
                scheduled.add(sequence.seq_id)
                budget -= num_tokens
        if not entries and not self._to_close:
            return None
        plan = StepPlan(self._next_step_id, tuple(entries), tuple(self._to_close), tuple(self._confirmed))
        self._next_step_id += 1
        self._num_closing_plans += bool(self._to_close)
        self._to_close = []
        self._confirmed = []
        return plan

    def accepted(
        self, plan: StepPlan, num_freed_blocks: int, errors: Mapping[int, TwostrokeError]
    ) -> list[SequenceOutput]:
        """The attention worker took the plan. `errors`: sequences whose rows of it are meaningless."""
        self.ledger.give_back(num_freed_blocks)
        self._closing.difference_update(plan.close_seq_ids)
        self._num_closing_plans -= bool(plan.close_seq_ids)
        outputs = []
        if errors:
            self._give_back_refused([entry for entry in plan.entries if entry.sequence.seq_id in errors])
        for seq_id, error in errors.items():
            sequence = self._sequences.get(seq_id)
            if sequence is not None:
                self._finish(sequence)
                outputs.append(SequenceOutput(sequence, None, FinishReason.ERROR, error))
        return outputs

    def update(self, plan: StepPlan, token_ids: SequenceOf[int]) -> list[SequenceOutput]:
        """The step ran. `token_ids` are aligned with the plan's sampled entries, in batch order."""
        outputs = []
        sampled = [entry.sequence for entry in plan.entries if entry.is_sampled]
        for sequence, token_id in zip(sampled, token_ids, strict=True):
            sequence.num_pending_tokens -= 1
            if sequence.status is SequenceStatus.FINISHED:
                continue  # ended by an earlier step, or cancelled: the one wasted token
            sequence.output_token_ids.append(token_id)
            self._suspects.clear(sequence)
            finish_reason = None
            if token_id in sequence.stop_token_ids:
                finish_reason = FinishReason.STOP
            elif len(sequence.output_token_ids) == sequence.max_tokens:
                finish_reason = FinishReason.LENGTH
            if finish_reason is not None:
                self._finish(sequence)
            elif sequence.status is SequenceStatus.RUNNING:
                self._confirmed.append((sequence.seq_id, token_id))
            outputs.append(SequenceOutput(sequence, token_id, finish_reason))
        return outputs

    def reset(self, ledger: BlockLedger, held_blocks: Mapping[int, int]) -> None:
        """A new attachment: nothing is open but `held_blocks`, and every live sequence waits in its order.

        Plans in flight are void; their tokens were never known and will be sampled again, alike.
        """
        self.ledger = ledger
        self._held_blocks = dict(held_blocks)
        self._running.clear()
        self._waiting.clear()
        self._to_close.clear()
        self._closing.clear()
        self._confirmed.clear()
        self.num_opening = self._num_closing_plans = 0
        self._is_short_of_blocks = False
        for sequence in self._sequences.values():
            sequence.num_computed_tokens = sequence.num_pending_tokens = 0
            sequence.num_blocks = sequence.num_reserved_blocks = 0
            self._waiting.push(sequence)

    def close_unclaimed(self, gateway: int | None = None) -> None:
        """Closes the sequences of an earlier dense worker that nobody, or not this gateway, submitted again."""
        unclaimed = [seq_id for seq_id in self._held_blocks if seq_id not in self._sequences]
        self._close_held([each for each in unclaimed if gateway in (None, each >> GATEWAY_SHIFT)])

    def _drop_held_blocks(self) -> None:
        """Gives up what the last waiting sequence in order kept from before; it will be computed anew."""
        holders = [seq_id for seq_id in self._held_blocks if seq_id in self._sequences]
        if holders:
            self._close_held([max(holders, key=lambda seq_id: self._sequences[seq_id].order)])

    def _close_held(self, seq_ids: SequenceOf[int]) -> None:
        for seq_id in seq_ids:
            del self._held_blocks[seq_id]
        self._to_close.extend(seq_ids)
        self._closing.update(seq_ids)

    def _blocks_to_reserve(self, sequence: Sequence, num_held_blocks: int) -> int:
        guaranteed = self.limits.policy == "guaranteed_no_evict"
        num_tokens = sequence.max_num_cached_tokens if guaranteed else sequence.num_tokens
        return max(0, self.ledger.blocks_for(num_tokens) - num_held_blocks)

    def _allocate(self, sequence: Sequence, num_tokens: int, scheduled: Collection[int]) -> bool:
        """Takes the blocks for `num_tokens` more tokens, preempting those later in order if there are too few."""
        if sequence.status is not SequenceStatus.RUNNING:
            return False  # preempted in this very plan
        num_blocks = max(0, self.ledger.blocks_for(sequence.num_computed_tokens + num_tokens) - sequence.num_blocks)
        num_reserved = min(num_blocks, sequence.num_reserved_blocks)
        if num_blocks - num_reserved > self.ledger.num_available_blocks:
            self._is_short_of_blocks = True
            if not self._num_closing_plans and not self._to_close:  # blocks on their way back come first
                self._preempt_latest(scheduled)
            return False
        self.ledger.unreserve(num_reserved)
        self.ledger.take(num_blocks)
        sequence.num_reserved_blocks -= num_reserved
        sequence.num_blocks += num_blocks
        return True

    def _give_back_refused(self, entries: Iterable[PlanEntry]) -> None:
        """Blocks that were taken for entries to which the attention worker gave none."""
        for entry in entries:
            num_tokens = entry.num_computed_tokens + entry.num_tokens
            num_blocks = self.ledger.blocks_for(num_tokens) - self.ledger.blocks_for(entry.num_computed_tokens)
            self.ledger.give_back(num_blocks)

    def _advance(self, sequence: Sequence, num_tokens: int) -> PlanEntry:
        entry = PlanEntry(
            sequence,
            num_tokens,
            sequence.num_computed_tokens,
            is_sampled=num_tokens == sequence.num_remaining_tokens,
        )
        sequence.num_computed_tokens += num_tokens
        sequence.num_pending_tokens += entry.is_sampled
        return entry

    def _preempt_latest(self, scheduled: Collection[int]) -> None:
        for victim in reversed(self._running[1:]):
            if victim.seq_id not in scheduled:
                remove(self._running, victim)
                self._close(victim)
                victim.num_computed_tokens = 0
                self._waiting.push(victim)
                self.num_preemptions += 1
                return
        if not scheduled:  # else the others advance, and will end or find no block themselves
            self._drop_held_blocks()

    def _finish(self, sequence: Sequence) -> None:
        status, sequence.status = sequence.status, SequenceStatus.FINISHED
        del self._sequences[sequence.seq_id]
        self._suspects.clear(sequence)
        if status is SequenceStatus.RUNNING:
            remove(self._running, sequence)
            self._close(sequence)
        elif status is SequenceStatus.WAITING:
            self._waiting.remove(sequence)
            if sequence.seq_id in self._held_blocks:
                self._close_held([sequence.seq_id])
        else:
            self._closing.add(sequence.seq_id)  # being opened; closed as soon as it is

    def _close(self, sequence: Sequence) -> None:
        self._release_reservation(sequence)
        sequence.num_blocks = 0
        self._to_close.append(sequence.seq_id)
        self._closing.add(sequence.seq_id)

    def _release_reservation(self, sequence: Sequence) -> None:
        self.ledger.unreserve(sequence.num_reserved_blocks)
        sequence.num_reserved_blocks = 0

