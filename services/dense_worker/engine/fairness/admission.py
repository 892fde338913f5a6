"""`Admission`: which waiting sequence is opened next, and whom it may take room from. Part of the scheduler."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from services.dense_worker.engine.block_ledger import BlockLedger
from services.dense_worker.engine.fairness.victims import Need, choose_victims
from services.dense_worker.engine.limits import SchedulerLimits
from services.dense_worker.engine.placement import Placement
from services.dense_worker.engine.sequence import Sequence
from services.dense_worker.engine.session import Session
from services.dense_worker.engine.turns import Turns
from services.dense_worker.features.fork_policy import ForkPolicy


class Lack(NamedTuple):
    """Why a sequence can never run."""

    num_blocks: int  # that it may need
    room: str  # what there is, for messages


class Admission:
    """Of one attachment."""

    def __init__(
        self,
        session: Session,
        limits: SchedulerLimits,
        forks: ForkPolicy,
        placement: Placement,
        turns: Turns | None = None,
    ) -> None:
        """`turns`: None: what runs stays"""
        self._session = session
        self._waiting = session.waiting
        self._limits = limits
        self._forks = forks
        self._placement = placement
        self._turns = turns
        self._is_guaranteed = limits.policy == "guaranteed_no_evict"  # a sequence needs all blocks at once
        self._entitled: Sequence | None = None  # goes next, because others give up blocks for it
        self._tried: set[int] = set()  # seq_ids of heads that have found nobody to take room from

    def most_blocks(self, sequence: Sequence) -> int:
        """The most blocks that a sequence may ever hold at a time."""
        return self._session.ledger.most_blocks(sequence.max_num_cached_tokens, self._limits.max_num_batched_tokens)

    def lack_of(self, sequence: Sequence, ledgers: Mapping[int, BlockLedger], *, awaits: bool = False) -> Lack | None:
        """What a sequence needs, and there is not even when these KV caches are empty; None: it has room then.

        With `awaits` those that are missing count, too.
        """
        num_blocks, room = self.most_blocks(sequence), self._placement.room_for(sequence, ledgers, awaits=awaits)
        return Lack(num_blocks, room.text) if num_blocks > room.num_blocks else None

    def next_to_open(self, suspect: Sequence | None) -> Sequence | None:
        """The next sequence, if it has room now. A waiting suspect goes before all, and takes nothing from others.

        Otherwise it is the first sequence of the client whose turn it is. Nobody overtakes it only because it is small,
        which would starve large sequences; but clients that hold much less may, and may take room from others.
        """
        if not self._waiting or not (self.num_places > 0 or self._waiting.has_several_clients):
            return None
        if self._entitled is not None and not self.may_have_room(self._entitled):
            self._entitled = None  # it waits for a KV cache to come back, and nobody waits behind it
        sequence = suspect or self._entitled or next(self._ready_heads(), None)
        self._session.awaits_caches = sequence is None and self._lacks_caches()
        if sequence is not None and not self._may_begin(sequence):
            sequence = self._next_begun()
        if sequence is not None and not self._has_room(sequence):
            sequence = None if sequence is suspect else self._make_room()
        if sequence is not None:
            self._entitled = None
        return sequence

    def has_left(self, sequence: Sequence) -> bool:
        """Whether a waiting sequence may be opened: not before the last token of one that has just left a KV cache, or
        the answer to its closing, has arrived."""
        return not sequence.num_pending_tokens and sequence.seq_id not in self._session.closing

    def may_have_room(self, sequence: Sequence) -> bool:
        """Whether the KV caches that are there, and not given up, have room for it when they are empty."""
        if not self._outgrows_each(sequence):
            return True
        return self.lack_of(sequence, self._session.open_ledgers) is None

    @property
    def num_places(self) -> int:
        """Free places. Each row takes one."""
        session = self._session
        num_leaving = sum([len(lane.to_close_later) for lane in session.lanes])
        return self._limits.max_num_seqs - session.num_running_rows - session.num_opening_rows - num_leaving

    def forget(self, sequence: Sequence) -> None:
        """Forgets a sequence that has ended."""
        if sequence is self._entitled:
            self._entitled = None

    def blocks_to_reserve(self, sequence: Sequence, num_held_blocks: int | None = None) -> int:
        """Blocks that it needs besides those that it holds.

        By default these are those from before the attachment, or those that it will share when it is forked.
        """
        session = self._session
        if num_held_blocks is None:
            num_held_blocks = session.orphaned_blocks.get(sequence.seq_id, 0)
            num_held_blocks = num_held_blocks or self._forks.num_shared_blocks(sequence, session)
        if sequence.divided is not None:
            return max(0, sequence.divided.num_blocks - num_held_blocks)
        if sequence.policy is not None:
            num_blocks = sequence.policy.blocks_to_promise(session.ledger, self._num_tokens(sequence))
            return max(0, num_blocks - num_held_blocks)
        num_step_tokens = min(sequence.num_tokens, self._limits.max_num_batched_tokens)
        return max(0, session.ledger.most_blocks(self._num_tokens(sequence), num_step_tokens) - num_held_blocks)

    def has_room_elsewhere(self, sequence: Sequence) -> bool:
        """Whether a KV cache that is not given up has room for all of a running sequence."""
        session, num_blocks = self._session, self.blocks_to_reserve(sequence, 0)
        return any(
            num_blocks <= ledger.num_available_blocks
            for cache_id, ledger in session.open_ledgers.items()
            if cache_id not in session.short_caches
        )

    def reserve_again(self, sequence: Sequence) -> None:
        """Adjusts the reservation of a running sequence that has dropped blocks to what it needs from now on."""
        session, ledger = self._session, self._session.ledger_of(sequence)
        session.release_reservation(sequence)
        num_left = ledger.blocks_for(self._num_tokens(sequence)) - sequence.num_evicted_blocks - sequence.num_blocks
        has_prompt = sequence.num_remaining_tokens > 1
        most = ledger.sliding_window.max_blocks(self._limits.max_num_batched_tokens if has_prompt else 1)
        assert most is not None, "blocks are dropped only behind a window"
        wanted = min(num_left, max(1, most - sequence.num_blocks), ledger.num_available_blocks)
        sequence.num_reserved_blocks = max(0, wanted)
        ledger.reserve(sequence.num_reserved_blocks)

    def reserve_for_rows(self) -> None:
        """Promises sequences with row policies again what dead rows have given back, so that they can reach their end.
        """
        for sequence in self._session.running:
            if sequence.policy is not None:
                ledger = self._session.ledger_of(sequence)
                num_wanted = self.blocks_to_reserve(sequence, sequence.num_blocks)
                num_blocks = min(num_wanted - sequence.num_reserved_blocks, ledger.num_available_blocks)
                if num_blocks > 0:
                    ledger.reserve(num_blocks)
                    sequence.num_reserved_blocks += num_blocks

    def _num_tokens(self, sequence: Sequence) -> int:
        """The tokens for which it needs blocks when it is opened."""
        if self._turns is not None:
            return min(sequence.num_tokens + self._limits.turn_tokens, sequence.max_num_cached_tokens)
        return sequence.max_num_cached_tokens if self._is_guaranteed else sequence.num_tokens

    def _may_begin(self, sequence: Sequence) -> bool:
        """Whether it has begun, or cache and host memory together have room for it."""
        return self._turns is None or self._turns.may_begin(sequence, self.most_blocks(sequence))

    def _next_begun(self) -> Sequence | None:
        """The next sequence that comes back for its turn, while new ones must wait."""
        waiting = [] if self._turns is None else self._turns.waiting()
        return next(filter(self.has_left, waiting), None)

    def _has_room(self, sequence: Sequence) -> bool:
        """Whether it has room now; then it names the KV cache in which it is to be opened."""
        if sequence.num_rows > self.num_places or not self._session.has_room_for_sequence:
            return False
        if self._outgrows_each(sequence):
            return self._divide(sequence, self.most_blocks(sequence))
        session, home = self._session, self._home_of(sequence)
        fitting = [] if home is None else self._fitting([home], self.blocks_to_reserve(sequence))
        if not fitting and sequence.seq_id not in session.orphaned_blocks:
            others = [each for each in session.open_ledgers if each != home]
            fitting = self._fitting(others, self.blocks_to_reserve(sequence, 0))
        if not fitting:
            return False
        sequence.cache_id = self._placement.choose(sequence, fitting, session) if len(fitting) > 1 else fitting[0]
        self._placement.note(sequence)
        return True

    def _divide(self, sequence: Sequence, num_blocks: int) -> bool:
        """Whether several KV caches have room for a sequence that may need more blocks than any has."""
        if sequence.seq_id in self._session.orphaned_blocks:
            self._session.close_orphaned([sequence.seq_id])  # of a larger cache that is gone
            return False
        sequence.divided = self._placement.divide(sequence, num_blocks, self._session)
        if sequence.divided is not None:
            sequence.cache_id = next(iter(sequence.divided.cache_ids))
        return sequence.divided is not None

    def _outgrows_each(self, sequence: Sequence) -> bool:
        """Whether it may need more blocks than there are in its home, or in any KV cache that is not given up."""
        session, num_blocks = self._session, self.most_blocks(sequence)
        if num_blocks <= session.most_blocks_of_one:
            return False
        home = self._home_of(sequence)
        return home is None or num_blocks > session.ledgers[home].num_blocks

    def _home_of(self, sequence: Sequence) -> int | None:
        """The KV cache that has blocks of it already, or blocks that it could share; None: none has."""
        if sequence.seq_id in self._session.orphaned_blocks:
            return self._session.orphan_caches[sequence.seq_id]
        source = self._forks.source_of(sequence, self._session)
        return None if source is None else source.cache_id

    def _fitting(self, cache_ids: Iterable[int], num_blocks: int) -> list[int]:
        """The KV caches that have so many blocks available."""
        session = self._session
        return [
            each
            for each in cache_ids
            if each not in session.short_caches and num_blocks <= session.ledgers[each].num_available_blocks
        ]

    def _ready_heads(self) -> Iterator[Sequence]:
        """The first sequence of each waiting client, in the order of their turns.

        Without those that are leaving. Sequences that wait for a KV cache to come back are passed by.
        """
        return filter(self.has_left, self._waiting.heads(self._session.orphaned_blocks, self.may_have_room))

    def _lacks_caches(self) -> bool:
        """Whether a head waits for a KV cache to come back, or to be kept. Whoever has none that is ready asks."""
        session = self._session
        heads = filter(self.has_left, self._waiting.heads(session.orphaned_blocks))
        return any(map(self._outgrows_each, heads))

    def _make_room(self) -> Sequence | None:
        """Preempts sequences for the first client in turn that has a right to their places or blocks.

        Returns its sequence if it has room now; blocks that were in use come back only after the next plan.
        """
        if not self._waiting.has_several_clients:
            return None
        if self._entitled is not None and self._session.awaits_blocks:
            return None
        heads = filter(self._may_begin, self._ready_heads())  # room is of no use to those that may not begin
        self._entitled, victims = choose_victims(self._session, heads, self._need_of, self.num_places, self._tried)
        for victim in victims:
            self._session.preempt(victim)
        return self._entitled if self._entitled is not None and self._has_room(self._entitled) else None

    def _need_of(self, sequence: Sequence) -> Need:
        if self._outgrows_each(sequence):  # it needs all blocks at once, in several caches
            return Need(self.most_blocks(sequence), self._session.open_ledgers.keys())
        home = self._home_of(sequence)
        return Need(self.blocks_to_reserve(sequence), None if home is None else (home,))
