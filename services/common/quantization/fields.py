"""`Fields`: reads a JSON object of a checkpoint's quantization, with errors that name format, field and value."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from services.common.errors import ModelError

Value = TypeVar("Value")


class Fields:
    """One JSON object. `where` names it in errors, such as "/models/a: quantization_config (awq)"."""

    def __init__(self, values: object, where: str) -> None:
        if not isinstance(values, Mapping):
            raise ModelError(f"{where} is {values!r}, expected an object")
        self._values, self.where = values, where

    def get(self, name: str, default: Any = None) -> Any:
        """The value as it is. A null is like an absent field."""
        value = self._values.get(name)
        return default if value is None else value

    def names(self) -> tuple[str, ...]:
        """The names of all fields."""
        return tuple(self._values)

    def one_of(self, name: str, supported: Sequence[Value], default: Any = None) -> Value:
        """The value, which must be one of `supported`, also in its type. An absent field has the default."""
        value = self.get(name, default)
        if not any(type(value) is type(each) and value == each for each in supported):
            raise self.unsupported(name, value, ", ".join(map(str, supported)))
        return value

    def first_of(self, *names: str) -> str:
        """The name of the first field that is there; the first name if none is."""
        return next((name for name in names if self.get(name) is not None), names[0])

    def layers(self, *names: str) -> tuple[str, ...]:
        """A list of layers, from all of these fields. An absent one is empty."""
        entries: list[str] = []
        for name in names:
            values = self.get(name, [])
            if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
                raise self.unsupported(name, values, "a list of names")
            entries += values
        for entry in entries:
            if entry.startswith("re:"):
                self._check_pattern(entry)
        return tuple(entries)

    def inner(self, name: str) -> Fields:
        """An object within this one."""
        return Fields(self._values.get(name), f"{self.where}.{name}")

    def unsupported(self, name: str, value: object, supported: str) -> ModelError:
        """The error for a value that is not supported."""
        return ModelError(f"{self.where} has {name} {value!r}, supported: {supported}")

    def refuse(self, *names: str) -> None:
        """Raises ModelError if one of these fields says anything."""
        for name in names:
            if self.get(name) not in (None, False, {}, []):
                raise self.unsupported(name, self.get(name), "none")

    def _check_pattern(self, entry: str) -> None:
        try:
            re.compile(entry.removeprefix("re:"))
        except re.error as error:
            raise ModelError(f"{self.where} lists {entry!r}, which is no regular expression: {error}") from error
