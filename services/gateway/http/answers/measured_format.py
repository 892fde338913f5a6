"""`MeasuredFormat`: adds times to the objects of another format, for requests or servers that want them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from services.gateway.chunks import Chunk, Completion, Finish, Prompt
from services.gateway.http.answers.answer import Format
from services.gateway.http.answers.timings import request_metrics, timings, timings_so_far
from services.gateway.http.schemas.sampling import GenerationFields


def measured(form: Format, body: GenerationFields, *, has_metrics: bool) -> Format:
    """`form` itself if no times are asked for. `has_metrics`: whether the server gives vLLM's `metrics`."""
    if not has_metrics and not body.timings_per_token:
        return form
    return MeasuredFormat(form, has_timings=bool(body.timings_per_token), has_metrics=has_metrics)


class MeasuredFormat:
    """The objects of completions or chats with `timings`, as in llama.cpp, and `metrics`, as in vLLM.

    `timings` is in every event of a stream. A whole answer has it, or with several answers each choice. `metrics` is in
    the whole object, or in the event with the usage, if there is one answer in all.
    """

    def __init__(self, form: Format, *, has_timings: bool, has_metrics: bool) -> None:
        self.param_names: Mapping[str, str] = form.param_names
        self.has_event_names = form.has_event_names
        self.end_of_stream = form.end_of_stream
        self._form = form
        self._has_timings = has_timings
        self._has_metrics = has_metrics
        self._begun_at = 0.0
        self._first_at: dict[tuple[int, int], float] = {}  # when the first tokens came, by prompt and answer
        self._finishes: list[Finish] = []

    async def begin(self, prompts: Sequence[list[int]]) -> None:
        self._begun_at = time.monotonic()
        await self._form.begin(prompts)

    def opening(self) -> Sequence[Any]:
        return self._form.opening()

    def chunk(self, prompt_index: int, chunk: Chunk) -> Sequence[Any]:
        objects = self._form.chunk(prompt_index, chunk)
        now = time.monotonic()
        first_at = self._first_at.setdefault((prompt_index, chunk.index), now)
        if chunk.finish is not None:
            self._finishes.append(chunk.finish)
        if not self._has_timings:
            return objects
        if chunk.finish is not None:
            found = timings(chunk.finish)
        else:
            found = timings_so_far(first_at - self._begun_at, chunk.num_output_tokens, now - first_at)
        return [{**each, "timings": found} for each in objects]

    def closing(self) -> Sequence[Any]:
        objects = self._form.closing()
        if not self._has_metrics or len(self._first_at) != 1:
            return objects
        return [{**each, "metrics": self._metrics()} for each in objects]

    def whole(self, answers: Sequence[tuple[Sequence[Completion], Prompt | None]]) -> Any:
        whole = self._form.whole(answers)
        finishes = [each.finish for completions, _ in answers for each in completions if each.finish is not None]
        if self._has_timings and len(finishes) == 1:
            whole["timings"] = timings(finishes[0])
        elif self._has_timings:
            for choice, finish in zip(whole["choices"], finishes, strict=True):
                choice["timings"] = timings(finish)
        if self._has_metrics and len(finishes) == 1:
            self._finishes = finishes
            whole["metrics"] = self._metrics()
        return whole

    def failure(self, error: Exception) -> Sequence[Any]:
        return self._form.failure(error)

    def _metrics(self) -> Any:
        [finish] = self._finishes
        return request_metrics(finish)
