"""llama.cpp's /props and /slots: the documented fields, and that they say what the server is and does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
from transformers import AutoTokenizer

from services.common.config import EMBEDDED_MODEL
from tests.support.clients.gateway_calls import EOS, ids
from tests.support.clients.http_gateway import with_client
from tests.support.running_gateway import RunningGateway
from tests.support.workers.fake_dense import FakeDense
from tests.unit.gateway.access.test_callers import bearer, keys_file

DOCUMENTED_PROPS = {
    "default_generation_settings", "total_slots", "model_path", "chat_template", "modalities", "build_info",
    "is_sleeping",
}  # fmt: skip
DOCUMENTED_SLOT = {"id", "id_task", "n_ctx", "speculative", "is_processing"}


async def slots(
    client: httpx2.AsyncClient, is_reached: Callable[[list[dict[str, Any]]], Any], headers: dict[str, str] | None = None
) -> list[dict[str, Any]]:
    """The slots as soon as they are as wanted; the time limit is that of the test."""
    while not is_reached(found := (await client.get("/slots", headers=headers)).json()):  # noqa: ASYNC110  no event
        await asyncio.sleep(0.01)
    return found


def test_props_are_those_of_the_model_and_the_defaults_of_completion(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        props = (await client.get("/props")).json()
        assert set(props) >= DOCUMENTED_PROPS
        assert (props["total_slots"], props["is_sleeping"]) == (4, False)
        assert props["modalities"]["vision"] is False
        assert props["chat_template"] == AutoTokenizer.from_pretrained(EMBEDDED_MODEL).chat_template
        settings = props["default_generation_settings"]
        assert settings["n_ctx"] == 777
        answer = (await client.post("/completion", json={"prompt": "a"})).json()["generation_settings"]
        assert settings["params"] == answer | {"seed": 2**32 - 1}
        assert settings["params"]["temperature"] == 0.8 and settings["params"]["n_predict"] == -1

    with_client(tmp_path, FakeDense(lambda submit: [*ids(" a"), EOS], max_model_len=777), test)


def test_what_cannot_be_changed_is_refused_in_llama_cpps_words(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        for path in ("/props", "/slots/0?action=save", "/slots/abc?action=erase", "/slots/1"):
            answer = await client.post(path, json={"filename": "a.bin"})
            error = answer.json()["error"]
            assert (answer.status_code, error["code"], error["type"]) == (501, 501, "not_supported_error")
        assert (await client.get("/lora-adapters")).json() == []

    with_client(tmp_path, FakeDense(lambda submit: [EOS]), test)


def test_props_show_a_template_of_its_own_for_tools(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for file in EMBEDDED_MODEL.iterdir():
        (model / file.name).symlink_to(file)
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates/tool_use.jinja").write_text("{{ tools | length }} tools")

    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        props = (await client.get("/props")).json()
        assert props["chat_template"] == (model / "chat_template.jinja").read_text()
        assert props["chat_template_tool_use"] == "{{ tools | length }} tools"
        body = {"messages": [{"role": "user", "content": "Hi"}]}
        tools = [{"type": "function", "function": {"name": "f"}}]
        assert (await client.post("/apply-template", json=body | {"tools": tools})).json() == {"prompt": "1 tools"}
        assert "Hi" in (await client.post("/apply-template", json=body)).json()["prompt"]

    with_client(tmp_path, FakeDense(lambda submit: [EOS]), test, model=model)


def test_slots_show_what_runs_and_none_free_is_a_503(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        idle = (await client.get("/slots", params={"fail_on_no_slot": 1})).json()
        assert [set(slot) for slot in idle] == [DOCUMENTED_SLOT] * 4
        assert [(slot["id"], slot["is_processing"], slot["id_task"]) for slot in idle] == [
            (index, False, -1) for index in range(4)
        ]
        body = {"prompt": [5, 6, 7], "n_predict": 500, "temperature": 0.25, "seed": 11}
        requests = [asyncio.create_task(client.post("/completion", json=body))]
        first, *others = await slots(client, lambda each: each[0].get("next_token", {}).get("n_decoded"))
        assert first["is_processing"] and not any(slot["is_processing"] for slot in others)
        assert first["n_prompt_tokens"] == 3 and first["id_task"] >= 0
        params = first["params"]
        assert (params["temperature"], params["seed"], params["n_predict"]) == (0.25, 11, 500)
        counts = first["next_token"]
        assert counts["n_decoded"] >= 1 and counts["n_decoded"] + counts["n_remain"] == 500
        requests += [asyncio.create_task(client.post("/completion", json=body)) for _ in range(3)]
        await slots(client, lambda each: each[3]["is_processing"])
        full = await client.get("/slots", params={"fail_on_no_slot": 1})
        assert full.status_code == 503 and full.json()["error"]["code"] == 503
        assert "all 4" in full.json()["error"]["message"]
        for request in requests:
            request.cancel()
        await asyncio.gather(*requests, return_exceptions=True)
        await slots(client, lambda each: not each[0]["is_processing"])
        assert (await client.get("/slots", params={"fail_on_no_slot": 1})).status_code == 200

    with_client(tmp_path, FakeDense(lambda submit: ids(" a") * 500, step_s=0.01), test)


def test_slots_show_the_details_of_the_callers_own_alone(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        ann, bob = ({"authorization": bearer(name)} for name in ("ann", "bob"))
        body = {"prompt": [5, 6, 7], "n_predict": 500}
        running = asyncio.create_task(client.post("/completion", json=body, headers=ann))
        [own, *_] = await slots(client, lambda each: each[0]["is_processing"], ann)
        [other, *_] = await slots(client, lambda each: each[0]["is_processing"], bob)
        assert {"params", "next_token", "n_prompt_tokens"} <= own.keys()
        assert set(other) == DOCUMENTED_SLOT and other["is_processing"]
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    dense = FakeDense(lambda submit: ids(" a") * 500, step_s=0.01)
    with_client(tmp_path, dense, test, api_keys_file=keys_file(tmp_path))
