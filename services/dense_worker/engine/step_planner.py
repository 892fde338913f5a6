"""`StepPlanner`: which running sequences advance in the next step, and by how many tokens. Part of the scheduler."""

from __future__ import annotations

from collections import deque

import numpy as np

from services.dense_worker.engine.decode_rows import NO_DECODES
from services.dense_worker.engine.fairness.step_shares import (
    Prefill,
    count_rows,
    divide_prefills,
    limit_decodes,
    limit_values,
    most_decodes,
    newcomers,
)
from services.dense_worker.engine.fairness.victims import choose_victim_of_shortage, put_largest_last
from services.dense_worker.engine.limits import SchedulerLimits
from services.dense_worker.engine.plan_builder import PlanBuilder
from services.dense_worker.engine.sequence import Sequence, SequenceStatus
from services.dense_worker.engine.session import Session
from services.dense_worker.features.drafting.drafting import Drafting
from services.dense_worker.features.fork_policy import ForkPolicy
from services.dense_worker.features.row_policy import RowPolicy

MAX_HOST_S = 0.02  # what slow sequences of a step may take of the host in all; one of them may always run
SLOW_S = 0.0005  # a sequence that takes less is in each step
MAX_STEP_S = 0.15  # the next step may take longer than the last ones, and streams wait for all of it
MIN_PROMPT_TOKENS = 32  # however long they take: with fewer, weights are read for too little
FIRST_PROMPT_TOKENS = 128  # while no step has been measured
TILE_ROWS = 128  # of products of many rows on a GPU: a tile that is not full takes as long as one that is
# Sizes of which a step best has a multiple: the tiles of small products then fill all of the GPU, or half of it.
STEP_ROWS = (4 * TILE_ROWS, 2 * TILE_ROWS, TILE_ROWS)
MAX_TILED_ROWS = 2048  # in longer steps one tile is too little to matter
_NUM_STEPS_KEPT = 8
_LEAST_S = 1e-6  # that a step takes, by any clock


class StepPlanner:
    """Of one lane of an attachment.

    Sequences that need a single token go first, so that a long prompt cannot stall running streams. Prompts share the
    rest of the step.
    """

    def __init__(
        self,
        session: Session,
        limits: SchedulerLimits,
        drafting: Drafting,
        forks: ForkPolicy,
        lane: int,
    ) -> None:
        self._session = session
        self._lane = lane
        self._waiting = session.waiting
        self._limits = limits
        self._drafting = drafting
        self._forks = forks
        self._host_turns = HostTurns()
        self._pace = PromptPace() if limits.measures_steps else None
        self._has_given_way = False  # whether the last step was only for newcomers

    def plan_step(self, suspect: Sequence | None) -> PlanBuilder | None:
        """The entries of the next step, perhaps none. None: the plan waits for sequences that are being opened.

        `suspect`: the only sequence that may run now; None: all may
        """
        session = self._session
        session.lanes[self._lane].short_caches.clear()
        step = PlanBuilder(self._limits.max_num_batched_tokens, self._limits.max_num_seqs)
        slow = [each for each, feature in session.rows.forced_by.items() if feature.host_s > SLOW_S]
        if slow and sum(map(_host_s, [*slow, *session.others])) > MAX_HOST_S:  # they take turns
            for sequence in slow:
                session.leave_row(sequence)
        rows = NO_DECODES.positions
        if suspect is None and len(session.rows):
            rows = session.rows.of_lane(session.rows.unfinished(), self._lane, len(session.lanes))
        decodes, prefills = self._find_others(suspect)
        if any([each.features for each in decodes]) or any([each.features for each, _ in prefills]):
            decodes, prefills = self._take_host_turns(decodes, prefills)
        most_tokens = self._most_prompt_tokens(len(rows) + _num_rows(decodes)) if prefills else 0
        is_shared = self._waiting.has_several_clients
        if is_shared and session.running:
            if not self._has_given_way and self._awaits_newcomers():
                return None  # they may come into this plan; the answer to their opening is on its way
            new = set() if self._has_given_way else self._find_newcomers(rows, decodes, prefills)
            if new:
                rows, decodes, prefills = rows[:0], [], [each for each in prefills if each[0] in new]
            self._has_given_way = bool(new)  # then the next step is for all
        elif session.running:
            self._has_given_way = False
        if prefills and any([sequence.features for sequence, _ in prefills]):
            prefills = limit_values(prefills)
        if is_shared and self._has_too_many(rows, decodes, prefills, step.num_tokens):
            rows, decodes = self._limit_decodes(rows, decodes, prefills, step.num_tokens)
        has_prompts = bool(prefills or session.to_fork)
        most = 0 if has_prompts else self._limits.max_num_seqs - session.num_running_rows
        self._drafting.begin_step(decodes, len(rows), most)
        if len(rows) or decodes or session.to_fork:
            self._plan_decodes(step, rows, decodes, is_shared=is_shared, may_fork=suspect is None)
        if prefills:
            self._plan_prefills(step, prefills, most_tokens, is_shared=is_shared)
        return step

    def _most_prompt_tokens(self, num_rows: int) -> int:
        """How many tokens of prompts the next step may have at most, while so many rows belong to streams.

        Prompts that are computed as a whole, or with all rows of a policy, may have more.
        """
        if self._pace is None or not num_rows:
            return self._limits.max_num_batched_tokens
        session, plan = self._session, self._session.last_plan
        has_prompts = plan is not None and plan.num_tokens > len(plan.entries)
        if has_prompts and not plan.extra_rows and not session.has_provided:
            self._pace.note(plan.num_tokens, session.last_step_s)
        session.has_provided = False
        return self._pace.most_tokens(num_rows)

    def _find_others(self, suspect: Sequence | None) -> tuple[list[Sequence], list[Prefill]]:
        """The sequences without a row that need a single token, and those that need more, with their numbers: of all
        rows, if they have a row policy.

        Those whose step does more than compute tokens are among the latter, so that it delays no stream.
        """
        session = self._session
        decodes, prefills = list[Sequence](), list[Prefill]()
        for sequence in session.others:
            if sequence.num_draft_tokens or sequence in session.to_fork or sequence.lane != self._lane:
                continue
            if suspect is not None and sequence is not suspect:
                continue
            if sequence.policy is not None and sequence.num_pending_tokens:
                continue  # the result of its last step decides which rows go on
            num_remaining = sequence.num_remaining_tokens
            if num_remaining > 1 or (num_remaining and sequence.features and sequence.joins_prompts):
                policy = sequence.policy
                num_to_compute = num_remaining if policy is None else policy.num_to_compute(sequence.counts)
                prefills.append((sequence, num_to_compute))
            elif num_remaining == 1:
                decodes.append(sequence)
        return decodes, prefills

    def _take_host_turns(
        self, decodes: list[Sequence], prefills: list[Prefill]
    ) -> tuple[list[Sequence], list[Prefill]]:
        """Without those that would take too long of the host; among them prompts that the step may end, and sample."""
        most = self._limits.max_num_batched_tokens
        ending = [sequence for sequence, num_tokens in prefills if sequence.features and num_tokens <= most]
        if not ending:
            return self._host_turns.choose(decodes), prefills
        candidates = [*decodes, *ending]
        waiting = set(candidates).difference(self._host_turns.choose(candidates))
        return (
            [each for each in decodes if each not in waiting],
            [each for each in prefills if each[0] not in waiting],
        )

    def _awaits_newcomers(self) -> bool:
        """Whether sequences are being opened for which the streams give way."""
        opening = [each.sequence for each in self._session.openings.values()]
        return bool(opening and newcomers(self._session.rows_of_client, opening))

    def _find_newcomers(
        self, rows: np.ndarray, decodes: list[Sequence], prefills: list[Prefill]
    ) -> set[Sequence]:
        """The sequences with prompts for which the streams give way."""
        if not prefills:
            return set()
        streams = self._session.rows.count_clients(rows) + count_rows(decodes)
        return newcomers(streams, (sequence for sequence, _ in prefills))

    def _has_too_many(
        self, rows: np.ndarray, decodes: list[Sequence], prefills: list[Prefill], num_tokens: int
    ) -> bool:
        """Whether a step is too short for all that need a single token and for its prompts."""
        num_rows = len(rows) + _num_rows(decodes)
        if num_rows <= num_tokens - num_tokens // 2:
            return False
        streams = self._session.rows.count_clients(rows) + count_rows(decodes)
        return num_rows > most_decodes(streams, prefills, num_tokens)

    def _limit_decodes(
        self, rows: np.ndarray, decodes: list[Sequence], prefills: list[Prefill], num_tokens: int
    ) -> tuple[np.ndarray, list[Sequence]]:
        """The rows and other sequences that get a single token, if there are too many."""
        chosen = limit_decodes(self._in_order(rows, decodes), prefills, num_tokens)
        slots = [sequence.slot for sequence in chosen if sequence.slot is not None]
        return np.array(slots, np.int64), [sequence for sequence in chosen if sequence.slot is None]

    def _in_order(self, rows: np.ndarray, others: list[Sequence]) -> list[Sequence]:
        return sorted([*self._session.rows.sequences[rows], *others], key=lambda each: each.order)

    def _plan_decodes(
        self, step: PlanBuilder, rows: np.ndarray, decodes: list[Sequence], *, is_shared: bool, may_fork: bool
    ) -> None:
        """Adds the rows, the sequences that are forked, and the other sequences that need a single token."""
        session = self._session
        if len(rows):
            decodes = self._plan_decode_rows(step, rows, decodes, is_shared=is_shared)
        if session.to_fork and may_fork:
            for sequence in self._forks.plan(step, session):
                self._session.preempt(sequence)
        if is_shared and decodes and min(each.num_available_blocks for each in session.ledgers.values()) < len(decodes):
            decodes = put_largest_last(decodes)
        for sequence in decodes:
            self._plan(step, sequence, 1, is_last=True)

    def _plan_decode_rows(
        self, step: PlanBuilder, rows: np.ndarray, decodes: list[Sequence], *, is_shared: bool
    ) -> list[Sequence]:
        """Adds the rows; where blocks may be too few, in order with the other sequences. Returns those left to add."""
        session = self._session
        lacks_block = session.rows.lacks_block(rows, session.ledger.block_size)
        growing = rows[lacks_block]
        step.num_tokens -= len(rows)
        step.num_logits -= len(rows)
        growing_by_cache = session.rows.by_cache(growing, session.ledgers) if len(growing) or decodes else []
        if not self._may_be_short(growing_by_cache, decodes):
            session.rows.grow(growing_by_cache, session.ledgers)
            step.decodes = session.rows.advance(rows, lacks_block)
            return decodes
        self._plan_by_order(step, growing, self._in_order(rows, decodes), is_shared=is_shared)
        num_left_out = len(rows) - len(step.decodes.positions)
        step.num_tokens += num_left_out
        step.num_logits += num_left_out
        return []

    def _may_be_short(self, growing_by_cache: list[tuple[int, np.ndarray]], decodes: list[Sequence]) -> bool:
        """Whether a KV cache may have too few blocks for these rows, which need one each, and for these sequences."""
        for cache_id, growing in growing_by_cache:
            num_blocks = self._session.rows.num_unreserved(growing)
            if decodes:
                num_blocks += _num_rows([each for each in decodes if each.cache_id == cache_id])
            if num_blocks > self._session.ledgers[cache_id].num_available_blocks:
                return True
        return False

    def _plan_by_order(
        self, step: PlanBuilder, growing: np.ndarray, sequences: list[Sequence], *, is_shared: bool
    ) -> None:
        """The same one by one, where blocks may be too few: those that come first get them.

        growing: int64, the slots of rows that lack a block
        """
        session, lacking = self._session, set(growing.tolist())
        slots, has_grown = list[int](), list[bool]()
        for sequence in put_largest_last(sequences) if is_shared else sequences:
            slot = sequence.slot
            if sequence.status is not SequenceStatus.RUNNING:
                continue  # preempted in this plan
            if slot is None:
                self._plan(step, sequence, 1, is_last=True)
            elif slot in lacking and not (
                sequence.num_reserved_blocks or session.ledger_of(sequence).num_available_blocks
            ):
                self._give_up_blocks(step, sequence)
            else:
                if slot in lacking:
                    session.rows.grow([(sequence.cache_id, np.array([slot]))], session.ledgers)
                slots.append(slot)
                has_grown.append(slot in lacking)
                step.seq_ids.add(sequence.seq_id)
        step.decodes = session.rows.advance(np.array(slots, np.int64), np.array(has_grown, bool))

    def _plan_prefills(
        self, step: PlanBuilder, prefills: list[Prefill], most_tokens: int, *, is_shared: bool
    ) -> None:
        """Divides the rest of the step, up to so many tokens, among the sequences that are not decoded."""
        num_beside = max(0, step.num_tokens - most_tokens)  # of its tokens that none of them gets
        num_wanted = sum([num_remaining for _, num_remaining in prefills])
        if self._pace is None and len(self._waiting) and num_wanted < step.num_tokens - num_beside:
            num_rows = self._limits.max_num_batched_tokens - step.num_tokens
            num_beside = step.num_tokens - fill_tiles(num_rows, num_wanted)
        shares = None  # how many tokens each prompt gets; None: as many as are left
        if is_shared:
            num_planned = count_rows(entry.sequence for entry in step.planned)
            num_planned.update(self._session.rows.count_clients(step.decodes.rows.slots))
            shares = divide_prefills(prefills, num_planned, step.num_tokens - num_beside)
            # A share may be less than one token for each row of a sequence: it needs the rest from those behind it.
            prefills = [*prefills[:1], *sorted(prefills[1:], key=lambda each: not _has_forked(each[0]))]
        for sequence, num_remaining in prefills:
            num_left = step.num_tokens - num_beside
            if num_left < 1:
                break
            num_tokens = min(num_remaining if shares is None else shares[sequence], num_left)
            for feature in sequence.features:
                num_tokens = feature.chunk(sequence, num_tokens, step)
            if num_tokens:
                self._plan(step, sequence, num_tokens, is_last=num_tokens == sequence.num_remaining_tokens)

    def _plan(self, step: PlanBuilder, sequence: Sequence, num_tokens: int, *, is_last: bool) -> None:
        """Adds an entry for `num_tokens` known or pending tokens; with the last one, also for draft tokens."""
        if sequence.policy is not None and _has_forked(sequence):
            self._plan_rows(step, sequence, sequence.policy, num_tokens)
            return
        drafts = self._drafting.propose(sequence, self._session, step) if is_last else ()
        if sequence.status is not SequenceStatus.RUNNING:
            return  # preempted in this plan
        num_blocks = self._session.take_blocks(sequence, num_tokens + len(drafts))
        if num_blocks is None:
            self._give_up_blocks(step, sequence)
            return
        has_evicted = self._session.evict_blocks(sequence)
        step.add(sequence, num_tokens, drafts, is_last + len(drafts), num_blocks, has_evicted)

    def _plan_rows(self, step: PlanBuilder, sequence: Sequence, policy: RowPolicy, num_tokens: int) -> None:
        """Adds all rows of a sequence that has a policy, or nothing.

        num_tokens: how many of all its rows together are wanted
        """
        if policy.num_rows > min(step.num_tokens, step.num_logits) or sequence.status is not SequenceStatus.RUNNING:
            return
        rows = policy.plan(sequence.counts, self._session.ledger_of(sequence), num_tokens)
        if rows is not None:
            step.add_rows(sequence, rows)
        elif not self._session.awaits_dead_rows:
            self._give_up_blocks(step, sequence)

    def _give_up_blocks(self, step: PlanBuilder, sequence: Sequence) -> None:
        """A running sequence cannot grow. Unless blocks are about to come back, another one gives up its blocks."""
        self._session.lanes[self._lane].short_caches.add(sequence.cache_id)
        if self._session.awaits_blocks:
            return
        beside = [each for each in self._session.running if sequence.cache_id in each.cache_ids]
        victim = choose_victim_of_shortage(beside, step.scheduled())
        if victim is not None:
            self._session.preempt(victim)
        elif not step.scheduled():  # otherwise the scheduled sequences advance
            self._session.drop_orphaned_blocks()


def fill_tiles(num_rows: int, num_wanted: int) -> int:
    """How many tokens of prompts a step has beside so many rows of streams, of those that are wanted.

    As many as fill the tiles of products, if that leaves no more than a half for the next step. To be called if others
    wait: their prompts fill the tiles of that one.
    """
    if num_rows >= TILE_ROWS and num_rows + num_wanted <= MAX_TILED_ROWS:
        for size in STEP_ROWS:
            num_left = (num_rows + num_wanted) % size
            if 2 * num_left <= num_wanted:
                return num_wanted - num_left
    return num_wanted


def _num_rows(sequences: list[Sequence]) -> int:
    return sum(sequence.num_rows for sequence in sequences)


def _has_forked(sequence: Sequence) -> bool:
    """Whether the next step computes tokens of each row of a sequence that has a policy."""
    return sequence.policy is not None and sequence.policy.has_forked(sequence.counts)


class HostTurns:
    """All sequences of a step wait for the host. So those that take long take turns, and delay each other alone."""

    def __init__(self) -> None:
        self._last: tuple[float, int] | None = None  # the order of the last slow one that had its turn

    def choose(self, sequences: list[Sequence]) -> list[Sequence]:
        """Those that are in the next step, in their order."""
        costs = {each: host_s for each in sequences if (host_s := _host_s(each)) > SLOW_S}
        if sum(costs.values()) <= MAX_HOST_S:
            return sequences
        slow = sorted(costs, key=lambda each: each.order)
        if (last := self._last) is not None:
            slow.sort(key=lambda each: each.order <= last)  # those behind the last one come first
        left_s, chosen = MAX_HOST_S, set[Sequence]()
        for each in slow:
            if chosen and costs[each] > left_s:
                break
            left_s -= costs[each]
            chosen.add(each)
            self._last = each.order
        return [each for each in sequences if each not in costs or each in chosen]


def _host_s(sequence: Sequence) -> float:
    return sum([feature.host_s for feature in sequence.features])


class PromptPace:
    """How many tokens of prompts a step on a CPU may have beside streams, which wait for all of it.

    The budget of a step is a number of tokens, and how long they take depends on model, machine and context. So steps
    with prompts are measured: the next one has as many tokens as take `MAX_STEP_S` at the slowest pace of the last
    ones. In small steps a token takes hardly longer, so this caution costs little.
    """

    def __init__(self) -> None:
        self._s_per_token = deque[float](maxlen=_NUM_STEPS_KEPT)

    def note(self, num_tokens: int, step_s: float) -> None:
        """A step with so many tokens has taken so long. One with few tells nothing of prompts."""
        if num_tokens >= MIN_PROMPT_TOKENS:
            self._s_per_token.append(max(step_s, _LEAST_S) / num_tokens)

    def most_tokens(self, num_rows: int) -> int:
        """Tokens of prompts in a step with so many rows of streams: at least as many as these."""
        if not self._s_per_token:
            return max(FIRST_PROMPT_TOKENS, num_rows)
        return max(MIN_PROMPT_TOKENS, num_rows, int(MAX_STEP_S / max(self._s_per_token)) - num_rows)
