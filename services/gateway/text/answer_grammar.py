"""How to read the answer to a chat, and its grammar: demanded calls, and reasoning that may come before any grammar."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pydantic_core import to_json

from services.common.errors import InvalidRequest
from services.common.sampling_params import ReasoningLimit
from services.common.structured_output import Constraint, StructuredOutput
from services.gateway.text.chat_template import Chat
from services.gateway.text.harmony import ANSWER_ENDS, CHANNEL, MESSAGE, START
from services.gateway.text.harmony import END as MESSAGE_END
from services.gateway.text.harmony.parser import Beginning as HarmonyBeginning
from services.gateway.text.parsing import Parsing
from services.gateway.text.reasoning.think_tags import BEGIN, END, Beginning
from services.gateway.text.tokenizer import Tokenizer
from services.gateway.text.tools.call_grammars import describe_parameters, grammar_of_calls
from services.grammar.grammar_error import GrammarError

TOOLS = "tools"  # the field that a grammar of calls comes from
MAX_PROMPT_END_TOKENS = 16  # enough to see whether a chat template opened the reasoning
_TEXT = {"type": "any_text"}
_ANALYSIS = {"type": "const_string", "value": f"{CHANNEL}analysis{MESSAGE}"}
_NEXT_HEADER = {"type": "const_string", "value": f"{MESSAGE_END}{START}assistant"}
_SPACE = {"type": "regex", "pattern": "\\n{0,4}"}  # not of the content; bounded, or a model may never end it


def read_parsing(
    chat: Chat, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], given: StructuredOutput | None
) -> Parsing | None:
    """What is to be found in the answers to a chat; None: they are plain text. `given`: as for `answer_grammar`."""
    prompt_end = tokenizer.decode(prompt_token_ids[-MAX_PROMPT_END_TOKENS:], skip_special_tokens=False)
    last = chat.messages[-1]
    parsing = tokenizer.chat_formats.parsing(
        chat.tools, prompt_end, last.content if chat.continue_final_message else None
    )
    return parsing and replace(
        parsing,
        has_grammar=not chat.tools.is_demanded and _excludes_calls(given),
        keeps_reasoning=chat.keeps_reasoning,
    )


def answer_ends(parsing: Parsing | None, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Tokens that end an answer, besides those that the model's config names."""
    if parsing is None or parsing.harmony is None:
        return ()
    return tuple(token_id for name in ANSWER_ENDS if (token_id := tokenizer.token_id(name)) is not None)


def read_reasoning_limit(chat: Chat, parsing: Parsing | None, tokenizer: Tokenizer) -> ReasoningLimit | None:
    """The longest reasoning of an answer. Raises `InvalidRequest` if the model cannot be held to one."""
    if chat.max_reasoning_tokens is not None and parsing is not None and parsing.harmony is not None:
        raise InvalidRequest(
            f"max_reasoning_tokens is {chat.max_reasoning_tokens}, but several tokens end the reasoning of this "
            "model, so it cannot be made to end it",
            "max_reasoning_tokens",
        )
    max_tokens, beginning = chat.max_reasoning_tokens, None if parsing is None else parsing.beginning
    if max_tokens is None or beginning in (None, Beginning.CONTENT):
        return None
    begin_token_id, end_token_id = map(tokenizer.token_id, (BEGIN, END))
    if begin_token_id is None or end_token_id is None:
        raise InvalidRequest(
            f"max_reasoning_tokens is {max_tokens}, but {BEGIN} and {END} are not single tokens of this model, so it "
            "cannot be made to end its reasoning",
            "max_reasoning_tokens",
        )
    return ReasoningLimit(max_tokens, end_token_id, begin_token_id if beginning is Beginning.EITHER else None)


def answer_grammar(parsing: Parsing, given: StructuredOutput | None) -> StructuredOutput | None:
    """The grammar of an answer that is parsed. `given`: the grammar that the request asks for itself.

    An answer with tools and a grammar is calls or follows the grammar; where calls are demanded, it is calls. A
    structural tag says itself where calls may stand. Raises `InvalidRequest` if a tool's schema cannot be enforced.
    """
    if parsing.tools.is_demanded:
        given = None  # as in vLLM, the call wins
    is_continued = parsing.harmony is HarmonyBeginning.CONTENT
    calls = None
    if parsing.tool_format is not None:
        tools = parsing.tools if parsing.harmony is None else replace(parsing.tools, is_parallel=False)
        has_other_grammar = _excludes_calls(given) and not is_continued
        calls = grammar_of_calls(tools, parsing.tool_format.grammar, has_other_grammar=has_other_grammar)
    if calls is None and (given is None or not (parsing.harmony or parsing.beginning is Beginning.REASONING)):
        return given  # an answer that has a grammar of its own does not begin with reasoning
    if calls is not None and given is not None and not _excludes_calls(given):
        raise InvalidRequest(
            f"{given.field_name} is a structural tag, which says itself how calls are written: no tool can be strict "
            "beside it",
            given.field_name,
        )
    if calls is not None and is_continued:
        raise InvalidRequest("a message that the answer continues cannot have calls that are required or strict", TOOLS)
    own = None if given is None else _as_format(given)
    if parsing.harmony is None:
        structure = _after_reasoning(_either(own, calls), parsing.beginning)
    elif is_continued:
        structure = _either(own, None)
    else:
        final = None if parsing.tools.is_demanded else own or _TEXT
        structure = _harmony_format(parsing.harmony, [] if calls is None else calls["tags"], final)
    tag = {"type": "structural_tag", "format": structure}
    field_name = TOOLS if given is None else given.field_name
    result = StructuredOutput(Constraint.STRUCTURAL_TAG, to_json(tag).decode(), field_name=field_name)
    result.validate()
    return result


def refusal(error: GrammarError, structure: StructuredOutput, parsing: Parsing | None) -> InvalidRequest:
    """The error of a request whose grammar cannot be used. It names the field, and the tool, that is wrong."""
    if parsing is not None and error.origin is not None:
        tool = next((tool for tool in parsing.tools.callable if tool.path == error.origin), None)
        if tool is not None:
            return InvalidRequest(f"{describe_parameters(tool)}: {error}", tool.path)
    if structure.field_name == TOOLS:
        return InvalidRequest(f"the schemas of the tools cannot be enforced: {error}", TOOLS)
    return InvalidRequest(f"{structure.field_name} cannot be used: {error}", structure.field_name)


def _excludes_calls(structure: StructuredOutput | None) -> bool:
    """Whether an answer of this grammar has no calls; a structural tag may have some."""
    return structure is not None and structure.constraint is not Constraint.STRUCTURAL_TAG


def _either(own: dict[str, Any] | None, calls: dict[str, Any] | None) -> dict[str, Any]:
    """The grammar of an answer that follows the first grammar or is the calls, whichever it begins with."""
    structures = [structure for structure in (own, calls) if structure is not None]
    return structures[0] if len(structures) == 1 else {"type": "or", "elements": structures}


def _after_reasoning(structure: dict[str, Any], beginning: Beginning | None) -> dict[str, Any]:
    end = {"type": "const_string", "value": END}
    if beginning is Beginning.REASONING:
        return {"type": "sequence", "elements": [_TEXT, end, _SPACE, structure]}
    if beginning is Beginning.EITHER:
        begin = {"type": "const_string", "value": BEGIN}
        reasoned = {"type": "sequence", "elements": [begin, _TEXT, end, _SPACE, structure]}
        return {"type": "or", "elements": [structure, reasoned]}
    return structure


def _harmony_format(
    beginning: HarmonyBeginning, calls: list[dict[str, Any]], final: dict[str, Any] | None
) -> dict[str, Any]:
    """The format of structural tags of a whole answer in Harmony; `beginning` is `HEADER` or `MESSAGE`.

    `calls`: the tags of calls that the answer may be, by `grammar_of_calls`. `final`: the format of the final message
    that it may be instead; None: it may be none. The final channel has the grammar, reasoning before it is free.
    """
    tags = list(calls)
    if final is not None:
        tags.append({"type": "tag", "begin": f"{CHANNEL}final{MESSAGE}", "content": final, "end": ""})
    answer = {"type": "or", "elements": tags}
    thought_first = {"type": "sequence", "elements": [_ANALYSIS, _TEXT, _NEXT_HEADER, answer]}
    whole = {"type": "or", "elements": [*tags, thought_first]}
    if beginning is HarmonyBeginning.HEADER:
        return whole
    return {"type": "sequence", "elements": [{"type": "const_string", "value": f"{START}assistant"}, whole]}


def _as_format(structure: StructuredOutput) -> dict[str, Any]:
    """A grammar as a format of structural tags."""
    try:
        match structure.constraint:
            case Constraint.JSON_SCHEMA:
                return {"type": "json_schema", "json_schema": json.loads(structure.text)}
            case Constraint.JSON_OBJECT:
                return {"type": "json_schema", "json_schema": {"type": "object"}}
            case Constraint.REGEX:
                return {"type": "regex", "pattern": structure.text}
            case Constraint.CHOICE:
                elements = [{"type": "const_string", "value": choice} for choice in structure.choices]
                return {"type": "or", "elements": elements}
            case Constraint.GRAMMAR:
                return {"type": "grammar", "grammar": structure.text}
            case Constraint.STRUCTURAL_TAG:
                return _as_object(structure)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{structure.field_name} is not JSON: {error}", structure.field_name) from error


def _as_object(structure: StructuredOutput) -> dict[str, Any]:
    tag = json.loads(structure.text)
    if not isinstance(tag, dict):
        raise InvalidRequest(f"{structure.field_name} is not a JSON object", structure.field_name)
    return {"type": "structural_tag", **tag}
