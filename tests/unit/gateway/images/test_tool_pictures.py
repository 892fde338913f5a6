"""Pictures in results of tools, as coding agents send screenshots: they stand in the tool's message, in order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx2
import pytest
from transformers import AutoTokenizer

from services.common.vision.vision_config import load_vision_config
from tests.support.clients.gateway_calls import ids
from tests.support.clients.http_gateway import with_client
from tests.support.dense.vision_models import noise
from tests.support.running_gateway import RunningGateway
from tests.support.served_vision import IMAGE_TOKEN, data_url, make_served_vision_model, prompt_ids
from tests.support.workers.fake_dense import FakeDense

SIDES = ((30, 43), (60, 20))
URLS = [data_url(noise(*sides, seed)) for seed, sides in enumerate(SIDES)]
USER = {"role": "user", "content": "Look."}


def anthropic_body(order: list[str | int], is_error: bool) -> dict[str, Any]:
    def block(each: str | int) -> dict[str, Any]:
        if isinstance(each, str):
            return {"type": "text", "text": each}
        data = URLS[each].partition(",")[2]
        return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}

    result = {"type": "tool_result", "tool_use_id": "t", "content": list(map(block, order)), "is_error": is_error}
    use = {"type": "tool_use", "id": "t", "name": "look", "input": {}}
    messages = [USER, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    return {"model": "model", "max_tokens": 1, "messages": messages}


def responses_body(order: list[str | int]) -> dict[str, Any]:
    output = [
        {"type": "input_text", "text": each}
        if isinstance(each, str)
        else {"type": "input_image", "image_url": URLS[each]}
        if each
        else {"type": "image_url", "image_url": {"url": URLS[each], "detail": "high"}}  # as in chats
        for each in order
    ]
    call = {"type": "function_call", "call_id": "t", "name": "look", "arguments": "{}"}
    items = [USER, call, {"type": "function_call_output", "call_id": "t", "output": output}]
    return {"max_output_tokens": 1, "input": items}


@pytest.mark.parametrize("order", [["a", 0, "b", 1], [1, 0], [0, "b"], ["a", 1]])
def test_pictures_stand_among_the_texts_of_a_result(order: list[str | int], tmp_path: Path) -> None:
    model = make_served_vision_model(tmp_path / "model")
    vision = load_vision_config(model)
    assert vision is not None
    texts = [each for each in order if isinstance(each, str)]
    parts = [
        {"type": "image"}
        if isinstance(each, int)
        else {"type": "text", "text": each if each == texts[0] else f"\n{each}"}
        for each in order
    ]
    shapes = [vision.layout.shape_of(*SIDES[each], is_low=False) for each in order if isinstance(each, int)]
    places = [IMAGE_TOKEN * shape.num_tokens for shape in shapes]

    def expected(parts: list[dict[str, str]]) -> list[int]:
        chat = [USER, {"role": "assistant", "content": ""}, {"role": "tool", "content": parts}]
        tokenizer = AutoTokenizer.from_pretrained(model)
        return prompt_ids(
            model, tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True), places
        )

    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        [listed] = (await client.get("/v1/models")).json()["models"]
        assert listed["capabilities"] == ["completion", "multimodal"]
        for url, body in (
            ("/v1/messages", anthropic_body(order, is_error=False)),
            ("/v1/responses", responses_body(order)),
            ("/v1/messages", anthropic_body(order, is_error=True)),
        ):
            answer = await client.post(url, json=body)
            assert answer.status_code == 200, answer.text

    dense = FakeDense(lambda submit: ids(" a"), vocab_size=2048)
    with_client(tmp_path, dense, test, model=model)
    found = [list(submit.spec.prompt_token_ids) for submit in dense.submits]
    assert found[:2] == [expected(parts)] * 2
    if parts[0]["type"] == "text":
        wrong = [{"type": "text", "text": f"Error: {parts[0]['text']}"}, *parts[1:]]
    else:
        wrong = [{"type": "text", "text": "Error: "}, *parts]
        wrong = [{**each, "text": f"\n{each['text']}"} if each.get("text") == "b" else each for each in wrong]
    assert found[2] == expected(wrong)
