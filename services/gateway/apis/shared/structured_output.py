"""Structured output, as OpenAI, vLLM, SGLang and llama.cpp write it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import pydantic
from pydantic import Field
from pydantic_core import PydanticCustomError, from_json, to_json

from services.common.structured_output import MAX_CHOICES
from services.gateway.apis.shared.request_model import RequestModel, at_most
from services.pb import sampling_pb2

JsonSchema = str | dict[str, Any] | bool
Choices = Annotated[list[str], at_most(MAX_CHOICES)]
OLDER = "vLLM's older name of the same in structured_outputs"
_Message = sampling_pb2.StructuredOutput


class NamedSchema(RequestModel):
    """A JSON Schema. `strict` changes nothing: an answer is always valid against it."""

    name: str | None = Field(None, max_length=256)
    description: str | None = None
    schema_: JsonSchema | None = Field(None, alias="schema", description="Any JSON if it is missing")
    strict: bool | None = None


class ResponseFormat(RequestModel):
    """OpenAI's structured output; `structural_tag`, with its own further fields, is vLLM's."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: NamedSchema | None = None
    schema_: JsonSchema | None = Field(
        None,
        alias="schema",
        description="For json_object, as with llama.cpp, and for json_schema, as with SGLang: the JSON Schema itself",
    )


class StructuredOutputs(RequestModel):
    """vLLM's structured output: exactly one of the first six."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {"disable_additional_properties": (False,)}

    json_: JsonSchema | None = Field(None, alias="json", description="A JSON Schema, as an object or as text")
    regex: str | None = Field(None, description="The whole answer matches this regular expression")
    choice: Choices | None = Field(None, description="The answer is one of these texts")
    grammar: str | None = Field(None, description="A context-free grammar in Lark or GBNF")
    json_object: bool | None = Field(None, description="true: any JSON object")
    structural_tag: str | dict[str, Any] | None = Field(None, description="As vLLM and xgrammar define it")
    disable_any_whitespace: bool | None = Field(None, description="JSON without whitespace between its tokens")
    whitespace_pattern: str | None = Field(None, description="Regular expression of the whitespace in JSON")


class StructuredOutputFields(RequestModel):
    """Structured output, as each server names it; one at most."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: JsonSchema | None = Field(None, description=OLDER)
    guided_regex: str | None = Field(None, description=OLDER)
    guided_choice: Choices | None = Field(None, description=OLDER)
    guided_grammar: str | None = Field(None, description=OLDER)
    json_schema: JsonSchema | None = Field(None, description="SGLang's and llama.cpp's structured_outputs.json")
    regex: str | None = Field(None, description="SGLang's name of structured_outputs.regex")
    ebnf: str | None = Field(None, description="SGLang's name of structured_outputs.grammar")
    grammar: str | None = Field(None, description="llama.cpp's name of structured_outputs.grammar")
    structural_tag: str | None = Field(None, description="SGLang's name of structured_outputs.structural_tag")

    @pydantic.model_validator(mode="after")
    def _check_form(self) -> StructuredOutputFields:
        structured_output_of(self)
        return self


_FIELDS = frozenset(StructuredOutputFields.__annotations__)


def structured_output_of(body: StructuredOutputFields) -> sampling_pb2.StructuredOutput | None:
    """What a body asks for. Raises `PydanticCustomError` if it asks for several, or names none."""
    if _FIELDS.isdisjoint(body.model_fields_set):
        return None
    structures = dict(_structures(body))
    if len(structures) > 1:
        raise PydanticCustomError(
            "several_forms",
            "the answer can have one form, and several are given: {names}",
            {"names": ", ".join(structures), "field": list(structures)[1]},
        )
    return next(iter(structures.values()), None)


def _structures(body: StructuredOutputFields) -> list[tuple[str, sampling_pb2.StructuredOutput]]:
    found: list[tuple[str, _Message | None]] = [
        ("response_format", _of_response_format(body.response_format)),
        ("structured_outputs", of_structured_outputs(body.structured_outputs)),
        ("guided_json", _of_schema(body.guided_json)),
        ("json_schema", _of_schema(body.json_schema)),
        ("guided_choice", _of_choice(body.guided_choice)),
        ("structural_tag", _of_tag(body.structural_tag or None)),
    ]
    if body.guided_regex is not None:
        found.append(("guided_regex", _Message(regex=body.guided_regex)))
    if body.guided_grammar is not None:
        found.append(("guided_grammar", _Message(grammar=body.guided_grammar)))
    if body.regex:  # empty, as in the fields below: none
        found.append(("regex", _Message(regex=body.regex)))
    found += [(name, _Message(grammar=text)) for name in ("grammar", "ebnf") if (text := getattr(body, name))]
    structures = [(name, structure) for name, structure in found if structure is not None]
    for name, structure in structures:
        structure.field_name = structure.field_name or name
    return structures


def _of_response_format(given: ResponseFormat | None) -> _Message | None:
    if given is None or given.type == "text":
        return None
    if given.type == "json_object":
        return _Message(json_object=True) if given.schema_ is None else _of_schema(given.schema_)
    if given.type == "structural_tag":
        return _of_tag({"type": given.type, **(given.model_extra or {})})
    if given.json_schema is None and given.schema_ is not None:
        return _of_schema(given.schema_)
    if given.json_schema is None:
        context = {"field": "response_format"}
        raise PydanticCustomError("json_schema", "json_schema must be provided where type is json_schema", context)
    schema = given.json_schema.schema_
    return _of_schema({} if schema is None else schema)


def json_structure(schema: JsonSchema | None, field_name: str) -> sampling_pb2.StructuredOutput:
    """JSON that is valid against a schema; without one, any JSON object. `field_name`: the client's."""
    if schema is None:
        return _Message(json_object=True, field_name=field_name)
    return _Message(json_schema=_schema_text(schema), field_name=field_name)


def of_structured_outputs(given: StructuredOutputs | None) -> sampling_pb2.StructuredOutput | None:
    """What vLLM's field asks for. Raises `PydanticCustomError` if it does not ask for one form."""
    if given is None:
        return None
    structures = {
        "json": _of_schema(given.json_, _whitespace_options(given)),
        "regex": None if given.regex is None else _Message(regex=given.regex),
        "choice": _of_choice(given.choice),
        "grammar": None if given.grammar is None else _Message(grammar=given.grammar),
        "json_object": _Message(json_object=True) if given.json_object else None,
        "structural_tag": _of_tag(given.structural_tag),
    }
    named = [(name, structure) for name, structure in structures.items() if structure is not None]
    if len(named) != 1:
        raise PydanticCustomError(
            "one_form",
            "exactly one of {names} is required; there are {count}",
            {"names": ", ".join(structures), "count": len(named), "field": "structured_outputs"},
        )
    [(name, structure)] = named
    structure.field_name = f"structured_outputs.{name}"
    return structure


def _whitespace_options(given: StructuredOutputs) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if given.disable_any_whitespace:
        options |= {"whitespace_flexible": False, "whitespace_pattern": None}
    if given.whitespace_pattern is not None:
        options["whitespace_pattern"] = given.whitespace_pattern
    return options


def _of_schema(schema: JsonSchema | None, options: Mapping[str, Any] | None = None) -> _Message | None:
    if schema is None:
        return None
    if options:
        try:
            schema = from_json(schema, allow_inf_nan=False) if isinstance(schema, str) else schema
        except ValueError as error:
            context = {"error": str(error), "field": "structured_outputs"}
            raise PydanticCustomError("json", "json is not JSON: {error}", context) from error
        if isinstance(schema, dict):
            schema = {**schema, "x-guidance": options}  # where llguidance looks for them
    return _Message(json_schema=_schema_text(schema))


def _schema_text(schema: JsonSchema) -> str:
    return schema if isinstance(schema, str) else to_json(schema).decode()


def _of_choice(choices: list[str] | None) -> _Message | None:
    return None if choices is None else _Message(choice=sampling_pb2.Choice(choices=choices))


def _of_tag(tag: str | dict[str, Any] | None) -> _Message | None:
    if tag is None:
        return None
    return _Message(structural_tag=tag if isinstance(tag, str) else to_json(tag).decode())
