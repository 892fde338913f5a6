"""Options of several prompts are copied for each of them: large ones are refused before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx2
import pytest

from services.gateway.apis.shared.to_message import MAX_COPIED_BYTES
from tests.support.clients.gateway_calls import EOS, ids
from tests.support.clients.http_gateway import check_error, with_client
from tests.support.running_gateway import RunningGateway
from tests.support.workers.fake_dense import FakeDense

LARGE = ["d" * 1_700_000]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": ["a"] * 64, "structured_outputs": {"choice": LARGE}},
    "/completion": {"prompt": ["a"] * 64, "json_schema": {"enum": LARGE}},
    "/generate": {"text": ["a"] * 64, "sampling_params": {"json_schema": f'{{"enum": ["{LARGE[0]}"]}}'}},
}


@pytest.mark.parametrize("path", BODIES)
def test_a_large_form_is_not_copied_for_each_prompt(tmp_path: Path, path: str) -> None:
    """A body of 1.7 MB became 109 MB, which took the event loop 0.1 s, and which nobody had counted."""
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        answer = await client.post(path, json=BODIES[path])
        assert answer.status_code == 400 and f"with several prompts at most {MAX_COPIED_BYTES} allowed" in answer.text

    with_client(tmp_path, FakeDense(lambda submit: [*ids(" one"), EOS]), test, max_prompts=64)


def test_options_within_their_limits_go_with_several_prompts(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        body = {"prompt": ["a", "b"], "stop": ["s" * 250] * 4, "max_tokens": 2}
        body["logit_bias"] = {str(i): 0.5 for i in range(3, 300)}
        answer = await client.post("/v1/completions", json=body)
        assert answer.status_code == 200 and len(answer.json()["choices"]) == 2
        one = {"prompt": "a", "structured_outputs": {"choice": LARGE}}  # which has the field's own limit
        check_error(await client.post("/v1/completions", json=one), 400, "structured_outputs.choice", "at most 262144")

    with_client(tmp_path, FakeDense(lambda submit: [*ids(" one"), EOS]), test)
