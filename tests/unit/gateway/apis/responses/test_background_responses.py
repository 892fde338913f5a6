"""`background` of /v1/responses with the official client: the request goes on when its client has an answer."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pydantic_core
import pytest

from services.common.errors import CapacityError
from services.gateway.apis.responses import stored_record
from services.gateway.apis.responses.background import BackgroundResponses
from services.gateway.apis.responses.event_log import EventLog, LoggedEvents
from services.gateway.apis.responses.response_store import StoredResponse
from services.gateway.resources.memory_budget import HeldMemory, MemoryBudget
from services.pb import dense_pb2, gateway_pb2
from tests.support.clients.gateway_calls import EOS, ids
from tests.support.clients.http_clients import async_client
from tests.support.clients.http_gateway import MODEL
from tests.support.running_gateway import RunningGateway, until
from tests.support.workers.fake_dense import FakeDense
from tests.unit.gateway.access.test_callers import bearer, keys_file
from tests.unit.gateway.apis.responses.test_responses import with_api

LONG = 5000


async def until_ended(api: openai.AsyncOpenAI, response_id: str) -> Any:
    for _ in range(1000):
        response = await api.responses.retrieve(response_id)
        if response.status not in ("queued", "in_progress"):
            return response
        await asyncio.sleep(0.01)
    raise TimeoutError(f"{response_id} has not ended")


def dense_of(token_ids: Sequence[int]) -> FakeDense:
    def script(submit: dense_pb2.Submit) -> Sequence[int]:
        return token_ids

    return FakeDense(script, step_s=0.002)


def test_a_response_is_found_when_it_has_ended(tmp_path: Path) -> None:
    async def test(api: openai.AsyncOpenAI, gateway: RunningGateway) -> None:
        same: dict[str, Any] = {"model": MODEL, "input": "Hi", "temperature": 0}
        plain = await api.responses.create(**same)
        begun = await api.responses.create(**same, background=True)
        assert (begun.status, begun.background, begun.output, begun.usage) == ("queued", True, [], None)
        found = await until_ended(api, begun.id)
        assert (found.status, found.output_text, found.usage) == ("completed", plain.output_text, plain.usage)
        cut = await until_ended(api, (await api.responses.create(**same, background=True, max_output_tokens=1)).id)
        assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        following = await api.responses.create(model=MODEL, input="And?", previous_response_id=found.id)
        assert following.status == "completed"
        assert (await api.responses.cancel(found.id)).status == "completed", "as with OpenAI"
        with pytest.raises(openai.BadRequestError, match="Cannot cancel a synchronous response"):
            await api.responses.cancel(plain.id)

    with_api(tmp_path, dense_of([*ids(" one two"), EOS]), test, store_responses=True)


def test_the_same_post_with_its_key_begins_no_second_response(tmp_path: Path) -> None:
    async def test(api: openai.AsyncOpenAI, gateway: RunningGateway) -> None:
        begin: dict[str, Any] = {"model": MODEL, "input": "Hi", "background": True}
        first, again, other = [
            await api.responses.create(**begin, extra_headers={"Idempotency-Key": key}) for key in ("a", "a", "b")
        ]
        assert first.id == again.id != other.id and again.status == "queued"
        for each in (first, other):
            assert (await until_ended(api, each.id)).status == "completed"
        assert len(dense.submits) == 2

    dense = dense_of([*ids(" one two"), EOS])
    with_api(tmp_path, dense, test, store_responses=True, resume=True)


def test_a_running_response_can_be_cancelled_and_deleted(tmp_path: Path) -> None:
    async def test(api: openai.AsyncOpenAI, gateway: RunningGateway) -> None:
        begin: dict[str, Any] = {"model": MODEL, "input": "Hi", "background": True, "max_output_tokens": 1500}
        for number, end in enumerate((api.responses.cancel, api.responses.delete), 1):
            response = await api.responses.create(**begin)
            await until(lambda: len(dense.running) == 1)
            assert (await api.responses.retrieve(response.id)).status == "in_progress"
            with pytest.raises(openai.BadRequestError, match="can be continued when it has ended") as refused:
                await api.responses.create(model=MODEL, input="And?", previous_response_id=response.id)
            assert refused.value.param == "previous_response_id"
            answer = await end(response.id)
            await until(lambda number=number: len(dense.cancelled_seq_ids) == number)
            if answer is None:
                with pytest.raises(openai.NotFoundError):
                    await api.responses.retrieve(response.id)
            else:
                assert answer.status == (await api.responses.retrieve(response.id)).status == "cancelled"

    dense = dense_of(ids(" a") * LONG)
    with_api(tmp_path, dense, test, store_responses=True)


def test_a_refused_request_is_an_error_at_once(tmp_path: Path) -> None:
    refused: list[tuple[dict[str, Any], str, str]] = [
        ({"store": False}, "background", "background can only be used when `store` is true"),
        ({"stream": True, "temperature": -1}, "temperature", "-1"),
        ({"top_logprobs": 2}, "top_logprobs", "they are not stored"),
        ({"include": ["message.output_text.logprobs"]}, "include", "they are not stored"),
        ({"temperature": -1}, "temperature", "-1"),
        ({"input": "a " * 4000}, "input", "maximum context length"),
    ]

    async def test(api: openai.AsyncOpenAI, gateway: RunningGateway) -> None:
        async with async_client(gateway.http_address) as client:
            for options, param, words in refused:
                body = {"input": "Hi", "background": True} | options
                response = await client.post("/v1/responses", json=body)
                error = response.json()["error"]
                assert (response.status_code, error["param"]) == (400, param) and words in error["message"], error

    with_api(tmp_path, dense_of([EOS]), test, store_responses=True)


def test_a_server_that_stores_nothing_has_no_background(tmp_path: Path) -> None:
    async def test(api: openai.AsyncOpenAI, gateway: RunningGateway) -> None:
        with pytest.raises(openai.BadRequestError, match=r"gateway\.store_responses") as refused:
            await api.responses.create(model=MODEL, input="Hi", background=True)
        assert refused.value.param == "background"

    with_api(tmp_path, dense_of([EOS]), test)


def test_others_neither_see_nor_cancel_it(tmp_path: Path) -> None:
    async def test(api: openai.AsyncOpenAI, gateway: RunningGateway) -> None:
        ann, bob = ({"extra_headers": {"authorization": bearer(name)}} for name in ("ann", "bob"))
        mine = await api.responses.create(model=MODEL, input="Hi", background=True, max_output_tokens=1500, **ann)
        for call in (api.responses.retrieve, api.responses.cancel, api.responses.delete):
            with pytest.raises(openai.NotFoundError):
                await call(mine.id, **bob)
        assert (await api.responses.retrieve(mine.id, **ann)).status == "in_progress"
        assert (await api.responses.cancel(mine.id, **ann)).status == "cancelled"
        await api.responses.create(model=MODEL, input="Hi", background=True, **ann)  # runs until the gateway ends

    options = {"store_responses": True, "api_keys_file": keys_file(tmp_path)}
    with_api(tmp_path, dense_of(ids(" a") * LONG), test, **options)


def test_what_runs_is_found_however_little_is_stored(tmp_path: Path) -> None:
    async def test(api: openai.AsyncOpenAI, gateway: RunningGateway) -> None:
        begin: dict[str, Any] = {"model": MODEL, "input": "Hi", "max_output_tokens": 1500}
        running = [(await api.responses.create(**begin, background=True)).id for _ in range(4)]
        assert [(await api.responses.retrieve(each)).status for each in running] == ["in_progress"] * 4
        assert len((await api.responses.input_items.list(running[0])).data) == 1
        assert [(await api.responses.cancel(each)).status for each in running] == ["cancelled"] * 4
        await until(lambda: len(dense.cancelled_seq_ids) == 4)
        for each in running[:2]:
            with pytest.raises(openai.NotFoundError):  # two are stored, those that ended last
                await api.responses.retrieve(each)

    dense = dense_of(ids(" a") * LONG)
    with_api(tmp_path, dense, test, store_responses=True, max_stored_responses=2)


def test_a_response_too_large_to_be_stored_is_refused_at_once(tmp_path: Path) -> None:
    async def test(api: openai.AsyncOpenAI, gateway: RunningGateway) -> None:
        with pytest.raises(openai.BadRequestError, match=r"as \d{4} bytes.* at most 3000 .*max_stored_response_bytes"):
            await api.responses.create(model=MODEL, input="Hi" * 1000, background=True)

    with_api(tmp_path, dense_of([EOS]), test, store_responses=True, max_stored_response_bytes=3000)


def test_what_runs_holds_memory_for_all_that_it_came_with_until_it_ends(tmp_path: Path) -> None:
    """What the model does not see is kept, too."""
    unseen = "a" * 100_000
    summary = {"type": "reasoning", "id": "rs", "summary": [{"type": "summary_text", "text": unseen}]}
    bodies: tuple[dict[str, Any], ...] = (
        {"metadata": {"a": unseen}, "input": "Hi"},
        {"input": [summary, {"role": "user", "content": "Hi"}]},
    )

    async def test(api: openai.AsyncOpenAI, gateway: RunningGateway) -> None:
        for body in bodies:
            running = list[str]()

            async def begin(body: dict[str, Any] = body, running: list[str] = running) -> None:
                request = api.responses.create(model=MODEL, max_output_tokens=1500, background=True, **body)
                running.append((await request).id)

            with pytest.raises(openai.RateLimitError, match="max_held_bytes"):
                for _ in range(30):
                    await begin()
            for each in running:  # several at once: none may keep what another one gives back
                await asyncio.gather(*(api.responses.cancel(each) for _ in range(5)))
            num_before = len(running)
            running.clear()
            for _ in range(num_before):
                await begin()
            await asyncio.gather(*map(api.responses.delete, running))

    limits: Any = {"max_held_bytes": 2_000_000, "max_held_wait_s": 0.2}
    with_api(tmp_path, dense_of(ids(" a") * LONG), test, store_responses=True, **limits)


def test_a_refusal_whose_client_has_gone_is_no_error_of_the_server() -> None:
    async def test() -> None:
        unhandled: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: unhandled.append(context))
        background: Any = BackgroundResponses(SimpleNamespace(heavy_work=None))  # type: ignore[arg-type]
        form = SimpleNamespace(response_id="resp_1", running=lambda: StoredResponse((b"{}",), (), b"[]"))
        caller = SimpleNamespace(key=None, client_id=1)
        held = HeldMemory(MemoryBudget(max_bytes=10), 1)
        message = gateway_pb2.GenerateRequest(prompt="Hi")
        client = asyncio.create_task(background.start(message, form, caller, held, is_stream=False))
        await asyncio.sleep(0)  # the request has a task
        client.cancel()
        await asyncio.wait({client})
        await until(lambda: not background._tasks)
        assert client.cancelled()
        del client  # which refers to the request's task
        gc.collect()
        assert not unhandled

    asyncio.run(test())


def test_what_hundreds_that_end_at_once_came_with_is_encoded_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its JSON was made when each began. Each is told how it has ended, though the store has room for few."""
    num_encoded = 0

    def to_json(*arguments: Any, **options: Any) -> bytes:
        nonlocal num_encoded
        encoded = pydantic_core.to_json(*arguments, **options)
        num_encoded += len(encoded)
        return encoded

    monkeypatch.setattr(stored_record, "to_json", to_json)
    metadata = {"a": "b" * 100_000}

    async def test(api: openai.AsyncOpenAI, gateway: RunningGateway) -> None:
        nonlocal num_encoded
        body: dict[str, Any] = {"model": MODEL, "input": "Hi", "metadata": metadata, "max_output_tokens": 1500}
        running = [(await api.responses.create(**body, background=True)).id for _ in range(20)]
        assert 20 * 100_000 < num_encoded < 21 * 100_000, "once for each"
        num_encoded = 0
        found = [await api.responses.retrieve(each) for each in running]
        assert {each.status for each in found} == {"in_progress"}
        ended = await asyncio.gather(*(api.responses.cancel(each) for each in running))
        assert [(each.id, each.status) for each in ended] == [(each, "cancelled") for each in running]
        assert all(each.metadata == metadata and each.output == [] for each in ended)
        assert num_encoded < 20 * 1000
        short = await api.responses.create(**body | {"max_output_tokens": 1}, background=True)
        completed = await until_ended(api, short.id)
        assert (completed.status, completed.metadata) == ("incomplete", metadata)

    limits: Any = {"max_stored_responses": 2}
    with_api(tmp_path, dense_of(ids(" a") * LONG), test, store_responses=True, **limits)


def test_a_cancel_is_one_request_of_the_clients_limit(tmp_path: Path) -> None:
    async def test(api: openai.AsyncOpenAI, gateway: RunningGateway) -> None:
        ann = {"extra_headers": {"authorization": bearer("ann")}}
        begun = await api.responses.create(model=MODEL, input="Hi", background=True, max_output_tokens=1500, **ann)
        assert (await api.responses.cancel(begun.id, **ann)).status == "cancelled"
        assert (await api.responses.retrieve(begun.id, **ann)).status == "cancelled"
        with pytest.raises(openai.RateLimitError, match="used up its 3 requests a minute"):
            await api.responses.retrieve(begun.id, **ann)

    options = {"store_responses": True, "api_keys_file": keys_file(tmp_path, "requests_per_minute = 3")}
    with_api(tmp_path, dense_of(ids(" a") * LONG), test, **options)


async def replayed(api: openai.AsyncOpenAI, response_id: str, **options: Any) -> list[Any]:
    return [each async for each in await api.responses.retrieve(response_id, stream=True, **options)]


def test_a_stream_goes_on_without_its_client_which_gets_the_rest_later(tmp_path: Path) -> None:
    async def test(api: openai.AsyncOpenAI, gateway: RunningGateway) -> None:
        same: dict[str, Any] = {"model": MODEL, "input": "Hi", "temperature": 0, "stream": True}
        plain = [each async for each in await api.responses.create(**same)]
        whole = [each async for each in await api.responses.create(**same, background=True)]
        assert [each.type for each in whole] == [each.type for each in plain]
        assert [each.sequence_number for each in whole] == list(range(len(whole)))
        last = whole[-1].response
        assert (last.status, last.background, last.output_text) == ("completed", True, plain[-1].response.output_text)
        assert (await api.responses.retrieve(last.id)).to_dict() == last.to_dict()
        assert await replayed(api, last.id) == whole
        assert await replayed(api, last.id, starting_after=5) == whole[6:]
        assert await replayed(api, last.id, starting_after=len(whole) - 1) == []

        stream = await api.responses.create(**same, background=True)
        begun = [await anext(stream) for _ in range(3)]
        await stream.close()
        response_id = begun[0].response.id
        two = await asyncio.gather(*(replayed(api, response_id, starting_after=2) for _ in range(2)))
        assert two[0] == two[1]
        assert [each.type for each in (*begun, *two[0])] == [each.type for each in whole]
        assert two[0][-1].response == await api.responses.retrieve(response_id)

    with_api(tmp_path, dense_of([*ids(" one two three") * 20, EOS]), test, store_responses=True)


def test_a_wrong_position_or_a_response_without_events_is_refused(tmp_path: Path) -> None:
    async def test(api: openai.AsyncOpenAI, gateway: RunningGateway) -> None:
        begin: dict[str, Any] = {"model": MODEL, "input": "Hi"}
        plain = await api.responses.create(**begin)
        whole = await api.responses.create(**begin, background=True)
        streamed = [each async for each in await api.responses.create(**begin, background=True, stream=True)]
        last, response_id = len(streamed) - 1, streamed[-1].response.id
        refused = [
            (plain.id, "stream=true", "stream", "has no events"),
            (whole.id, "stream=true", "stream", "has no events"),
            (response_id, f"stream=true&starting_after={last + 1}", "starting_after", f"0 to {last}"),
            (response_id, "stream=true&starting_after=-1", "starting_after", "-1"),
            (response_id, "starting_after=1", "starting_after", "stream is not true"),
        ]
        asked: Any = ["reasoning.encrypted_content", "message.output_text.logprobs"]
        with pytest.raises(openai.BadRequestError, match="which are not stored") as error:
            await api.responses.retrieve(plain.id, include=asked)
        assert error.value.param == "include"
        await api.responses.retrieve(plain.id, include=asked[:1])
        async with async_client(gateway.http_address) as client:
            for each, query, param, words in refused:
                response = await client.get(f"/v1/responses/{each}?{query}")
                error = response.json()["error"]
                assert (response.status_code, error["param"]) == (400, param) and words in error["message"], error

    with_api(tmp_path, dense_of([*ids(" one"), EOS]), test, store_responses=True)


def test_readers_of_a_cancelled_stream_come_to_its_end(tmp_path: Path) -> None:
    async def test(api: openai.AsyncOpenAI, gateway: RunningGateway) -> None:
        begin: dict[str, Any] = {"model": MODEL, "input": "Hi", "background": True, "max_output_tokens": 1500}
        stream = await api.responses.create(**begin, stream=True)
        first = await anext(stream)
        response_id = first.response.id
        assert (await api.responses.cancel(response_id)).status == "cancelled"
        seen = [first, *[each async for each in stream]]
        assert "response.completed" not in [each.type for each in seen]
        assert await replayed(api, response_id) == seen
        assert (await api.responses.retrieve(response_id)).status == "cancelled"

    with_api(tmp_path, dense_of(ids(" a") * LONG), test, store_responses=True)


def test_events_that_memory_has_no_room_for_are_lost_and_the_response_is_not(tmp_path: Path) -> None:
    async def test(api: openai.AsyncOpenAI, gateway: RunningGateway) -> None:
        begin: dict[str, Any] = {"model": MODEL, "input": "Hi", "background": True, "max_output_tokens": 1500}
        stream = await api.responses.create(**begin, stream=True)
        response_id = (await anext(stream)).response.id
        with pytest.raises(openai.APIError, match="max_held_bytes"):
            async for _ in stream:
                pass
        with pytest.raises(openai.APIStatusError, match="max_held_bytes") as gone:
            await replayed(api, response_id)
        assert gone.value.status_code == 410
        assert (await until_ended(api, response_id)).usage.output_tokens == 1500

    limits: Any = {"max_held_bytes": 300_000}
    with_api(tmp_path, dense_of(ids(" a") * LONG), test, store_responses=True, **limits)


def test_events_that_are_too_large_to_be_stored_leave_the_response(tmp_path: Path) -> None:
    async def test(api: openai.AsyncOpenAI, gateway: RunningGateway) -> None:
        begin: dict[str, Any] = {"model": MODEL, "input": "Hi", "background": True}
        whole = [each async for each in await api.responses.create(**begin, stream=True)]
        assert whole[-1].type == "response.completed"
        assert await api.responses.retrieve(whole[-1].response.id) == whole[-1].response
        with pytest.raises(openai.BadRequestError, match="has no events"):
            await replayed(api, whole[-1].response.id)

    dense = dense_of([*ids(" one two three") * 20, EOS])
    with_api(tmp_path, dense, test, store_responses=True, max_stored_response_bytes=8000)


def test_events_that_somebody_reads_are_counted_until_then_though_nobody_stores_them() -> None:
    """Or a client that reads slowly, and deletes each response, would have any number of them kept."""

    async def test() -> None:
        budget, goes_on, num_sent = MemoryBudget(max_bytes=10_000), asyncio.Event(), 0
        log, beside = (EventLog(HeldMemory(budget, (0, 0))) for _ in range(2))

        async def send(_: Any) -> None:
            nonlocal num_sent
            await goes_on.wait()
            num_sent += 1

        async def read() -> None:
            scope = {"state": {"send_body": send, "request_id": "a"}}
            await LoggedEvents(log)(scope, asyncio.Event().wait, send)

        log.add([{"type": "response.created", "text": "a" * 5000}])
        early = asyncio.create_task(read())
        await asyncio.sleep(0)
        log.end()
        assert budget.num_held == log.num_bytes > 5000
        late = asyncio.create_task(read())
        await asyncio.sleep(0)
        assert budget.num_held == log.num_bytes, "once, however many read"
        goes_on.set()
        await asyncio.gather(early, late)
        assert budget.num_held == 0 and num_sent == 2 * 3
        beside.add([{"type": "response.created", "text": "b" * 6000}])
        with pytest.raises(CapacityError, match="max_held_bytes"):
            await read()

    asyncio.run(test())


def test_times_are_those_of_the_answer(tmp_path: Path) -> None:
    async def test(api: openai.AsyncOpenAI, gateway: RunningGateway) -> None:
        begin: dict[str, Any] = {"model": MODEL, "input": "Hi", "extra_body": {"timings_per_token": True}}
        whole = await until_ended(api, (await api.responses.create(**begin, background=True)).id)
        streamed = [each async for each in await api.responses.create(**begin, background=True, stream=True)]
        for response in (whole, streamed[-1].response, await api.responses.retrieve(streamed[-1].response.id)):
            assert response.to_dict()["timings"]["predicted_n"] == response.usage.output_tokens

    with_api(tmp_path, dense_of([*ids(" one two"), EOS]), test, store_responses=True)


def test_all_of_many_that_are_cancelled_at_once_are_answered(tmp_path: Path) -> None:
    """Also those that the store has no room for afterwards."""

    async def test(api: openai.AsyncOpenAI, gateway: RunningGateway) -> None:
        begin: dict[str, Any] = {"model": MODEL, "input": "Hi", "max_output_tokens": 1500, "background": True}
        running = [(await api.responses.create(**begin)).id for _ in range(20)]
        cancelled = await asyncio.gather(*map(api.responses.cancel, running))
        assert [(each.id, each.status) for each in cancelled] == [(each, "cancelled") for each in running]

    with_api(tmp_path, dense_of(ids(" a") * LONG), test, store_responses=True, max_stored_responses=2)
