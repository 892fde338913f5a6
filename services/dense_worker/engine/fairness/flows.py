"""`Flow`: the live sequences of one client, or of one tenant with all of its clients, and what they have cost so far.

A tenant is an API key; without keys there is one tenant. Its clients are addresses. The gateway names both by numbers.

The flow that has cost the fewest tokens goes next. That is deficit round robin with a quantum of one token: a ranking
takes the place of the rounds in which nobody has enough credit.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator

MAX_DEBT_TOKENS = 512  # how far behind its fair turn a flow may begin to wait


class Flow:
    """Exists from the arrival of its first live sequence until the end of the last one.

    A tenant's flow has `clients`. A client's flow has `num_waiting`, the number of its waiting sequences.
    """

    __slots__ = ("clients", "group", "num_live", "num_tokens", "num_waiting", "number")

    def __init__(self, number: int, group: FlowGroup) -> None:
        self.number = number
        self.group = group
        self.clients = FlowGroup(self) if group.owner is None else None
        self.num_waiting = 0
        self.num_live = 0
        self.num_tokens = 0.0  # its cost: see `charge`; only differences between flows that wait have a meaning

    @property
    def is_waiting(self) -> bool:
        return self.num_waiting > 0 if self.clients is None else self.clients.has_waiting

    @property
    def path(self) -> tuple[Flow, Flow]:
        """A client's flow, and its tenant's."""
        tenant = self.group.owner
        assert tenant is not None, "only clients have sequences"
        return self, tenant

    def charge(self, num_tokens: int) -> None:
        """Adds to the cost of a client and of its tenant."""
        if num_tokens:  # a new prompt has none in the KV cache, and its first token has to come soon
            for flow in self.path:
                flow.num_tokens += num_tokens
                flow.group.rank(flow)

    def choose(self, num_tokens: int) -> None:
        """Charges a client for a sequence that leaves the queue: the tokens that it has to compute."""
        self.charge(num_tokens)
        for flow in self.path:
            flow.group.note_chosen(flow, num_tokens)

    def set_num_waiting(self, num_waiting: int) -> None:
        """Sets the number of a client's waiting sequences."""
        has_changed = bool(num_waiting) != self.is_waiting
        self.num_waiting = num_waiting
        for flow in self.path if has_changed else ():
            flow.group.rank(flow)

    def leave(self) -> None:
        """Counts that one of a client's sequences has ended."""
        for flow in self.path:
            flow.group.leave(flow)


class FlowGroup:
    """All tenants of a queue, or all clients of one tenant. Every operation takes O(log n) comparisons.

    `_clock` is the cost that a flow would have if it had always waited and got its share. Flows begin to wait with this
    cost, so they get nothing for the time when they asked for nothing. The clock runs on with every choice; therefore
    new flows without end cannot keep an old one waiting.
    """

    def __init__(self, owner: Flow | None = None) -> None:
        self.owner = owner
        self._flows: dict[int, Flow] = {}
        self._waiting = _Ranking()
        self._clock = 0.0
        self._last_chosen: Flow | None = None

    @property
    def has_waiting(self) -> bool:
        return bool(self._waiting.entries)

    def enter(self, number: int) -> Flow:
        """The flow with this number, with one more live sequence."""
        flow = self._flows.get(number)
        if flow is None:
            flow = self._flows[number] = Flow(number, self)
        flow.num_live += 1
        return flow

    def enter_client(self, tenant: int, client: int) -> Flow:
        """The flow of a client of a tenant, with one more live sequence. This group has the tenants."""
        clients = self.enter(tenant).clients
        assert clients is not None, "a tenant has clients"
        return clients.enter(client)

    def leave(self, flow: Flow) -> None:
        """Counts that one of a flow's sequences has ended."""
        flow.num_live -= 1
        if not flow.num_live:
            del self._flows[flow.number]
            if self._last_chosen is flow:
                self._last_chosen = None

    def waiting_clients(self) -> Iterator[Flow]:
        """All clients that wait, the one whose turn it is first. This group has the tenants."""
        for tenant in self._waiting:
            assert tenant.clients is not None, "a tenant has clients"
            yield from tenant.clients._waiting

    def note_chosen(self, flow: Flow, num_tokens: int) -> None:
        """Notes that a sequence of a flow was chosen and charged for; it counts as waiting until afterwards."""
        self._set_clock(num_tokens / len(self._waiting.entries))
        self._last_chosen = flow

    def rank(self, flow: Flow) -> None:
        """Puts a flow at its place after its cost has changed, or it has begun or ceased to wait."""
        if not flow.is_waiting:
            self._waiting.discard(flow)
        elif flow in self._waiting:
            self._waiting.put(flow)
        else:
            self._set_clock(0.0)
            flow.num_tokens = min(max(flow.num_tokens, self._clock), self._clock + MAX_DEBT_TOKENS)
            # Of flows with equal costs the one chosen last does not go first again, else the earliest one goes first.
            entries = self._waiting.entries
            goes_first = bool(entries) and entries[0][2] is self._last_chosen
            self._waiting.put(flow, goes_first=goes_first)

    def _set_clock(self, num_tokens: float) -> None:
        """Advances the clock, within the costs of the flows that wait: sequences may cost less than was charged."""
        self._clock += num_tokens
        if entries := self._waiting.entries:
            self._clock = min(max(self._clock, entries[0][0]), entries[-1][0])


class _Ranking:
    """Flows by cost, the lowest first; equal ones in the order in which they got there."""

    def __init__(self) -> None:
        self.entries: list[tuple[float, int, Flow]] = []  # (cost, turn, flow); no two turns are equal
        self._entry_of: dict[Flow, tuple[float, int, Flow]] = {}
        self._turns = itertools.count(1)

    def __iter__(self) -> Iterator[Flow]:
        return (flow for _, _, flow in self.entries)

    def __contains__(self, flow: Flow) -> bool:
        return flow in self._entry_of

    def put(self, flow: Flow, *, goes_first: bool = False) -> None:
        entry = self._entry_of.get(flow)
        if entry is not None and entry[0] == flow.num_tokens:
            return
        self.discard(flow)
        turn = next(self._turns)
        entry = self._entry_of[flow] = flow.num_tokens, -turn if goes_first else turn, flow
        bisect.insort(self.entries, entry)

    def discard(self, flow: Flow) -> None:
        entry = self._entry_of.pop(flow, None)
        if entry is not None:
            del self.entries[bisect.bisect_left(self.entries, entry)]
