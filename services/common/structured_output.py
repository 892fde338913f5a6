"""`StructuredOutput`: how the text of an output has to be structured, as the client wrote it.

Gateway and dense worker compile the same value with the same tokenizer, so what the gateway accepts the worker can run.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from services.common.errors import InvalidRequest

MAX_FORM_BYTES = 256 * 1024
MAX_CHOICES = 10_000
MAX_FIELD_NAME_CHARACTERS = 128
FIELD_NAME = "structured_output"


class Constraint(StrEnum):
    """The kinds of structured output. The values are the fields of the message `StructuredOutput`."""

    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    CHOICE = "choice"
    GRAMMAR = "grammar"
    STRUCTURAL_TAG = "structural_tag"


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """One of them. Equal values mean the same, so results of compiling it can be kept by value."""

    constraint: Constraint
    text: str = ""  # schema, regular expression, grammar or structural tag; empty for the other kinds
    choices: tuple[str, ...] = ()  # of `Constraint.CHOICE`; in the client's order
    field_name: str = field(default=FIELD_NAME, compare=False)  # its name in the client's request, for error messages
    compiled_bytes: int = field(default=0, compare=False)  # that a worker needs for it, if the gateway has tried it

    @property
    def num_bytes(self) -> int:
        """The size of its texts in UTF-8."""
        return sum(len(text.encode("utf-8", "surrogatepass")) for text in (self.text, *self.choices))

    def validate(self) -> None:
        """Raises `InvalidRequest` if it is too large to be compiled, or has an empty text to choose."""
        name = self.field_name
        if len(name) > MAX_FIELD_NAME_CHARACTERS or not name.isprintable():
            raise InvalidRequest(
                f"structured_output.field_name has {len(name)} characters, must be at most "
                f"{MAX_FIELD_NAME_CHARACTERS} printable ones",
                "structured_output.field_name",
            )
        if self.num_bytes > MAX_FORM_BYTES:
            raise InvalidRequest(
                f"{name} ({self.constraint.value}) has {self.num_bytes} bytes, at most {MAX_FORM_BYTES} allowed", name
            )
        if self.constraint is Constraint.CHOICE:
            if not 1 <= len(self.choices) <= MAX_CHOICES:
                raise InvalidRequest(f"{name} has {len(self.choices)} choices, must have 1 to {MAX_CHOICES}", name)
            if not all(self.choices):
                raise InvalidRequest(f"{name} has an empty choice at index {self.choices.index('')}", name)
