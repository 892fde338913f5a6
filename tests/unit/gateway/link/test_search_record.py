"""What the gateway keeps of a beam search: its beams, and the best answers that have ended."""

from __future__ import annotations

from services.gateway.link.search_record import SearchRecord
from services.pb import dense_pb2, sampling_pb2

STEP = {"parents": [0, 0], "token_ids": [5, 6], "scores": [-1.0, -2.0]}
BEFORE = dense_pb2.BeamStep(**STEP)


def step_with_ended(*scores: float) -> dense_pb2.BeamStep:
    """Both beams swap places; an answer with each of these scores ends, named by its last token."""
    ended = [dense_pb2.EndedBeam(parent=0, token_id=50 + i, score=score) for i, score in enumerate(scores)]
    return dense_pb2.BeamStep(parents=[1, 0], token_ids=[7, 8], scores=[-3.0, -4.0], ended=ended)


def test_beams_keep_the_tokens_of_those_that_they_continue() -> None:
    record = SearchRecord(2)
    assert record.encode() == ([], [])
    record.add(BEFORE)
    record.add(step_with_ended())
    beams, ended = record.encode()
    assert [(list(beam.token_ids), beam.score) for beam in beams] == [([6, 7], -3.0), ([5, 8], -4.0)]
    assert not ended


def test_as_many_ended_answers_as_beams_are_kept_and_the_best_ones_come_first() -> None:
    record = SearchRecord(2)
    record.add(BEFORE)
    record.add(step_with_ended(-0.9))
    record.add(step_with_ended(-0.5, -0.9))
    _, ended = record.encode()
    assert [(list(answer.token_ids), answer.score) for answer in ended] == [([6, 7, 50], -0.5), ([5, 50], -0.9)]


def test_log_probabilities_come_back_as_they_were() -> None:
    def of_token(logprob: float) -> sampling_pb2.TokenLogprobs:
        return sampling_pb2.TokenLogprobs(logprob=logprob, top_token_ids=[9, 4], top_logprobs=[-0.25, logprob])

    record = SearchRecord(2)
    record.add(dense_pb2.BeamStep(**STEP, logprobs=[of_token(-1.0), of_token(-2.0)]))
    step = dense_pb2.BeamStep(parents=[1, 0], token_ids=[7, 8], scores=[-3.0, -4.0])
    step.logprobs.extend([of_token(-1.5), of_token(-2.5)])
    step.ended.add(parent=0, token_id=3, score=-0.5, logprobs=of_token(-0.125))
    record.add(step)
    beams, [ended] = record.encode()
    assert [list(beam.logprobs) for beam in beams] == [
        [of_token(-2.0), of_token(-1.5)],
        [of_token(-1.0), of_token(-2.5)],
    ]
    assert list(ended.logprobs) == [of_token(-1.0), of_token(-0.125)]
    assert [list(each.token_ids) for each in (*beams, ended)] == [[6, 7], [5, 8], [5, 3]]


def test_long_beams_are_forgotten_without_recursion() -> None:
    record = SearchRecord(2)
    for _ in range(100_000):
        record.add(dense_pb2.BeamStep(parents=[0, 0], token_ids=[5, 6], scores=[-1.0, -2.0]))
    beams, _ = record.encode()
    assert [len(beam.token_ids) for beam in beams] == [100_000] * 2
