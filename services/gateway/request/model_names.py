"""The names that clients may use for the served model and its adapters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from services.common.config import MAX_MODEL_NAME_CHARACTERS
from services.common.errors import InvalidRequest, UnknownModel
from services.lora.adapter import Adapter

# Hugging Face's clients send them to a server without knowing the model: Text Generation Inference takes any name.
PLACEHOLDERS = frozenset({"dummy", "tgi"})


@dataclass(frozen=True, slots=True)
class ModelNames:
    """The names of the one model that is served, and of the adapters that a caller may name."""

    names: tuple[str, ...]  # at least one
    accepts_any: bool  # whether any other name also means this model
    root: str  # the model's directory, which /v1/models shows
    adapters: Mapping[str, Adapter] = field(default_factory=dict)  # by name

    @property
    def first(self) -> str:
        """The server's own name for the model."""
        return self.names[0]

    def check(self, name: str) -> None:
        """Accepts a name; empty means the first. Raises `UnknownModel`, or `InvalidRequest` if the name is too long."""
        if not name or name in self.names or name in self.adapters or name in PLACEHOLDERS:
            return
        if len(name) > MAX_MODEL_NAME_CHARACTERS:
            raise InvalidRequest(
                f"model has {len(name)} characters, at most {MAX_MODEL_NAME_CHARACTERS} allowed", "model"
            )
        if not self.accepts_any:
            raise UnknownModel(
                f"The model `{name}` does not exist: {name!r} is not served here, {self.first!r} is", "model"
            )
