"""`LogitsBudget`: limits the memory for logits of all open requests together. Runs in the event loop."""

from __future__ import annotations

from services.common.errors import CapacityError, InvalidRequest

KEY = "gateway.max_logits_bytes"


class LogitsBudget:
    """What is reserved is released when the request ends."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_reserved = 0

    def reserve(self, num_bytes: int) -> None:
        """Raises `InvalidRequest` for more than the whole budget, `CapacityError` for more than what is left of it."""
        if num_bytes > self._max_bytes:
            raise InvalidRequest(
                f"the answers may have {num_bytes} bytes of logits, {KEY} is {self._max_bytes}: shorten the prompt or "
                "lower max_tokens or n",
                "return_generation_logits",
            )
        if self._num_reserved + num_bytes > self._max_bytes:
            raise CapacityError(
                f"open requests may have {self._num_reserved} bytes of logits, {num_bytes} more would exceed "
                f"{self._max_bytes} ({KEY})"
            )
        self._num_reserved += num_bytes

    def release(self, num_bytes: int) -> None:
        """Gives back what was reserved."""
        self._num_reserved -= num_bytes
