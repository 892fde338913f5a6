"""Requests for vectors: inputs, each a text, token ids or texts between token ids, and what they have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import Request
from pydantic import Field

from services.common.config import MAX_INPUTS
from services.common.errors import InvalidRequest
from services.common.shorten import quote
from services.gateway.apis.shared.generation_fields import NamedFields, Priority, User
from services.gateway.apis.shared.prompts import kind_of_prompts, prompt_list, prompts_of
from services.gateway.apis.shared.request_model import CountOrAll, at_most
from services.gateway.vectors.vectors import InputOptions, VectorInput

Texts = Annotated[list[str], Field(fail_fast=True), at_most(MAX_INPUTS)]


def _kind_of_input(value: Any) -> str:
    """A list that begins with a text has an input in each element, as with OpenAI: a number there is a mistake."""
    return "<prompts>" if isinstance(value, list) and value and isinstance(value[0], str) else kind_of_prompts(value)


Input = prompts_of(MAX_INPUTS, _kind_of_input)


def input_list(given: str | list[Any], field: str = "input") -> list[VectorInput]:
    """All inputs of an `Input`, one element each."""
    inputs = prompt_list(given)
    return [VectorInput(f"{field}[{i}]" if len(inputs) > 1 else field, each) for i, each in enumerate(inputs)]


def prompt_text(name: str, prompts: Mapping[str, str]) -> str:
    """The text of the model's prompt with this name. Raises `InvalidRequest` if there is none."""
    if name not in prompts:
        known = ", ".join(prompts) or "none"
        raise InvalidRequest(f"the model has no prompt {quote(name)}, it has: {known}", "prompt_name")
    return prompts[name]


class InputFields(NamedFields):
    """What bodies for vectors have in common."""

    model: str | None = None
    user: User = None
    priority: Priority = None
    cache_salt: Annotated[str, Field(min_length=1)] | None = Field(
        None, description="Only requests with the same salt share prefixes of inputs"
    )
    truncate_prompt_tokens: CountOrAll | None = Field(
        None,
        description="Cut longer inputs behind so many tokens; -1: as many as the model takes. Default: refuse them",
    )
    add_special_tokens: bool | None = Field(
        None, description="Add the special tokens that the model expects around a text; default: not for messages"
    )

    def options(self, request: Request) -> InputOptions:
        """What all inputs of the body have in common."""
        cut = self.truncate_prompt_tokens
        return InputOptions(
            model=self.model or "",
            request_id=request.state.request_id,
            user=self.user or "",
            traceparent=request.headers.get("traceparent", ""),
            priority=self.priority,
            cache_salt=self.cache_salt or "",
            adds_special_tokens=self.add_special_tokens,
            max_tokens=None if cut is None else max(0, cut),
        )
