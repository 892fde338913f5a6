"""`OpenAIFormat`: what the objects of completions and chats have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from services.gateway.apis.openai.answer_objects import UsageObject
from services.gateway.apis.openai.fields import OpenAIFields
from services.gateway.apis.openai.logprobs import prompt_logprobs
from services.gateway.apis.shared.answer import DONE, Format
from services.gateway.apis.shared.feature_fields import asked_reports, report_objects
from services.gateway.core.chunks import Finish, Prompt
from services.gateway.core.request_service import RequestService
from services.gateway.features.report import ReportPart
from services.gateway.http.json_pieces import json_line
from services.gateway.resources.repeatable import created_at

PLACEHOLDER = "\N{OBJECT REPLACEMENT CHARACTER}"  # in the place of a text


class OpenAIFormat(Format):
    """What the formats of completions and chats have in common. It belongs to one request."""

    end_of_stream = DONE

    def __init__(self, service: RequestService, body: OpenAIFields, kind: str, answer_id: str) -> None:
        """`kind` is OpenAI's `text_completion`, `chat.completion` or `chat.completion.chunk`."""
        self.head = {  # of every object
            "id": answer_id,
            "object": kind,
            "created": created_at(),
            "model": body.model or service.names.first,  # the name in the request
            "system_fingerprint": f"fp_{service.model.weights_hash[:12]}",
        }
        self._tokenizer = service.tokenizer
        self._eos_token_ids = service.eos_token_ids
        self._prompts: Sequence[list[int]] = ()  # token ids
        self._usage = UsageCounter()
        self._has_usage, self._has_running_usage = body.has_usage, body.has_running_usage
        self._num_named = body.num_named
        self._fields, self._has_reports = body, bool(asked_reports(body))
        # Whether an object of a stream may have nothing of its own but its text.
        self._is_plain = not (
            body.has_logprobs or body.return_token_ids or self._has_running_usage or body.timings_per_token
        )
        self._text_objects = TextObjects(self._text_object)
        self.text_frame = self._text_objects.first_frame if self._is_plain and body.stream else None

    async def begin(self, prompts: Sequence[list[int]]) -> None:
        self._prompts = prompts
        if self.text_frame is not None:
            self.text_frame()  # is made ahead of the first text

    def closing(self) -> Sequence[Any]:
        return [{**self.head, "choices": [], "usage": self._usage.usage()}] if self._has_usage else ()

    def _text_object(self, index: int, text: str) -> Any:
        """The object of a stream that has nothing but the text of an answer."""
        raise NotImplementedError

    def _end_fields(self, finish: Finish) -> dict[str, Any]:
        """Those of a choice that tell of its end, beside the reason.

        `matched_stop` is SGLang's field, and `stop_reason` vLLM's, which is None for EOS, too. Both have the stop
        string, or the id of the token, that ended the answer.
        """
        ended_by: str | int | None = finish.stop_token_id if finish.stop_string is None else finish.stop_string
        is_eos = finish.stop_string is None and ended_by in self._eos_token_ids
        fields = {"stop_reason": None if is_eos else ended_by, "matched_stop": ended_by}
        return fields if finish.beam_score is None else {**fields, "beam_score": finish.beam_score}

    def _reported(self, reports: Mapping[str, Sequence[ReportPart]], finish: Finish) -> dict[str, Any]:
        """SGLang's `hidden_states`, if they were asked for: those of the last token that was computed."""
        found = report_objects(self._fields, reports, finish.num_prompt_tokens) if self._has_reports else {}
        return {name: each and each.last for name, each in found.items()}

    def _prompt_logprobs(self, prompt: Prompt | None) -> Any:
        """vLLM's object; None if they were not asked for, or not computed."""
        if prompt is None or prompt.logprobs is None:
            return None
        return prompt_logprobs(self._tokenizer, prompt.token_ids, prompt.logprobs, self._num_named)

    def _running_usage(self, prompt_index: int, num_output_tokens: int) -> UsageObject:
        """The counts of one unfinished answer, without cached tokens."""
        num_prompt_tokens = len(self._prompts[prompt_index])
        return {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": num_output_tokens,
            "total_tokens": num_prompt_tokens + num_output_tokens,
        }


class UsageCounter:
    """Counts a request's tokens: each prompt once, all answers to it."""

    def __init__(self) -> None:
        self._prompts: dict[int, Finish] = {}
        self._num_output_tokens = 0
        self._num_reasoning_tokens: int | None = None  # None: reasoning is not separated

    def add(self, prompt_index: int, finish: Finish) -> None:
        """Counts one answer to the prompt with this index."""
        first = self._prompts.setdefault(prompt_index, finish)
        if finish.num_cached_tokens < first.num_cached_tokens:
            self._prompts[prompt_index] = finish  # the first of several answers computes the prompt for the others
        self._num_output_tokens += finish.num_output_tokens
        if finish.num_reasoning_tokens is not None:
            self._num_reasoning_tokens = (self._num_reasoning_tokens or 0) + finish.num_reasoning_tokens

    def usage(self) -> UsageObject:
        """The counts as OpenAI's object."""
        num_prompt_tokens = sum(finish.num_prompt_tokens for finish in self._prompts.values())
        usage: UsageObject = {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": self._num_output_tokens,
            "total_tokens": num_prompt_tokens + self._num_output_tokens,
            "prompt_tokens_details": {
                "cached_tokens": sum(finish.num_cached_tokens for finish in self._prompts.values())
            },
        }
        if self._num_reasoning_tokens is not None:
            usage["completion_tokens_details"] = {"reasoning_tokens": self._num_reasoning_tokens}
            usage["reasoning_tokens"] = self._num_reasoning_tokens
        return usage


class TextObjects:
    """The events of streamed objects that differ in nothing but their text: only that is encoded for each of them."""

    __slots__ = ("_frames", "_make")

    def __init__(self, make: Callable[[int, str], Any]) -> None:
        """`make`: the object with an index and a text, which is its last value that may have the placeholder."""
        self._make = make
        self._frames: dict[int, tuple[bytes, bytes]] = {}  # what surrounds the text, by index

    def first_frame(self) -> tuple[bytes, bytes]:
        """What surrounds the JSON of the text in `event` of index 0."""
        return self._frame(0)

    def event(self, index: int, text: str) -> bytes:
        """The event, which has no name, of the object with this index and text."""
        frame = self._frame(index)
        return b"%b%b%b" % (frame[0], json_line(text), frame[1])

    def _frame(self, index: int) -> tuple[bytes, bytes]:
        if (frame := self._frames.get(index)) is not None:
            return frame
        before, _, after = json_line(self._make(index, PLACEHOLDER)).rpartition(json_line(PLACEHOLDER))
        frame = self._frames[index] = (b"data: " + before, after + b"\n\n")
        return frame
