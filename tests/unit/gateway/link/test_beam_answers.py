"""Answers of a beam search without the log-probabilities that were asked for are an error, not answers without them."""

from __future__ import annotations

import pytest

from services.common.beams.options import BeamSearchOptions
from services.common.errors import PeerError
from services.common.token_logprobs import TokenLogprobs, encode_logprobs, encode_rows
from services.gateway.link.dense_messages import keep_output
from services.gateway.link.journal import Journal
from services.gateway.link.journal_entry import JournalEntry
from services.pb import dense_pb2
from tests.support.clients.generation_requests import make_request, open_entry
from tests.support.running_gateway import run

LOGPROBS = [TokenLogprobs(-0.5, ((7, -0.5),)), TokenLogprobs(-0.25, ((2, -0.25),))]


def ended(num_logprobs: int | None, **logprobs: object) -> JournalEntry:
    """A search for one answer, which has ended with one of two tokens."""
    journal = Journal()
    options = BeamSearchOptions(2, 1)
    request = make_request("search", max_tokens=9, best_of=2, beam_search=options, num_logprobs=num_logprobs)
    entry = open_entry(journal, request)
    sequences = journal.new_stream()
    sequences.add(entry)
    answer = dense_pb2.BeamAnswer(token_ids=[7, 2], score=-1.0, reason=dense_pb2.SequenceEnd.STOP, **logprobs)
    end = dense_pb2.SequenceEnd(seq_id=entry.seq_id, reason=dense_pb2.SequenceEnd.STOP, answers=[answer])
    keep_output(sequences, dense_pb2.StepOutput(ended=[end]))
    return entry


def test_answers_have_the_log_probabilities_that_were_asked_for() -> None:
    async def test() -> None:
        token_ids, logprobs, _ = ended(1, logprob_rows=encode_rows(LOGPROBS)).take_new_tokens()
        assert token_ids == [7, 2] and logprobs == LOGPROBS
        token_ids, logprobs, _ = ended(None).take_new_tokens()
        assert token_ids == [7, 2] and not logprobs

    run(test())


@pytest.mark.parametrize("is_sent", [False, True])
def test_answers_without_rows_of_them_are_those_of_another_version(*, is_sent: bool) -> None:
    """Before rows, a dense worker sent messages."""

    async def test() -> None:
        messages = map(encode_logprobs, LOGPROBS) if is_sent else ()
        with pytest.raises(PeerError, match=r"no log-probabilities of a beam search .* it is of another version"):
            ended(1, logprobs=messages).take_new_tokens()

    run(test())
