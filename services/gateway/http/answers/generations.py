"""The generations of one HTTP request, one a prompt, as one stream of chunks or as whole answers."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from services.common.errors import InvalidRequest, TwostrokeError
from services.gateway.access.access import Caller
from services.gateway.frontend import Frontend
from services.gateway.generation import Chunk, Completion, Generation, Prompt
from services.pb import gateway_pb2

T = TypeVar("T")


class Generations:
    """Started all or none by `start`; `close` in any case."""

    def __init__(self) -> None:
        self.running: list[Generation] = []
        self._readers: dict[asyncio.Task[Chunk], int] = {}  # of several prompts, the place of each
        self._ready: list[asyncio.Task[Chunk]] = []

    async def start(
        self, frontend: Frontend, messages: Sequence[gateway_pb2.GenerateRequest], caller: Caller
    ) -> None:
        """Raises a `TwostrokeError` for the first that is refused."""
        num_answers = sum(max(1, message.n, message.best_of) for message in messages)
        try:
            if num_answers > frontend.max_answers:
                raise InvalidRequest(
                    f"{len(messages)} prompts with n or best_of make {num_answers} answers, gateway.max_answers is "
                    f"{frontend.max_answers}",
                    "n",
                )
            caller.usage.check_prompts(len(messages), num_answers)
        except TwostrokeError as error:
            frontend.metrics.on_rejected(error)
            raise
        num_logprobs = 0
        for place, message in enumerate(messages):
            prompt_name = f"prompt[{place}]" if len(messages) > 1 else "prompt"
            generation = await frontend.start(message, caller, num_logprobs, prompt_name)
            self.running.append(generation)
            num_logprobs += generation.request.max_num_logprobs
            await asyncio.sleep(0)  # others' turn: to start one prompt's answers may take milliseconds

    async def next_chunk(self) -> tuple[int, Chunk] | None:
        """Place of a prompt and what is new of its answers; None: all have ended. Raises what a generation raises."""
        if len(self.running) == 1:
            [generation] = self.running
            return None if generation.is_finished else (0, await generation.next_chunk())
        if not self._readers and not self._ready:
            for place in range(len(self.running)):
                self._read(place)
        if not self._ready:
            if not self._readers:
                return None
            done, _ = await asyncio.wait(self._readers, return_when=asyncio.FIRST_COMPLETED)
            self._ready.extend(done)
        task = self._ready.pop()
        place = self._readers.pop(task)
        chunk = task.result()
        self._read(place)
        return place, chunk

    async def completions(self) -> list[tuple[list[Completion], Prompt | None]]:
        """All answers, prompt by prompt; read side by side, for a stop string ends only what is read."""
        return await gather_or_cancel([generation.completions() for generation in self.running])

    async def close(self) -> None:
        """Stops what still runs."""
        for task in self._readers:
            task.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)
        for generation in self.running:
            generation.close()

    def _read(self, place: int) -> None:
        generation = self.running[place]
        if not generation.is_finished:
            self._readers[asyncio.ensure_future(generation.next_chunk())] = place


async def gather_or_cancel(coroutines: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """All results, or the first error once the others have been cancelled."""
    if len(coroutines) == 1:
        return [await coroutines[0]]
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
