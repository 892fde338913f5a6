"""POST /vertex_generate: /generate in the form of Google's Vertex AI, as SGLang has it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pydantic
from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from services.gateway.apis.sglang.format import GenerateFormat
from services.gateway.apis.sglang.routes import answer_generate
from services.gateway.apis.sglang.schema import GenerateBody, GenerateObject
from services.gateway.apis.sglang.sessions import Sessions
from services.gateway.apis.shared.routes import json_router, streamed
from services.gateway.core.chunks import Completion, Prompt
from services.gateway.core.request_service import RequestService

PROMPTS = ("text", "input_ids")  # by which of them an instance has its prompt


def _document(schema: dict[str, Any]) -> None:
    """Makes of the schema of /generate's body that of this one."""
    others = schema["properties"]
    prompts = {name: others.pop(name) for name in PROMPTS}
    instances = {"type": "array", "minItems": 1, "items": {"type": "object", "properties": prompts}}
    schema["properties"] = {"instances": instances, "parameters": {"type": "object", "properties": others}}
    schema["required"] = ["instances"]


class VertexBody(GenerateBody):
    """`instances`, each with a prompt, and `parameters`: the other fields of /generate."""

    model_config = pydantic.ConfigDict(json_schema_extra=_document)

    @pydantic.model_validator(mode="before")
    @classmethod
    def _read_instances(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        others = dict(body)
        instances, parameters = others.pop("instances", None), others.pop("parameters", None)
        if not isinstance(instances, list) or not instances or not all(isinstance(each, dict) for each in instances):
            raise PydanticCustomError("instances", "must be a list of objects, at least one", {"field": "instances"})
        if not isinstance(parameters, dict | None):
            raise PydanticCustomError("parameters", "must be an object", {"field": "parameters"})
        for name in cls.model_fields:
            if others.get(name) is not None:
                raise PydanticCustomError("misplaced", "belongs into parameters", {"field": name})
            if name in PROMPTS and parameters and parameters.get(name) is not None:
                context = {"field": "parameters", "name": name}
                raise PydanticCustomError("misplaced", "{name} belongs into instances", context)
        kind = next((name for name in PROMPTS if instances[0].get(name) is not None), None)
        if kind is None:
            raise PydanticCustomError("prompt", "[0] has neither text nor input_ids", {"field": "instances"})
        for index, each in enumerate(instances):
            context = {"field": "instances", "index": index, "kind": kind}
            if {name for name, value in each.items() if value is not None} != {kind}:
                message = "[{index}] must have {kind} alone, as the first one has it"
                raise PydanticCustomError("prompt", message, context)
            if kind == "input_ids" and not isinstance(each[kind], list):
                raise PydanticCustomError("prompt", "[{index}] must have a list of token ids as {kind}", context)
        read = {**others, **(parameters or {}), kind: [each[kind] for each in instances]}
        body.update(read)  # where errors look for the field that they name
        return read


class Predictions(TypedDict):
    """The answers, in the order of the instances."""

    predictions: list[GenerateObject]


class VertexFormat(GenerateFormat):
    """The `Format` of whole answers; a stream is that of /generate."""

    def whole(self, answers: Sequence[tuple[Sequence[Completion], Prompt | None]]) -> Any:
        return {"predictions": super().whole(answers)}


def vertex_routes(service: RequestService, sessions: Sessions) -> APIRouter:
    """The route of one gateway."""
    router = json_router(service, "Generation")

    @router.post("/vertex_generate", responses=streamed(Predictions))
    async def vertex_generate(body: VertexBody, request: Request) -> Response:
        """Continues the prompt of each instance."""
        return await answer_generate(service, sessions, body, request, VertexFormat)

    return router
