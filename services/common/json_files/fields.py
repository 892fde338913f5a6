"""`Fields`: reads a JSON object of a model's files, with errors that name file, field and value."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from services.common.errors import ModelError

Value = TypeVar("Value")

MAX_SIZE = 2**24  # of anything that a config counts, such as positions, tokens of the vocabulary and features


class Fields:
    """One JSON object. `where` names it in errors, such as "/models/a: quantization_config (awq)"."""

    def __init__(self, values: object, where: str) -> None:
        if not isinstance(values, Mapping):
            raise ModelError(f"{where} is {values!r}, expected an object")
        self.raw, self.where = values, where

    def get(self, name: str, default: Any = None) -> Any:
        """The value as it is. A null is like an absent field."""
        value = self.raw.get(name)
        return default if value is None else value

    def names(self) -> tuple[str, ...]:
        """The names of all fields."""
        return tuple(self.raw)

    def one_of(self, name: str, supported: Sequence[Value], default: Any = None) -> Value:
        """The value, which must be one of `supported`, also in its type. An absent field has the default."""
        value = self.get(name, default)
        if not any(type(value) is type(each) and value == each for each in supported):
            raise self.unsupported(name, value, ", ".join(map(str, supported)))
        return value

    def number(self, name: str, default: float | None = None) -> float | None:
        """A field that is a number above 0; `default` if it is missing or null."""
        value = self.get(name, default)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise self.error(name, value, "expected a number above 0")
        return float(value)

    def size(self, name: str, most: int = MAX_SIZE) -> int:
        """A field that is a whole number from 1 to `most`."""
        value = self.get(name)
        if type(value) is not int or not 1 <= value <= most:
            raise self.error(name, value, f"expected a whole number from 1 to {most}")
        return value

    @property
    def dtype(self) -> str:
        """The element type that the field of this name gives, as torch names it."""
        name = str(self.get("dtype", "float32")).removeprefix("torch.")
        if name not in ("float32", "bfloat16", "float16"):
            raise self.unsupported("dtype", name, "float32, bfloat16, float16")
        return name

    def first_of(self, *names: str) -> str:
        """The name of the first field that is there; the first name if none is."""
        return next((name for name in names if self.get(name) is not None), names[0])

    def inner(self, name: str) -> Fields:
        """An object within this one."""
        return Fields(self.raw.get(name), f"{self.where}.{name}")

    def refuse(self, *names: str) -> None:
        """Raises ModelError if one of these fields says anything."""
        for name in names:
            if self.get(name) not in (None, False, {}, []):
                raise self.unsupported(name, self.get(name), "none")

    def unsupported(self, name: str, value: object, supported: str) -> ModelError:
        """The error for a value that is not supported."""
        return self.error(name, value, f"supported: {supported}")

    def error(self, name: str, value: object, rest: str) -> ModelError:
        """The error about a field."""
        return ModelError(f"{self.where} has {name} {value!r}, {rest}")
