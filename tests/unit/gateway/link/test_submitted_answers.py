"""What the dense worker is told of the answers to one prompt, and what it makes of it."""

from __future__ import annotations

from services.common.beams.options import BeamSearchOptions
from services.dense_worker.gateway_messages import decode_sequence
from services.gateway.link.dense_messages import encode_submit
from services.gateway.link.journal import Journal
from tests.support.clients.generation_requests import make_request
from tests.support.reports import prompt_logprobs


def test_answers_to_one_prompt_name_their_group_and_others_have_none() -> None:
    journal = Journal()
    groups = []
    for number, num_answers in enumerate((1, 3, 2)):
        entries = journal.open(make_request(str(number), n=1, best_of=num_answers))
        sequences = [decode_sequence(encode_submit(entry).submit, 1) for entry in entries]
        assert len(sequences) == num_answers
        groups.append({sequence.group_id for sequence in sequences})
    assert groups[0] == {0}
    assert [len(group) for group in groups] == [1, 1, 1]
    assert len(set.union(*groups)) == 3


def test_a_beam_search_is_no_group() -> None:
    request = make_request(n=2, best_of=4, beam_search=BeamSearchOptions(4, 2))
    first, follower = Journal().open(request)
    assert follower.is_follower
    assert decode_sequence(encode_submit(first).submit, 1).group_id == 0


def test_all_workers_hold_the_spec_that_the_gateway_has_written() -> None:
    options = {"cache_salt": "s", "stop_token_ids": (2, 7), "num_logprobs": 3, "features": prompt_logprobs(2)}
    request = make_request(**options, n=2, best_of=2)
    entries = Journal().open(request)
    sequences = [decode_sequence(encode_submit(entry).submit, 1) for entry in entries]
    assert [sequence.spec for sequence in sequences] == [entry.spec for entry in entries]
    assert entries[0].spec is request.spec
    assert all(sequence.describe_to_runner().spec is sequence.spec for sequence in sequences)
