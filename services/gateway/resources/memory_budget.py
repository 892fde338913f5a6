"""`MemoryBudget`: limits the memory that all open requests together take. Runs in the event loop.

Whatever is large is counted before it is read, computed or encoded: bodies, embeddings, log-probabilities, logits.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from services.common.errors import CapacityError, InvalidRequest
from services.common.fairness.client_turns import Client
from services.common.fairness.kept_room import may_wait, refusal

KEY = "gateway.max_held_bytes"
BYTES_PER_BODY_BYTE = 4  # of a body or message: itself, the objects that are made of it, and the prompt


class MemoryBudget:
    """One for a gateway. The last part is kept for clients that hold nothing, or little."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_held = 0
        self._held_of = Counter[Client]()  # a client that holds nothing has no entry

    def add(self, client: Client, num_bytes: int) -> None:
        """Counts what a client holds more, or less."""
        self.num_held += num_bytes
        self._held_of[client] += num_bytes
        if not self._held_of[client]:
            del self._held_of[client]

    def check(self, client: Client, num_bytes: int, what: str, param: str | None, advice: str) -> None:
        """Raises `InvalidRequest` or `CapacityError`, as in `HeldMemory.reserve`, if so much more does not fit."""
        if num_bytes > self.max_bytes:
            raise InvalidRequest(
                f"the request may take {num_bytes} bytes of memory for {what}, {KEY} is {self.max_bytes}: {advice}",
                param,
            )
        if self.num_held + num_bytes > self.max_bytes:
            raise CapacityError(
                f"open requests may take {self.num_held} bytes of memory, {num_bytes} more for {what} would exceed "
                f"{self.max_bytes} ({KEY})"
            )
        num_own = self._held_of[client]
        if any(client) and not may_wait(self.max_bytes, self.num_held, num_own, num_bytes):
            held = f"{num_own} of {self.num_held} bytes of memory that requests may take ({KEY})"
            raise CapacityError(refusal(held, num_bytes, self.max_bytes))


@dataclass(slots=True)
class HeldMemory:
    """What one request holds of the budget, until `release`."""

    budget: MemoryBudget
    client: Client
    num_bytes: int = field(default=0, init=False)

    def reserve(self, num_bytes: int, what: str, param: str | None = None, advice: str = "send less") -> None:
        """Holds more. `what` takes the bytes, such as "logits"; `param`: the field to blame.

        Raises `InvalidRequest` for more than the whole budget, with an `advice`, and `CapacityError` for more than is
        left of it for this client.
        """
        self.budget.check(self.client, num_bytes, what, param, advice)
        self.budget.add(self.client, num_bytes)
        self.num_bytes += num_bytes

    def add(self, num_bytes: int) -> None:
        """Holds more of what has been made already, so it is too late to refuse it."""
        self.budget.add(self.client, num_bytes)
        self.num_bytes += num_bytes

    def release(self) -> None:
        """Gives back all that the request holds."""
        self.budget.add(self.client, -self.num_bytes)
        self.num_bytes = 0
