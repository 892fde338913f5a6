"""The names that clients may use for the served model."""

from __future__ import annotations

from dataclasses import dataclass

from services.common.config import MAX_MODEL_NAME_CHARACTERS
from services.common.errors import InvalidRequest, UnknownModel


@dataclass(frozen=True, slots=True)
class ModelNames:
    """The names of the one model that is served."""

    names: tuple[str, ...]  # at least one
    accepts_any: bool  # whether any other name also means this model
    root: str  # the model's directory, which /v1/models shows

    @property
    def first(self) -> str:
        """The server's own name for the model."""
        return self.names[0]

    def check(self, name: str) -> None:
        """Accepts a name; empty means the first. Raises `UnknownModel`, or `InvalidRequest` if the name is too long."""
        if not name or name in self.names:
            return
        if len(name) > MAX_MODEL_NAME_CHARACTERS:
            raise InvalidRequest(
                f"model has {len(name)} characters, at most {MAX_MODEL_NAME_CHARACTERS} allowed", "model"
            )
        if not self.accepts_any:
            raise UnknownModel(f"model {name!r} is not served here, {self.first!r} is", "model")
