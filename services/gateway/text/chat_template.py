"""Renders a chat with the model's own chat template, within limits of time and size.

It runs on a thread of `Tokenizer`: a template is a program by the model's author and may take arbitrarily long.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import jinja2
import structlog
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from services.common.errors import InvalidRequest
from services.gateway.text.chat_message import PROBE, Message, has_later_system_message, without_later_system_messages
from services.gateway.text.chat_vectors import ChatVectors
from services.gateway.text.harmony import is_harmony_template
from services.gateway.text.harmony.messages import harmony_fields
from services.gateway.text.tools.tool import NO_TOOLS, ToolChoice, Tools

log = structlog.get_logger()

MAX_RENDER_S = 5.0  # of processor time: a busy machine may take longer
MAX_RENDERED_CHARACTERS = 16 * 2**20
MAX_WORK_S = 0.002  # after which a template rests: the event loop gets the interpreter lock without asking for it
REST_S = 0.001
MAX_ERROR_CHARACTERS = 300  # of a template's error message
_PROBE_TEXT = "whether a text is shown"
TEMPLATE_FILE = "<template>"  # Jinja2's file name for a template without a file


# A template that tells a message without text by this test, as DeepSeek's do, gets none and not an empty text.
_TESTS_FOR_NONE = re.compile(r"content['\"]?\]? is (not )?none")


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation and options for its template, as in `apply_chat_template` of transformers."""

    messages: Sequence[Message]
    add_generation_prompt: bool = True  # end with the tokens that make the model answer
    continue_final_message: bool = False  # leave the last message open; excludes the one above
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)  # further variables of the template
    tools: Tools = NO_TOOLS
    max_reasoning_tokens: int | None = None  # of the answer; None: no limit
    template: str | None = None  # the client's own template; None: the model's
    vectors: Sequence[ChatVectors] = ()  # for which placeholders stand in the messages
    keeps_reasoning: bool = False  # in the content of the answer

    @property
    def has_pictures(self) -> bool:
        """Whether a message has any."""
        return any([each.pictures for each in self.messages])


class ChatTemplate:
    """The template of one tokenizer."""

    def __init__(self, hf_tokenizer: PreTrainedTokenizerBase) -> None:
        self.may_want_parts = False  # whether it may be a processor's, so that a content may have to be a list
        self._hf_tokenizer = hf_tokenizer
        parameters = inspect.signature(hf_tokenizer.apply_chat_template).parameters
        # Variables that the server passes itself, and special tokens: arguments of these names would replace them.
        self._taken_names = {"messages", *parameters, *hf_tokenizer.special_tokens_map} - {"documents", "kwargs"}

    def compile(self, source: str) -> None:
        """Has transformers compile and keep it now: when the first chat is rendered, tracing makes that far slower.

        `source`: the file or directory that it is from, for the log if it cannot be compiled.
        """
        templates = self._hf_tokenizer.chat_template or {}
        for name, template in templates.items() if isinstance(templates, Mapping) else [("default", templates)]:
            try:
                render_jinja_template([], chat_template=template)
            except Exception as error:  # which each chat then gets; Python's compiler has limits of its own
                reason = f"{type(error).__name__}: {_short(error)}"
                log.warning(
                    "the chat template cannot be compiled: chats are refused", source=source, name=name, reason=reason
                )

    def check(self, chat: Chat) -> None:
        """Raises `InvalidRequest` for a chat that no template could render."""
        if self._hf_tokenizer.chat_template is None and chat.template is None:
            raise InvalidRequest("this model has no chat template: send a prompt instead of a chat")
        if chat.continue_final_message and chat.add_generation_prompt:
            raise InvalidRequest(
                "Cannot set both `continue_final_message` and `add_generation_prompt` to True. The first continues "
                "the last message, the second begins another one",
                "continue_final_message",
            )
        if chat.continue_final_message and not chat.messages[-1].content:
            raise InvalidRequest("continue_final_message is true, but the last message is empty", "messages")
        self.check_names(chat.template_kwargs)

    def check_names(self, template_kwargs: Mapping[str, Any]) -> None:
        """Raises `InvalidRequest` for variables that nobody else may set."""
        if taken := sorted(self._taken_names & template_kwargs.keys()):
            raise InvalidRequest(
                f"chat_template_kwargs has {taken[0]!r}, which the server sets itself", "chat_template_kwargs"
            )

    @functools.cached_property
    def _takes_later_system_message(self) -> bool:
        """Whether the template renders a conversation with a message of the system in the middle."""
        try:
            self.render(Chat(PROBE), [message.fields() for message in PROBE], {}, [])
        except InvalidRequest:
            return False
        return True

    @functools.cached_property
    def _wants_parts(self) -> bool:
        """Whether the template leaves out a content that is a text, and shows one that is a list of parts."""
        probe = Message("user", _PROBE_TEXT)
        try:
            return _PROBE_TEXT not in self.render(Chat([probe]), [probe.fields()], {}, [])
        except InvalidRequest:
            return True

    def variables(self, chat: Chat) -> list[Any]:
        """What the client gives the template: messages, further variables, and definitions of tools."""
        template = self._hf_tokenizer.chat_template if chat.template is None else chat.template
        is_none_without_text = isinstance(template, str) and _TESTS_FOR_NONE.search(template) is not None
        messages = chat.messages
        tools = [tool.definition for tool in chat.tools.tools] if chat.tools.choice is not ToolChoice.NONE else []
        if isinstance(template, str) and is_harmony_template(template):
            return [harmony_fields(messages), chat.template_kwargs, tools]
        is_own = chat.template is None
        if is_own and has_later_system_message(messages) and not self._takes_later_system_message:
            messages = without_later_system_messages(messages)
        has_parts = is_own and self.may_want_parts and self._wants_parts
        return [
            [message.fields(is_none_without_text, has_parts) for message in messages],
            chat.template_kwargs,
            tools,
        ]

    def render(
        self,
        chat: Chat,
        messages: Sequence[Mapping[str, Any]],
        template_kwargs: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]],
    ) -> str:
        """The rendered text, special tokens included. The other arguments are `variables(chat)`, maybe changed.

        Raises `InvalidRequest` with the reason if the template refuses the chat, fails, or exceeds a limit.
        """
        bounds = _Bounds()
        try:
            with bounds:
                text = self._hf_tokenizer.apply_chat_template(
                    messages,
                    tools=tools or None,
                    add_generation_prompt=chat.add_generation_prompt,
                    continue_final_message=chat.continue_final_message,
                    tokenize=False,
                    **template_kwargs,
                )
                bounds.check_size(len(text))
        except (_OutOfBounds, jinja2.TemplateError, ValueError) as error:  # raised by the template or by transformers
            raise InvalidRequest(f"the chat template refuses this chat: {_short(error)}", "messages") from error
        except Exception as error:  # a template is a program and may raise anything
            raise InvalidRequest(
                f"the chat template fails on this chat: {type(error).__name__}: {_short(error)}", "messages"
            ) from error
        return text


class _OutOfBounds(Exception):
    """Ends a template that exceeds a limit."""


class _Bounds:
    """Limits the rendering on one thread by tracing it, which is the only way to end a template that never returns.

    It also lets the event loop run now and then.
    """

    def __init__(self) -> None:
        self._deadline = self._max_thread_time = self._rest_at = 0.0
        self._outer_trace = sys.gettrace()
        self._num_characters = 0

    def __enter__(self) -> None:
        self._deadline = time.monotonic() + MAX_RENDER_S
        self._max_thread_time = time.thread_time() + MAX_RENDER_S
        self._rest_at = time.monotonic() + MAX_WORK_S
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
        if event == "return" and isinstance(value, str):  # a piece of the text; the pieces are joined at the end
            self._num_characters += len(value)
            self.check_size(self._num_characters)
        return self._trace_line

    def _check_time(self) -> None:
        now = time.monotonic()
        if now > self._rest_at:
            time.sleep(REST_S)
            self._rest_at = time.monotonic() + MAX_WORK_S
        # The clock first, because it is read faster.
        if now > self._deadline and time.thread_time() > self._max_thread_time:
            raise _OutOfBounds(f"it takes longer than {MAX_RENDER_S:g} s")


def _short(error: Exception) -> str:
    text = str(error)
    return text if len(text) <= MAX_ERROR_CHARACTERS else f"{text[:MAX_ERROR_CHARACTERS]}…"
