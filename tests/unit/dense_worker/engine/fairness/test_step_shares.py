"""How a step is divided among clients, compared with the definition of max-min fairness."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from services.dense_worker.engine.fairness.step_shares import divide_prefills, fill, limit_decodes
from services.dense_worker.engine.sequence import Sequence
from tests.support.dense.scheduler_cluster import make_sequence
from tests.support.dense.sequences import ask


def fill_one_by_one(levels: list[int], wishes: list[int], total: int) -> list[int]:
    """Max-min fairness by definition: each token goes to the client that has the fewest and still wants more."""
    shares = [0] * len(levels)
    for _ in range(total):
        wanting = [i for i in range(len(levels)) if shares[i] < wishes[i]]
        if not wanting:
            break
        shares[min(wanting, key=lambda i: (levels[i] + shares[i], i))] += 1
    return shares


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 40)), max_size=8), st.integers(0, 200))
def test_filling_is_max_min_fair(clients: list[tuple[int, int]], total: int) -> None:
    levels, wishes = [level for level, _ in clients], [wish for _, wish in clients]
    assert fill(levels, wishes, total) == fill_one_by_one(levels, wishes, total)


def sequences_of(clients: list[tuple[int, int]]) -> list[Sequence]:
    sequences = [make_sequence(number, 3, 4) for number in range(len(clients))]
    for sequence, (tenant, client) in zip(sequences, clients, strict=True):
        ask(sequence, tenant=tenant, client=client)
    return sequences


clients = st.tuples(st.integers(0, 2), st.integers(0, 3))


@settings(deadline=None)
@given(
    st.lists(st.tuples(clients, st.integers(2, 50)), max_size=12),
    st.lists(clients, max_size=12),
    st.integers(0, 99),
)
def test_the_whole_budget_is_used_and_shares_are_fair(
    wishes: list[tuple[tuple[int, int], int]], running: list[tuple[int, int]], num_tokens: int
) -> None:
    sequences = sequences_of([client for client, _ in wishes])
    prefills = list(zip(sequences, [count for _, count in wishes], strict=True))
    shares = divide_prefills(prefills, Counter(running), num_tokens)
    assert all(0 <= shares[sequence] <= count for sequence, count in prefills)
    assert shares.total() == min(num_tokens, sum(count for _, count in wishes))
    totals = Counter(tenant for tenant, _ in running)
    for sequence, _ in prefills:
        totals[sequence.spec.tenant] += shares[sequence]
    for sequence, count in prefills:
        if shares[sequence] < count:  # its tenant wants more
            richer = [tenant for tenant in totals if totals[tenant] > totals[sequence.spec.tenant] + 1]
            assert not any(shares[each] for each in sequences if each.spec.tenant in richer)


def test_a_short_prompt_does_not_wait_for_the_long_prompts_of_another_client() -> None:
    *long, short = sequences_of([(0, 1)] * 30 + [(0, 2)])
    shares = divide_prefills([(each, 8000) for each in long] + [(short, 100)], Counter(), 450)
    assert shares[short] == 100
    assert shares[long[0]] == 350, "the prompts of one client are served in order"


def test_a_more_urgent_priority_is_served_first() -> None:
    urgent, other = sequences_of([(0, 1), (0, 2)])
    ask(other, priority=1)
    shares = divide_prefills([(urgent, 100), (other, 100)], Counter(), 150)
    assert (shares[urgent], shares[other]) == (100, 50)


def test_running_streams_leave_half_of_a_step_to_the_prompt_of_another_client() -> None:
    *streams, prompt = sequences_of([(0, 1)] * 500 + [(0, 2)])
    assert limit_decodes(streams, [(prompt, 300)], 512) == streams[:256]
    assert limit_decodes(streams, [(prompt, 12)], 512) == streams
    assert limit_decodes(streams[:200], [(prompt, 300)], 512) == streams[:200]


def test_the_prompt_of_a_client_with_running_streams_displaces_no_stream() -> None:
    *streams, prompt = sequences_of([(0, 1)] * 300 + [(0, 2)] * 200 + [(0, 2)])
    assert limit_decodes(streams, [(prompt, 300)], 512) == streams


def test_clients_with_few_streams_keep_all_of_them() -> None:
    many, few, [prompt] = sequences_of([(0, 1)] * 300), sequences_of([(0, 2)] * 100), sequences_of([(0, 3)])
    chosen = limit_decodes(many + few, [(prompt, 300)], 512)
    assert len(chosen) == 256
    assert [each for each in chosen if each.spec.client == 2] == few
