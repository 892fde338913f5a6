"""Which client a request counts for: in the messages to the dense worker, and in the gateway's own queue."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.common.errors import CapacityError, TwostrokeError
from services.common.fairness import KEPT_PARTS, SMALL_PARTS
from services.gateway.access.access import Access, Caller
from services.gateway.access.admission import Admission, Ticket
from services.gateway.link.journal import Journal
from services.gateway.link.journal_entry import JournalEntry
from tests.support.clients.gateway_calls import request, say, with_gateway
from tests.support.clients.generation_requests import make_request
from tests.support.clients.http_clients import async_client
from tests.support.running_gateway import RunningGateway
from tests.support.workers.fake_dense import FakeDense

KEYS = {"ann": "ann-ann-ann-ann-ann", "bob": "bob-bob-bob-bob-bob"}
ADDRESSES = ["203.0.113.1", "203.0.113.2"]
LIMIT = 640


def keys_file(directory: Path) -> Path:
    file = directory / "keys.toml"
    file.write_text("".join(f'[[keys]]\nname = "{name}"\nkey = "{key}"\n' for name, key in KEYS.items()))
    return file


async def send(gateway: RunningGateway, address: str, key: str | None = None) -> None:
    """One request over HTTP and one over gRPC from the same client."""
    headers = {"x-forwarded-for": address} | ({} if key is None else {"authorization": f"Bearer {key}"})
    async with async_client(gateway.http_address) as client:
        answer = await client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2}, headers=headers)
        assert answer.status_code == 200, answer.text
    await gateway.stub.Generate(request(max_tokens=2), metadata=tuple(headers.items()))


def test_requests_carry_a_number_of_the_client_and_of_the_key(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    dense = FakeDense(say([5, 6, 7]))

    async def test(gateway: RunningGateway) -> None:
        for key in KEYS.values():
            for address in ADDRESSES:
                await send(gateway, address, key)

    with_gateway(tmp_path, dense, test, api_keys_file=keys_file(tmp_path), trusted_proxies=["unix"])
    pairs = [(submit.spec.tenant, submit.spec.client) for submit in dense.submits]
    assert pairs[::2] == pairs[1::2], "HTTP and gRPC"
    ann1, ann2, bob1, bob2 = pairs[::2]
    assert ann1[0] == ann2[0] != bob1[0] == bob2[0]
    assert ann1[1] == bob1[1] != ann2[1] == bob2[1]
    assert all(number for pair in pairs for number in pair)
    logs = "".join(capfd.readouterr())
    assert "request ended" in logs and not any(address in logs for address in ADDRESSES)


def test_without_keys_clients_differ_by_address_only(tmp_path: Path) -> None:
    dense = FakeDense(say([5, 6, 7]))

    async def test(gateway: RunningGateway) -> None:
        for address in ADDRESSES:
            await send(gateway, address)

    with_gateway(tmp_path, dense, test, trusted_proxies=["unix"])
    assert {submit.spec.tenant for submit in dense.submits} == {0}
    assert len({submit.spec.client for submit in dense.submits}) == 2


def test_an_untrusted_header_changes_nothing(tmp_path: Path) -> None:
    dense = FakeDense(say([5, 6, 7]))

    async def test(gateway: RunningGateway) -> None:
        for address in ADDRESSES:
            await send(gateway, address)

    with_gateway(tmp_path, dense, test)
    assert len({submit.spec.client for submit in dense.submits}) == 1


class Queue:
    """An admission and the journal whose length it limits."""

    def __init__(self, max_num_waiting: int = LIMIT, max_num_waiting_tokens: int = 100 * LIMIT) -> None:
        self.journal = Journal()
        self.admission = Admission(self.journal, max_num_waiting, max_num_waiting_tokens)
        self._access = Access(None, "")
        self._num_requests = 0

    def caller(self, address: str) -> Caller:
        return self._access.identify(None, address)

    def enter(self, address: str, num_tokens: int = 1) -> JournalEntry:
        caller = self.caller(address)
        ticket: Ticket = self.admission.open(caller)
        self._num_requests += 1
        given = make_request(f"r{self._num_requests}", prompt_token_ids=[1] * num_tokens, client=caller.client)
        try:
            ticket.admit(given)
        except TwostrokeError:
            ticket.close()
            raise
        return self.journal.open(given)[0]

    def fill(self, address: str, num_tokens: int = 1) -> int:
        """How many requests of a client are accepted until one is refused."""
        count = 0
        while True:
            try:
                self.enter(address, num_tokens)
            except CapacityError:
                return count
            count += 1


def test_one_client_cannot_fill_the_queue_and_others_get_in() -> None:
    queue = Queue()
    assert queue.fill("10.0.0.1") == LIMIT - LIMIT // KEPT_PARTS
    with pytest.raises(CapacityError, match="this client has 560 of 560 waiting answers"):
        queue.enter("10.0.0.1")
    num_others = sum(queue.fill(f"10.0.1.{number}") for number in range(20))
    assert num_others == LIMIT // KEPT_PARTS, "the limit of all holds too"
    assert queue.journal.waiting.own == LIMIT


def test_a_client_with_little_in_the_queue_gets_a_64th_of_what_is_kept() -> None:
    queue = Queue()
    queue.fill("10.0.0.1")
    assert queue.fill("10.0.0.2") == LIMIT // SMALL_PARTS


def test_the_same_holds_for_prompt_tokens() -> None:
    queue = Queue(max_num_waiting_tokens=6400)
    assert queue.fill("10.0.0.1", 100) == 64 - 64 // KEPT_PARTS
    assert queue.fill("10.0.0.2", 50) == 100 // 50
    queue.enter("10.0.0.3", 500)  # its only one may be long
    with pytest.raises(CapacityError):
        queue.enter("10.0.0.4", 500)


def test_what_has_started_or_ended_makes_room_for_the_same_client() -> None:
    queue = Queue()
    first = queue.enter("10.0.0.1")
    queue.fill("10.0.0.1")
    first.start(0.0, 0)
    second = queue.enter("10.0.0.1")
    with pytest.raises(CapacityError):
        queue.enter("10.0.0.1")
    queue.journal.close(second)
    queue.enter("10.0.0.1")
    queue.journal.close(first)
    assert queue.journal.waiting_of(queue.caller("10.0.0.1").client_id)[0] == LIMIT - LIMIT // KEPT_PARTS


def test_requests_being_read_count_for_their_client() -> None:
    queue = Queue()
    tickets = [queue.admission.open(queue.caller("10.0.0.1")) for _ in range(560)]
    with pytest.raises(CapacityError):
        queue.admission.open(queue.caller("10.0.0.1"))
    queue.admission.open(queue.caller("10.0.0.2")).close()
    tickets[0].close()
    queue.admission.open(queue.caller("10.0.0.1"))
