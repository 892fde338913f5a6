"""`HeldForms`: the memory that compiled forms of open requests take in dense workers. Runs in the event loop.

A form of some kilobytes may take tens of megabytes when it is compiled, from before its sequence waits until it ends.
Requests with the same form share it there, and so they do here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from services.common.fairness.client_queue import Client
from services.common.structured_output import StructuredOutput
from services.gateway.resources.memory_budget import HeldMemory, MemoryBudget


@dataclass(slots=True)
class _Held:
    memory: HeldMemory
    num_requests: int = 0


class HeldForms:
    """Counts each form once in a budget, while any request has it."""

    def __init__(self, budget: MemoryBudget) -> None:
        self._budget = budget
        self._held: dict[StructuredOutput, _Held] = {}

    async def hold(self, form: StructuredOutput, client: Client) -> Callable[[], None]:
        """Holds a form that has been tried. Call what it returns once, when the request has ended.

        Raises `InvalidRequest` if the form alone exceeds the budget, and `CapacityError` if there is no room for long.
        """
        if form not in self._held:
            memory = HeldMemory(self._budget, client)
            advice = "send a smaller form"
            await memory.reserve(form.compiled_bytes, "the compiled form of the output", form.field_name, advice)
            if self._held.setdefault(form, _Held(memory)).memory is not memory:
                memory.release()  # another request with the form has waited beside this one
        held = self._held[form]
        held.num_requests += 1

        def release() -> None:
            held.num_requests -= 1
            if not held.num_requests:
                del self._held[form]
                held.memory.release()

        return release
