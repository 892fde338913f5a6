"""`LogitsBudget`: limits the memory for logits of all open requests together. Runs in the event loop."""

from __future__ import annotations

from services.common.errors import CapacityError, InvalidRequest
from services.gateway.request import GenerationRequest

KEY = "gateway.max_logits_bytes"


def max_num_logits(request: GenerationRequest, vocab_size: int) -> int:
    """The numbers in all logits that the answers to a request may have."""
    num_rows = request.best_of * request.max_tokens if request.return_generation_logits else 0
    if request.return_context_logits:
        num_rows += len(request.prompt_token_ids)
    return num_rows * vocab_size


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
