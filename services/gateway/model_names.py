"""What clients may call the served model."""

from __future__ import annotations

from dataclasses import dataclass

from services.common.config import MAX_MODEL_NAME_CHARACTERS
from services.common.errors import InvalidRequest, UnknownModel


@dataclass(frozen=True, slots=True)
class ModelNames:
    """The names of the one model that is served."""

    names: tuple[str, ...]  # at least one
    accepts_any: bool  # whether any other name is taken for this model, too
    root: str  # where the model comes from, as /v1/models tells

    @property
    def first(self) -> str:
        """What the server itself calls it."""
        return self.names[0]

    def check(self, name: str) -> None:
        """Empty means the first. Raises `UnknownModel` for one of no model here, `InvalidRequest` if it is too long."""
        if not name or name in self.names:
            return
        if len(name) > MAX_MODEL_NAME_CHARACTERS:
            raise InvalidRequest(
                f"model has {len(name)} characters, at most {MAX_MODEL_NAME_CHARACTERS} allowed", "model"
            )
        if not self.accepts_any:
            raise UnknownModel(f"model {name!r} is not served here, {self.first!r} is", "model")
