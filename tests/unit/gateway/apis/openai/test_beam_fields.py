"""The fields of beam search over HTTP: wrong values are a 400 that names field, value and limit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx2

from tests.support.clients.http_gateway import check_error, with_client
from tests.support.running_gateway import RunningGateway
from tests.support.workers.fake_dense import FakeDense

SEARCH = {"use_beam_search": True, "best_of": 4, "max_tokens": 4}
WRONG: list[tuple[dict[str, Any], str, list[str]]] = [
    ({"length_penalty": 2.0}, "length_penalty", ["only with use_beam_search"]),
    ({"early_stopping": True}, "early_stopping", ["only with use_beam_search"]),
    ({**SEARCH, "best_of": 17}, "best_of", ["best_of is 17", "from 1 to 16"]),
    ({**SEARCH, "best_of": 0}, "best_of", ["best_of is 0"]),
    ({**SEARCH, "n": 5}, "n", ["n is 5", "which is 4"]),
    ({**SEARCH, "early_stopping": "soon"}, "early_stopping", []),
    ({**SEARCH, "length_penalty": 1e9}, "length_penalty", ["1000000000", "-10 to 10"]),
    ({**SEARCH, "temperature": 0.5}, "temperature", ["temperature is 0.5"]),
    ({**SEARCH, "response_format": {"type": "json_object"}}, "response_format", ["beam search"]),
    ({**SEARCH, "stop": "x"}, "stop", ["beam search"]),
]


def test_wrong_values_are_refused_by_name(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        chat = {"messages": [{"role": "user", "content": "a"}]}
        routes = {"/v1/completions": {"prompt": "a"}, "/v1/chat/completions": chat}
        for path, body in routes.items():
            for options, param, words in WRONG:
                response = await client.post(path, json={**body, **options})
                assert response.json()["error"]["param"].startswith(param), (options, response.text)
                check_error(response, 400, response.json()["error"]["param"], *words)
        assert not dense.submits

    dense = FakeDense(lambda submit: [70, 80])
    with_client(tmp_path, dense, test)
