"""Ollama's routes: compared with chats and completions of OpenAI, and with what Ollama's reference says of its own."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import openai
import pytest

from services.gateway.apis.ollama.conversion import chat_message, generate_message
from services.gateway.apis.ollama.schema import OllamaChatRequest, OllamaGenerateRequest
from services.gateway.request.model_limits import ModelNames
from tests.support.chats.chat_models import TIME, WEATHER, with_chat_model
from tests.support.clients.gateway_calls import EOS, REFERENCE, ids
from tests.support.clients.http_clients import async_client
from tests.support.clients.http_gateway import CHATS, COMPLETIONS, MODEL, USER, say, with_client
from tests.support.running_gateway import RunningGateway
from tests.support.workers.fake_dense import FakeDense, fake_logprob, fake_vector

CHAT, GENERATE = "/api/chat", "/api/generate"
TEXT = " in Łódź, 東京."
ASK: dict[str, Any] = {"model": MODEL, "messages": USER}
WHOLE = {"stream": False}
DURATIONS = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")
REASONED = "<think>\nTwo and two.\n</think>\n\nFour."


def until_eos() -> FakeDense:
    return FakeDense(lambda submit: [*ids(TEXT), EOS][: submit.spec.max_tokens])


def lines_of(answer: httpx2.Response) -> list[dict[str, Any]]:
    """The objects of a stream."""
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/x-ndjson"
    assert answer.text.endswith("\n")
    return [json.loads(line) for line in answer.text.splitlines()]


def prompt_of(dense: FakeDense) -> list[int]:
    """The token ids of the last prompt."""
    return list(dense.submits[-1].spec.prompt_token_ids)


def test_a_stream_is_lines_of_json_and_the_last_one_has_counts_and_times(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        *pieces, last = lines_of(await client.post(CHAT, json=ASK))
        assert len(pieces) > 2 and not any(each["done"] for each in pieces)
        assert [each["message"]["role"] for each in pieces] == ["assistant"] * len(pieces)
        assert "".join(each["message"]["content"] for each in pieces) == TEXT
        assert last["message"] == {"role": "assistant", "content": ""}
        whole = (await client.post(CHAT, json=ASK | WHOLE)).json()
        assert whole["message"] == {"role": "assistant", "content": TEXT}
        for each in (last, whole):
            assert (each["model"], each["done"], each["done_reason"]) == (MODEL, True, "stop")
            assert each["prompt_eval_count"] == len(prompt_of(dense))
            assert each["eval_count"] == len(ids(TEXT)) + 1
            assert all(type(each[name]) is int and each[name] > 0 for name in DURATIONS)
            assert sum(each[name] for name in DURATIONS[1:]) == pytest.approx(each["total_duration"], abs=3)
            assert datetime.now(UTC) >= datetime.fromisoformat(each["created_at"]) and each["created_at"][-1] == "Z"
        short = (await client.post(CHAT, json=ASK | WHOLE | {"options": {"num_predict": 2}})).json()
        assert (short["done_reason"], short["eval_count"]) == ("length", 2)

    dense = until_eos()
    with_client(tmp_path, dense, test)


def test_generate_puts_its_text_into_the_chat_template_unless_it_is_raw(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        async def prompt(path: str, **body: Any) -> list[int]:
            answer = await client.post(path, json={"model": MODEL} | body)
            assert answer.status_code == 200, answer.text
            return prompt_of(dense)

        alone = await prompt(CHATS, messages=USER)
        system = {"role": "system", "content": "Be brief."}
        assert await prompt(GENERATE, prompt=USER[0]["content"]) == alone == await prompt(CHAT, messages=USER)
        assert await prompt(CHATS, messages=[system, *USER]) == await prompt(
            GENERATE, prompt=USER[0]["content"], system="Be brief."
        )
        assert await prompt(GENERATE, prompt=" a", raw=True, system="unused") == REFERENCE(" a")["input_ids"]
        answer = (await client.post(GENERATE, json={"model": MODEL, "prompt": "Hi"} | WHOLE)).json()
        *_, last = lines_of(await client.post(GENERATE, json={"model": MODEL, "prompt": "Hi"}))
        assert answer["response"] == TEXT and "message" not in answer
        assert answer["context"] == last["context"] == [*prompt_of(dense), *ids(TEXT), EOS]
        assert await prompt(GENERATE, prompt=USER[0]["content"], context=answer["context"]) == [
            *answer["context"], *alone,
        ]
        raw = (await client.post(GENERATE, json={"model": MODEL, "prompt": "Hi", "raw": True} | WHOLE)).json()
        assert "context" not in raw

    dense = until_eos()
    with_client(tmp_path, dense, test)


def test_pictures_are_part_of_a_chat_which_a_model_without_a_template_refuses() -> None:
    names = ModelNames((MODEL,), False, "")
    body = OllamaGenerateRequest(model=MODEL, prompt="What is this?", images=["aGVsbG8="])
    message = generate_message(body, "id", names, has_template=False)
    assert [len(each.pictures) for each in message.chat.messages] == [1]


def test_options_have_ollamas_names_and_defaults(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        async def spec(**options: Any) -> Any:
            answer = await client.post(CHAT, json=ASK | WHOLE | {"options": options})
            assert answer.status_code == 200, answer.text
            return dense.submits[-1].spec

        used = (await spec()).sampling
        assert (used.temperature, used.top_k, used.top_p) == (pytest.approx(0.8), 40, pytest.approx(0.9))
        assert (used.repetition_penalty, used.presence_penalty, used.frequency_penalty) == (1, 0, 0)
        given = {"temperature": 0, "top_k": 3, "top_p": 0.5, "min_p": 0.25, "seed": 7, "num_predict": 5}
        penalties = {"repeat_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.25}
        found = await spec(**given, **penalties, num_ctx=512, num_gpu=1, repeat_last_n=-1)
        used = found.sampling
        assert (used.temperature, used.top_k, used.top_p, used.min_p) == (0, 3, 0.5, 0.25)
        assert (used.seed, found.max_tokens) == (7, 5)
        assert (used.repetition_penalty, used.presence_penalty, used.frequency_penalty) == (1.5, 0.5, 0.25)
        used = (await spec(**penalties, repeat_last_n=0)).sampling
        assert (used.repetition_penalty, used.presence_penalty, used.frequency_penalty) == (1, 0, 0)
        seeds = {(await spec(seed=-1)).sampling.seed for _ in range(3)}
        assert len(seeds) == 3
        lengths = {(await spec(num_predict=count)).max_tokens for count in (-2, -1, 0)}
        assert lengths == {2048 - len(prompt_of(dense))}
        for given, expected in (  # Ollama brings them into their range: its sampler keeps the first token at top_p 0
            ({"top_p": 0}, (1, 1, 0)), ({"top_p": -1}, (1, 1, 0)), ({"top_p": 2, "min_p": 2}, (40, 1, 1)),
            ({"top_p": 1, "min_p": -1}, (40, 1, 0)), ({"top_k": -2, "top_p": 1}, (0, 1, 0)),
            ({"top_k": 10**9, "top_p": 1}, (0, 1, 0)), ({"top_k": 32_000, "top_p": 1}, (32_000, 1, 0)),
        ):  # fmt: skip
            used = (await spec(**given)).sampling
            assert (used.top_k, used.top_p, used.min_p) == expected, given
        assert (await spec(temperature=-1)).sampling.temperature == 0
        stopped = (await client.post(CHAT, json=ASK | WHOLE | {"options": {"stop": [","]}})).json()
        assert stopped["message"]["content"] == TEXT.partition(",")[0] and stopped["done_reason"] == "stop"
        for wrong, name in (
            ({"repeat_last_n": 64, "repeat_penalty": 1.1}, "repeat_last_n"), ({"mirostat": 1}, "mirostat"),
            ({"typical_p": 0.5}, "typical_p"), ({"temperature": "hot"}, "temperature"), ({"top_p": "2"}, "top_p"),
        ):  # fmt: skip
            refused = await client.post(CHAT, json=ASK | {"options": wrong})
            assert refused.status_code == 400 and refused.json()["error"].startswith(f"options.{name}"), refused.text

    dense = until_eos()
    with_client(tmp_path, dense, test)


def test_a_format_is_an_object_or_a_schema(tmp_path: Path) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}

    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        async def form(path: str, **body: Any) -> Any:
            """The grammar of the answer; None: any text."""
            answer = await client.post(path, json={"model": MODEL} | WHOLE | body)
            assert answer.status_code == 200, answer.text
            sampling = dense.submits[-1].spec.sampling
            return sampling.structured_output.grammar if sampling.HasField("structured_output") else None

        for given, openai_form in (
            ("json", {"type": "json_object"}), ("", None), (None, None),
            (schema, {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}),
        ):  # fmt: skip
            expected = await form(CHATS, messages=USER, response_format=openai_form)
            assert (expected is None) == (not given)
            assert await form(CHAT, messages=USER, format=given) == expected
            assert await form(GENERATE, prompt="a", format=given) == expected
        wrong = await client.post(CHAT, json=ASK | {"format": {"type": "bad"}})
        assert wrong.status_code == 400 and wrong.json()["error"].startswith("format")

    dense = FakeDense(lambda submit: [*ids('{"a":1}'), EOS])
    with_client(tmp_path, dense, test)


def test_a_request_without_a_prompt_generates_nothing(tmp_path: Path) -> None:
    """With it Ollama's clients load a model, or take it out of memory."""

    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        for path, body, piece in (
            (CHAT, {"messages": []}, {"message": {"role": "assistant", "content": ""}}),
            (GENERATE, {}, {"response": ""}),
        ):  # fmt: skip
            for keep_alive, reason in ((None, "load"), ("5m", "load"), (-1, "load"), (0, "unload"), ("0s", "unload")):
                given = {"model": MODEL, "keep_alive": keep_alive} | body
                [line] = lines_of(await client.post(path, json=given))
                whole = (await client.post(path, json=given | WHOLE)).json()
                for each in (line, whole):
                    assert {**each, "created_at": ""} == {
                        "model": MODEL, "created_at": "", **piece, "done": True, "done_reason": reason,
                    }
        assert not dense.submits

    dense = until_eos()
    with_client(tmp_path, dense, test)


def test_names_may_have_ollamas_tag_and_errors_are_texts(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        tagged = (await client.post(CHAT, json=ASK | WHOLE | {"model": f"{MODEL}:latest"})).json()
        assert (tagged["model"], tagged["message"]["content"]) == (f"{MODEL}:latest", TEXT)
        assert (await client.post("/api/show", json={"name": f"{MODEL}:latest"})).status_code == 200
        for path, body in (
            (CHAT, ASK), (CHAT, {"messages": []}), (GENERATE, {"prompt": "a"}), (GENERATE, {}), ("/api/show", {}),
        ):  # fmt: skip
            unknown = await client.post(path, json=body | {"model": "other:7b"})
            assert unknown.status_code == 404 and unknown.json().keys() == {"error"}
            assert "'other:7b'" in unknown.json()["error"]
        for path, body, status, word in (
            (CHAT, {"messages": USER}, 400, "model"),
            (CHAT, ASK | {"messages": [{"role": "user", "content": 5}]}, 400, "messages[0].content"),
            (GENERATE, {"model": MODEL, "prompt": "a", "template": "{{ .Prompt }}"}, 400, "template"),
            (GENERATE, {"model": MODEL, "prompt": "a", "context": [10**8]}, 400, "context"),
            (GENERATE, {"model": MODEL, "prompt": "a", "context": [5], "raw": True}, 400, "context"),
            ("/api/pull", {"model": MODEL}, 404, "/api/pull"),
        ):  # fmt: skip
            wrong = await client.post(path, json=body)
            assert wrong.status_code == status and word in wrong.json()["error"], wrong.text
        headers = {"idempotency-key": "one"}
        refused = await client.post(CHAT, json=ASK, headers=headers)
        assert refused.status_code == 400 and "resumed" in refused.json()["error"]

    with_client(tmp_path, until_eos(), test, resume=True)


@pytest.mark.parametrize("kind", [None, "application/x-www-form-urlencoded", "text/plain"])
def test_bodies_need_not_say_that_they_are_json(kind: str | None, tmp_path: Path) -> None:
    """LiteLLM sends no content type, and curl -d that of a form. At routes of others it is an error."""

    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        headers = {} if kind is None else {"content-type": kind}
        for path, body, status in ((CHAT, ASK | WHOLE, 200), ("/api/show", {"model": MODEL}, 200), (CHATS, ASK, 415)):
            answer = await client.post(path, content=json.dumps(body).encode(), headers=headers)
            assert answer.status_code == status, answer.text
        wrong = await client.post(CHAT, content=b"model=a", headers=headers)
        assert wrong.status_code == 400 and "not JSON" in wrong.json()["error"]
        foreign = headers | {"origin": "https://elsewhere.example"}
        refused = await client.post(CHAT, content=json.dumps(ASK).encode(), headers=foreign)
        assert refused.status_code == 403, "no other page may send it from a browser"

    with_client(tmp_path, until_eos(), test)


def test_a_stream_that_fails_ends_with_a_line_of_the_error(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        async with client.stream("POST", CHAT, json=ASK) as stream:
            lines = stream.aiter_lines()
            assert json.loads(await anext(lines))["message"]["content"]
            await dense.kill()
            *_, last = [json.loads(line) async for line in lines]
        assert last.keys() == {"error"} and "worker" in last["error"]

    dense = FakeDense(lambda submit: ids(" a") * 1000, step_s=0.01)
    with_client(tmp_path, dense, test, connect_timeout_s=1.0)


def test_log_probabilities_are_those_of_chats(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        body = ASK | {"logprobs": True, "top_logprobs": 2}
        [choice] = (await client.post(CHATS, json=body)).json()["choices"]
        whole = (await client.post(CHAT, json=body | WHOLE)).json()["logprobs"]
        streamed = [each for line in lines_of(await client.post(CHAT, json=body)) for each in line.get("logprobs", ())]
        assert whole == streamed == choice["logprobs"]["content"]
        assert [each["logprob"] for each in whole] == pytest.approx([fake_logprob(each) for each in [*ids(TEXT), EOS]])

    with_client(tmp_path, until_eos(), test)


def test_what_it_tells_of_the_model(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        [tag] = (await client.get("/api/tags")).json()["models"]
        [running] = (await client.get("/api/ps")).json()["models"]
        shown = (await client.post("/api/show", json={"model": MODEL})).json()
        for each in (tag, running):
            assert (each["name"], each["model"], each["digest"]) == (MODEL, MODEL, "c0ffee")
            assert each["details"] == shown["details"] and all(
                each["details"][name] for name in ("format", "family", "parameter_size", "quantization_level")
            )
        assert tag["size"] == running["size"] > 0 and running["size_vram"] == 0
        assert datetime.fromisoformat(running["expires_at"]).year > datetime.now(UTC).year
        assert running["context_length"] == shown["model_info"]["llama.context_length"] == 2048
        assert shown["template"] == REFERENCE.chat_template and "completion" in shown["capabilities"]
        assert (await client.get("/api/version")).json().keys() == {"version"}

    with_client(tmp_path, until_eos(), test)


def test_calls_of_tools_have_objects_as_arguments_and_come_whole(tmp_path: Path) -> None:
    city = {"city": 'Paris, "Île-de-France"\n', "days": 3}
    call = json.dumps({"name": "get_weather", "arguments": city})
    time = '<tool_call>{"name": "get_time", "arguments": {}}</tool_call>'
    text = f"I look.\n<tool_call>\n{call}\n</tool_call>\n{time}"
    cut = text[: text.index("days")]

    async def test(api: openai.AsyncOpenAI, gateway: RunningGateway) -> None:
        body = {"model": "model", "messages": USER, "tools": [WEATHER, TIME]}
        async with async_client(gateway.http_address) as client:
            whole = (await client.post(CHAT, json=body | WHOLE)).json()["message"]
            streamed = [line["message"] for line in lines_of(await client.post(CHAT, json=body))]
            assert "".join(each["content"] for each in streamed) == whole["content"] == "I look."
            for calls in (whole["tool_calls"], [call for each in streamed for call in each.get("tool_calls", ())]):
                functions = [each["function"] for each in calls]
                assert functions == [
                    {"index": 0, "name": "get_weather", "arguments": city},
                    {"index": 1, "name": "get_time", "arguments": {}},
                ]
            unfinished = (await client.post(CHAT, json=body | WHOLE | {"options": {"num_predict": 40}})).json()
            assert unfinished["done_reason"] == "length" and "tool_calls" not in unfinished["message"]

    with_chat_model(tmp_path, "hermes", [text, text, cut + "x" * 200], test)


def test_results_of_tools_belong_to_the_calls_of_their_names_in_order() -> None:
    """Ollama's clients send neither ids of calls nor of results."""
    calls = [("get_time", {}), ("get_weather", {"city": "Paris"}), ("get_weather", {"city": "Rome"})]
    results = [("get_weather", "sun in Paris"), (None, "noon"), ("get_weather", "rain in Rome"), (None, "of no call")]
    messages = [
        {"role": "assistant", "tool_calls": [{"function": {"name": name, "arguments": each}} for name, each in calls]},
        *({"role": "tool", "tool_name": name, "content": text} for name, text in results),
        {"role": "assistant", "tool_calls": [{"id": "given", "function": {"name": "get_time"}}]},
        {"role": "tool", "tool_call_id": "given", "content": "late"},
    ]
    body = OllamaChatRequest.model_validate(ASK | {"messages": messages})
    message = chat_message(body, "one", ModelNames((MODEL,), False, ""))
    calling, sun, noon, rain, lost, again, late = message.chat.messages
    time, paris, rome = [call.id for call in calling.tool_calls]
    assert [call.arguments for call in calling.tool_calls] == ["{}", '{"city":"Paris"}', '{"city":"Rome"}']
    assert len({time, paris, rome}) == 3
    assert [each.tool_call_id for each in (sun, noon, rain)] == [paris, time, rome]
    assert lost.tool_call_id and lost.tool_call_id not in (time, paris, rome)
    assert again.tool_calls[0].id == late.tool_call_id == "given"


def test_reasoning_stands_in_thinking_unless_it_is_not_wanted(tmp_path: Path) -> None:
    async def test(api: openai.AsyncOpenAI, gateway: RunningGateway) -> None:
        chat, text = {"model": "model", "messages": USER}, {"model": "model", "prompt": "Hi"}
        async with async_client(gateway.http_address) as client:
            whole = (await client.post(CHAT, json=chat | WHOLE)).json()["message"]
            assert (whole["thinking"], whole["content"]) == ("Two and two.", "Four.")
            pieces = [line["message"] for line in lines_of(await client.post(CHAT, json=chat | {"think": True}))]
            assert "".join(each.get("thinking", "") for each in pieces) == "Two and two."
            assert "".join(each["content"] for each in pieces) == "Four."
            generated = (await client.post(GENERATE, json=text | WHOLE)).json()
            assert (generated["thinking"], generated["response"]) == ("Two and two.", "Four.")
            hidden = (await client.post(CHAT, json=chat | WHOLE | {"think": False})).json()["message"]
            assert "thinking" not in hidden

    with_chat_model(tmp_path, "qwen3", [REASONED] * 4, test)


def test_vectors(tmp_path: Path) -> None:
    def unit(text: str) -> np.ndarray:
        vector = fake_vector(REFERENCE(text)["input_ids"])
        return vector / np.linalg.norm(vector)

    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        both = (await client.post("/api/embed", json={"model": MODEL, "input": [" a", " b c"]})).json()
        np.testing.assert_allclose(both["embeddings"], [unit(" a"), unit(" b c")], atol=1e-6)
        num_tokens = sum(len(REFERENCE(text)["input_ids"]) for text in (" a", " b c"))
        assert (both["model"], both["prompt_eval_count"]) == (MODEL, num_tokens)
        assert both["total_duration"] > 0 and both["load_duration"] > 0
        one = (await client.post("/api/embed", json={"model": f"{MODEL}:latest", "input": " a"})).json()
        np.testing.assert_allclose(one["embeddings"], [unit(" a")], atol=1e-6)
        short = (await client.post("/api/embed", json={"model": MODEL, "input": " a", "dimensions": 3})).json()
        first = unit(" a")[:3]
        np.testing.assert_allclose(short["embeddings"], [first / np.linalg.norm(first)], atol=1e-6)
        older = (await client.post("/api/embeddings", json={"model": MODEL, "prompt": " a"})).json()
        assert older.keys() == {"embedding"} and len(older["embedding"]) == len(first_vector)
        long = {"model": MODEL, "input": " a" * 5000}
        cut = (await client.post("/api/embed", json=long)).json()
        assert cut["prompt_eval_count"] == 2047
        refused = await client.post("/api/embed", json=long | {"truncate": False})
        assert refused.status_code == 400 and "input" in refused.json()["error"]
        for body in ({"input": " a"}, {"model": MODEL}, {"model": MODEL, "input": []}):
            wrong = await client.post("/api/embed", json=body)
            assert wrong.status_code == 400 and wrong.json().keys() == {"error"}, wrong.text
        for given, path in ((5, "input is 5:"), ([" a", 5], "input[1] is 5:")):
            wrong = await client.post("/api/embed", json={"model": MODEL, "input": given})
            assert wrong.status_code == 400 and wrong.json()["error"].startswith(path), wrong.text

    first_vector = fake_vector([1])
    with_client(tmp_path, FakeDense(say(" a")), test, runner="pooling")


def test_completions_and_chats_are_as_before(tmp_path: Path) -> None:
    """Their streams are events, whose ends are blank lines."""

    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        answer = await client.post(COMPLETIONS, json={"prompt": "a", "stream": True, "max_tokens": 3})
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert all(event.startswith("data: ") for event in answer.text.split("\n\n")[:-1])

    with_client(tmp_path, until_eos(), test)
