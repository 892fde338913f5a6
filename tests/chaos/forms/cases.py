"""Requests whose answers have a form, of every kind beside every option, and what a valid answer is.

The judges know nothing of llguidance: `jsonschema`, `re`, and Python's own parser of expressions.
"""

from __future__ import annotations

import ast
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

import jsonschema

from services.pb import gateway_pb2
from tests.chaos.forms.answers import Answer
from tests.chaos.forms.thinking_model import BEGIN, BEGIN_ID, END_ID

EOS_ID = 2  # of the embedded model
MAX_TOKENS = 300
MAX_ENDLESS_TOKENS = 60  # of calls that may go on
MAX_REASONING = 6
QUESTIONS = ("What is the weather in Paris and Rome?", "San Francisco is a", "List some facts about the moon.")

WORD = {"type": "string", "maxLength": 5}
SCHEMAS: tuple[Any, ...] = (
    {
        "type": "object",
        "properties": {
            "name": WORD,
            "number_of_rooms": {"type": "integer", "minimum": 1, "maximum": 99},
            "kind_of_building": {"enum": ["house", "tower", "townhouse"]},
            "has_garden": {"type": "boolean"},
        },
        "required": ["name", "number_of_rooms", "has_garden"],
        "additionalProperties": False,
    },
    {
        "type": "array",
        "items": {"anyOf": [{"$ref": "#/$defs/point"}, {"const": "nothing at all"}]},
        "minItems": 1,
        "maxItems": 3,
        "$defs": {
            "point": {
                "type": "object",
                "properties": {"latitude": {"type": "integer", "multipleOf": 5, "minimum": -90, "maximum": 90},
                               "longitude": {"type": "number", "minimum": 0, "exclusiveMaximum": 1}},
                "required": ["latitude"],
                "additionalProperties": False,
            }
        },
    },
    {
        "type": "object",
        "properties": {"date": {"type": "string", "format": "date"},
                       "code": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
                       "tags": {"type": "array", "items": {"enum": ["red", "reddish", "blue"]}, "maxItems": 2}},
        "required": ["date", "code", "tags"],
        "additionalProperties": False,
    },
)  # fmt: skip
PATTERNS = (
    r"(The (cat|catalogue) is [a-z]{1,6}\. ){2}End",
    r"[0-9]{4}-(0[1-9]|1[0-2]) (monday|tuesday|wednesday)( and (monday|tuesday))?",
    r"<item id=\"[0-9]{1,3}\">[a-zA-Z ]{0,8}</item>",
)
EXPRESSIONS = (
    'start: "result = " sum\nsum: product (("+" | "-") product){1,3}\nproduct: factor ("*" factor)?\n'
    'factor: /[1-9][0-9]?/ | "(" /[1-9]/ " - " /[1-9]/ ")"\n',
    'start: "value = " call\ncall: "minimum(" list ")" | "maximum(" list ")"\nlist: /[1-9]/ (", " /[1-9][0-9]?/){2}\n',
)
FUNCTIONS = ("minimum", "maximum")
TOOLS: Mapping[str, Any] = {
    "get_weather": {
        "type": "object",
        "properties": {"city": WORD, "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]}},
        "required": ["city", "unit"],
        "additionalProperties": False,
    },
    "set_temperature": {
        "type": "object",
        "properties": {"degrees": {"type": "integer", "minimum": 5, "maximum": 30}, "is_night": {"type": "boolean"}},
        "required": ["degrees"],
        "additionalProperties": False,
    },
}
STOPS = ("is", ",", "1")  # may be in a text; what is before them is a beginning of it


class NotValid(Exception):
    """An answer has not the form that was asked for."""


@dataclass(frozen=True)
class Case:
    """A request, and how its answers are judged."""

    name: str
    message: gateway_pb2.GenerateRequest
    check: Callable[[Answer], None]  # of a whole answer. Raises `NotValid`
    reasons: bool = False  # the answer begins with reasoning
    may_be_cut: bool = False  # by max_tokens, in its last call
    whole: gateway_pb2.GenerateRequest | None = None  # the same without stop strings, where they may cut answers off


def check_json(schema: Any) -> Callable[[Answer], None]:
    def check(answer: Answer) -> None:
        jsonschema.validate(json.loads(answer.text), schema, format_checker=jsonschema.FormatChecker())

    return check


def check_pattern(pattern: str) -> Callable[[Answer], None]:
    def check(answer: Answer) -> None:
        if re.fullmatch(pattern, answer.text) is None:
            raise NotValid(f"{answer.text!r} does not match {pattern}")

    return check


def check_expression(answer: Answer) -> None:
    [statement] = ast.parse(answer.text).body
    if not isinstance(statement, ast.Assign) or not isinstance(statement.value, (ast.BinOp, ast.Call)):
        raise NotValid(f"{answer.text!r} is no assignment of an expression")
    allowed = (ast.BinOp, ast.Constant, ast.operator, ast.Call, ast.Name, ast.expr_context)
    for node in ast.walk(statement.value):
        if not isinstance(node, allowed) or (isinstance(node, ast.Name) and node.id not in FUNCTIONS):
            raise NotValid(f"{answer.text!r} has {node}")


def check_calls(names: set[str], most: int | None) -> Callable[[Answer], None]:
    def check(answer: Answer) -> None:
        if not answer.calls or answer.text or (most is not None and len(answer.calls) > most):
            raise NotValid(f"{len(answer.calls)} calls, and the text {answer.text!r}")
        for name, arguments in answer.calls:
            if name not in names:
                raise NotValid(f"no tool is called {name!r}")
            jsonschema.validate(json.loads(arguments), TOOLS[name])

    return check


KINDS = ("json_schema", "regex", "grammar", "strict tool", "parallel tools")
REASONING = ("off", "on", "limited")
COUNTS = (1, 3)  # n
OPTIONS = ("none", "logprobs", "stop", "min_tokens", "ignore_eos")
TEMPERATURES = (0.0, 1.0)


def every_case(seed: int) -> Iterator[Case]:
    """All combinations; the seed decides which form, question and noise each has."""
    random = Random(seed)
    for parts in itertools.product(KINDS, REASONING, COUNTS, OPTIONS, TEMPERATURES):
        yield make_case(random, *parts)


def make_case(random: Random, kind: str, reasoning: str, count: int, option: str, temperature: float) -> Case:
    name = f"{kind}, reasoning {reasoning}, n {count}, {option}, temperature {temperature}"
    message = gateway_pb2.GenerateRequest(n=count, max_tokens=MAX_TOKENS)
    sampling, chat = message.sampling, message.chat
    sampling.temperature, sampling.seed = temperature, random.randrange(2**31)
    chat.messages.add(role="user", content=random.choice(QUESTIONS))
    _begin(message, reasoning, temperature)
    check = _add_form(random, kind, message)
    may_be_cut, whole = False, None
    if option == "logprobs":
        message.logprobs = 2
    elif option == "min_tokens":
        sampling.min_tokens = random.randint(5, 50)
    elif option == "ignore_eos":
        message.ignore_eos = True
        if kind == "parallel tools":  # there is always room for one more call
            message.max_tokens, may_be_cut = MAX_ENDLESS_TOKENS, True
    elif option == "stop":
        whole = gateway_pb2.GenerateRequest()
        whole.CopyFrom(message)
        message.stop.append(random.choice(STOPS))
    return Case(name, message, check, reasoning != "off", may_be_cut, whole)


def _begin(message: gateway_pb2.GenerateRequest, reasoning: str, temperature: float) -> None:
    """Whether the answer begins in the middle of a reasoning. A random model must be urged to end it, and its calls."""
    bias = message.sampling.logit_bias
    bias[EOS_ID] = 3.0 if temperature else 100.0
    if reasoning == "off":
        bias[BEGIN_ID] = -100.0
        return
    message.chat.messages.add(role="assistant", content=BEGIN)
    message.chat.continue_final_message = True
    if reasoning == "limited":
        message.chat.max_reasoning_tokens = MAX_REASONING
    else:
        bias[END_ID] = 14.0 if temperature else 100.0


def _add_form(random: Random, kind: str, message: gateway_pb2.GenerateRequest) -> Callable[[Answer], None]:
    form = message.sampling.structured_output
    if kind == "json_schema":
        schema = random.choice(SCHEMAS)
        form.json_schema = json.dumps(schema)
        return check_json(schema)
    if kind == "regex":
        form.regex = random.choice(PATTERNS)
        return check_pattern(form.regex)
    if kind == "grammar":
        form.grammar = random.choice(EXPRESSIONS)
        return check_expression
    message.sampling.ClearField("structured_output")
    functions = [{"name": name, "parameters": schema, "strict": True} for name, schema in TOOLS.items()]
    message.chat.tools = json.dumps([{"type": "function", "function": function} for function in functions])
    if kind == "strict tool":
        name = random.choice([*TOOLS])
        message.chat.tool_choice = f"function:{name}"
        return check_calls({name}, 1)
    message.chat.tool_choice = "required"
    return check_calls({*TOOLS}, None)
