"""`ToolFormat`: how a model writes calls of tools, chosen by its chat template or by the configuration."""

from __future__ import annotations

import hashlib
import re
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from services.gateway.resources.repeatable import draw_bits
from services.gateway.text.deltas import Parser
from services.gateway.text.harmony import HARMONY, MARKERS, is_harmony_template
from services.gateway.text.tools.call_grammars import CALL_GRAMMARS, CallGrammar
from services.gateway.text.tools.call_writer import new_call_id
from services.gateway.text.tools.hermes import HermesParser
from services.gateway.text.tools.llama3_json import Llama3JsonParser
from services.gateway.text.tools.mistral import MistralParser
from services.gateway.text.tools.pythonic import PythonicParser
from services.gateway.text.tools.qwen3_coder import Qwen3CoderParser
from services.gateway.text.tools.tool import Tool

AUTO, NONE = "auto", "none"
SHORT_ID_CHARACTERS = 9  # Mistral's templates refuse other lengths
_ALPHABET = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One format."""

    name: str  # in gateway.tool_parser
    markers: tuple[str, ...]  # tokens that the parser must see, although a tokenizer may call them special
    make_parser: Callable[[Sequence[Tool]], Parser] | None  # None: `HarmonyParser` finds calls beside all the rest
    in_template: Callable[[str], bool]  # whether a chat template asks the model for this format
    grammar: CallGrammar  # of calls that are demanded
    has_short_ids: bool = False

    def call_id(self, given: str) -> str:
        """The id of a call for the chat template; the same one for the same given id."""
        if not self.has_short_ids or (len(given) == SHORT_ID_CHARACTERS and given.isascii() and given.isalnum()):
            return given
        number = int.from_bytes(hashlib.sha256(given.encode()).digest())
        return _short_id(number)


def new_short_id() -> str:
    """An id like Mistral's."""
    return _short_id(draw_bits(64))


def _short_id(number: int) -> str:
    characters = []
    for _ in range(SHORT_ID_CHARACTERS):
        number, index = divmod(number, len(_ALPHABET))
        characters.append(_ALPHABET[index])
    return "".join(characters)


# In the order in which a template is compared with them.
FORMATS: Mapping[str, ToolFormat] = {
    each.name: each
    for each in (
        ToolFormat(HARMONY, MARKERS, None, is_harmony_template, CALL_GRAMMARS[HARMONY]),
        ToolFormat(
            "qwen3_coder",
            ("<tool_call>", "</tool_call>"),
            lambda tools: Qwen3CoderParser(new_call_id, {tool.name: tool.parameters for tool in tools}),
            lambda template: "<function=" in template and "<parameter=" in template,
            CALL_GRAMMARS["qwen3_coder"],
        ),
        ToolFormat(
            "hermes",
            ("<tool_call>", "</tool_call>"),
            lambda tools: HermesParser(new_call_id),
            lambda template: "<tool_call>" in template,
            CALL_GRAMMARS["hermes"],
        ),
        ToolFormat(
            "mistral",
            ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
            lambda tools: MistralParser(new_short_id),
            lambda template: "[TOOL_CALLS]" in template,
            CALL_GRAMMARS["mistral"],
            has_short_ids=True,
        ),
        ToolFormat(
            "pythonic",
            ("<|python_start|>", "<|python_end|>"),
            lambda tools: PythonicParser(new_call_id, {tool.name for tool in tools}),
            lambda template: "<|python_start|>" in template or re.search(r"\[\w+\(\w+ ?=", template) is not None,
            CALL_GRAMMARS["pythonic"],
        ),
        ToolFormat(
            "llama3_json",
            ("<|python_tag|>",),
            lambda tools: Llama3JsonParser(new_call_id, {tool.name for tool in tools}),
            lambda template: '"parameters": ' in template and "<|start_header_id|>" in template,
            CALL_GRAMMARS["llama3_json"],
        ),
    )
}


def choose_tool_format(setting: str, template: str) -> ToolFormat | None:
    """The format of `gateway.tool_parser`, or for `auto` that of the chat template; None if there is none."""
    if setting == NONE:
        return None
    if setting == AUTO:
        chosen = next((each for each in FORMATS.values() if each.in_template(template)), None)
    else:
        chosen = FORMATS[setting]
    if chosen is not None and chosen.name == "mistral" and "[ARGS]" not in template:
        return replace(chosen, grammar=CALL_GRAMMARS["mistral_list"])
    return chosen
