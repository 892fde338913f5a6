"""SGLang's sessions: what precedes a request is what its client would otherwise have sent again."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import httpx2
import pytest
from structlog.testing import capture_logs

from services.common.config import Config, GatewaySection, LaunchSection
from services.common.errors import InvalidRequest
from services.gateway.apis.sglang.schema import SessionParams
from services.gateway.apis.sglang.sessions import BYTES_PER_CHARACTER, REQUEST_BYTES, SESSION_BYTES, Sessions
from tests.support.clients.gateway_calls import EOS, REFERENCE, ids
from tests.support.clients.http_clients import events
from tests.support.clients.http_gateway import check_error, with_client
from tests.support.running_gateway import RunningGateway, until
from tests.support.workers.fake_dense import FakeDense
from tests.unit.gateway.access.test_callers import keys_file

URL = "/generate"
ANSWER = [*ids(" one two"), EOS]
FIRST, NEW = [1, 20, 21, 22], [30, 31]
MIB = 2**20


def answering() -> FakeDense:
    return FakeDense(lambda submit: ANSWER)


async def opened(client: httpx2.AsyncClient, **body: Any) -> str:
    response = await client.post("/open_session", json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def turn(client: httpx2.AsyncClient, session: dict[str, Any], **body: Any) -> Any:
    response = await client.post(URL, json={"session_params": session} | body)
    assert response.status_code == 200, response.text
    return response.json()


def prompt_of(dense: FakeDense) -> list[int]:
    """Of the last request."""
    return list(dense.submits[-1].spec.prompt_token_ids)


def test_a_request_follows_the_prompt_and_the_answer_of_another(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        session = await opened(client, capacity_of_str_len=1000)
        first = (await turn(client, {"id": session, "rid": None}, input_ids=FIRST))["meta_info"]["id"]
        assert prompt_of(dense) == FIRST
        whole, after = [*FIRST, *ANSWER], {"id": session, "rid": first}
        answer = await turn(client, after, input_ids=NEW, rid="second")
        assert prompt_of(dense) == [*whole, *NEW] and answer["meta_info"]["prompt_tokens"] == len(whole) + 2
        for more, before in (
            ({"offset": -1}, whole[:-1]),
            ({"offset": 2}, whole[:2]),
            ({"offset": 0}, whole),
            ({"offset": -100}, []),
            ({"drop_previous_output": True}, FIRST),
        ):
            await turn(client, after | more, input_ids=NEW)
            assert prompt_of(dense) == [*before, *NEW], more
        bos = REFERENCE.bos_token_id
        await turn(client, after, input_ids=[bos, *NEW])
        assert prompt_of(dense) == [*whole, *NEW]
        await turn(client, after, text=" a city")
        assert prompt_of(dense) == [*whole, *REFERENCE(" a city", add_special_tokens=False)["input_ids"]]
        second = [*whole, *NEW, *ANSWER]
        stream = {"session_params": {"id": session, "rid": "second"}, "input_ids": [7], "rid": "third", "stream": True}
        assert events((await client.post(URL, json=stream)).text)
        assert prompt_of(dense) == [*second, 7]
        await turn(client, {"id": session, "rid": "third"}, input_ids=[8])
        assert prompt_of(dense) == [*second, 7, *ANSWER, 8]

    dense = answering()
    with_client(tmp_path, dense, test, max_session_bytes=MIB)


def test_replacing_forgets_what_follows(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        session = await opened(client, session_id="mine")
        assert session == "mine"

        def after(rid: str | None, **more: Any) -> dict[str, Any]:
            return {"id": session, "rid": rid} | more

        for name, parent in (("a", None), ("b", "a"), ("c", "b"), ("d", None)):
            await turn(client, after(parent), input_ids=FIRST, rid=name)
        await turn(client, after("a", replace=True), input_ids=NEW, rid="e")
        for gone in ("b", "c"):
            refused = await client.post(URL, json={"session_params": after(gone), "input_ids": NEW})
            check_error(refused, 400, "session_params.rid", "mine", gone)
        for kept in ("a", "d", "e"):
            await turn(client, after(kept), input_ids=NEW)
        refused = await client.post(URL, json={"session_params": after("a"), "input_ids": NEW, "rid": "e"})
        check_error(refused, 400, "rid", "has a request 'e' already")
        await turn(client, after("a", replace=True), input_ids=NEW, rid="e")  # which is forgotten itself
        assert prompt_of(dense) == [*FIRST, *ANSWER, *NEW]
        unchanged = {"session_params": after("a", replace=True), "input_ids": NEW, "rid": "d"}
        check_error(await client.post(URL, json=unchanged), 400, "rid", "has a request 'd' already")
        await turn(client, after("e"), input_ids=NEW)
        await turn(client, after(None, replace=True), input_ids=FIRST, rid="f")
        refused = await client.post(URL, json={"session_params": after("a"), "input_ids": NEW})
        check_error(refused, 400, "session_params.rid", "has no request 'a'")
        await turn(client, after("f"), input_ids=NEW)

    dense = answering()
    with_client(tmp_path, dense, test, max_session_bytes=MIB)


def test_a_request_that_fails_or_whose_session_is_closed_is_not_kept(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        session = await opened(client)
        body = {"session_params": {"id": session}, "input_ids": FIRST, "rid": "a"}
        check_error(await client.post(URL, json=body | {"lora_path": "none"}), 404, "lora_path")
        running = asyncio.ensure_future(client.post(URL, json=body))
        await until(lambda: len(dense.running) == 1)
        refused = await client.post(URL, json={"session_params": {"id": session, "rid": "a"}, "input_ids": NEW})
        check_error(refused, 400, "session_params.rid", "that has ended")
        assert (await client.post("/close_session", json={"session_id": session})).status_code == 200
        assert await opened(client, session_id=session) == session
        assert (await client.post("/abort_request", json={"rid": "a"})).status_code == 200
        assert (await running).status_code == 200
        refused = await client.post(URL, json={"session_params": {"id": session, "rid": "a"}, "input_ids": NEW})
        check_error(refused, 400, "session_params.rid", "has no request 'a'")

    dense = FakeDense(lambda submit: ids(" a") * 5000, step_s=0.002)
    with_client(tmp_path, dense, test, max_session_bytes=MIB)


def test_what_is_wrong_is_said_by_name(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        session = await opened(client)
        again = await client.post("/open_session", json={"session_id": session})
        check_error(again, 400, "session_id", session, "open already")
        check_error(await client.post("/open_session", json={"streaming": True}), 400, "streaming")
        check_error(await client.post("/close_session", json={}), 400, "session_id")
        unknown = await client.post("/close_session", json={"session_id": "x"})
        check_error(unknown, 400, "session_id", "'x'", "gateway.max_session_bytes")
        for wrong, field in (
            ({"session_params": {"id": "x"}, "input_ids": FIRST}, "session_params.id"),
            ({"session_params": {"rid": "x"}, "input_ids": FIRST}, "session_params.id"),
            ({"session_params": {"id": session}, "input_ids": [FIRST, NEW]}, "session_params"),
            ({"session_params": {"id": session}, "input_ids": []}, "session_params"),
            ({"session_params": {"id": session}, "text": []}, "session_params"),
            ({"session_params": {"id": session}, "input_ids": FIRST, "sampling_params": {"n": 2}}, "session_params"),
            ({"session_params": {"id": session, "offset": 2**40}, "input_ids": FIRST}, "session_params.offset"),
        ):
            check_error(await client.post(URL, json=wrong), 400, field)
        plain = {"session_params": {}, "input_ids": [FIRST, NEW], "sampling_params": {"n": 2}}
        assert len((await client.post(URL, json=plain)).json()) == 4
        with capture_logs() as logs:
            await turn(client, {"id": session, "ofset": 1}, input_ids=FIRST)
        assert [each["fields"] for each in logs if each.get("num_fields")] == ["ofset"]

    with_client(tmp_path, answering(), test, max_session_bytes=MIB)


def test_others_have_sessions_of_their_own(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        ann, bob = ({"authorization": f"Bearer {name}-{name}-{name}-{name}-{name}"} for name in ("ann", "bob"))
        for headers in (ann, bob):
            assert (await client.post("/open_session", json={"session_id": "s"}, headers=headers)).json() == "s"
        body = {"session_params": {"id": "s"}, "input_ids": FIRST, "rid": "a"}
        assert (await client.post(URL, json=body, headers=ann)).status_code == 200
        after = {"session_params": {"id": "s", "rid": "a"}, "input_ids": NEW}
        check_error(await client.post(URL, json=after, headers=bob), 400, "session_params.rid")
        assert (await client.post("/close_session", json={"session_id": "s"}, headers=bob)).status_code == 200
        assert (await client.post(URL, json=after, headers=ann)).status_code == 200

    with_client(tmp_path, answering(), test, max_session_bytes=MIB, api_keys_file=keys_file(tmp_path))


def test_a_server_without_sessions_says_so(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        for path, body, field in (
            ("/open_session", {}, "session_id"),
            ("/close_session", {"session_id": "x"}, "session_id"),
            (URL, {"session_params": {"id": "x"}, "input_ids": FIRST}, "session_params"),
        ):
            check_error(await client.post(path, json=body), 400, field, "gateway.max_session_bytes is 0")

    with_client(tmp_path, answering(), test)
    with pytest.raises(ValueError, match=r"max_session_bytes: launch\.gateway_processes is 2, must be 1"):
        Config(gateway=GatewaySection(max_session_bytes=1), launch=LaunchSection(gateway_processes=2))


def has(sessions: Sessions, owner: Any, session_id: str) -> bool:
    try:
        sessions.turn(owner, SessionParams(id=session_id), "asked")
    except InvalidRequest:
        return False
    return True


def test_what_all_sessions_take_is_bounded_and_the_least_recently_used_go_first() -> None:
    most = 4 * 10_000
    sessions = Sessions(most)
    num_tokens = (9_000 - SESSION_BYTES - REQUEST_BYTES - 2 * BYTES_PER_CHARACTER) // 4
    for owner in range(4):
        sessions.open(("", owner), "s")
        sessions.turn(("", owner), SessionParams(id="s"), "a").end([5] * num_tokens, [])
        assert has(sessions, ("", owner), "s")
    sessions.open(("", 0), "t")  # beside one of 9,000 bytes
    sessions.turn(("", 0), SessionParams(id="t"), "a").end([5] * 1000, [])
    assert not has(sessions, ("", 0), "s") and has(sessions, ("", 0), "t")
    assert all(has(sessions, ("", owner), "s") for owner in (1, 2, 3))
    sessions.open(("", 5), "s")
    sessions.turn(("", 5), SessionParams(id="s"), "a").end([5] * num_tokens, [])
    assert [has(sessions, ("", owner), "t" if owner == 0 else "s") for owner in (0, 1, 2, 3, 5)] == [
        False, True, True, True, True,
    ]  # fmt: skip
    sessions.turn(("", 1), SessionParams(id="s"), "b").end([5] * 5000, [])  # more than one owner may have
    assert not has(sessions, ("", 1), "s")
    for owner in range(1000):
        sessions.open(("many", owner), "s")
    num_kept = sum(has(sessions, ("many", owner), "s") for owner in range(1000))
    assert num_kept == most // (SESSION_BYTES + BYTES_PER_CHARACTER)
    for owner in range(1000):
        if has(sessions, ("many", owner), "s"):
            sessions.close(("many", owner), "s")
    assert sessions._num_bytes == 0 and not sessions._shelves and not sessions._by_use


def test_long_names_count() -> None:
    """Those of sessions, of requests and of what these follow: a character takes up to 4 bytes, and 4 as UTF-8."""
    sessions, owner, most = Sessions(4 * 100_000), ("", 0), 100_000
    names = ["\U0001f600" * 500 + f"{number:03}" for number in range(200)]
    for name in names:
        sessions.open(owner, name)
    kept = [name for name in names if has(sessions, owner, name)]
    assert most / 2 < sum(map(sys.getsizeof, kept)) <= most
    num_bytes, parent = 0, None
    for name in names:
        if not has(sessions, owner, kept[-1]):  # it alone takes too much
            break
        sessions.turn(owner, SessionParams(id=kept[-1], rid=parent), name).end([], [])
        num_bytes += sys.getsizeof(name) + sys.getsizeof(parent or "")
        parent = name
    else:
        pytest.fail("requests with long names were never dropped")
    assert most / 2 < num_bytes <= most + 2 * sys.getsizeof(name)
