"""The room of a queue that one client cannot take from others: the gateways' queues and the dense worker's have it.

The last part of a queue is kept for clients that have nothing else in it, or little.
"""

from __future__ import annotations

KEPT_PARTS = 8  # one part in so many of the queue is kept
SMALL_PARTS = 64  # little is at most one part in so many


def may_wait(limit: int, num_waiting: int, num_own: int, num_more: int) -> bool:
    """Whether a client with `num_own` of the `num_waiting` in a queue may add `num_more`, if the queue has room."""
    return is_little(limit, num_own, num_more) or num_waiting + num_more <= limit - limit // KEPT_PARTS


def is_little(limit: int, num_own: int, num_more: int) -> bool:
    """Whether a client with `num_own` that adds `num_more` may use all of the limit."""
    return num_own == 0 or num_own + num_more <= limit // SMALL_PARTS


def refusal(what: str, num_more: int, limit: int) -> str:
    """What to tell a client that has `what` and may not add `num_more`."""
    return (
        f"this client has {what}; with {num_more} more it would use the last 1/{KEPT_PARTS} of the limit of "
        f"{limit}, which is kept for clients with at most 1/{SMALL_PARTS} of it"
    )
