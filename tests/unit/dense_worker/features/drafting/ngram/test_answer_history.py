"""Earlier answers: only one's own, and not more than fit."""

from __future__ import annotations

from services.common.sampling_params import SamplingParams
from services.dense_worker.engine.sequence import Sequence
from services.dense_worker.features.drafting.ngram.answer_history import AnswerHistory
from services.dense_worker.features.drafting.ngram.ngram_index import MIN_CAPACITY, SEPARATOR
from tests.support.dense.sequences import new_sequence

LENGTHS = (2, 4)


def answered(output: list[int], tenant: int = 0, client: int = 0, salt: str = "") -> Sequence:
    return new_sequence(
        1, "r", [1, 2, 3], SamplingParams(), 10_000, output_token_ids=output, tenant=tenant, client=client,
        cache_salt=salt,
    )  # fmt: skip


def texts(history: AnswerHistory, sequence: Sequence) -> list[list[int]]:
    return [index.tokens.tolist() for index in history.find(sequence)]


def test_answers_are_kept_with_the_end_of_their_prompts() -> None:
    history = AnswerHistory(LENGTHS, 100_000)
    history.add(answered([7, 8, 9]))
    history.add(answered([4, 5]))
    assert texts(history, answered([])) == [[1, 2, 3, 7, 8, 9, SEPARATOR, 1, 2, 3, 4, 5, SEPARATOR]]


def test_nobody_gets_the_answers_of_others() -> None:
    history = AnswerHistory(LENGTHS, 100_000)
    history.add(answered([7] * 5, tenant=1, client=8, salt="a"))
    history.add(answered([6] * 5, client=8))
    assert texts(history, answered([], tenant=1, client=9, salt="a")), "one key, whatever the address"
    assert not texts(history, answered([], tenant=2, client=8, salt="a"))
    assert not texts(history, answered([], tenant=1, client=8, salt="b"))
    assert texts(history, answered([], client=8)) == [[1, 2, 3, 6, 6, 6, 6, 6, SEPARATOR]]
    assert not texts(history, answered([], client=9)), "without keys, the address counts"


def test_memory_is_limited_however_many_clients_there_are() -> None:
    history = AnswerHistory(LENGTHS, 20 * MIN_CAPACITY)
    for client in range(100):
        history.add(answered([client] * 30, client=client))
        assert history.num_tokens <= 20 * MIN_CAPACITY
    assert len([client for client in range(100) if texts(history, answered([], client=client))]) == 20
    assert texts(history, answered([], client=99)) and not texts(history, answered([], client=0))


def test_one_client_keeps_its_newest_answers() -> None:
    history = AnswerHistory(LENGTHS, 40_000)
    for number in range(200):
        history.add(answered([number] * 1000))
        assert history.num_tokens <= 40_000
    kept = {token for text in texts(history, answered([])) for token in text}
    assert 199 in kept and 100 not in kept
    history.add(answered(list(range(90_000))))
    assert history.num_tokens <= 40_000
