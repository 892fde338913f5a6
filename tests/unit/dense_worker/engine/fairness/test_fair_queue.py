"""The order of clients in the queue: equal shares of tokens, no starvation, priorities first. Without a scheduler."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from services.dense_worker.engine.sequence import Sequence, SequenceStatus
from services.dense_worker.engine.waiting_queue import WaitingQueue
from tests.support.dense.scheduler_cluster import make_sequence
from tests.support.dense.sequences import ask

MAX_PROMPT_LEN, MAX_OUTPUT_LEN = 40, 60


class Server:
    """Runs one sequence after the other, so that a turn costs all tokens that the sequence computes."""

    def __init__(self) -> None:
        self.queue = WaitingQueue(100_000, 10_000_000, 1.0)
        self.num_sequences = 0
        self.num_tokens: Counter[tuple[int, int]] = Counter()  # computed so far, by (tenant, client)

    def arrive(self, tenant: int, client: int, prompt_len: int, priority: int = 0) -> Sequence:
        self.num_sequences += 1
        sequence = make_sequence(self.num_sequences, prompt_len, MAX_OUTPUT_LEN)
        ask(sequence, tenant=tenant, client=client, priority=priority)
        self.queue.admit(sequence)
        self.queue.push(sequence)
        return sequence

    def serve(self, num_output_tokens: int, num_cached_tokens: int = 0) -> Sequence:
        """Opens the next sequence, computes its prompt and its output, and ends it."""
        sequence = next(self.queue.heads(()))
        self.queue.choose(sequence)
        sequence.status = SequenceStatus.RUNNING
        sequence.num_computed_tokens = min(num_cached_tokens, sequence.num_prompt_tokens - 1)
        self.queue.note_opened(sequence)
        num_computed = sequence.num_prompt_tokens - sequence.num_computed_tokens
        sequence.output_token_ids += [0] * num_output_tokens
        self.queue.forget(sequence)
        self.num_tokens[sequence.spec.tenant, sequence.spec.client] += num_computed + num_output_tokens
        return sequence


@settings(deadline=None)
@given(st.integers(2, 6), st.data())
def test_waiting_clients_differ_by_at_most_the_cost_of_one_sequence(
    num_clients: int, data: st.DataObject
) -> None:
    server = Server()
    for client in range(num_clients):
        for _ in range(80):  # enough that every client has waiting sequences until the end
            prompt_len = data.draw(st.integers(1, MAX_PROMPT_LEN)) if client % 2 else 1 + client
            server.arrive(0, client, prompt_len)
    most = 0
    for _ in range(79):
        num_output_tokens, num_cached_tokens = data.draw(st.tuples(st.integers(0, MAX_OUTPUT_LEN), st.integers(0, 40)))
        before = server.num_tokens.total()
        server.serve(num_output_tokens, num_cached_tokens)
        most = max(most, server.num_tokens.total() - before)
        counts = [server.num_tokens[0, client] for client in range(num_clients)]
        assert max(counts) - min(counts) <= 1 + most, "a quantum of one token, and the largest cost"


@settings(deadline=None)
@given(st.integers(1, 5), st.integers(1, 5), st.integers(1, 20))
def test_tenants_get_equal_shares_for_any_number_of_clients(num_few: int, num_many: int, prompt_len: int) -> None:
    server = Server()
    for tenant, num_clients in ((1, num_few), (2, num_many)):
        for client in range(num_clients):
            for _ in range(50):
                server.arrive(tenant, client, prompt_len)
    for _ in range(50):
        server.serve(4)
    of_tenant = {tenant: sum(n for (each, _), n in server.num_tokens.items() if each == tenant) for tenant in (1, 2)}
    assert abs(of_tenant[1] - of_tenant[2]) <= 1 + prompt_len + 4
    for tenant in (1, 2):
        counts = [n for (each, _), n in server.num_tokens.items() if each == tenant]
        assert max(counts) - min(counts) <= 1 + prompt_len + 4


@settings(deadline=None)
@given(st.integers(1, 6), st.integers(1, MAX_PROMPT_LEN), st.integers(1, MAX_PROMPT_LEN))
def test_a_steady_flow_of_new_clients_does_not_starve_an_old_one(num_new: int, old_len: int, new_len: int) -> None:
    server = Server()
    for _ in range(5):
        server.arrive(0, 0, old_len)
    for number in range(1, num_new + 1):
        server.arrive(0, number, new_len)
    turns = []
    for turn in range(1000):
        if server.serve(0).spec.client == 0:
            turns.append(turn)
            if len(turns) == 5:
                break
        else:  # one new client for each that has finished
            server.arrive(0, num_new + 1 + turn, new_len)
    # Between two turns of the old client each other client gets as many tokens as it, and one more sequence.
    longest = num_new * (old_len / new_len + 2)
    assert len(turns) == 5
    assert all(later - earlier - 1 <= longest for earlier, later in pairwise(turns))


@settings(deadline=None)
@given(st.integers(1, 200), st.integers(1, 100))
def test_a_client_cannot_save_unused_shares_for_later(num_alone: int, num_later: int) -> None:
    server = Server()
    for _ in range(num_alone + num_later):
        server.arrive(0, 1, 10)
    for _ in range(num_alone):
        server.serve(10)
    before = server.num_tokens[0, 1]
    for _ in range(num_later):
        server.arrive(0, 2, 10)
    for _ in range(num_later):
        server.serve(10)
        lead = server.num_tokens[0, 2] - (server.num_tokens[0, 1] - before)
        assert abs(lead) <= 1 + 20


def test_a_new_client_is_next_although_another_has_500_waiting_sequences() -> None:
    server = Server()
    for _ in range(500):
        server.arrive(0, 1, 20)
    for _ in range(10):
        server.serve(50)
    newcomer = server.arrive(0, 2, 20)
    assert next(server.queue.heads(())) is newcomer


def test_cached_prompt_tokens_cost_a_client_nothing() -> None:
    server = Server()
    for client in (1, 2):
        for _ in range(30):
            server.arrive(0, client, 40)
    served = Counter[int]()
    for _ in range(20):  # client 1 finds 39 of 40 tokens in the cache
        client = next(server.queue.heads(())).spec.client
        server.serve(0, 39 if client == 1 else 0)
        served[client] += 1
    assert served[1] > 10 * served[2], "40 sequences of client 1 cost as much as one of client 2"


def test_how_many_are_passed_by_is_bounded_over_all_clients() -> None:
    """And each client has its part of them, however many others have."""
    for num_clients, num_each in ((1, 200), (2, 200), (20, 30), (300, 5)):
        server, asked = Server(), Counter[int]()
        for client in range(num_clients):
            for _ in range(num_each):
                server.arrive(0, client, 3)

        def denies(sequence: Sequence, asked: Counter[int] = asked) -> bool:
            asked[sequence.spec.client] += 1
            return False

        assert not list(server.queue.heads((), denies))
        assert asked.keys() == set(range(num_clients)) and asked.total() <= 64 + num_clients
        assert set(asked.values()) == {1 + 64 // num_clients}


def test_nobody_waits_behind_one_with_blocks_that_cannot_go() -> None:
    server = Server()
    stuck, held, other = [server.arrive(0, client, 3) for client in (1, 2, 3)]
    assert list(server.queue.heads({stuck.seq_id, held.seq_id}, lambda each: each is not stuck)) == [held]
    assert list(server.queue.heads({stuck.seq_id}, lambda each: each is not stuck)) == [held, other]


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(-3, 3), st.integers(0, 3)), min_size=2, max_size=40))
def test_priorities_come_before_the_shares_of_clients(arrivals: list[tuple[int, int]]) -> None:
    server = Server()
    for priority, client in arrivals:
        server.arrive(0, client, 1 + 10 * client, priority)
    served = [server.serve(5).spec.priority for _ in arrivals]
    assert served == sorted(priority for priority, _ in arrivals)  # all arrived at the same time


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["arrive", "serve", "cancel"]), st.integers(0, 3), st.integers(0, 2))))
def test_the_queue_forgets_clients_without_sequences(steps: list[tuple[str, int, int]]) -> None:
    server = Server()
    waiting: dict[int, Sequence] = {}
    for what, client, tenant in steps:
        if what == "arrive":
            sequence = server.arrive(tenant, client, 3)
            waiting[sequence.seq_id] = sequence
        elif waiting and what == "serve":
            del waiting[server.serve(2).seq_id]
        elif waiting:
            _, sequence = waiting.popitem()
            server.queue.remove(sequence)
            server.queue.forget(sequence)
        assert len(server.queue) == len(waiting)
        live = {(sequence.spec.tenant, sequence.spec.client) for sequence in waiting.values()}
        assert server.queue.has_several_clients == (len(live) > 1)
    while waiting:
        del waiting[server.serve(1).seq_id]
    assert not server.queue and not server.queue.has_several_clients
