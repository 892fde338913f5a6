"""Anthropic's own client with tools and reasoning, against a gateway whose model writes what the test says."""

from __future__ import annotations

import asyncio
import base64
import json
from pathlib import Path

from transformers import AutoTokenizer

from services.gateway.apis.anthropic.schema import CountTokensRequest, MessagesRequest
from tests.clients.environments import Environment
from tests.clients.test_clients import PROGRAMS, needs, run
from tests.support.chats.chat_models import make_chat_model, prompt_text, writes
from tests.support.cluster import free_port, running_cluster
from tests.support.dense.vision_models import noise
from tests.support.running_gateway import run as run_test
from tests.support.running_gateway import running_gateway
from tests.support.served_vision import Truth, Turn, make_served_vision_model, png
from tests.support.workers.fake_dense import FakeDense

CITY = {"city": 'Paris, "Île-de-France"\n'}
CALL = f"<tool_call>\n{json.dumps({'name': 'get_weather', 'arguments': CITY})}\n</tool_call>"


@needs("anthropic")
def test_a_conversation_with_a_tool(tmp_path: Path) -> None:
    dense = FakeDense(writes(CALL, CALL, "Sunny."), max_model_len=4096)
    keys = tmp_path / "keys.toml"
    keys.write_text('[[keys]]\nname = "someone"\nkey = "a-secret-key-0123456789"\n')

    async def test() -> None:
        model = make_chat_model(tmp_path / "model", "hermes")
        address = f"127.0.0.1:{free_port()}"
        options = {"http_address": address, "model": model, "api_keys_file": keys}
        async with running_gateway(tmp_path, dense, **options):
            python = Environment("anthropic").program("python")
            command = [python, str(PROGRAMS / "anthropic_tools.py"), f"http://{address}"]
            got = json.loads(await asyncio.to_thread(run, command))
        assert got == {
            "whole": [["tool_use", CITY]],
            "streamed": [["tool_use", CITY]],
            "stop_reasons": ["tool_use", "tool_use", "end_turn"],
            "thinking": [],
            "has_json_events": True,
            "last": "Sunny.",
            "errors": [
                ["NotFoundError", "not_found_error", True],
                ["AuthenticationError", "authentication_error", True],
            ],
        }

    run_test(test())
    assert "<tool_response>\nsunny\n</tool_response>" in prompt_text(dense.submits[2])


# Who asks, from where, how fast and for how much money, and what Anthropic caches or does when it refuses.
WITHOUT_EFFECT = {
    *("betas", "billing_policy", "cache_control", "diagnostics", "fallback_credit_token", "fallbacks", "inference_geo"),
    *("service_tier", "speed", "user_profile_id", "workspace_id"),
}
REFUSED = {"compaction", "container", "context_management", "mcp_servers"}
OTHERS_REFUSED = {"chat_template", "ec_transfer_params", "kv_transfer_params"}  # fields that vLLM adds to Messages


@needs("anthropic")
def test_every_field_is_served_refused_or_without_effect() -> None:
    command = [Environment("anthropic").program("python"), str(PROGRAMS / "anthropic_fields.py")]
    for name, fields in json.loads(run(command)).items():
        model = CountTokensRequest if name == "count_tokens" else MessagesRequest
        assert model.unsupported.keys() == REFUSED | OTHERS_REFUSED
        served = model.model_fields.keys() - WITHOUT_EFFECT
        assert set(fields) - served - REFUSED == WITHOUT_EFFECT & set(fields), name


@needs("anthropic")
def test_the_tool_runner_goes_on_without_threads(tmp_path: Path) -> None:
    dense = FakeDense(writes(CALL, "Sunny.", CALL, "Sunny."), max_model_len=4096)

    async def test() -> None:
        model = make_chat_model(tmp_path / "model", "hermes")
        address = f"127.0.0.1:{free_port()}"
        async with running_gateway(tmp_path, dense, http_address=address, model=model):
            python = Environment("anthropic").program("python")
            command = [python, str(PROGRAMS / "anthropic_tool_runner.py"), f"http://{address}"]
            got = json.loads(await asyncio.to_thread(run, command))
        assert got == {"called": [CITY["city"]] * 2, "texts": [["Sunny.", "end_turn"]] * 2}

    run_test(test())
    for submit in dense.submits[1::2]:
        text = prompt_text(submit)
        assert "How is the weather in Paris?" in text and "<tool_response>\nsunny\n</tool_response>" in text


@needs("anthropic")
def test_thinking_is_passed_back(tmp_path: Path) -> None:
    dense = FakeDense(writes("<think>\nHm.\n</think>\n\n" + CALL, "<think>\nHm.\n</think>\n\n" + CALL, "Sunny."))

    async def test() -> None:
        model = make_chat_model(tmp_path / "model", "qwen3")
        address = f"127.0.0.1:{free_port()}"
        async with running_gateway(tmp_path, dense, http_address=address, model=model):
            python = Environment("anthropic").program("python")
            command = [python, str(PROGRAMS / "anthropic_tools.py"), f"http://{address}"]
            got = json.loads(await asyncio.to_thread(run, command))
        assert [kind for kind, _ in got["streamed"]] == [kind for kind, _ in got["whole"]] == ["thinking", "tool_use"]
        assert [text.strip() for text in got["thinking"]] == ["Hm."]

    run_test(test())
    assert "<think>\nHm.\n</think>" in prompt_text(dense.submits[2]).replace("\n\n</think>", "\n</think>")


@needs("anthropic")
def test_a_picture(tmp_path: Path) -> None:
    picture = noise(50, 37, 1)
    turns: list[Turn] = [("user", [picture, "What is this?"])]
    model, address = make_served_vision_model(tmp_path / "model"), f"127.0.0.1:{free_port()}"
    settings = (f"model.path={model}", f"gateway.http_address={address}")
    with running_cluster(tmp_path, *settings, is_warm=True):
        python = Environment("anthropic").program("python")
        data = base64.b64encode(png(picture)).decode()
        got = json.loads(run([python, str(PROGRAMS / "anthropic_picture.py"), f"http://{address}", data]))
    truth, tokenizer = Truth(model), AutoTokenizer.from_pretrained(model)
    [token_ids], _ = truth.generate(turns, 12)
    text = tokenizer.decode(token_ids, skip_special_tokens=True)
    assert got["whole"] == got["streamed"] and got["whole"] and text.startswith(got["whole"])
    shown: list[Turn] = [("user", ["Look."]), ("assistant", []), ("tool", ["Seen:", picture])]
    [token_ids], _ = truth.generate(shown, 12)
    text, num_tokens = got["shown"]
    assert text and tokenizer.decode(token_ids, skip_special_tokens=True).startswith(text)
    assert num_tokens == truth.num_prompt_tokens(shown)
    assert got["input_tokens"] == [truth.num_prompt_tokens(turns)] * 3
    assert "is none of PNG" in got["error"]
