"""`StructuredOutput`: the form that the text of an output must have, as the client wrote it.

Gateway and dense worker compile the same value with the same tokenizer, so what the gateway accepts the worker can run.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Constraint(StrEnum):
    """The kinds of form. The values are the fields of the message `StructuredOutput`."""

    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    CHOICE = "choice"
    GRAMMAR = "grammar"
    STRUCTURAL_TAG = "structural_tag"


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """One form. Equal values are the same form, so results of compiling it can be kept by value."""

    constraint: Constraint
    text: str = ""  # schema, regular expression, grammar or structural tag; empty for the other kinds
    choices: tuple[str, ...] = ()  # of `Constraint.CHOICE`; in the client's order
