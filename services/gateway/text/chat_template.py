"""From a chat to the text that the model's own template makes of it, within bounds of time and size.

Runs on a thread of `Tokenizer`: a template is a program of whoever made the model, and takes as long as it likes.
"""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase

from services.common.errors import InvalidRequest

MAX_RENDER_S = 5.0
MAX_RENDERED_CHARACTERS = 16 * 2**20
MAX_SHOWN_CHARACTERS = 300  # of what a template says is wrong
TEMPLATE_FILE = "<template>"  # what Jinja2 calls a template that is in no file


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a chat; `role` as the chat template names it."""

    role: str
    content: str
    name: str = ""  # of the speaker; empty: none

    def fields(self) -> dict[str, str]:
        """As the chat template finds it."""
        fields = {"role": self.role, "content": self.content}
        return fields | {"name": self.name} if self.name else fields


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation, and how its template is to be used: as `apply_chat_template` of transformers has it."""

    messages: Sequence[Message]
    add_generation_prompt: bool = True  # end with what makes the model answer
    continue_final_message: bool = False  # leave the last message open; excludes the one above
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)  # further variables of the template


class ChatTemplate:
    """The template of one tokenizer."""

    def __init__(self, hf_tokenizer: PreTrainedTokenizerBase) -> None:
        self._hf_tokenizer = hf_tokenizer
        parameters = inspect.signature(hf_tokenizer.apply_chat_template).parameters
        # What the template gets otherwise, and special tokens, which arguments of these names would replace.
        self._taken_names = {"messages", *parameters, *hf_tokenizer.special_tokens_map} - {"kwargs"}

    def check(self, chat: Chat) -> None:
        """Raises `InvalidRequest` for what cannot be rendered, whatever its messages say."""
        if self._hf_tokenizer.chat_template is None:
            raise InvalidRequest("this model has no chat template: send a prompt instead of a chat")
        if chat.continue_final_message and chat.add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message and add_generation_prompt are both true: the first continues the last "
                "message, the second begins another one",
                "continue_final_message",
            )
        if chat.continue_final_message and not chat.messages[-1].content:
            raise InvalidRequest("continue_final_message is true, but the last message is empty", "messages")
        if taken := sorted(self._taken_names & chat.template_kwargs.keys()):
            raise InvalidRequest(
                f"chat_template_kwargs has {taken[0]!r}, which the server sets itself", "chat_template_kwargs"
            )

    def render(
        self, chat: Chat, messages: Sequence[Mapping[str, str]], template_kwargs: Mapping[str, Any]
    ) -> str:
        """The text, special tokens included. `messages` and `template_kwargs` go in the place of the chat's own.

        Raises `InvalidRequest` with the reason, whatever the template does.
        """
        bounds = _Bounds()
        try:
            with bounds:
                text = self._hf_tokenizer.apply_chat_template(
                    messages,
                    add_generation_prompt=chat.add_generation_prompt,
                    continue_final_message=chat.continue_final_message,
                    tokenize=False,
                    **template_kwargs,
                )
                bounds.check_size(len(text))
        except (_OutOfBounds, jinja2.TemplateError, ValueError) as error:  # its own words, or those of transformers
            raise InvalidRequest(f"the chat template refuses this chat: {_short(error)}", "messages") from error
        except Exception as error:  # a template is a program: its mistakes are of every kind
            raise InvalidRequest(
                f"the chat template fails on this chat: {type(error).__name__}: {_short(error)}", "messages"
            ) from error
        return text


class _OutOfBounds(Exception):
    """Ends a template that takes too much."""


class _Bounds:
    """Around the rendering on one thread, which it traces: the only way to end a template that never returns."""

    def __init__(self) -> None:
        self._deadline = 0.0
        self._outer_trace = sys.gettrace()
        self._num_characters = 0

    def __enter__(self) -> None:
        self._deadline = time.monotonic() + MAX_RENDER_S
        sys.settrace(self._enter_frame)

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._outer_trace)

    def check_size(self, num_characters: int) -> None:
        if num_characters > MAX_RENDERED_CHARACTERS:
            raise _OutOfBounds(f"it makes more than {MAX_RENDERED_CHARACTERS} characters")

    def _enter_frame(self, frame: FrameType, event: str, value: object) -> Any:
        self._check_time()
        return self._trace_line if frame.f_code.co_filename == TEMPLATE_FILE else None

    def _trace_line(self, frame: FrameType, event: str, value: object) -> Any:
        self._check_time()
        if event == "return" and isinstance(value, str):  # a piece of the text; they are joined at the end
            self._num_characters += len(value)
            self.check_size(self._num_characters)
        return self._trace_line

    def _check_time(self) -> None:
        if time.monotonic() > self._deadline:
            raise _OutOfBounds(f"it takes longer than {MAX_RENDER_S:g} s")


def _short(error: Exception) -> str:
    text = str(error)
    return text if len(text) <= MAX_SHOWN_CHARACTERS else f"{text[:MAX_SHOWN_CHARACTERS]}…"
