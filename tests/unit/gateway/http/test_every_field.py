"""Every field of the request types of the installed `openai` package, and every field that docs/api.md promises.

Each is served, refused by name, or in a list of fields that cannot change an answer. A version of the package with a
new field fails here, until the field is one of the three.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_type_hints

import httpx2
import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params

from services.gateway.http.schemas.base import RequestModel
from services.gateway.http.schemas.chat import ChatRequest
from services.gateway.http.schemas.completions import CompletionRequest
from services.gateway.http.schemas.generate import GenerateSampling
from services.gateway.http.schemas.llama_cpp import LlamaCppBody
from services.gateway.http.schemas.responses.request import ResponsesRequest
from services.gateway.http.schemas.sampling import IGNORED
from tests.support.clients.http_gateway import say, with_client
from tests.support.cluster import REPOSITORY
from tests.support.running_gateway import RunningGateway
from tests.support.workers.fake_dense import FakeDense

API = (REPOSITORY / "docs" / "api.md").read_text()
# Who asks, for how much money, what is stored at OpenAI and how its caches are paid: nothing of it is in an answer.
WITHOUT_EFFECT = {
    *("metadata", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "safety_identifier"),
    *("service_tier", "store", "verbosity"),
}
HI: Any = [{"role": "user", "content": "Hi"}]
TYPES: list[tuple[str, Any, type[RequestModel], set[str], dict[str, Any]]] = [
    ("/v1/chat/completions", chat_create_params.CompletionCreateParamsStreaming, ChatRequest, WITHOUT_EFFECT,
     {"messages": HI, "max_tokens": 1}),
    ("/v1/completions", completion_create_params.CompletionCreateParamsStreaming, CompletionRequest, set(),
     {"prompt": "a", "max_tokens": 1}),
    ("/v1/responses", response_create_params.ResponseCreateParamsStreaming, ResponsesRequest,
     WITHOUT_EFFECT - {"metadata", "store", "verbosity"} | {"access_programs", "max_tool_calls"},
     {"input": "a", "max_output_tokens": 1}),
]  # fmt: skip


def served(model: type[RequestModel]) -> set[str]:
    """The fields that do what they promise."""
    fields = {field.alias or name: field.description or "" for name, field in model.model_fields.items()}
    return {name for name, text in fields.items() if text != IGNORED and not text.startswith(f"{IGNORED}:")}


@pytest.mark.parametrize(("path", "given", "model", "ignored", "body"), TYPES, ids=[each[0] for each in TYPES])
def test_every_field_of_openai_is_served_refused_or_without_effect(
    path: str, given: Any, model: type[RequestModel], ignored: set[str], body: dict[str, Any], tmp_path: Path
) -> None:
    names = set(get_type_hints(given, include_extras=True))
    assert names - served(model) - model.unsupported.keys() == ignored & names
    assert ignored <= model.model_fields.keys() | names and not ignored & served(model)

    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        for name in names & model.unsupported.keys():
            answer = await client.post(path, json=body | {name: {"anything": 1}})
            error = answer.json()["error"]
            assert answer.status_code == 400 and error["param"] == name, (name, error)
            assert (await client.post(path, json=body | {name: None})).status_code == 200, name

    with_client(tmp_path, FakeDense(say(" one")), test)


def test_every_field_that_the_page_promises_is_served() -> None:
    both, rest = API[API.index("## Fields beyond OpenAI's") :].split("Chats only:", 1)
    of_chats = rest[: rest.index("\n`/tokenize`")]
    for text, models in ((both, (ChatRequest, CompletionRequest)), (of_chats, (ChatRequest,))):
        rows = re.findall(r"^\| (`.*?) \|", text, re.MULTILINE)
        names = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
        assert len(names) > 5
        for model in models:
            assert set(names) <= served(model), (model, set(names) - served(model))
    for section, model in (("/generate", GenerateSampling), ("/completion", LlamaCppBody)):
        text = API[API.index(f"## {section}\n") :].split("\n## ", 2)[0]
        own = {"/generate": ("max_new_tokens", "min_new_tokens", "no_stop_trim", "sampling_seed")}.get(
            section, ("n_predict", "n_cmpl", "n_probs", "logit_bias", "cache_prompt", "response_fields")
        )
        assert all(f"`{name}" in text for name in own) and set(own) <= served(model)
