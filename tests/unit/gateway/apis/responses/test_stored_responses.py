"""`store` and `previous_response_id` of /v1/responses with the official client."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path
from typing import Any

import openai
import pytest

from services.common.config import Config, GatewaySection, LaunchSection
from services.common.errors import InvalidRequest
from services.gateway.apis.responses.items import MessageItem
from services.gateway.apis.responses.response_store import ResponseStore, StoredResponse
from services.gateway.apis.responses.schema import ResponsesRequest
from services.gateway.apis.responses.stored_record import ResponseRecord, read_conversation
from services.gateway.resources.heavy_work import HeavyWork
from services.gateway.resources.memory_budget import HeldMemory, MemoryBudget
from tests.support.chats.chat_models import prompt_text, with_chat_model
from tests.support.clients.gateway_calls import EOS, ids
from tests.support.clients.http_gateway import MODEL
from tests.support.running_gateway import RunningGateway
from tests.support.workers.fake_dense import FakeDense
from tests.unit.gateway.access.test_callers import bearer, keys_file
from tests.unit.gateway.apis.anthropic.test_messages import prompt_of
from tests.unit.gateway.apis.responses.test_responses import with_api

TOOL = {"type": "function", "name": "get_weather", "parameters": {"type": "object", "properties": {}}, "strict": False}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {}}\n</tool_call>'


def answering(*texts: str) -> FakeDense:
    """Gives each request the next text."""
    left = list(texts)
    return FakeDense(lambda submit: [*ids(left.pop(0)), EOS])


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_is_continued_with_its_whole_conversation(tmp_path: Path, stream: bool) -> None:
    async def ask(api: openai.AsyncOpenAI, **options: Any) -> Any:
        if not stream:
            return await api.responses.create(model=MODEL, **options)
        return [event async for event in await api.responses.create(model=MODEL, stream=True, **options)][-1].response

    async def test(api: openai.AsyncOpenAI, gateway: RunningGateway) -> None:
        first = await ask(api, input="Hi", instructions="Be brief.")
        second = await ask(api, input=[user("And"), user("then?")], previous_response_id=first.id)
        assert (first.previous_response_id, second.previous_response_id) == (None, first.id)
        assert first.to_dict()["store"] is second.to_dict()["store"] is True
        third = await ask(api, input="Why?", previous_response_id=second.id)
        branch = await ask(api, input="No.", previous_response_id=first.id, store=False)
        assert branch.to_dict()["store"] is False
        with pytest.raises(openai.NotFoundError, match=r"Response with id .* not found"):  # vLLM's words
            await api.responses.retrieve(branch.id)
        assert (await api.responses.retrieve(third.id)).to_dict() == third.to_dict()
        await api.responses.delete(second.id)
        with pytest.raises(openai.NotFoundError):
            await api.responses.retrieve(second.id)
        for gone in (second.id, "resp_of_nobody"):
            with pytest.raises(openai.BadRequestError, match="there is no response") as refused:
                await ask(api, input="Why?", previous_response_id=gone)
            assert refused.value.param == "previous_response_id"
        await ask(api, input="So?", previous_response_id=third.id)

    dense = answering(" one", " two", " three", " four", " five")
    with_api(tmp_path, dense, test, store_responses=True)
    begun = [user("Hi"), assistant(" one"), user("And\nthen?"), assistant(" two"), user("Why?")]
    chats = [
        [{"role": "system", "content": "Be brief."}, *begun[:1]],
        begun[:3],  # as with OpenAI, instructions hold for one response
        begun,
        [*begun[:2], user("No.")],
        [*begun, assistant(" three"), user("So?")],
    ]
    assert [list(submit.spec.prompt_token_ids) for submit in dense.submits] == list(map(prompt_of, chats))


def test_results_of_calls_follow_a_stored_response(tmp_path: Path) -> None:
    async def test(api: openai.AsyncOpenAI, gateway: RunningGateway) -> None:
        first = await api.responses.create(model="model", input="How is it?", tools=[TOOL])
        [call] = first.output
        output = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
        options: Any = {"model": "model", "tools": [TOOL]}
        short = await api.responses.create(input=[output], previous_response_id=first.id, **options)
        whole = await api.responses.create(input=[user("How is it?"), call.to_dict(), output], store=False, **options)
        assert short.output_text == whole.output_text == "It is sunny."

    dense = with_chat_model(tmp_path, "hermes", [CALL, "It is sunny."], test, store_responses=True)
    _, short, whole = dense.submits
    assert list(short.spec.prompt_token_ids) == list(whole.spec.prompt_token_ids)
    assert "sunny" in prompt_text(short)


def test_input_items_are_those_that_the_model_was_given(tmp_path: Path) -> None:
    async def test(api: openai.AsyncOpenAI, gateway: RunningGateway) -> None:
        first = await api.responses.create(model=MODEL, input="Hi")
        second = await api.responses.create(
            model=MODEL, input=[user("And"), {**user("then?"), "id": "msg_mine"}], previous_response_id=first.id
        )
        items = [item async for item in api.responses.input_items.list(second.id, order="asc")]
        texts = [(item.role, item.content[0].text) for item in items]
        assert texts == [("user", "Hi"), ("assistant", " one"), ("user", "And"), ("user", "then?")]
        assert (items[1].id, items[3].id) == (first.output[0].id, "msg_mine")
        assert len({item.id for item in items}) == 4
        paged = [item.id async for item in api.responses.input_items.list(second.id, limit=1)]
        assert paged == [item.id for item in reversed(items)]
        wrong: list[tuple[dict[str, Any], str]] = [
            ({"after": "msg_none"}, "id of no item"),
            ({"limit": 0}, "limit is '0': .* greater than or equal to 1"),
            ({"limit": 101}, "limit is '101': .* less than or equal to 100"),
            ({"order": "up"}, "order is 'up': .* 'asc' or 'desc'"),
        ]
        for given, words in wrong:
            with pytest.raises(openai.BadRequestError, match=words) as refused:
                await api.responses.input_items.list(second.id, **given)
            assert [refused.value.param] == [*given]

    with_api(tmp_path, answering(" one", " two"), test, store_responses=True)


def test_an_api_key_finds_its_own_responses_only(tmp_path: Path) -> None:
    async def test(api: openai.AsyncOpenAI, gateway: RunningGateway) -> None:
        ann, bob = ({"extra_headers": {"authorization": bearer(name)}} for name in ("ann", "bob"))
        mine = await api.responses.create(model=MODEL, input="Hi", **ann)
        for call in (api.responses.retrieve, api.responses.delete, api.responses.cancel):
            with pytest.raises(openai.NotFoundError, match="none of this client"):
                await call(mine.id, **bob)
        with pytest.raises(openai.NotFoundError, match="none of this client"):
            await api.responses.input_items.list(mine.id, **bob)
        with pytest.raises(openai.BadRequestError, match="there is no response"):
            await api.responses.create(model=MODEL, input="Go on", previous_response_id=mine.id, **bob)
        same = {"extra_headers": {"authorization": bearer("bob"), "x-request-id": mine.id.removeprefix("resp_")}}
        assert (await api.responses.create(model=MODEL, input="Bob", **same)).id == mine.id
        assert (await api.responses.retrieve(mine.id, **ann)).output_text == " one"
        assert (await api.responses.retrieve(mine.id, **bob)).output_text == " two"

    options: Any = {"store_responses": True, "api_keys_file": keys_file(tmp_path)}
    with_api(tmp_path, answering(" one", " two"), test, **options)


def test_a_conversation_may_be_as_large_as_a_body(tmp_path: Path) -> None:
    async def test(api: openai.AsyncOpenAI, gateway: RunningGateway) -> None:
        first = await api.responses.create(model=MODEL, input="Hi " * 500, max_output_tokens=2)
        with pytest.raises(openai.BadRequestError, match=r"has \d+ bytes .*max_body_bytes is 2500") as refused:
            await api.responses.create(model=MODEL, input="Hi " * 300, previous_response_id=first.id)
        assert refused.value.param == "previous_response_id"

    with_api(tmp_path, answering(" one", " two"), test, store_responses=True, max_body_bytes=2500)


def test_nothing_is_stored_by_default(tmp_path: Path) -> None:
    async def test(api: openai.AsyncOpenAI, gateway: RunningGateway) -> None:
        response = await api.responses.create(model=MODEL, input="Hi", store=True)
        assert response.to_dict()["store"] is False
        with pytest.raises(openai.NotFoundError, match=r"gateway\.store_responses"):
            await api.responses.retrieve(response.id)
        with pytest.raises(openai.BadRequestError, match=r"gateway\.store_responses"):
            await api.responses.create(model=MODEL, input="Go on", previous_response_id=response.id)

    with_api(tmp_path, answering(" one"), test)


def test_stored_conversations_take_of_the_memory_that_requests_share(tmp_path: Path) -> None:
    """A small request may read a large conversation, so many small ones would take memory that nobody counts."""
    long: Any = {"role": "user", "content": "Hi", "ignored": "x" * 20_000}  # takes 80,000 bytes with what is made of it

    async def conversation(api: openai.AsyncOpenAI) -> str:
        first = await api.responses.create(model=MODEL, input=[long])
        return (await api.responses.create(model=MODEL, input=[long], previous_response_id=first.id)).id

    async def waits(api: openai.AsyncOpenAI, gateway: RunningGateway) -> None:
        last = await conversation(api)
        small: Any = {"model": MODEL, "input": "So?", "previous_response_id": last}
        assert [each.output_text for each in await asyncio.gather(*(api.responses.create(**small) for _ in "ab"))] == [
            " two", " two",
        ]  # they have waited for each other  # fmt: skip
        with pytest.raises(openai.BadRequestError, match="for the stored conversation beside") as wrong:
            await api.responses.create(model=MODEL, input=[long], previous_response_id=last)
        assert wrong.value.param == "previous_response_id"

    async def is_refused(api: openai.AsyncOpenAI, gateway: RunningGateway) -> None:
        last = await conversation(api)
        running = await api.responses.create(model=MODEL, input=[long], max_output_tokens=1000, stream=True)
        await anext(running)
        for refused in (
            api.responses.create(model=MODEL, input="So?", previous_response_id=last),
            api.responses.input_items.list(last),
        ):
            with pytest.raises(openai.RateLimitError, match="max_held_bytes"):
                await refused
        await running.close()
        patient = api.with_options(max_retries=10)  # until the gateway has seen that nobody reads the stream
        assert len((await patient.responses.input_items.list(last)).data) == 3

    def answer(submit: Any) -> list[int]:
        return ids(" a") * 1000 if submit.spec.max_tokens == 1000 else [*ids(" two"), EOS]

    for test, wait_s in ((waits, 60.0), (is_refused, 0.3)):
        limits: Any = {"max_held_bytes": 200_000, "max_held_wait_s": wait_s}
        with_api(tmp_path, FakeDense(answer, step_s=0.02), test, store_responses=True, **limits)


def test_of_large_conversations_that_are_read_at_once_only_one_is_in_memory_as_objects() -> None:
    """A full collection of Python's garbage would look at the objects of all of them, in one piece of a second."""
    gc.collect()
    gc.freeze()  # of all objects of tests before, which would be counted again and again
    items = b",".join([b'{"role": "user", "content": "Hello"}'] * 500)
    store = ResponseStore(1, 10**6, 10**6)
    store.put("ann", "resp_1", StoredResponse((b"{}",), (b"[%b]" % items,), b"[]"))
    body = ResponsesRequest(input="Go on", previous_response_id="resp_1")
    lists = [b"[%b]" % items]

    def num_objects() -> int:
        objects = gc.get_objects()
        return sum(type(each) is MessageItem for each in objects) + sum(
            type(each) is list and len(each) == 500 and type(each[0]) is dict for each in objects
        )

    async def test() -> None:
        work, held, most, lengths = HeavyWork(), HeldMemory(MemoryBudget(10**9), (0, 0)), 0, list[int]()

        async def read_page() -> None:
            async with read_conversation(lists, 10**6, work, held, None) as elements:
                lengths.append(len(elements))

        async def go_on() -> None:
            record = ResponseRecord(store, "ann", "r", body)
            lengths.append(await record.after_earlier(len, 10**6, 10**6, work, held))

        tasks = [asyncio.ensure_future(each()) for _ in range(6) for each in (go_on, read_page)]
        while not all(task.done() for task in tasks):
            await asyncio.sleep(0)
            most = max(most, num_objects())
        await asyncio.gather(*tasks)
        assert lengths == [500] * 12
        assert 500 <= most <= 501, "the items of one conversation, and the list of which they were made"
        assert num_objects() == 0
        work.close()

    asyncio.run(test())


def test_several_gateway_processes_store_nothing() -> None:
    with pytest.raises(ValueError, match=r"store_responses: launch\.gateway_processes is 2, must be 1"):
        Config(gateway=GatewaySection(store_responses=True), launch=LaunchSection(gateway_processes=2))


def test_an_answer_that_no_request_may_repeat_is_an_error_of_the_request() -> None:
    store = ResponseStore(1, 10**6, 10**6)
    output = b'[{"type": "function_call", "call_id": "c", "name": "get weather", "arguments": "{}"}]'
    store.put("ann", "resp_1", StoredResponse((b"{}",), (b'[{"role": "user", "content": "Hi"}]',), output))
    body = ResponsesRequest(input="Go on", previous_response_id="resp_1")
    held = HeldMemory(MemoryBudget(10**6), (0, 0))
    with pytest.raises(InvalidRequest, match="cannot be continued") as refused:
        asyncio.run(ResponseRecord(store, "ann", "r", body).after_earlier(list, 10**6, 10**6, HeavyWork(), held))
    assert refused.value.param == "previous_response_id"
