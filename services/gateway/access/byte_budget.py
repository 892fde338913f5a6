"""`ByteBudget`: limits the memory that all open requests together may take for one purpose. Runs in the event loop."""

from __future__ import annotations

from dataclasses import dataclass

from services.common.errors import CapacityError, InvalidRequest


@dataclass(slots=True)
class ByteBudget:
    """What is reserved is released when the request ends."""

    max_bytes: int
    key: str  # of the config, for messages
    what: str  # takes the bytes, such as "logits"
    param: str  # the field to blame
    advice: str  # to a client that asks for more than there can be
    num_reserved: int = 0

    def reserve(self, num_bytes: int, what: str | None = None, param: str | None = None) -> None:
        """Raises `InvalidRequest` for more than the whole budget, `CapacityError` for more than what is left of it.

        `what` and `param` are those of the budget unless they are given.
        """
        what = what or self.what
        if num_bytes > self.max_bytes:
            raise InvalidRequest(
                f"the request may have {num_bytes} bytes of {what}, {self.key} is {self.max_bytes}: {self.advice}",
                param or self.param,
            )
        if self.num_reserved + num_bytes > self.max_bytes:
            raise CapacityError(
                f"open requests may have {self.num_reserved} bytes of {self.what}, {num_bytes} more "
                f"of {what} would exceed {self.max_bytes} ({self.key})"
            )
        self.num_reserved += num_bytes

    def release(self, num_bytes: int) -> None:
        """Gives back what was reserved."""
        self.num_reserved -= num_bytes
