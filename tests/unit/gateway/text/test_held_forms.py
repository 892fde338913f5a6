"""What compiled forms take in dense workers counts once for all open requests with the same form."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from services.common.errors import CapacityError, InvalidRequest
from services.common.structured_output import Constraint, StructuredOutput
from services.gateway.resources.memory_budget import MemoryBudget
from services.gateway.text.held_forms import HeldForms
from tests.support.running_gateway import until

CLIENT, OTHER = (0, 1), (0, 2)
LONG_S = 60.0  # longer than any test


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, LONG_S / 2))


def form(text: str, num_bytes: int) -> StructuredOutput:
    return StructuredOutput(Constraint.GRAMMAR, text, field_name="response_format", compiled_bytes=num_bytes)


def test_requests_with_the_same_form_count_once_and_until_the_last_one_ends() -> None:
    async def test() -> None:
        budget = MemoryBudget(1000)
        forms = HeldForms(budget)
        ends = [await forms.hold(form("a", 600), client) for client in (CLIENT, OTHER, CLIENT)]
        assert budget.num_held == 600
        for end in ends[:2]:
            end()
        assert budget.num_held == 600
        with pytest.raises(CapacityError, match=r"600 bytes of memory, 500 more for the compiled form of the output"):
            await forms.hold(form("b", 500), CLIENT)
        ends[2]()
        assert budget.num_held == 0
        (await forms.hold(form("b", 500), OTHER))()
        assert budget.num_held == 0

    run(test())


def test_a_form_counts_for_a_client_that_still_has_it() -> None:
    async def test() -> None:
        budget = MemoryBudget(1000)
        forms = HeldForms(budget)
        first, second = [await forms.hold(form("a", 600), client) for client in (CLIENT, OTHER)]
        first()
        (await forms.hold(form("b", 300), CLIENT))()  # it holds nothing else, so that the last eighth is for it, too
        with pytest.raises(CapacityError, match=r"600 of 600 bytes of memory"):
            await forms.hold(form("b", 300), OTHER)
        second()
        assert budget.num_held == 0

    run(test())


def test_a_form_waits_for_room_and_two_that_waited_for_the_same_count_once() -> None:
    async def test() -> None:
        budget = MemoryBudget(1000, LONG_S, 10)
        forms = HeldForms(budget)
        end = await forms.hold(form("a", 800), CLIENT)
        waiting = [asyncio.create_task(forms.hold(form("b", 400), client)) for client in (CLIENT, OTHER)]
        await until(lambda: budget.num_waiting == 1)
        end()
        ends = await asyncio.gather(*waiting)
        assert budget.num_held == 400
        for end in ends:
            end()
        assert budget.num_held == 0

    run(test())


def test_a_client_that_leaves_while_its_form_waits_holds_nothing() -> None:
    async def test() -> None:
        budget = MemoryBudget(1000, LONG_S, 10)
        forms = HeldForms(budget)
        end = await forms.hold(form("a", 800), CLIENT)
        waiting = asyncio.create_task(forms.hold(form("b", 400), OTHER))
        await until(lambda: budget.num_waiting == 1)
        waiting.cancel()
        await asyncio.wait([waiting])
        end()
        assert budget.num_held == budget.num_waiting == 0

    run(test())


def test_requests_with_the_same_form_need_its_memory_once_also_while_they_wait() -> None:
    async def test() -> None:
        budget = MemoryBudget(1000, LONG_S, 10)
        forms = HeldForms(budget)
        end = await forms.hold(form("a", 800), CLIENT)
        waiting = [asyncio.create_task(forms.hold(form("b", 900), client)) for client in (CLIENT, OTHER, CLIENT)]
        await until(lambda: budget.num_waiting == 1)
        waiting[0].cancel()  # the next one waits in its place
        await asyncio.wait(waiting[:1])
        end()
        for end in await asyncio.gather(*waiting[1:]):
            end()
        assert budget.num_held == budget.num_waiting == 0

    run(test())


def test_requests_with_the_same_form_are_refused_together() -> None:
    async def test() -> None:
        budget = MemoryBudget(1000, 0.01, 10)
        forms = HeldForms(budget)
        end = await forms.hold(form("a", 800), CLIENT)
        waiting = [asyncio.create_task(forms.hold(form("b", 900), client)) for client in (CLIENT, OTHER)]
        await asyncio.wait(waiting)
        assert all(isinstance(each.exception(), CapacityError) for each in waiting)
        end()
        assert budget.num_held == budget.num_waiting == 0

    run(test())


def test_a_form_that_could_never_fit_is_refused_by_value_limit_and_field() -> None:
    async def test() -> None:
        message = r"1001 bytes of memory for the compiled form of the output, gateway\.max_held_bytes is 1000"
        with pytest.raises(InvalidRequest, match=message) as refused:
            await HeldForms(MemoryBudget(1000)).hold(form("a", 1001), CLIENT)
        assert refused.value.param == "response_format"

    run(test())
