"""The generations of one HTTP request, one per prompt, merged into one stream of chunks or list of answers."""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from services.common.config import GatewaySection
from services.common.errors import InvalidRequest
from services.gateway.access.access import Caller
from services.gateway.core.chunks import Chunk, Completion, Prompt
from services.gateway.core.generation import Generation
from services.gateway.core.request_service import Part, RequestService, num_answers_of
from services.gateway.resources.gather import gather_or_cancel
from services.pb import gateway_pb2


class Generations:
    """All generations of a request. Always call `close`, also if `start` fails."""

    def __init__(self, service: RequestService, *, repeats_prompt: bool = False) -> None:
        """`repeats_prompt`: the first chunk of every answer carries the prompt, and not only that of answer 0."""
        self.running: list[Generation] = []
        self._service = service
        self._repeated = _RepeatedPrompts() if repeats_prompt else None
        self._readers: dict[asyncio.Task[Chunk], int] = {}  # index of the prompt, by the task that reads its next chunk
        self._ready: list[asyncio.Task[Chunk]] = []

    async def start(
        self, messages: Sequence[gateway_pb2.GenerateRequest], caller: Caller, *, in_one_message: bool = False
    ) -> None:
        """Starts one generation per message. Raises the `TwostrokeError` of the first one that is refused.

        `in_one_message`: see `Part`.
        """
        service = self._service
        num_answers = sum(map(num_answers_of, messages))
        if num_answers > 1:  # a single one is checked when it is opened
            with service.metrics.noting_rejection():
                _check_num_answers(messages, num_answers, service.section)
                caller.usage.check_prompts(len(messages), num_answers)
        if len(messages) > 1:
            await self._start_batch(messages, caller, in_one_message)
            return
        [message] = messages
        self.running.append(await service.start(message, caller, Part(in_one_message=in_one_message)))
        await asyncio.sleep(0)  # it goes on its way to the dense worker

    async def _start_batch(
        self, messages: Sequence[gateway_pb2.GenerateRequest], caller: Caller, in_one_message: bool
    ) -> None:
        """Starts several generations, which can be aborted together while none of them is read."""
        service, num_logprobs = self._service, 0
        with ExitStack() as stack:
            with service.metrics.noting_rejection():
                give_up_room = stack.enter_context(service.room(messages, caller))
            async with service.reading(messages, caller) as aborted:
                for prompt_index, message in enumerate(messages):
                    if prompt_index:  # starting the answers to one prompt may take milliseconds
                        await service.heavy_work.beginning()
                    give_up_room(num_answers_of(message))  # its start takes it before anybody else can
                    name = f"prompt[{prompt_index}]"
                    part = Part(name, num_logprobs, is_being_read=True, in_one_message=in_one_message)
                    generation = await service.start(message, caller, part)
                    self.running.append(generation)
                    if message.request_id in aborted:  # alone, before it was started
                        generation.abort()
                    num_logprobs += generation.request.max_num_logprobs
                    await asyncio.sleep(0)

    async def next_chunk(self) -> tuple[int, Chunk] | None:
        """The index of a prompt and the next chunk of its answers; None when all have ended.

        Raises the error of a failed generation.
        """
        repeated = self._repeated
        if repeated is None:
            return await self._next_chunk()
        while not repeated.chunks:
            chunk = await self._next_chunk()
            if chunk is None:
                return None
            repeated.add(*chunk)
        return repeated.chunks.popleft()

    async def forward(
        self,
        take: Callable[[list[Chunk]], None],
        can_take: Callable[[], bool],
        take_text: Callable[[str], None] | None = None,
    ) -> None:
        """Passes chunks of the only prompt to `take` as in `Generation.forward`.

        Returns at once if chunks of several prompts have to be merged, or must wait for their prompt, or may be large:
        `next_chunk` has all of them.
        """
        if len(self.running) != 1 or self._repeated is not None:
            return
        [generation] = self.running
        request = generation.request
        if request.num_logprobs is None and not request.returns_prompt and not request.is_stepwise:
            await generation.forward(take, can_take, take_text)

    async def _next_chunk(self) -> tuple[int, Chunk] | None:
        if len(self.running) == 1:
            [generation] = self.running
            return None if generation.is_finished else (0, await generation.next_chunk())
        if not self._readers and not self._ready:
            for prompt_index in range(len(self.running)):
                self._read(prompt_index)
        if not self._ready:
            if not self._readers:
                return None
            done, _ = await asyncio.wait(self._readers, return_when=asyncio.FIRST_COMPLETED)
            self._ready.extend(done)
        task = self._ready.pop()
        prompt_index = self._readers.pop(task)
        chunk = task.result()
        self._read(prompt_index)
        return prompt_index, chunk

    async def completions(self) -> list[tuple[list[Completion], Prompt | None]]:
        """All answers, grouped by prompt. All are read concurrently, because only reading detects stop strings."""
        return await gather_or_cancel([generation.completions() for generation in self.running])

    async def close(self) -> None:
        """Stops all running generations. Each takes milliseconds: one of all requests in each iteration of the loop."""
        for task in self._readers:
            task.cancel()
        left = self.running[::-1]
        try:
            await asyncio.gather(*self._readers, return_exceptions=True)
            while left:
                if not left[-1].is_finished:
                    await self._service.heavy_work.beginning()
                left.pop().close()
        finally:  # also if this task is cancelled meanwhile
            for generation in left:
                generation.close()

    def _read(self, prompt_index: int) -> None:
        generation = self.running[prompt_index]
        if not generation.is_finished:
            self._readers[asyncio.ensure_future(generation.next_chunk())] = prompt_index


def _check_num_answers(
    messages: Sequence[gateway_pb2.GenerateRequest], num_answers: int, section: GatewaySection
) -> None:
    """Raises `InvalidRequest` for too many answers. Of one prompt, where it is read if `max_n` allows no more."""
    if num_answers <= section.max_answers or (len(messages) == 1 and section.max_n <= section.max_answers):
        return
    field = "best_of" if messages[0].best_of >= messages[0].n else "n"
    what = f"{field} is {num_answers}"
    if len(messages) > 1:
        what = f"{len(messages)} prompts with n or best_of make {num_answers} answers"
    raise InvalidRequest(f"{what}, gateway.max_answers is {section.max_answers}", field)


class _RepeatedPrompts:
    """Holds back the chunks of each prompt's answers until answer 0 has brought the prompt, and gives it to all.

    The log-probabilities of a prompt are computed once, for answer 0, which may start later than the others.
    """

    def __init__(self) -> None:
        self.chunks: deque[tuple[int, Chunk]] = deque()  # ready, with the indexes of their prompts
        self._prompts: dict[int, Prompt] = {}  # by index
        self._held = defaultdict[int, list[Chunk]](list)  # by index of the prompt
        self._begun: set[tuple[int, int]] = set()  # indexes of prompt and answer, of answers that have the prompt

    def add(self, prompt_index: int, chunk: Chunk) -> None:
        """Adds a chunk; it and those held back become ready if the prompt is known."""
        held = self._held[prompt_index]
        held.append(chunk)
        if chunk.prompt is not None:
            self._prompts[prompt_index] = chunk.prompt
        prompt = self._prompts.get(prompt_index)
        if prompt is None:
            return
        for each in held:
            if (prompt_index, each.index) not in self._begun:
                self._begun.add((prompt_index, each.index))
                each.prompt = prompt
            self.chunks.append((prompt_index, each))
        held.clear()
