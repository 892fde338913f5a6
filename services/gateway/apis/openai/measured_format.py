"""`MeasuredFormat`: adds times and progress to the objects of another format, where they are wanted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from services.gateway.apis.openai.answer_objects import RequestMetrics
from services.gateway.apis.openai.format import OpenAIFormat
from services.gateway.apis.shared.answer import Format
from services.gateway.apis.shared.timings import TimingsSoFar, prompt_progress, timings
from services.gateway.core.chunks import Chunk, Completion, Finish, Prompt


class MeasuredFormat(Format):
    """The objects of completions or chats with `timings`, as in llama.cpp, and `metrics`, as in vLLM.

    `timings` is in every event of a stream, with one answer also in that with the usage. A whole answer has it, or with
    several answers each choice. `metrics` is in the whole object, or in the event with the usage, if there is one
    answer in all. While the prompt of a streamed chat is computed, events have `prompt_progress`, as in llama.cpp.
    """

    def __init__(self, form: OpenAIFormat, *, has_timings: bool, has_metrics: bool) -> None:
        self.param_names: Mapping[str, str] = form.param_names
        self.end_of_stream = form.end_of_stream
        self.repeats_prompt = form.repeats_prompt
        self._form = form
        self._has_timings = has_timings
        self._has_metrics = has_metrics
        self._timings = TimingsSoFar()
        self._finishes: list[Finish] = []

    async def begin(self, prompts: Sequence[list[int]]) -> None:
        self._timings.begin(prompts)
        await self._form.begin(prompts)

    def opening(self) -> Sequence[Any]:
        return self._form.opening()

    def chunk(self, prompt_index: int, chunk: Chunk) -> Sequence[Any]:
        objects = []
        for progress in prompt_progress(chunk.reports):
            delta = {"role": "assistant", "content": None}
            choice = {"index": chunk.index, "delta": delta, "finish_reason": None}
            objects.append({**self._form.head, "choices": [choice], "prompt_progress": progress})
        if objects and not chunk.token_ids and chunk.finish is None:
            return objects
        return [*objects, *self._measured_chunk(prompt_index, chunk)]

    def _measured_chunk(self, prompt_index: int, chunk: Chunk) -> Sequence[Any]:
        objects = self._form.chunk(prompt_index, chunk)
        if chunk.finish is not None:
            self._finishes.append(chunk.finish)
        if not self._has_timings:
            return objects
        found = self._timings.of(prompt_index, chunk)
        return [{**each, "timings": found} for each in objects]

    def closing(self) -> Sequence[Any]:
        objects = self._form.closing()
        if len(self._finishes) != 1:
            return objects
        added: dict[str, Any] = {"timings": timings(self._finishes[0])} if self._has_timings else {}
        if self._has_metrics:
            added["metrics"] = self._metrics()
        return [{**each, **added} for each in objects]

    def whole(self, answers: Sequence[tuple[Sequence[Completion], Prompt | None]]) -> Any:
        whole = self._form.whole(answers)
        finishes = [each.finish for completions, _ in answers for each in completions if each.finish is not None]
        if self._has_timings and len(finishes) == 1:
            whole["timings"] = timings(finishes[0])
        elif self._has_timings:
            choices = zip(whole["choices"], finishes, strict=True)  # which may be made as they are encoded
            whole["choices"] = ({**choice, "timings": timings(finish)} for choice, finish in choices)
        if self._has_metrics and len(finishes) == 1:
            self._finishes = finishes
            whole["metrics"] = self._metrics()
        return whole

    def failure(self, error: Exception) -> Sequence[Any]:
        return self._form.failure(error)

    def _metrics(self) -> Any:
        [finish] = self._finishes
        return request_metrics(finish)


def request_metrics(finish: Finish) -> RequestMetrics:
    """vLLM's object; null where there is nothing to measure."""
    times, num_tokens = finish.timings, finish.num_output_tokens
    if times.first_token_s is None or times.queue_s is None:
        first_s = generation_s = rate = None
    else:
        first_s = times.first_token_s - times.queue_s
        generation_s = 0.0 if times.per_token_s is None else times.per_token_s * (num_tokens - 1)
        rate = num_tokens / (first_s + generation_s) if first_s + generation_s > 0 else None
    return {
        "time_to_first_token_ms": _ms(first_s),
        "generation_time_ms": _ms(generation_s),
        "queue_time_ms": _ms(times.queue_s),
        "mean_itl_ms": _ms(times.per_token_s),
        "tokens_per_second": rate,
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds
