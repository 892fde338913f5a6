"""`Session`: all state that lives as long as one attachment. A new attachment gets a new session; nothing is reset."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from services.common.errors import PeerError
from services.common.fairness import Client
from services.common.kv_cache.sliding_window import SlidingWindow
from services.dense_worker.engine.attachment import AttachedCache, Attachment
from services.dense_worker.engine.block_ledger import BlockLedger
from services.dense_worker.engine.decode_rows import DecodeRows, Decodes
from services.dense_worker.engine.lane_dealer import LaneDealer
from services.dense_worker.engine.plan_builder import PlanBuilder, PlannedEntry
from services.dense_worker.engine.sequence import Sequence, SequenceStatus
from services.dense_worker.engine.waiting_queue import WaitingQueue, insert, remove
from services.step import NO_TOKENS, NewSequence, PlanAccepted, StepPlan, TokenColumns

if TYPE_CHECKING:  # these need torch; the scheduler must not
    from services.channel import Channel
    from services.dense_worker.runner.batch_rows import RequestState
    from services.dense_worker.runner.model_runner import RunningStep

# How long after an attachment gateways may submit the sequences of an earlier dense worker again.
CLAIM_TIMEOUT_S = 30.0
FEW_STREAMS = 32  # with more, steps are longer, and both workers take longer to launch them


@dataclass(frozen=True, slots=True)
class Opening:
    """A sequence that the attention worker is opening."""

    sequence: Sequence
    new: NewSequence  # what was sent
    state: RequestState  # what the runner gets when it is open
    asked_s: float  # on the monotonic clock


@dataclass(slots=True, eq=False)
class ScheduledStep:
    """A step from its plan to its tokens. The scheduler makes it; the engine publishes, launches and collects it.

    Points in time are on the monotonic clock.
    """

    plan: StepPlan
    decodes: Decodes  # the plan's first entries
    entries: tuple[PlannedEntry, ...]  # aligned with the rest
    closes_rows: bool = False  # dead ones
    frees_blocks: bool = False  # for others, by more than dead rows
    lost: set[Sequence] = field(default_factory=set)  # whose attention worker went away before the step had ended
    # Those that have left their KV cache since the step was scheduled, with its cache_id, or several.
    left: dict[Sequence, Collection[int]] = field(default_factory=dict)

    running: RunningStep = field(init=False, repr=False)  # set when it is launched
    launch_start_s: float = 0.0
    launch_s: float = 0.0  # host time to publish and launch it
    begin_s: float = 0.0  # when the step before it ended, or its own launch if that was later
    gap_s: float = 0.0  # from the end of the step before it to its launch; 0 if it was planned ahead
    end_s: float = 0.0  # when its tokens were here
    follow_up_s: float = 0.0  # part of it that followed its sampler
    waited_before_s: float | None = None  # the channel's total wait when it began to run; None on CUDA
    wait_s: float | None = None  # spent waiting for the attention worker; None on CUDA, where no host sees it
    started: SequenceOf[Sequence] = ()  # in their first step, which gateways have been told before it has ended

    @property
    def sequences(self) -> list[Sequence]:
        """Those of its entries, without lost ones."""
        return [entry.sequence for entry in self.entries if entry.sequence not in self.lost]

    def taken_blocks(self, seq_id: int) -> Iterator[tuple[Sequence, int]]:
        """The sequence of an entry, and how many blocks it has taken; nothing if the plan has no such entry."""
        for index in np.flatnonzero(self.plan.entries.seq_ids == np.uint64(seq_id)).tolist():
            num_rows = len(self.decodes.positions)
            if index < num_rows:
                yield self.decodes.rows.sequences[index], int(self.decodes.has_grown[index])
            else:
                yield self.entries[index - num_rows].sequence, self.entries[index - num_rows].num_taken_blocks


class Lane:
    """What the session keeps for the plans of one lane."""

    def __init__(self) -> None:
        self.to_close: list[int] = []  # seq_ids that the next plan closes, without dead rows
        self.to_close_later: list[int] = []  # that the plan after it closes: then a host tier can have all their blocks
        self.to_keep: set[int] = set()  # seq_ids of those that leave and come back: a host tier shall have their blocks
        self.dead_rows: list[int] = []  # seq_ids of rows that the next plan closes; their sequence goes on
        self.short_caches: set[int] = set()  # where a running sequence could not grow: admit nobody
        self.last_end_s = 0.0  # end of the last completed step, on the monotonic clock

    def close_later(self) -> None:
        """What was to be closed later is closed by the next plan."""
        self.to_close += self.to_close_later
        self.to_keep.update(self.to_close_later)
        self.to_close_later = []


# The attachment of a worker that has not attached yet. It has no blocks, so that nothing runs.
NO_ATTACHMENT = Attachment(
    epoch=0,
    attachment_id=0,
    channels={},
    block_size=1,
    caches=(AttachedCache(0, 0, 0, {}),),
    max_model_len=0,
)


class Session:
    """Owned by the engine thread. The scheduler and its parts keep their state of this attachment here.

    Whoever decides that a sequence has to go, scheduler, admission, moves or planner, says so here.
    """

    def __init__(
        self, attachment: Attachment, waiting: WaitingQueue, last_step_id: int = 0, num_preemptions: int = 0
    ) -> None:
        """`waiting`: the scheduler's; `last_step_id`, `num_preemptions`: those of the session before"""
        self.attachment = attachment
        self.waiting = waiting
        self.last_step_id = last_step_id  # of the newest plan, which may still run what leaves now
        self.num_preemptions = num_preemptions  # in total
        # Whether no KV cache had anything when they were attached.
        self.has_new_caches = all(each.is_empty for each in attachment.caches)
        self.sliding_window = SlidingWindow(attachment.block_size, attachment.window, attachment.num_sink_tokens)
        self.ledgers: dict[int, BlockLedger] = {}  # by cache_id
        self.ledger: BlockLedger  # of the largest KV cache; blocks have the same size in all
        self.prefixes = SeenPrefixes(attachment.block_size)
        self.layer_sliding_window = SlidingWindow(attachment.block_size, attachment.layer_window)
        self.running: list[Sequence] = []  # in the order of the waiting queue
        self.rows = DecodeRows()  # of those that need one token in each step and nothing else
        self.others: list[Sequence] = []  # the rest, in the same order
        # Rows that running sequences have in a step, by client; without `to_fork`.
        self.rows_of_client = Counter[Client]()
        self.num_running_rows = 0  # rows that they have in a step together: more than sequences if some have several
        # Running sequences that are not in the cache yet, with those from which they will be forked.
        self.to_fork: dict[Sequence, Sequence] = {}
        self.to_open: list[NewSequence] = []  # those of the openings that no plan has
        self.starting: dict[int, NewSequence] = {}  # by seq_id, of running sequences that their first step opens
        self.openings: dict[int, Opening] = {}  # by seq_id, the oldest first; cancelled ones included
        self.num_opening_rows = 0  # that these will have in a step together
        self.in_flight: tuple[ScheduledStep, ...] = ()  # the oldest first; when the session ends, the rest is void
        self.unanswered: dict[int, ScheduledStep] = {}  # by step_id: those without the last answer, or in flight
        self.num_completed = 0  # number of completed steps
        self.last_step_s = 0.0  # how long the last completed step took
        self.has_provided = False  # whether features have worked between steps since this was last looked at
        self.last_plan: StepPlan | None = None  # that of the last completed step
        self.is_leaving = False  # ends when no step is in flight; no new step begins
        self.has_ended = False
        self.num_errors = Counter[tuple[int, int]]()  # errors in the answers so far, by lane and cache_id
        self.request_ids: dict[int, str] = {}  # by seq_id, of running sequences; for messages, from any thread

        # Sequences of an earlier dense worker, by seq_id, and the time until which gateways may claim them.
        self.orphaned_blocks: dict[int, int] = {}  # how many
        self.orphan_caches: dict[int, int] = {}  # the KV cache that has them
        self.claim_deadline_s: float | None = None  # None: nothing can be claimed

        self.lanes = tuple(Lane() for _ in attachment.channels or (0,))
        self.dealer = LaneDealer(len(self.lanes))
        self.closing: set[int] = set()  # seq_ids that cannot be opened before the attention worker has closed them
        self.num_freeing_plans = 0  # published ones that free blocks, whose answer is still out; without dead rows
        self.num_burying_plans = 0  # the same for those that close dead rows
        self.sampled: list[TokenColumns] = []  # tokens for the next plan, in order
        self.draining: set[int] = set()  # cache_ids whose sequences move to others
        self.awaits_caches = False  # whether all that could be opened next waits for KV caches that are missing
        for cache in attachment.caches:
            self.add_cache(cache)

    # KV caches, which come and go

    def add_cache(self, cache: AttachedCache) -> None:
        """An attention worker has sequences from now on."""
        self.ledgers[cache.cache_id] = BlockLedger(self.sliding_window, cache.num_blocks, cache.num_free_blocks)
        self.ledger = self._largest_ledger()
        self.prefixes.set_cache(cache.cache_id, cache.num_blocks, is_empty=cache.is_empty)
        for seq_id, num_blocks in cache.orphaned_blocks.items():
            if num_blocks > self.orphaned_blocks.get(seq_id, -1):  # with no blocks, too, it must be closed
                self.orphaned_blocks[seq_id], self.orphan_caches[seq_id] = num_blocks, cache.cache_id
        if cache.orphaned_blocks:
            self.claim_deadline_s = time.monotonic() + CLAIM_TIMEOUT_S

    def remove_cache(self, cache_id: int) -> None:
        """An attention worker is gone, and so is what it had. No sequence is there any more."""
        del self.ledgers[cache_id]
        self.ledger = self._largest_ledger()
        self.prefixes.remove_cache(cache_id)
        for lane in self.lanes:
            lane.short_caches.discard(cache_id)
        self.draining.discard(cache_id)
        for seq_id in [each for each in self.orphaned_blocks if self.orphan_caches[each] == cache_id]:
            del self.orphaned_blocks[seq_id]
        for key in [key for key in self.num_errors if key[1] == cache_id]:
            del self.num_errors[key]

    def _largest_ledger(self) -> BlockLedger:
        return max(self.ledgers.values(), key=lambda each: each.num_blocks)

    @property
    def open_ledgers(self) -> dict[int, BlockLedger]:
        """The KV caches that are not given up, by cache_id."""
        if not self.draining:
            return self.ledgers
        return {cache_id: each for cache_id, each in self.ledgers.items() if cache_id not in self.draining}

    @property
    def most_blocks_of_one(self) -> int:
        """The blocks of the largest KV cache that is not given up."""
        if not self.draining:
            return self.ledger.num_blocks
        return max((each.num_blocks for each in self.open_ledgers.values()), default=0)

    @property
    def short_caches(self) -> set[int]:
        """The cache_ids of those in which a running sequence could not grow: admit nobody."""
        return set().union(*[lane.short_caches for lane in self.lanes])

    def ledger_of(self, sequence: Sequence) -> BlockLedger:
        """The blocks of the KV cache in which a sequence is, or will be opened; or its own, of several."""
        return sequence.divided or self.ledgers[sequence.cache_id]

    # Sequences, from when they wait until they are closed

    def wait(self, sequence: Sequence) -> None:
        """A sequence waits, for the first time or again."""
        missing = [each.resource for each in sequence.features if not each.is_ready]
        self.waiting.push(sequence, missing)
        if sequence.policy is not None:
            sequence.policy.leave_cache()
            held = self.orphaned_blocks.keys() - {sequence.seq_id}  # rows from before the attachment
            self.close_orphaned(held & set(sequence.policy.seq_ids))

    @property
    def has_room_for_sequence(self) -> bool:
        """Whether the KV cache can keep a further sequence, if there are blocks for it."""
        most = self.attachment.max_num_sequences
        return most is None or len(self.running) + len(self.openings) < most

    def begin_opening(self, opening: Opening) -> None:
        """A sequence is being opened."""
        self.openings[opening.sequence.seq_id] = opening
        self.num_opening_rows += opening.sequence.num_rows

    def end_opening(self, seq_id: int) -> Opening | None:
        """A sequence is not being opened any more; None: it was not."""
        if (opening := self.openings.pop(seq_id, None)) is not None:
            self.num_opening_rows -= opening.sequence.num_rows
        return opening

    def check_openings(self, now_s: float, timeout_s: float) -> None:
        """Raises `PeerError` if the oldest opening has had no answer for longer than `timeout_s`."""
        oldest = next(iter(self.openings.values()), None)
        if oldest is not None and now_s - oldest.asked_s > timeout_s:
            raise PeerError(f"sequence {oldest.sequence.seq_id:x} has not been opened after {timeout_s:g} s")

    def enter(self, sequence: Sequence) -> None:
        """A sequence is in the KV cache, or will be forked into it: steps may run it from now on."""
        sequence.status = SequenceStatus.RUNNING
        self.request_ids[sequence.seq_id] = sequence.spec.request_id
        self.dealer.enter(sequence)
        self.prefixes.note(sequence)
        insert(self.running, sequence)
        insert(self.others, sequence)
        self.num_running_rows += sequence.num_rows
        if sequence not in self.to_fork:
            self._count_rows(sequence, 1)

    def enter_cache(self, sequence: Sequence) -> None:
        """The next plan forks a sequence of `to_fork`."""
        del self.to_fork[sequence]
        self._count_rows(sequence, 1)

    def enter_row(self, sequence: Sequence) -> None:
        """From now on a running sequence needs one token in each step and nothing else."""
        remove(self.others, sequence)
        self.rows.enter(sequence)

    def leave_row(self, sequence: Sequence) -> None:
        """A running sequence that has a row is handled by itself."""
        self.rows.leave(sequence)
        insert(self.others, sequence)

    def leave(self, sequence: Sequence) -> None:
        """A running sequence runs no more: the next plan closes it."""
        if sequence.slot is not None:
            self.leave_row(sequence)
        self.dealer.leave(sequence)
        self.prefixes.note(sequence)  # by now it may have a first block
        remove(self.running, sequence)
        remove(self.others, sequence)
        self.num_running_rows -= sequence.num_rows
        if sequence not in self.to_fork:
            self._count_rows(sequence, -1)
        self.close(sequence)

    def preempt(self, victim: Sequence) -> None:
        """A running sequence gives up its blocks, and waits again."""
        for step in self.in_flight:
            step.left.setdefault(victim, victim.cache_ids)
        self.keep_copies(victim)
        self.leave(victim)
        self.wait(victim)
        self.num_preemptions += 1

    def end_turn(self, sequence: Sequence, order: tuple[float, int]) -> None:
        """A running sequence whose blocks are full gives them up, and waits again, from now on in this order.

        The step that fills the last block is under way. So it is closed one plan later, when that block can be copied.
        """
        lane = self.lanes[sequence.lane]
        to_close, lane.to_close = lane.to_close, lane.to_close_later
        self.leave(sequence)
        lane.to_close_later, lane.to_close = lane.to_close, to_close
        sequence.order = order
        self.wait(sequence)
        self.num_preemptions += 1

    def keep_copies(self, sequence: Sequence) -> None:
        """A running sequence leaves soon, and comes back: a host tier shall have its blocks."""
        self.lanes[sequence.lane].to_keep.add(sequence.seq_id)

    def close(self, sequence: Sequence) -> None:
        """A sequence that no step runs any more leaves the cache with the next plan of its lane, with all its rows."""
        self.release_reservation(sequence)
        self.to_fork.pop(sequence, None)
        sequence.leave_cache()
        self.request_ids.pop(sequence.seq_id, None)
        self.starting.pop(sequence.seq_id, None)  # its cache, to which it is unknown, does not mind its closing
        self._close_ids({sequence.seq_id, *sequence.open_seq_ids}, sequence.lane)
        self.release_features(sequence)

    def release_features(self, sequence: Sequence) -> None:
        """A sequence needs no resources of its features any more, or only for plans that have been published."""
        for feature in sequence.features:
            feature.leave(self.last_step_id)

    def close_rest(self, sequence: Sequence, lost_cache_id: int) -> None:
        """A sequence was being opened when one of its KV caches was lost: it leaves the others with the next plan."""
        if sequence.divided is not None:
            num_openings = len(self.to_open)
            self.to_open = [each for each in self.to_open if each.seq_id != sequence.seq_id]
            if len(self.to_open) == num_openings:  # they have been sent
                sequence.divided.take_without(lost_cache_id)
                self._close_ids([sequence.seq_id], sequence.lane)
            sequence.divided = None

    def _close_ids(self, seq_ids: Iterable[int], lane: int) -> None:
        for seq_id in seq_ids:
            self.lanes[lane].to_close.append(seq_id)
            self.closing.add(seq_id)

    def _count_rows(self, sequence: Sequence, sign: int) -> None:
        client = sequence.spec.client_id
        self.rows_of_client[client] += sign * sequence.num_rows
        if not self.rows_of_client[client]:
            del self.rows_of_client[client]

    # What an earlier dense worker has left

    def ends_claims(self, now_s: float) -> bool:
        """Whether the time to claim sequences has passed; true once."""
        if self.claim_deadline_s is None or now_s <= self.claim_deadline_s:
            return False
        self.claim_deadline_s = None
        return True

    def close_orphaned(self, seq_ids: Iterable[int]) -> None:
        """Sequences of an earlier dense worker leave the cache with the next plan."""
        seq_ids = list(seq_ids)
        for seq_id in seq_ids:
            del self.orphaned_blocks[seq_id]
        self._close_ids(seq_ids, lane=0)

    def drop_orphaned_blocks(self) -> None:
        """Gives up the blocks that the last waiting sequence holds from before; it will be computed again."""
        waiting = {each.seq_id: each for each in self.waiting if each.seq_id in self.orphaned_blocks}
        if waiting:
            self.close_orphaned([max(waiting, key=lambda seq_id: waiting[seq_id].order)])

    # Blocks of running sequences

    def take_blocks(self, sequence: Sequence, num_tokens: int) -> int | None:
        """Takes the blocks for `num_tokens` more tokens of a sequence, those first that are reserved for it.

        Returns how many; None: there are too few.
        """
        ledger, num_present = self.ledger_of(sequence), sequence.num_evicted_blocks + sequence.num_blocks
        num_blocks = max(0, ledger.blocks_for(sequence.num_computed_tokens + num_tokens) - num_present)
        if not ledger.take_for(sequence.counts, num_blocks):
            return None
        sequence.num_blocks += num_blocks
        return num_blocks

    def evict_blocks(self, sequence: Sequence) -> bool:
        """Counts the blocks that a sequence drops in the step that is being planned; returns whether there are any.

        Those that the rows of a policy drop are not counted.
        """
        if self.sliding_window.window is None or sequence.policy is not None:
            return False
        num_dropped = self.sliding_window.num_evicted_blocks(sequence.num_computed_tokens)
        num_more = num_dropped - sequence.num_evicted_blocks
        if num_more <= 0:
            return False
        sequence.num_blocks -= num_more
        sequence.num_evicted_blocks = num_dropped
        return True

    def reserve(self, sequence: Sequence, num_blocks: int) -> None:
        """Promises a running sequence more blocks, at most those that are available."""
        self.ledger_of(sequence).reserve(num_blocks)
        if sequence.slot is None:
            sequence.num_reserved_blocks += num_blocks
        else:
            self.rows.num_reserved[sequence.slot] += num_blocks

    def release_reservation(self, sequence: Sequence) -> None:
        """Takes back what is reserved for a sequence."""
        self.ledger_of(sequence).unreserve(sequence.num_reserved_blocks)
        sequence.num_reserved_blocks = 0

    @property
    def awaits_blocks(self) -> bool:
        """Whether blocks are about to come back, so that nobody has to give up any before that."""
        return bool(self.num_freeing_plans or any([lane.to_close or lane.to_close_later for lane in self.lanes]))

    @property
    def awaits_dead_rows(self) -> bool:
        """Whether dead rows are being closed. Their sequences need about as many blocks again, others get none."""
        return bool(self.num_burying_plans or any([lane.dead_rows for lane in self.lanes]))

    # Steps, from their plans to their ends

    def schedule(self, builder: PlanBuilder, lane: int) -> ScheduledStep | None:
        """A step as planned, with all that the session has for the next one of a lane; None: there is nothing.

        It is in flight until it is completed.
        """
        of_lane = self.lanes[lane]
        if not builder.has_entries:
            of_lane.close_later()
        if not (builder.has_entries or of_lane.to_close or of_lane.dead_rows):
            return None
        self.last_step_id += 1
        plan = StepPlan(
            self.last_step_id,
            builder.all_entries(),
            (*of_lane.to_close, *of_lane.dead_rows),
            self._take_sampled(),
            tuple(builder.forks),
            (*self.take_openings(), *self._take_starting(builder)),
            tuple(builder.forced),
            lane,
            evicts_blocks=builder.evicts_blocks,
            extra_rows=tuple(builder.extra_rows),
            kept_seq_ids=tuple(of_lane.to_keep),
        )
        frees_blocks = plan.evicts_blocks or bool(of_lane.to_close)
        step = ScheduledStep(plan, builder.decodes, tuple(builder.planned), bool(of_lane.dead_rows), frees_blocks)
        self.in_flight += (step,)
        self.unanswered[plan.step_id] = step
        self.num_freeing_plans += step.frees_blocks
        self.num_burying_plans += step.closes_rows
        of_lane.to_close, of_lane.to_keep, of_lane.dead_rows = [], set(), []
        of_lane.close_later()
        return step

    def take_openings(self) -> tuple[NewSequence, ...]:
        """The sequences that the next plan opens for an answer."""
        new_sequences, self.to_open = tuple(self.to_open), []
        return new_sequences

    def _take_starting(self, builder: PlanBuilder) -> Iterator[NewSequence]:
        """The sequences that a plan opens and runs at once."""
        for sequence, *_ in builder.planned if self.starting else ():
            if (new := self.starting.pop(sequence.seq_id, None)) is not None:
                yield new

    def _take_sampled(self) -> TokenColumns:
        """The tokens that became known since the last plan."""
        chunks, self.sampled = self.sampled, []
        if len(chunks) == 1:
            return chunks[0]
        if not chunks:
            return NO_TOKENS
        return TokenColumns(
            np.concatenate([each.seq_ids for each in chunks]), np.concatenate([each.token_ids for each in chunks])
        )

    def channel_of(self, step: ScheduledStep) -> Channel:
        """That of its lane."""
        return self.attachment.channels[step.plan.lane]

    def begin_of(self, step: ScheduledStep) -> float:
        """When the oldest step of its lane began: when the one before it ended, or at its launch if that was later."""
        return max(self.lanes[step.plan.lane].last_end_s, step.launch_start_s)

    @property
    def has_few_streams(self) -> bool:
        """Whether a step is of a few streams alone, whose plan goes by a link and so takes the shortest time."""
        return self.attachment.link is not None and not self.others and len(self.rows) <= FEW_STREAMS

    def accept(self, answer: PlanAccepted) -> ScheduledStep | None:
        """Counts what the answer to a plan says; None: it is of a lost worker, and the step has ended without it.

        Raises `PeerError` for a plan that does not wait for an answer.
        """
        step = self.unanswered.get(answer.step_id)
        if step is None and not answer.is_last:  # another attention worker has given the last answer already
            step = next((each for each in self.in_flight if each.plan.step_id == answer.step_id), None)
        is_lost = answer.cache_id not in self.ledgers
        if step is None and is_lost and not answer.is_last:
            return None
        if step is None:
            raise PeerError(f"step {answer.step_id} was not published, or has been answered")
        if not is_lost:
            if answer.errors:
                self.num_errors[step.plan.lane, answer.cache_id] += len(answer.errors)
            self.ledgers[answer.cache_id].give_back(answer.num_freed_blocks)
        if not answer.is_last:
            return step
        del self.unanswered[answer.step_id]
        self.closing.difference_update(step.plan.close_seq_ids)
        self.num_freeing_plans -= step.frees_blocks
        self.num_burying_plans -= step.closes_rows
        return step

    def errors_of(self, lane: int) -> int:
        """Errors in the answers of all present attention workers so far."""
        if not self.num_errors:  # in almost all attachments
            return 0
        return sum(num_errors for (each, _), num_errors in self.num_errors.items() if each == lane)

    def complete(self, step: ScheduledStep) -> None:
        """Notes that the oldest step in flight ended at its `end_s`."""
        assert self.in_flight[0] is step, "steps are completed in the order of their plans"
        lane = self.lanes[step.plan.lane]
        step.begin_s = self.begin_of(step)
        step.gap_s = step.begin_s - lane.last_end_s
        self.in_flight = self.in_flight[1:]
        self.num_completed += 1
        lane.last_end_s = step.end_s
        self.last_step_s = step.end_s - step.begin_s
        self.last_plan = step.plan
        if not step.plan.frees_blocks:
            self.unanswered.pop(step.plan.step_id, None)  # such a plan gets no answer


class SeenPrefixes:
    """Tells which sequences the prefix caches have nothing of, so that the plan that opens them can run them.

    Knows the first blocks of sequences that have been in the KV caches, by hash.

    No more than the caches have blocks together: each sequence with another first block has taken a block since, so
    what is forgotten here has mostly been evicted there. What has not been is missed, and computed as a whole: blocks
    of a sequence that still runs, of a cache that others have passed by, of rows that were given up. While one of the
    caches was not empty at first, anything may be in it.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._caches: dict[int, tuple[int, bool]] = {}  # by cache_id: blocks, and whether it was empty
        self._most = 0
        self._is_complete = True  # whether all caches were empty before
        self._seen: OrderedDict[int, None] = OrderedDict()

    def set_cache(self, cache_id: int, num_blocks: int, *, is_empty: bool) -> None:
        """A KV cache is used from now on."""
        self._caches[cache_id] = num_blocks, is_empty
        self._count()

    def remove_cache(self, cache_id: int) -> None:
        """A KV cache is gone."""
        del self._caches[cache_id]
        self._count()

    def _count(self) -> None:
        self._most = sum(num_blocks for num_blocks, _ in self._caches.values())
        self._is_complete = all(is_empty for _, is_empty in self._caches.values())
        while len(self._seen) > self._most:
            self._seen.popitem(last=False)

    def note(self, sequence: Sequence) -> None:
        """A sequence enters or leaves a KV cache."""
        if (key := self._key(sequence)) is not None:
            self._seen[key] = None
            self._seen.move_to_end(key)
            if len(self._seen) > self._most:
                self._seen.popitem(last=False)

    def may_have(self, sequence: Sequence) -> bool:
        """Whether blocks of a sequence may be cached."""
        key = self._key(sequence)
        return not self._is_complete or (key is not None and key in self._seen)

    def _key(self, sequence: Sequence) -> int | None:
        """Sequences with the same first block have the same key; None: it has none that is full."""
        prompt, size = sequence.spec.prompt_token_ids, self._block_size
        token_ids = (*prompt[:size], *sequence.output_token_ids[: max(0, size - len(prompt))])
        return hash((sequence.spec.prefix_key, token_ids)) if len(token_ids) == size else None
