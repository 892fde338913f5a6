"""`Parsing`: what is to be found in the answers of one request. `ChatFormats`: what a model can write.

Completions and chats without tools and reasoning have no `Parsing`: their answers are plain text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.common.errors import InvalidRequest
from services.gateway.text.reasoning.formats import ReasoningFormat, choose_reasoning_format
from services.gateway.text.reasoning.think_tags import BEGIN, END, Beginning
from services.gateway.text.tools.formats import ToolFormat, choose_tool_format
from services.gateway.text.tools.tool import ToolChoice, Tools


@dataclass(frozen=True, slots=True)
class Parsing:
    """How to read the answers of one request."""

    tool_format: ToolFormat | None  # None: no calls
    tools: Tools
    beginning: Beginning | None  # None: reasoning is not separated

    @property
    def markers(self) -> frozenset[str]:
        """Special tokens that are kept in the text, since the parsers look for them."""
        tools = () if self.tool_format is None else self.tool_format.markers
        return frozenset((*tools, *((BEGIN, END) if self.beginning else ())))


@dataclass(frozen=True, slots=True)
class ChatFormats:
    """How the served model writes calls and reasoning; None: it does not, or nobody knows how."""

    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None

    @classmethod
    def choose(
        cls, tool_parser: str, reasoning_parser: str, template: str | Mapping[str, Any] | None
    ) -> ChatFormats:
        """By configuration or chat template."""
        text = "\n".join(map(str, template.values())) if isinstance(template, Mapping) else template or ""
        return cls(choose_tool_format(tool_parser, text), choose_reasoning_format(reasoning_parser, text))

    def check(self, tools: Tools) -> None:
        """Raises `InvalidRequest` if the model cannot be given tools."""
        if tools.choice is not ToolChoice.NONE and self.tools is None:
            raise InvalidRequest(
                "tools are not supported by this model: its chat template has no known format of calls, and "
                "gateway.tool_parser names none",
                "tools",
            )

    def parsing(self, tools: Tools, prompt_end: str, open_message: str | None) -> Parsing | None:
        """How to read the answers to a chat; None if they are plain text. See `ReasoningFormat.beginning`."""
        tool_format = None if tools.choice is ToolChoice.NONE else self.tools
        beginning = None if self.reasoning is None else self.reasoning.beginning(prompt_end, open_message)
        if tool_format is None and beginning is None:
            return None
        return Parsing(tool_format, tools, beginning)
