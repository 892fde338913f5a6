"""What open requests hold together is limited, with room for clients that hold little."""

from __future__ import annotations

import pytest

from services.common.errors import CapacityError, InvalidRequest
from services.gateway.resources.memory_budget import HeldMemory, MemoryBudget

GREEDY, OTHER, ANYBODY = (0, 1), (0, 2), (0, 0)


def test_a_request_that_could_never_fit_is_wrong_and_names_value_and_limit() -> None:
    message = r"1001 bytes of memory for logits, gateway.max_held_bytes is 1000: ask for less"
    with pytest.raises(InvalidRequest, match=message) as refused:
        HeldMemory(MemoryBudget(1000), GREEDY).reserve(1001, "logits", "n", "ask for less")
    assert refused.value.param == "n"


def test_the_sum_over_all_requests_counts_until_they_end() -> None:
    budget = MemoryBudget(1000)
    first, second = HeldMemory(budget, ANYBODY), HeldMemory(budget, ANYBODY)
    first.reserve(600, "its body")
    first.reserve(100, "logits")
    with pytest.raises(CapacityError, match=r"700 bytes of memory, 301 more for logits would exceed 1000"):
        second.reserve(301, "logits")
    second.reserve(300, "logits")
    first.release()
    first.release()
    assert budget.num_held == 300
    second.reserve(700, "logits")


def test_the_last_eighth_is_for_clients_that_hold_little() -> None:
    budget = MemoryBudget(6400)
    greedy = HeldMemory(budget, GREEDY)
    for _ in range(14):
        greedy.reserve(400, "logits")
    with pytest.raises(CapacityError, match=r"this client has 5600 of 5600 bytes of memory .*gateway.max_held_bytes"):
        HeldMemory(budget, GREEDY).reserve(101, "logits")
    HeldMemory(budget, OTHER).reserve(800, "logits")


def test_what_has_been_made_already_counts_but_is_not_refused() -> None:
    budget = MemoryBudget(1000)
    held = HeldMemory(budget, OTHER)
    held.add(1200)
    with pytest.raises(CapacityError):
        HeldMemory(budget, GREEDY).reserve(1, "its body")
    held.release()
    assert budget.num_held == 0
