"""POST /v1/responses with the official client: whole answers, and streams that build up the same answer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from tests.support.clients.gateway_calls import EOS, REFERENCE, ids, text_of
from tests.support.clients.http_clients import async_client, named_events
from tests.support.clients.http_gateway import MODEL, say
from tests.support.running_gateway import RunningGateway, run, running_gateway
from tests.support.workers.fake_dense import FakeDense, fake_logprob
from tests.unit.gateway.apis.anthropic.test_messages import prompt_of

TEXT = " Łódź, 東京 🙂🙃 cities."
Test = Callable[[openai.AsyncOpenAI, RunningGateway], Awaitable[None]]


def with_api(tmp_path: Path, dense: FakeDense, test: Test, **options: Any) -> None:
    """Runs `test` with the official client."""

    async def body() -> None:
        async with (
            running_gateway(tmp_path, dense, **options) as gateway,
            async_client(gateway.http_address) as transport,
        ):
            api = openai.AsyncOpenAI(
                api_key="none needed", base_url="http://gateway/v1", http_client=transport, max_retries=0
            )
            await test(api, gateway)

    run(body())


def timeless(response: Any) -> dict[str, Any]:
    """The response without its times, as the server sent it."""
    fields = response.to_dict(exclude_unset=False)
    return {name: value for name, value in fields.items() if name not in ("created_at", "completed_at")}


def test_a_whole_response(tmp_path: Path) -> None:
    async def test(api: openai.AsyncOpenAI, gateway: RunningGateway) -> None:
        response = await api.responses.create(
            model=MODEL,
            input="Hi",
            instructions="Be brief.",
            max_output_tokens=50,
            temperature=0.5,
            metadata={"a": "b"},
            extra_headers={"x-request-id": "mine"},
        )
        assert (response.id, response.object, response.model) == ("resp_mine", "response", MODEL)
        assert response.status == "completed"
        assert response.output_text == TEXT
        [item] = response.output
        assert item.to_dict() == {
            "id": "msg_mine_0",
            "type": "message",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": TEXT, "annotations": [], "logprobs": []}],
        }
        num_prompt_tokens, num_output_tokens = len(dense.submits[0].spec.prompt_token_ids), len(ids(TEXT)) + 1
        assert response.usage.to_dict() == {
            "input_tokens": num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 0},
            "output_tokens": num_output_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": num_prompt_tokens + num_output_tokens,
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": num_output_tokens,
        }
        assert (response.error, response.incomplete_details, response.instructions) == (None, None, "Be brief.")
        assert (response.temperature, response.metadata, response.max_output_tokens) == (0.5, {"a": "b"}, 50)
        assert response.to_dict()["store"] is False

    dense = FakeDense(lambda submit: [*ids(TEXT), EOS])
    dense.num_cached_tokens = 2
    with_api(tmp_path, dense, test)
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert list(dense.submits[0].spec.prompt_token_ids) == prompt_of(chat)


def test_options_of_sampling_reach_the_worker(tmp_path: Path) -> None:
    options = {"frequency_penalty": 0.5, "presence_penalty": -0.25, "repetition_penalty": 1.5, "seed": -1}
    more = {"logit_bias": {"7": 2.5}, "ignore_eos": True, "stop": [TEXT[-2:]]}

    async def test(api: openai.AsyncOpenAI, gateway: RunningGateway) -> None:
        response = await api.responses.create(model=MODEL, input="Hi", extra_body=options | more)
        assert response.output_text == TEXT[:-2]
        shown = response.to_dict()
        assert (shown["frequency_penalty"], shown["presence_penalty"]) == (0.5, -0.25)
        with pytest.raises(openai.BadRequestError, match="presence_penalty"):
            await api.responses.create(model=MODEL, input="Hi", extra_body={"presence_penalty": 3})

    dense = FakeDense(lambda submit: [*ids(TEXT), EOS])
    with_api(tmp_path, dense, test)
    [submit] = dense.submits
    sampling = submit.spec.sampling
    found = {name: getattr(sampling, name) for name in options}
    assert found == options | {"seed": 2**64 - 1}
    assert dict(sampling.logit_bias) == {7: 2.5}
    assert EOS not in submit.spec.stop_token_ids


def test_vllms_form_of_an_answer_reaches_the_worker(tmp_path: Path) -> None:
    async def test(api: openai.AsyncOpenAI, gateway: RunningGateway) -> None:
        chat: Any = [{"role": "user", "content": "Hi"}]
        for form in ({"regex": "[a-z]+"}, {"choice": ["yes", "no"]}, None):
            given = {"structured_outputs": form}
            await api.responses.create(model=MODEL, input="Hi", extra_body=given)
            await api.chat.completions.create(model=MODEL, messages=chat, extra_body=given)

    dense = FakeDense(lambda submit: [*ids(TEXT), EOS])
    with_api(tmp_path, dense, test)
    found = [each.spec.sampling.structured_output for each in dense.submits]
    assert found[::2] == found[1::2], "the same as for a chat"
    assert found[0] != found[2] and not dense.submits[4].spec.sampling.HasField("structured_output")


def test_a_stream_builds_up_the_whole_response(tmp_path: Path) -> None:
    async def test(api: openai.AsyncOpenAI, gateway: RunningGateway) -> None:
        headers = {"x-request-id": "mine"}
        options: Any = {"model": MODEL, "input": "Hi", "extra_headers": headers}
        whole = await api.responses.create(**options)
        async with api.responses.stream(**options) as stream:
            events = [event async for event in stream]
            final = await stream.get_final_response()
        kinds = [event.type for event in events]
        num_deltas = kinds.count("response.output_text.delta")
        assert kinds == [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
            *["response.output_text.delta"] * num_deltas,
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.completed",
        ]
        assert num_deltas > 3
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert {event.item_id for event in events if hasattr(event, "item_id")} == {"msg_mine_0"}
        assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == TEXT
        assert final.output_text == TEXT
        plain = [event async for event in await api.responses.create(**options, stream=True)]
        assert timeless(plain[-1].response) == timeless(whole)
        assert timeless(plain[0].response) == timeless(whole) | {"status": "in_progress", "output": [], "usage": None}

    with_api(tmp_path, FakeDense(lambda submit: [*ids(TEXT), EOS], step_s=0.02), test)


def test_items_become_a_chat(tmp_path: Path) -> None:
    async def test(api: openai.AsyncOpenAI, gateway: RunningGateway) -> None:
        items: Any = [
            {"role": "developer", "content": "Be kind."},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "One"}]},
            {"role": "user", "content": "two"},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": None, "encrypted_content": "gAAA"},
            {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search"}},
            {
                "type": "message",
                "id": "msg_1",
                "role": "assistant",
                "status": "completed",
                "content": [{"type": "output_text", "text": "A", "annotations": []}],
            },
            {"role": "user", "content": "Go on"},
        ]
        await api.responses.create(model=MODEL, input=items, instructions="Be brief.", max_output_tokens=1)

    dense = FakeDense(say(" one"))
    with_api(tmp_path, dense, test)
    assert list(dense.submits[0].spec.prompt_token_ids) == prompt_of(
        [
            {"role": "system", "content": "Be brief.\nBe kind."},
            {"role": "user", "content": "One\ntwo"},
            {"role": "assistant", "content": "A"},
            {"role": "user", "content": "Go on"},
        ]
    )


def test_an_answer_that_is_cut_off_is_incomplete(tmp_path: Path) -> None:
    async def test(api: openai.AsyncOpenAI, gateway: RunningGateway) -> None:
        options: Any = {"model": MODEL, "input": "Hi", "max_output_tokens": 2}
        whole = await api.responses.create(**options)
        assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert (whole.output[0].status, whole.output_text) == ("incomplete", text_of(ids(" one two three")[:2]))
        events = [event async for event in await api.responses.create(**options, stream=True)]
        assert events[-1].type == "response.incomplete"
        assert events[-1].response.output[0].to_dict()["content"] == whole.output[0].to_dict()["content"]

    with_api(tmp_path, FakeDense(say(" one two three")), test)


@pytest.mark.parametrize("is_stream", [False, True])
def test_log_probabilities(tmp_path: Path, is_stream: bool) -> None:
    token_ids = ids(TEXT)

    async def test(api: openai.AsyncOpenAI, gateway: RunningGateway) -> None:
        options: Any = {"model": MODEL, "input": "Hi", "include": ["message.output_text.logprobs"], "top_logprobs": 2}
        if is_stream:
            events = [event async for event in await api.responses.create(**options, stream=True)]
            response = events[-1].response
            [done] = [event for event in events if event.type == "response.output_text.done"]
            pieces = [each for event in events if event.type == "response.output_text.delta" for each in event.logprobs]
            shown = [*token_ids, EOS][: max(len(pieces), len(token_ids))]  # EOS too if it came together with the text
            assert [each.logprob for each in pieces] == [fake_logprob(each) for each in shown]
            assert [each.token for each in done.logprobs[: len(pieces)]] == [each.token for each in pieces]
        else:
            response = await api.responses.create(**options)
        logprobs = response.output[0].content[0].logprobs
        assert [each.logprob for each in logprobs] == [fake_logprob(each) for each in [*token_ids, EOS]]
        assert b"".join(bytes(each.bytes) for each in logprobs[:-1]).decode() == TEXT
        assert {len(each.top_logprobs) for each in logprobs} == {2}

    with_api(tmp_path, FakeDense(lambda submit: [*token_ids, EOS]), test)


def test_a_failure_in_the_middle_of_a_stream_is_told(tmp_path: Path) -> None:
    async def test(api: openai.AsyncOpenAI, gateway: RunningGateway) -> None:
        events = []
        async for event in await api.responses.create(model=MODEL, input="Hi", stream=True):
            events.append(event)
            if event.type == "response.output_text.delta" and dense.num_streams:
                await dense.kill()
        assert events[-1].type == "response.failed"
        assert events[-1].response.status == "failed"
        assert events[-1].response.error.code == "server_error"
        assert [event.sequence_number for event in events] == list(range(len(events)))

    dense = FakeDense(lambda submit: ids(" one") * 100, step_s=0.02)
    with_api(tmp_path, dense, test, connect_timeout_s=1.5)


def test_nothing_is_stored(tmp_path: Path) -> None:
    async def test(api: openai.AsyncOpenAI, gateway: RunningGateway) -> None:
        calls: list[Callable[[str], Awaitable[Any]]] = [
            api.responses.retrieve,
            api.responses.delete,
            api.responses.cancel,
            api.responses.input_items.list,
        ]
        for call in calls:
            with pytest.raises(openai.NotFoundError) as caught:
                await call("resp_123")
            assert "resp_123" in caught.value.message
            assert caught.value.type == "invalid_request_error"

    with_api(tmp_path, FakeDense(say(" one")), test)


def test_the_tokens_of_an_input_are_counted(tmp_path: Path) -> None:
    async def test(api: openai.AsyncOpenAI, gateway: RunningGateway) -> None:
        given: dict[str, Any] = {"model": MODEL, "input": "How many?", "instructions": "Be brief."}
        counted = await api.responses.input_tokens.count(**given)
        assert counted.object == "response.input_tokens"
        response = await api.responses.create(**given, max_output_tokens=2)
        assert counted.input_tokens == response.usage.input_tokens == len(dense.submits[0].spec.prompt_token_ids)
        assert len(dense.submits) == 1, "counting generates nothing"
        with pytest.raises(openai.NotFoundError):
            await api.responses.input_tokens.count(**given | {"model": "other"})

    dense = FakeDense(say(TEXT))
    with_api(tmp_path, dense, test)


def test_the_events_have_names(tmp_path: Path) -> None:
    async def test(api: openai.AsyncOpenAI, gateway: RunningGateway) -> None:
        async with async_client(gateway.http_address) as client:
            body = {"model": MODEL, "input": "Hi", "max_output_tokens": 1, "stream": True}
            response: httpx2.Response = await client.post("/v1/responses", json=body)
        assert named_events(response.text)[-1]["type"] == "response.incomplete"

    with_api(tmp_path, FakeDense(say(" one")), test)


@pytest.mark.parametrize("name", ["mine", "resp_mine"])
def test_the_body_may_name_the_response(name: str, tmp_path: Path) -> None:
    async def test(api: openai.AsyncOpenAI, gateway: RunningGateway) -> None:
        given = api.responses.with_raw_response.create
        raw = await given(model=MODEL, input="Hi", extra_body={"request_id": name})
        assert (raw.parse().id, raw.headers["x-request-id"]) == ("resp_mine", name)
        raw = await given(model=MODEL, input="Hi", extra_body={"request_id": name}, extra_headers={"x-request-id": "x"})
        assert raw.parse().id == "resp_x"

    with_api(tmp_path, FakeDense(lambda submit: [70, EOS]), test)


def test_raw_messages_are_what_the_model_was_given_and_wrote(tmp_path: Path) -> None:
    async def test(api: openai.AsyncOpenAI, gateway: RunningGateway) -> None:
        asked: dict[str, Any] = {"model": MODEL, "input": "Hi", "extra_body": {"enable_response_messages": True}}
        whole = await api.responses.create(**asked)
        events = [each async for each in await api.responses.create(**asked, stream=True)]
        prompt_ids = list(dense.submits[0].spec.prompt_token_ids)
        assert prompt_ids == prompt_of([{"role": "user", "content": "Hi"}])
        kind = {"type": "raw_message_tokens"}
        prompt = {**kind, "message": REFERENCE.decode(prompt_ids), "tokens": prompt_ids}
        token_ids = [*ids(TEXT), EOS]
        answer = {**kind, "message": f"{TEXT}{REFERENCE.decode([EOS])}", "tokens": token_ids}
        for response, shown in ((whole, [answer]), (events[0].response, []), (events[-1].response, [answer])):
            assert response.to_dict()["input_messages"] == [prompt]
            assert response.to_dict()["output_messages"] == shown
        plain = await api.responses.create(model=MODEL, input="Hi")
        assert not {"input_messages", "output_messages"} & plain.to_dict().keys()

    dense = FakeDense(lambda submit: [*ids(TEXT), EOS])
    with_api(tmp_path, dense, test)
