"""Chooses the sequences that give up their places or blocks, so that each client gets a fair share of them.

A client that holds nothing may take from any that does not end up with less than it. A client that holds something may
take only if the other still has 5/4 of that afterwards; from there on the queue makes the shares equal, as sequences
end. So no two clients take the same place from each other again and again. Among the clients with the most, the
youngest sequence gives way. It keeps its turn in the queue; its keys and values stay in the prefix cache until others
need the blocks, so mostly little of it is computed again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from functools import cached_property
from typing import NamedTuple

from services.common.fairness import Client
from services.dense_worker.engine.sequence import Sequence
from services.dense_worker.engine.session import Session

MAX_TRIED = 4  # newcomers for which victims are looked for in one call


class Need(NamedTuple):
    """What a waiting sequence needs."""

    num_blocks: int
    cache_ids: Collection[int] | None  # the KV caches in which it needs them; None: in any one


class Holdings:
    """How much each tenant and each client holds: places, or blocks."""

    def __init__(
        self, holders: Iterable[Sequence], size: Callable[[Sequence], int], others: Mapping[Client, int] | None = None
    ) -> None:
        """`others`: what is held besides, by client"""
        self._size = size
        self._of_tenant = Counter[int]()
        self._of_client = Counter[Client](others or {})
        for (tenant, _), count in self._of_client.items():
            self._of_tenant[tenant] += count
        for sequence in holders:
            self._of_tenant[sequence.spec.tenant] += size(sequence)
            self._of_client[sequence.spec.client_id] += size(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Takes away what a sequence holds."""
        self._of_tenant[sequence.spec.tenant] -= self._size(sequence)
        self._of_client[sequence.spec.client_id] -= self._size(sequence)

    def of(self, sequence: Sequence) -> tuple[int, int]:
        """What the tenant and the client of a sequence hold."""
        return self._of_tenant[sequence.spec.tenant], self._of_client[sequence.spec.client_id]

    def may_take(self, newcomer: Sequence, amount: int, victim: Sequence) -> bool:
        """Whether the newcomer's side has a right to this exchange. Sides are tenants, or clients of one tenant."""
        level = 1 if newcomer.spec.tenant == victim.spec.tenant else 0
        return self.of(victim)[level] - self._size(victim) >= _claim(self.of(newcomer)[level], amount)

    def may_be_poor(self, newcomer: Sequence, amount: int) -> bool:
        """Whether `may_take` may be true for any victim: fast, because it is asked for many newcomers."""
        of_tenant, of_client = self.of(newcomer)
        most_of_tenant, most_of_client = self._most
        return _claim(of_tenant, amount) < most_of_tenant or _claim(of_client, amount) < most_of_client

    @cached_property
    def _most(self) -> tuple[int, int]:
        """The most that a tenant and a client hold."""
        return max(self._of_tenant.values(), default=0), max(self._of_client.values(), default=0)


def _claim(held: int, amount: int) -> int:
    """What the other side must have afterwards."""
    return (held + amount) * 5 // 4 if held else amount


def choose_victims(
    session: Session,
    heads: Iterable[Sequence],
    need_of: Callable[[Sequence], Need],
    num_free_places: int,
    tried: set[int],
) -> tuple[Sequence | None, list[Sequence]]:
    """The first of `heads` that has a right to room; and whom to preempt for it.

    None, and nobody, if none has; nobody if blocks are about to come back. Only sequences that are not more urgent give
    way, and never the very first one, so that at least that one always advances.

    `tried`: seq_ids for which earlier calls have found nobody, so that the next ones get their turn; changed here.
    """
    opening = [each.sequence for each in session.openings.values()]
    places = Holdings([*opening, *session.to_fork], held_places, session.rows_of_client)
    blocks: Holdings | None = None  # counted only if blocks are scarce
    num_in_caches = _num_available(session)
    roomiest = max(num_in_caches, key=num_in_caches.__getitem__, default=0)
    num_tried = 0
    for newcomer in heads:
        num_missing_places = newcomer.num_rows - num_free_places
        if num_missing_places > 0:  # hundreds may wait: what they need is computed only for those that may get it
            if not places.may_be_poor(newcomer, newcomer.num_rows):
                continue
            if newcomer.seq_id in tried and not session.awaits_blocks:
                continue
        num_blocks, home = need_of(newcomer)
        cache_ids = (roomiest,) if home is None else home
        num_missing = num_blocks - sum(num_in_caches.get(each, 0) for each in cache_ids)
        if num_missing_places <= 0:
            blocks = blocks or Holdings([*session.running, *opening], held_blocks)
            if not blocks.may_be_poor(newcomer, num_blocks):
                continue
        if num_missing_places <= 0 and num_missing <= 0:
            return newcomer, []  # it fits beside a sequence of a richer client that does not
        if num_missing > 0 and session.awaits_blocks:
            return newcomer, []
        if newcomer.seq_id in tried:
            continue
        victims = _victims_of(newcomer, num_blocks, num_missing, num_missing_places, session, cache_ids)
        if victims:
            tried.clear()
            return newcomer, victims
        tried.add(newcomer.seq_id)
        num_tried += 1
        if num_tried == MAX_TRIED:
            return None, []
    tried.clear()
    return None, []


def _num_available(session: Session) -> dict[int, int]:
    """The available blocks of each KV cache that is not given up; none where a running sequence could not grow."""
    return {
        cache_id: 0 if cache_id in session.short_caches else ledger.num_available_blocks
        for cache_id, ledger in session.ledgers.items()
        if cache_id not in session.draining
    }


def _victims_of(
    newcomer: Sequence,
    num_blocks: int,
    num_missing: int,
    num_missing_places: int,
    session: Session,
    cache_ids: Collection[int],
) -> list[Sequence]:
    """The sequences to preempt so that there are so many more blocks and places; empty without a right to them.

    Blocks are of use in these KV caches only.
    """
    holders = [*session.running, *(opening.sequence for opening in session.openings.values())]
    places, blocks = Holdings(holders, held_places), Holdings(holders, held_blocks)
    candidates = [each for each in reversed(session.running[1:]) if each.spec.priority >= newcomer.spec.priority]
    if num_missing > 0:
        candidates = [each for each in candidates if not set(cache_ids).isdisjoint(each.cache_ids)]
    victims: list[Sequence] = []
    while num_missing_places > 0 or num_missing > 0:
        holdings, amount = (places, newcomer.num_rows) if num_missing_places > 0 else (blocks, num_blocks)
        allowed = [each for each in candidates if holdings.may_take(newcomer, amount, each)]
        if not allowed:
            return []
        victim = max(allowed, key=holdings.of)  # the first of several, which is the youngest
        candidates.remove(victim)
        places.remove(victim)
        blocks.remove(victim)
        victims.append(victim)
        num_missing -= sum(victim.num_blocks_in(each) for each in victim.cache_ids if each in cache_ids)
        num_missing_places -= held_places(victim)
    return victims


def put_largest_last(sequences: SequenceOf[Sequence]) -> list[Sequence]:
    """The same sequences, those of clients with the most blocks last, so that a lack of blocks meets these.

    The very first one stays the first, so that it always advances.
    """
    blocks = Holdings(sequences, held_blocks)
    return [*sequences[:1], *sorted(sequences[1:], key=blocks.of)]


def choose_victim_of_shortage(running: SequenceOf[Sequence], scheduled: Collection[int]) -> Sequence | None:
    """The sequence to preempt when a running one cannot grow: the last one of the client with the most blocks.

    `scheduled`: seq_ids that are part of the step already. The very first sequence never gives way.
    """
    holdings = Holdings(running, held_blocks)
    candidates = [each for each in reversed(running[1:]) if each.seq_id not in scheduled]
    return max(candidates, key=holdings.of, default=None)


def held_places(sequence: Sequence) -> int:
    """Places of a step that a sequence has: one for each of its rows."""
    return sequence.num_rows


def held_blocks(sequence: Sequence) -> int:
    """Blocks that a sequence has or that are promised to it."""
    return sequence.num_blocks + sequence.num_reserved_blocks
