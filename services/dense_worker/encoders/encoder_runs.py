"""`EncoderRuns`: runs an encoder between steps, and keeps its outputs. Engine thread.

A sequence can only be opened while the outputs of all its inputs are in memory; until then it is parked in the waiting
queue, and others go on. One run computes inputs of several sequences, by clients in turns, up to a budget of rows. It
has parts, and there is at most one of them between two steps, so that running streams are delayed by a part alone. On a
GPU a run is beside the steps, none of which waits for it: its sequences are opened when it has ended, or when no step
is under way. Where steps take longer than a run, a second run may wait there behind it. Outputs are kept by the hash of
their input, up to a number of bytes; the least recently used go first. What a sequence in the cache still reads stays,
and so does what a sequence reads that is to be opened earlier.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic

import torch

from services.common.errors import CapacityError, TwostrokeError
from services.common.fairness import Client
from services.dense_worker.encoders.encoder import Encoded, EncodedKey, Encoder, EncoderCounts, EncoderRun, Input
from services.dense_worker.features.sequence_feature import SequenceFeature

if TYPE_CHECKING:
    from services.dense_worker.engine.sequence import Sequence
    from services.dense_worker.engine.waiting_queue import WaitingQueue
    from services.dense_worker.features.feature import Event

_LAST = (math.inf, 0)  # the order of nobody


@dataclass(slots=True, eq=False)
class _Output:
    encoded: Encoded
    num_bytes: int
    num_users: int = 0  # sequences in the cache that may still read it


@dataclass(slots=True)
class _UnderWay(Generic[Input]):
    run: EncoderRun
    inputs: Mapping[str, Input]  # by hash
    found: list[Encoded] | None = None  # their outputs, which a GPU may still compute


@dataclass(slots=True)
class _Choice(Generic[Input]):
    """Of the inputs of the next run."""

    known: set[str]  # hashes of what is kept, under way or chosen
    num_bytes: int  # of what is under way or chosen
    begun: dict[Sequence, int]  # sequences that have some of what they need, and the bytes that they lack
    begun_bytes: int  # the sum of these
    inputs: dict[str, Input] = field(default_factory=dict)  # those chosen, by hash
    num_rows: int = 0  # of these
    parked: list[Sequence] = field(default_factory=list)  # by making room
    must_stay: set[str] | None = None  # for those that are not first; None: to be looked up when something must go


class EncoderRuns(Generic[Input]):
    """The runs of one encoder, for the sequences with its feature."""

    def __init__(
        self, name: str, encoder: Encoder[Input], max_rows: int, max_bytes: int, *, max_runs: int = 1
    ) -> None:
        """name: of the feature. max_rows: of one run, which has one input at least. max_bytes: of kept outputs.
        max_runs: that a GPU has at a time.
        """
        self.name = name
        self.counts = EncoderCounts()
        self._encoder = encoder
        self._max_rows = max_rows
        self._max_bytes = max_bytes
        self._max_runs = max_runs
        self._outputs: OrderedDict[str, _Output] = OrderedDict()  # by hash, the least recently used first
        self._under_way: list[_UnderWay[Input]] = []  # a GPU has all of those before the last
        self._last_part_before: int | None = None  # the oldest step under way at the last part
        self._turns = _Turns()
        self._post: Callable[[Event], None] | None = None

    def start(self, post: Callable[[Event], None]) -> None:
        """Called when the engine exists; see `Feature.start`."""
        self._post = post

    def has(self, key: EncodedKey) -> bool:
        """Whether all outputs are in memory."""
        return all(each in self._outputs for each in key.hashes)

    def pin(self, key: EncodedKey) -> Pin:
        """The outputs for a sequence that enters the cache; they stay in memory until the pin is released."""
        for each in dict.fromkeys(key.hashes):
            self._outputs[each].num_users += 1
            self._outputs.move_to_end(each)
        self.counts.num_hits += len(key.hashes)
        return Pin(self, key, {each: self._outputs[each].encoded for each in key.hashes})

    def unpin(self, key: EncodedKey) -> None:
        """A sequence reads them no more."""
        for each in dict.fromkeys(key.hashes):
            self._outputs[each].num_users -= 1

    def run(self, waiting: WaitingQueue, oldest_step_id: int | None) -> list[Sequence]:
        """Computes a part of what parked sequences lack; see `Feature.provide`.

        Returns the sequences that are newly parked, because what they wait for has made room.
        """
        missing = [(key, sequence) for key, sequence in waiting.missing() if self._is_own(key)]
        needed = set(_hashes_of(missing))
        # When everybody who waits for a run has gone, so does its memory.
        self._under_way = [each for each in self._under_way if not needed.isdisjoint(each.inputs)]
        if not missing or (oldest_step_id is not None and oldest_step_id == self._last_part_before):
            return []
        self._last_part_before = oldest_step_id
        may_wait = oldest_step_id is None  # steps may wait on the GPU for the end of runs, because there are no others
        is_going_on = bool(self._under_way)
        parked: list[Sequence] = []
        self._complete(may_wait)
        if self._can_begin():
            inputs, parked = self._choose(missing, waiting)
            if inputs:
                self._under_way.append(_UnderWay(self._encoder.begin(list(inputs.values())), inputs))
                is_going_on = True
        if self._under_way and self._under_way[-1].found is None:
            self._advance(self._under_way[-1])
            self._complete(may_wait)
        for key, _ in missing:
            if self.has(key):
                waiting.unpark(key)
        if may_wait and is_going_on and not all(self.has(key) for key, _ in missing):
            self._call_again()
        return parked

    def _can_begin(self) -> bool:
        if not self._under_way:
            return True
        return self._under_way[-1].found is not None and len(self._under_way) < self._max_runs

    def _advance(self, under_way: _UnderWay[Input]) -> None:
        """Goes on with the last run."""
        try:
            under_way.found = under_way.run.advance()
        except (torch.OutOfMemoryError, CapacityError) as error:  # the latter from the capture of a graph
            self._under_way.remove(under_way)
            count = len(under_way.inputs)
            reason = CapacityError(f"the device has no memory left to encode {count} inputs: {error}")
            self._fail(set(under_way.inputs), reason)

    def _complete(self, may_wait: bool) -> None:
        """Keeps the outputs of runs that have ended, or of all that a GPU has, if steps may wait for them."""
        for each in list(self._under_way):
            if each.found is None or not (may_wait or all(one.is_computed for one in each.found)):
                return
            self._under_way.remove(each)
            for (name, read), encoded in zip(each.inputs.items(), each.found, strict=True):
                self._outputs[name] = _Output(encoded, encoded.rows.nbytes)
                self.counts.num_encoded += 1
                self.counts.num_rows += self._encoder.size(read)
                self.counts.num_bytes += encoded.rows.nbytes

    def _choose(
        self, missing: list[tuple[EncodedKey, Sequence]], waiting: WaitingQueue
    ) -> tuple[dict[str, Input], list[Sequence]]:
        """The inputs of the next run, by hash, in the order of their turns; and whom making room has parked.

        The first sequence gets room before any other. Another one begins if there is room for all that it lacks beside
        what those lack that have begun; its client is passed by as long as there is none.
        """
        first = missing[0][1]
        under_way = {name: each for run in self._under_way for name, each in run.inputs.items()}
        known, num_bytes = {*self._outputs, *under_way}, sum(map(self._encoder.output_bytes, under_way.values()))
        lacking = next((each for each in self._inputs_of(first) if each.hash not in known), None)
        if lacking is not None:  # others are only looked at if it has room: there may be a thousand
            room = num_bytes + self._encoder.output_bytes(lacking)
            if not self._may_have_room(room, first, waiting, is_only=not under_way):
                return {}, []
        turns_of = self._turns_of(missing, waiting)
        begun = self._begun(turns_of, known)
        choice = _Choice[Input](known, num_bytes, begun, sum(begun.values()))
        for turns in turns_of:
            while turns:
                for client, waits in list(turns.items()):
                    while client in turns and waits[0][1].hash in choice.known:
                        _pass_on(turns, client)
                for client in self._turns.sorted(turns):  # until one gets room: whoever gets none changes no turns
                    sequence, each = turns[client][0]
                    if choice.inputs and choice.num_rows + self._encoder.size(each) > self._max_rows:
                        return choice.inputs, choice.parked
                    if self._find_room(choice, sequence, each, waiting, is_first=sequence is first):
                        self._take(choice, sequence, each)
                        self._turns.charge(client, self._encoder.size(each))
                        _pass_on(turns, client)
                        break
                    if sequence is first:
                        return choice.inputs, choice.parked
                    del turns[client]
        return choice.inputs, choice.parked

    def _begun(
        self, turns_of: list[dict[Client, deque[tuple[Sequence, Input]]]], known: set[str]
    ) -> dict[Sequence, int]:
        """The sequences that have some of what they need, and how many bytes they lack."""
        waits_for = itertools.chain.from_iterable(waits for turns in turns_of for waits in turns.values())
        return {
            sequence: self._lacking_bytes(sequence, known)
            for sequence in dict.fromkeys(sequence for sequence, _ in waits_for)
            if any(each.hash in known for each in self._inputs_of(sequence))
        }

    def _find_room(
        self, choice: _Choice[Input], sequence: Sequence, each: Input, waiting: WaitingQueue, *, is_first: bool
    ) -> bool:
        """Whether there is room for an input of a sequence, which may have been made."""
        is_only = not (choice.inputs or self._under_way)
        room = choice.num_bytes + self._encoder.output_bytes(each)
        if not is_first and sequence not in choice.begun:
            room = choice.num_bytes + self._lacking_bytes(sequence, choice.known) + choice.begun_bytes
        excess = self.counts.num_bytes + room - self._max_bytes
        if excess > 0 and not is_first:
            if choice.must_stay is None:
                choice.must_stay = self._must_stay(waiting)
            if not self._can_drop(excess, choice.must_stay, sequence, is_only=is_only):
                return False
        parked = self._make_room(room, sequence, waiting, is_only=is_only, is_first=is_first)
        if parked is None:
            return False
        choice.parked += parked
        if excess > 0:
            choice.must_stay = None
        return True

    def _take(self, choice: _Choice[Input], sequence: Sequence, each: Input) -> None:
        choice.inputs[each.hash] = each
        choice.num_rows += self._encoder.size(each)
        choice.num_bytes += self._encoder.output_bytes(each)
        choice.known.add(each.hash)
        num_lacking = self._lacking_bytes(sequence, choice.known)
        choice.begun_bytes += num_lacking - choice.begun.get(sequence, 0)
        choice.begun[sequence] = num_lacking

    def _lacking_bytes(self, sequence: Sequence, known: set[str]) -> int:
        lacking = {each.hash: each for each in self._inputs_of(sequence) if each.hash not in known}
        return sum(map(self._encoder.output_bytes, lacking.values()))

    def _turns_of(
        self, missing: list[tuple[EncodedKey, Sequence]], waiting: WaitingQueue
    ) -> list[dict[Client, deque[tuple[Sequence, Input]]]]:
        """For each priority, the one that goes first before the others, what its clients wait for."""
        firsts: dict[tuple[EncodedKey, Client], Sequence] = {}  # equal inputs are computed at anybody's first turn
        for key, _ in missing:
            for sequence in waiting.all_of(key):
                firsts.setdefault((key, sequence.spec.client_id), sequence)
        found: dict[int, dict[Client, deque[tuple[Sequence, Input]]]] = {}
        for (_, client), sequence in sorted(firsts.items(), key=lambda item: item[1].order):
            turns = found.setdefault(waiting.class_of(sequence), {})
            turns.setdefault(client, deque()).extend((sequence, each) for each in self._inputs_of(sequence))
        self._turns.set_waiting([client for turns in found.values() for client in turns])
        return list(found.values())

    def _may_have_room(self, num_bytes: int, first: Sequence, waiting: WaitingQueue, *, is_only: bool) -> bool:
        """Whether `_make_room` would find so much for the first sequence."""
        own = {each.hash for each in self._inputs_of(first)}
        earlier = {each.hash for other in waiting if other.order < first.order for each in self._inputs_of(other)}
        must_stay = {name for name, output in self._outputs.items() if output.num_users or name in earlier - own}
        kept = sum(self._outputs[name].num_bytes for name in must_stay | (own & self._outputs.keys()))
        return kept + num_bytes <= self._max_bytes or (is_only and not must_stay)

    def _can_drop(self, excess: int, must_stay: set[str], sequence: Sequence, *, is_only: bool) -> bool:
        """Whether outputs of so many bytes may go; nobody else's has to stay if the only one is of any size."""
        kept_bytes = sum(self._outputs[name].num_bytes for name in must_stay)
        own = {each.hash for each in self._inputs_of(sequence)}
        return excess <= self.counts.num_bytes - kept_bytes or (is_only and must_stay <= own)

    def _must_stay(self, waiting: WaitingQueue) -> set[str]:
        """Outputs that only the first sequence may make others lose: somebody reads them or waits for them."""
        needed = {each.hash for other in waiting for each in self._inputs_of(other)}
        return {name for name, output in self._outputs.items() if output.num_users or name in needed}

    def _make_room(
        self, num_bytes: int, sequence: Sequence, waiting: WaitingQueue, *, is_only: bool, is_first: bool
    ) -> list[Sequence] | None:
        """Drops outputs until there is room for so many bytes more. None: there is none, and nothing was dropped.

        What others wait for is computed again later, so only the first sequence makes them lose it: those that come
        last. If no other sequence needs any of them, there is room for one of any size.
        """
        excess = self.counts.num_bytes + num_bytes - self._max_bytes
        if excess <= 0:
            return []
        own = {each.hash for each in self._inputs_of(sequence)}
        needed = dict[str, tuple[float, int]]()  # outputs for which others wait, with the order of the first of them
        for other in waiting:
            for each in self._inputs_of(other) if other is not sequence else ():
                needed[each.hash] = min(other.order, needed.get(each.hash, other.order))
        earlier = {name for name, order in needed.items() if not is_first or order < sequence.order}
        must_stay = {name for name, output in self._outputs.items() if output.num_users or name in earlier}
        names = [name for name in self._outputs if name not in must_stay | own]
        names.sort(key=lambda name: needed.get(name, _LAST), reverse=True)
        free = {name: self._outputs[name].num_bytes for name in names}
        if sum(free.values()) < excess and (must_stay or not is_only):
            return None
        dropped = set[str]()
        for name, size in free.items():
            if excess <= 0:
                break
            del self._outputs[name]
            dropped.add(name)
            self.counts.num_bytes -= size
            excess -= size
        keys = {each.resource for other in waiting for each in other.features if self._is_own(each.resource)}
        lacking = [key for key in keys if not dropped.isdisjoint(key.hashes)]
        return list(itertools.chain.from_iterable(waiting.park(key) for key in lacking))

    def _inputs_of(self, sequence: Sequence) -> Iterable[Input]:
        for feature in sequence.features:
            if isinstance(feature, EncodedSequence) and self._is_own(feature.resource):
                yield from feature.inputs

    def _is_own(self, key: object) -> bool:
        return isinstance(key, EncodedKey) and key.encoder == self.name

    def _call_again(self) -> None:
        """Has the engine look for work again at once: it may have nothing else to do."""
        assert self._post is not None, "the engine exists when a sequence waits"
        self._post(lambda waiting: ())

    def _fail(self, hashes: set[str], error: TwostrokeError) -> None:
        """Ends the waiting sequences that need one of these."""
        assert self._post is not None, "the engine exists when a sequence waits"

        def failed(waiting: WaitingQueue) -> list[tuple[Sequence, TwostrokeError]]:
            lacking = [each for each in waiting if any(one.hash in hashes for one in self._inputs_of(each))]
            return [(each, error) for each in lacking]

        self._post(failed)


class _Turns:
    """The clients whose inputs wait take turns.

    First comes the tenant for which the fewest rows were computed while it waited, then its client with the fewest. Who
    begins to wait counts as having had an even share of what was computed before, so that those who come later do not
    pass by for ever who has had some.
    """

    def __init__(self) -> None:
        self._num_rows = dict[tuple[int, ...], float]()  # of tenants, and of their clients
        self._num_waiting = Counter[tuple[int, ...]]()  # tenants, and clients of each
        self._shares = dict[tuple[int, ...], float]()  # rows that each of them would have had

    def set_waiting(self, clients: Collection[Client]) -> None:
        """These wait now; others are forgotten."""
        names = {name for tenant, client in clients for name in ((tenant,), (tenant, client))}
        self._num_waiting = Counter(name[:-1] for name in names)
        kept = {name: num_rows for name, num_rows in self._num_rows.items() if name in names}
        groups = {name[:-1] for name in kept}
        self._shares = {group: share for group, share in self._shares.items() if group in groups}
        self._num_rows = {name: kept.get(name, self._shares.get(name[:-1], 0.0)) for name in names}

    def sorted(self, turns: Mapping[Client, deque[tuple[Sequence, Input]]]) -> list[Client]:
        """Who goes first, and who after it."""
        return sorted(turns, key=lambda one: (self._num_rows[one[:1]], self._num_rows[one], turns[one][0][0].order))

    def charge(self, client: Client, num_rows: int) -> None:
        """So many rows are computed for a client that waits."""
        for name in (client[:1], client):
            group = name[:-1]
            self._num_rows[name] += num_rows
            self._shares[group] = self._shares.get(group, 0.0) + num_rows / self._num_waiting[group]


def _pass_on(turns: dict[Client, deque[tuple[Sequence, Input]]], client: Client) -> None:
    """A client's next input, if it has one, waits for its next turn."""
    turns[client].popleft()
    if not turns[client]:
        del turns[client]


def _hashes_of(missing: Iterable[tuple[EncodedKey, Sequence]]) -> Iterator[str]:
    return itertools.chain.from_iterable(key.hashes for key, _ in missing)


class Pin(Generic[Input]):
    """Keeps outputs in memory for one sequence, until it is released."""

    def __init__(self, runs: EncoderRuns[Input], key: EncodedKey, outputs: Mapping[str, Encoded]) -> None:
        self.outputs = outputs  # by hash
        self._runs: EncoderRuns[Input] | None = runs
        self._key = key

    def release(self) -> None:
        """The outputs may be dropped; steps under way still have them. Nothing happens the second time."""
        if self._runs is not None:
            self._runs.unpin(self._key)
            self._runs = None


class EncodedSequence(SequenceFeature, Generic[Input]):
    """What one sequence has of an encoder: its inputs, and their outputs while it is in the cache."""

    def __init__(self, inputs: tuple[Input, ...], runs: EncoderRuns[Input]) -> None:
        self.inputs = inputs
        self.resource = EncodedKey(runs.name, tuple(each.hash for each in inputs))
        self.pin: Pin[Input] | None = None  # while the sequence is in the cache; steps may read it later
        self._runs = runs

    @property
    def is_ready(self) -> bool:
        """Whether all outputs are in memory."""
        return self._runs.has(self.resource)

    def enter(self) -> None:
        """Keeps the outputs in memory."""
        self.pin = self._runs.pin(self.resource)

    def at_opening(self) -> EncodedSequence[Input]:
        """With the outputs of now: steps under way read them when the sequence has left."""
        return copy.copy(self)

    def leave(self, last_step_id: int) -> None:
        """They may be dropped; steps under way have their own references."""
        assert self.pin is not None, "it has entered"
        self.pin.release()
