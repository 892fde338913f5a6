"""Speculation by n-grams and earlier answers: the answers are those of services without it, in fewer steps."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import jsonschema
import pytest

from services.pb import gateway_pb2
from tests.support.cluster import REQUEST_TIMEOUT_S
from tests.support.plain_services import PlainServices, plain_services

TEXT = "one two three four five six seven eight. " * 3
PROMPTS = [TEXT, "San Francisco is a", "The cat and the dog. The cat and the", "1 2 3 4 1 2 3 4 1 2"]
MAX_TOKENS = 60

SCHEMA = {
    "type": "object",
    "properties": {"first_property": {"type": "integer"}, "second_property": {"enum": ["red", "blue"]}},
    "required": ["first_property", "second_property"],
    "additionalProperties": False,
}
FORM = {"json_schema": json.dumps(SCHEMA)}

# Each request runs twice; the second time the first answer is known.
OPTIONS = [
    {"sampling": {"temperature": 0.0}},
    {"sampling": {"temperature": 1.0, "seed": 3}},
    {"sampling": {"temperature": 0.8, "seed": 4, "top_p": 0.9, "top_k": 50, "min_p": 0.01}, "n": 3},
    {"sampling": {"temperature": 0.0, "repetition_penalty": 1.2, "frequency_penalty": 0.3}},
    {"sampling": {"temperature": 0.5, "seed": 5, "presence_penalty": 1.0}},
    {"sampling": {"temperature": 0.0}, "stop": ["th", "ar"]},
    {"sampling": {"temperature": 0.7, "seed": 6, "min_tokens": 12}, "ignore_eos": False},
    {"sampling": {"temperature": 0.0, "bad_words": [{"token_ids": [40]}, {"token_ids": [12, 13]}]}},
    {"sampling": {"temperature": 0.0, "logit_bias": {5: 2.5, 9: -3.0}}},
    {"sampling": {"temperature": 0.9, "seed": 8, "structured_output": {"regex": "([a-z]{2,5} ){8,20}"}}},
    {"sampling": {"temperature": 0.9, "seed": 11, "structured_output": FORM}, "logprobs": 2, "ignore_eos": False},
    {"sampling": {"temperature": 0.0}, "logprobs": 3},
]

Answer = tuple[str, list[int], int, list[list[int]]]


@dataclass
class Both:
    off: PlainServices
    on: PlainServices


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    off, on = tmp_path_factory.mktemp("off"), tmp_path_factory.mktemp("on")
    modules = {"dense_worker": "tests.support.workers.speculating_dense_worker"}
    with plain_services(off) as without, plain_services(on, modules=modules) as speculating:
        yield Both(without, speculating)


def ask(services: PlainServices, prompt: str, options: dict[str, object]) -> list[Answer]:
    message = gateway_pb2.GenerateRequest(**{"max_tokens": MAX_TOKENS, "ignore_eos": True, "prompt": prompt} | options)
    response = services.gateway.Generate(message, timeout=REQUEST_TIMEOUT_S)
    return [
        (
            each.text,
            list(each.token_ids),
            each.finish.reason,
            [list(token.top_token_ids) for token in each.logprobs],
        )
        for each in response.completions
    ]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: next(reversed(options["sampling"])))
def test_answers_are_those_without_speculation(both: Both, options: dict[str, object]) -> None:
    for prompt in PROMPTS[:2]:
        expected = ask(both.off, prompt, options)
        for _ in range(2):
            assert ask(both.on, prompt, options) == expected
    both.on.wait_idle()


def test_an_answer_that_was_given_before_takes_few_steps(both: Both) -> None:
    num_steps = []
    for _ in range(2):
        before = both.on.dense_status().num_steps
        ask(both.on, PROMPTS[2], {"sampling": {"temperature": 1.0, "seed": 77}})
        num_steps.append(both.on.dense_status().num_steps - before)
    assert num_steps[1] < 0.5 * num_steps[0]


def test_what_a_form_forces_takes_few_steps(both: Both) -> None:
    request = PROMPTS[1], {"sampling": {"temperature": 1.0, "seed": 12, "structured_output": FORM}, "ignore_eos": False}
    before = both.on.dense_status().num_steps
    [(text, token_ids, _, _)] = ask(both.on, *request)
    num_steps = both.on.dense_status().num_steps - before
    assert ask(both.off, *request)[0][:2] == (text, token_ids)
    jsonschema.validate(json.loads(text), SCHEMA)
    assert num_steps < 0.7 * len(token_ids)


@pytest.mark.parametrize("role", ["dense_worker", "attn_worker"])
def test_a_kill_changes_no_token(both: Both, role: str) -> None:
    options = [{"sampling": {"temperature": temperature, "seed": 9}} for temperature in (0.0, 0.8)]
    options.append({"sampling": {"temperature": 0.8, "seed": 9, "structured_output": FORM}})
    requests = [(prompt, each) for prompt in PROMPTS for each in options]
    expected = [ask(both.off, *request) for request in requests]
    with ThreadPoolExecutor(len(requests)) as threads:
        answers = [threads.submit(ask, both.on, *request) for request in requests]
        while both.on.attention_status().num_sequences == 0:
            assert not all(answer.done() for answer in answers), "the answers ended before the kill"
        os.kill(both.on.pid_of(role), signal.SIGKILL)
        assert [answer.result() for answer in answers] == expected
    both.on.wait_idle(timeout_s=60.0)
