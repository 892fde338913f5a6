"""The options of a beam search: what is accepted, and what is refused with value and limit."""

from __future__ import annotations

from typing import Any

import pytest

from services.common.beams.options import BeamSearchOptions, EarlyStopping
from services.common.errors import InvalidRequest
from services.gateway.link.journal import Journal
from services.pb import sampling_pb2
from tests.unit.gateway.request.test_request import IDS, read

SEARCH = {"beam_search": {}, "best_of": 4, "max_tokens": 8}


def test_best_of_is_the_number_of_beams_and_n_of_the_answers() -> None:
    request = read({**IDS, **SEARCH, "n": 2})
    assert request.spec.beam_search == BeamSearchOptions(4, 2, 1.0, EarlyStopping.HEURISTIC)
    assert (request.n, request.best_of, request.num_sequences) == (2, 4, 2)
    assert request.spec.sampling.is_greedy
    alone = read({**IDS, "beam_search": {}, "n": 3})
    assert alone.spec.beam_search == BeamSearchOptions(3, 3)


def test_scores_and_end_are_options() -> None:
    search = {"length_penalty": -0.5, "early_stopping": sampling_pb2.EARLY_STOPPING_NEVER}
    request = read({**IDS, **SEARCH, "beam_search": search})
    assert request.spec.beam_search == BeamSearchOptions(4, 1, -0.5, EarlyStopping.NEVER)


def test_log_probabilities_of_all_beams_count_towards_the_limit_of_a_request() -> None:
    request = read({**IDS, **SEARCH, "n": 1, "logprobs": 3})
    assert request.max_num_logprobs == 4 * 8 * (1 + 3), "beams, tokens, and the token with the most likely ones"


def test_a_single_beam_is_greedy_sampling() -> None:
    request = read({**IDS, "beam_search": {}})
    assert request.spec.beam_search is None and request.spec.sampling.is_greedy


@pytest.mark.parametrize(
    "options",
    [
        {"sampling": {"temperature": 0.0, "min_tokens": 3, "seed": 9}},
        {"sampling": {"top_k": 1}},
        {"stop_token_ids": [9], "ignore_eos": True, "logprobs": 3, "echo": True, "cache_salt": "x", "priority": 2},
    ],
)
def test_options_that_work_with_a_search(options: dict[str, Any]) -> None:
    assert read({**IDS, **SEARCH, **options}).spec.beam_search is not None


@pytest.mark.parametrize(
    ("options", "param", "words"),
    [
        ({"best_of": 0}, "best_of", "best_of is 0, the number of beams must be from 1 to 16"),
        ({"best_of": 17}, "best_of", "best_of is 17, the number of beams must be from 1 to 16"),
        ({"n": 5}, "n", "n is 5, must be from 1 to best_of, the number of beams, which is 4"),
        ({"n": 0}, "n", "n is 0"),
        ({"sampling": {"temperature": 0.7}}, "temperature", "temperature is 0.7, must be 0 or unset"),
        ({"sampling": {"top_k": 5}}, "top_k", "top_k is 5"),
        ({"sampling": {"top_p": 0.5}}, "top_p", "top_p is 0.5"),
        ({"sampling": {"min_p": 0.25}}, "min_p", "min_p is 0.25"),
        ({"sampling": {"repetition_penalty": 1.5}}, "repetition_penalty", "repetition_penalty is 1.5"),
        ({"sampling": {"presence_penalty": 1.0}}, "presence_penalty", "presence_penalty is 1"),
        ({"sampling": {"frequency_penalty": -1.0}}, "frequency_penalty", "frequency_penalty is -1"),
        ({"sampling": {"logit_bias": {5: 1.0}}}, "logit_bias", "logit_bias"),
        ({"sampling": {"allowed_token_ids": [5]}}, "allowed_token_ids", "allowed_token_ids"),
        ({"sampling": {"structured_output": {"regex": "a"}}}, "structured_output", "structured_output"),
        ({"bad_words": ["cat"]}, "bad_words", "bad_words"),
        ({"stop": ["."]}, "stop", "stop"),
        ({"prompt_logprobs": 0}, "prompt_logprobs", "prompt_logprobs"),
        ({"return_context_logits": True}, "return_context_logits", "return_context_logits"),
        ({"return_generation_logits": True}, "return_generation_logits", "return_generation_logits"),
        ({"beam_search": {"length_penalty": 10.5}}, "length_penalty", "length_penalty is 10.5, must be from -10 to 10"),
        ({"beam_search": {"length_penalty": float("nan")}}, "length_penalty", "length_penalty is nan"),
        ({"beam_search": {"early_stopping": 7}}, "early_stopping", "early_stopping is 7"),
        ({"max_tokens": 0, "echo": True}, "n", "best_of or n is 4, must be 1"),
    ],
)
def test_what_a_search_cannot_do_is_refused_by_name(options: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        read({**IDS, **SEARCH, **options})
    assert refused.value.param == param
    assert words in str(refused.value)


def test_the_beams_of_a_search_have_ids_of_their_own() -> None:
    journal = Journal()
    [first, second] = journal.open(read({**IDS, **SEARCH, "n": 2}))
    [other] = journal.open(read(IDS))
    assert second.seq_id == first.seq_id + 1 and second.is_follower and not first.is_follower
    assert other.seq_id == first.seq_id + 4
