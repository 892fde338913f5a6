"""The limit on the log-probabilities of a request, summed over all its answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.support.running_gateway import RunningGateway, until
from tests.support.workers.fake_dense import FakeDense
from tests.unit.gateway.http.test_http_errors import CHAT, CHATS, COMPLETIONS, check_error, with_client


@pytest.mark.parametrize(
    ("path", "body", "count"),
    [
        (COMPLETIONS, {"prompt": "a", "max_tokens": 20, "logprobs": 4}, 20 * 5),
        (COMPLETIONS, {"prompt": ["a"] * 5, "max_tokens": 4, "logprobs": 4}, 5 * 4 * 5),
        (COMPLETIONS, {"prompt": "a", "n": 10, "max_tokens": 10, "logprobs": 0}, 10 * 10),
        (COMPLETIONS, {"prompt": "a", "best_of": 10, "max_tokens": 10}, 10 * 10),
        (COMPLETIONS, {"prompt": [5] * 20, "max_tokens": 1, "prompt_logprobs": 4}, 20 * 5),
        (CHATS, {**CHAT, "max_tokens": 10, "n": 5, "logprobs": True, "top_logprobs": 1}, 5 * 10 * 2),
    ],
)
def test_the_total_number_of_log_probabilities_is_limited(
    tmp_path: Path, path: str, body: dict[str, Any], count: int
) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        response = await client.post(path, json=body)
        param = "top_logprobs" if path == CHATS else "logprobs"
        check_error(response, 400, param, f"{count} log-prob", "gateway.max_request_logprobs is 99")
        await until(lambda: not dense.running)  # the previous prompts are cancelled
        fields = {key: value - 1 for key, value in body.items() if key == "max_tokens" and value > 1}
        fewer = {**body, **fields} if fields else {**body, "prompt": [5] * 19}
        assert (await client.post(path, json=fewer)).status_code == 200

    dense = FakeDense(lambda submit: [50] * submit.spec.max_tokens)
    with_client(tmp_path, dense, test, max_request_logprobs=99)


def test_the_limit_does_not_apply_to_requests_without_log_probabilities(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, _: RunningGateway) -> None:
        response = await client.post(COMPLETIONS, json={"prompt": ["a"] * 4, "n": 4, "max_tokens": 100})
        assert response.status_code == 200

    with_client(tmp_path, FakeDense(lambda submit: [50] * submit.spec.max_tokens), test, max_request_logprobs=1)
