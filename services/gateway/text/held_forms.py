"""`HeldForms`: the memory that compiled forms of open requests take in dense workers. Runs in the event loop.

A form of some kilobytes may take tens of megabytes when it is compiled, from before its sequence waits until it ends.
Requests with the same form share it there, and so they do here.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from services.common.errors import TwostrokeError
from services.common.fairness import Client
from services.common.structured_output import StructuredOutput
from services.gateway.resources.memory_budget import HeldMemory, MemoryBudget


@dataclass(slots=True)
class _Held:
    memory: HeldMemory
    requests: Counter[Client] = field(default_factory=Counter)  # that have it; a client without one has no entry


class HeldForms:
    """Counts each form once in a budget, while any request has it, as that of a client which has such a request."""

    def __init__(self, budget: MemoryBudget) -> None:
        self._budget = budget
        self._held: dict[StructuredOutput, _Held] = {}
        self._waiting: dict[StructuredOutput, asyncio.Future[None]] = {}  # for memory: done when there is some, or none

    async def hold(self, form: StructuredOutput, client: Client) -> Callable[[], None]:
        """Holds a form that has been tried. Call what it returns once, when the request has ended.

        Raises `InvalidRequest` if the form alone exceeds the budget, and `CapacityError` if there is no room for long.
        """
        while form not in self._held:
            if (waiting := self._waiting.get(form)) is None:
                await self._reserve(form, client)
                continue
            await asyncio.wait([waiting])
            if not waiting.cancelled() and (error := waiting.exception()) is not None:
                raise error
        held = self._held[form]
        held.requests[client] += 1

        def release() -> None:
            held.requests[client] -= 1
            if not held.requests[client]:
                del held.requests[client]
            if not held.requests:
                del self._held[form]
                held.memory.release()
            elif held.memory.client not in held.requests:
                held.memory.move_to(next(iter(held.requests)))

        return release

    async def _reserve(self, form: StructuredOutput, client: Client) -> None:
        """Waits for the memory of a form for all requests that have it; the next one does, if this one is cancelled."""
        memory = HeldMemory(self._budget, client)
        waiting = self._waiting[form] = asyncio.get_running_loop().create_future()
        try:
            await memory.reserve(
                form.compiled_bytes, "the compiled form of the output", form.field_name, "send a smaller form"
            )
        except TwostrokeError as error:
            waiting.set_exception(error)
            waiting.exception()  # nobody else may wait for it
            raise
        finally:
            del self._waiting[form]
            waiting.cancel()  # unless it has failed: the others look again
        memory.settle()
        self._held[form] = _Held(memory)
