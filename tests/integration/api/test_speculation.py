"""MeasuredDrafting by earlier answers, heads and a draft model: the answers are those without it, in fewer steps."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import jsonschema
import pytest

from services.common.config import EMBEDDED_MODEL
from services.pb import gateway_pb2
from tests.support.cluster import REQUEST_TIMEOUT_S
from tests.support.dense.eagle_head import head_that_knows
from tests.support.dense.medusa_heads import heads_that_know
from tests.support.plain_services import PlainServices, plain_services

TEXT = "one two three four five six seven eight. " * 3
PROMPTS = [TEXT, "San Francisco is a", "The cat and the dog. The cat and the", "1 2 3 4 1 2 3 4 1 2"]
MAX_TOKENS = 20
MAX_FORM_TOKENS = 60  # of an answer that must be whole
MAX_ROUNDS = 20  # a busy machine may have no time for drafts, or for a kill before the answers end
NUM_HEADS = 3

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

SURVIVING = [
    {"sampling": {"temperature": 0.0, "seed": 9}},
    {"sampling": {"temperature": 0.8, "seed": 9}},
    {"sampling": {"temperature": 0.8, "seed": 9, "structured_output": FORM}},
]
# Half of the options are tried with a prompt that repeats itself, the others with one that the heads know.
OF_OPTIONS = [(PROMPTS[(index + 1) % 2], options) for index, options in enumerate(OPTIONS)]
OF_KILLS = [(prompt, options) for prompt in PROMPTS for options in SURVIVING]

Answer = tuple[str, list[int], int, list[list[int]]]

pytestmark = pytest.mark.timeout(400)  # five clusters start, and the machine may be slow


@dataclass
class Both:
    off: PlainServices
    on: PlainServices


MODULES = {"dense_worker": "tests.support.workers.speculating_dense_worker"}


@pytest.fixture(scope="module")
def off(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlainServices]:
    with plain_services(tmp_path_factory.mktemp("off")) as services:
        yield services


@pytest.fixture(scope="module")
def both(off: PlainServices, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    settings = "scheduler.speculation=suffix"
    with plain_services(tmp_path_factory.mktemp("on"), settings, modules=MODULES) as speculating:
        yield Both(off, speculating)


@pytest.fixture(scope="module")
def known_answer(off: PlainServices) -> list[int]:
    """The greedy answer to one prompt."""
    message = gateway_pb2.GenerateRequest(
        max_tokens=MAX_TOKENS + NUM_HEADS, ignore_eos=True, prompt=PROMPTS[1], sampling={"temperature": 0.0}
    )
    [answer] = off.gateway.Generate(message, timeout=REQUEST_TIMEOUT_S).completions
    return list(answer.token_ids)


@pytest.fixture(scope="module")
def medusa(off: PlainServices, known_answer: list[int], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    """The heads know the answer to one prompt. For all other texts they are mostly wrong."""
    directory = tmp_path_factory.mktemp("medusa")
    path = heads_that_know(directory / "heads", PROMPTS[1], known_answer, NUM_HEADS)
    settings = "scheduler.speculation=medusa", f"scheduler.speculation_model={path}"
    with plain_services(directory, *settings, modules=MODULES) as services:
        yield Both(off, services)


@pytest.fixture(scope="module")
def eagle(off: PlainServices, known_answer: list[int], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    """The head knows the same answer, but only from its first token on: not behind a cached prefix or a kill."""
    directory = tmp_path_factory.mktemp("eagle")
    path = head_that_knows(directory / "head", PROMPTS[1], known_answer, NUM_HEADS)
    settings = "scheduler.speculation=eagle3", f"scheduler.speculation_model={path}"
    with plain_services(directory, *settings, modules=MODULES) as services:
        yield Both(off, services)


@pytest.fixture(scope="module")
def draft(off: PlainServices, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    """The draft model is the served one, so that its drafts are right unless an option changes the choice."""
    settings = "scheduler.speculation=draft_model", f"scheduler.draft_model={EMBEDDED_MODEL}"
    with plain_services(tmp_path_factory.mktemp("draft"), *settings, modules=MODULES) as services:
        yield Both(off, services)


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


@pytest.fixture(scope="module")
def speculated(both: Both, medusa: Both, eagle: Both, draft: Both) -> dict[str, list[list[Answer]]]:
    """The answers with each source of drafts, in the order of the options. Half of them share their steps."""
    # Those that copy earlier answers know the first one when they are asked again.
    asked = {"copies": (both.on, 2), "medusa": (medusa.on, 1), "eagle": (eagle.on, 1), "draft": (draft.on, 1)}
    half = len(OPTIONS) // 2

    def ask_repeatedly(services: PlainServices, count: int) -> list[list[Answer]]:
        parts = (OF_OPTIONS[:half], OF_OPTIONS[half:]) * count
        answers = [each for part in parts for each in ask_all(services, part)]
        services.wait_idle()
        return answers

    with ThreadPoolExecutor(len(asked)) as threads:
        return dict(zip(asked, threads.map(lambda each: ask_repeatedly(*each), asked.values()), strict=True))


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: next(reversed(options["sampling"])))
def test_answers_are_those_without_speculation(
    speculated: dict[str, list[list[Answer]]], plain: list[list[Answer]], options: dict[str, object]
) -> None:
    index = OPTIONS.index(options)
    for source, answers in speculated.items():
        assert all(answer == plain[index] for answer in answers[index :: len(OPTIONS)]), source


def ask_all(services: PlainServices, requests: list[tuple[str, dict[str, object]]]) -> list[list[Answer]]:
    """Asks for all answers at once."""
    with ThreadPoolExecutor(len(requests)) as threads:
        return list(threads.map(lambda each: ask(services, *each), requests))


@pytest.fixture(scope="module")
def plain(off: PlainServices) -> list[list[Answer]]:
    """The answers without speculation, in the order of the options."""
    return ask_all(off, OF_OPTIONS)


@pytest.fixture(scope="module")
def plain_of_kills(off: PlainServices) -> list[list[Answer]]:
    return ask_all(off, OF_KILLS)


def steps_of(services: PlainServices, prompt: str, options: dict[str, object]) -> tuple[int, list[Answer]]:
    """How many steps the answers take, and the answers."""
    services.wait_idle()
    before = services.dense_status().num_steps
    answers = ask(services, prompt, options)
    return services.dense_status().num_steps - before, answers


def test_an_answer_that_was_given_before_takes_few_steps(both: Both) -> None:
    num_steps = []
    for seed in range(77, 77 + MAX_ROUNDS):
        options = {"sampling": {"temperature": 1.0, "seed": seed}}
        num_steps.append([steps_of(both.on, PROMPTS[2], options)[0] for _ in range(2)])
        if num_steps[-1][1] < 0.5 * num_steps[-1][0]:
            return
    raise AssertionError(f"the second answers took as many steps as the first ones: {num_steps}")


@pytest.mark.parametrize(("source", "temperature"), [("medusa", 0.0), ("eagle", 0.0), ("draft", 0.0), ("draft", 1.0)])
def test_an_answer_that_the_heads_or_a_draft_model_know_takes_few_steps(
    request: pytest.FixtureRequest, source: str, temperature: float
) -> None:
    both: Both = request.getfixturevalue(source)
    message = PROMPTS[1], {"sampling": {"temperature": temperature, "seed": 3}}
    expected, counts = ask(both.off, *message), []
    for _ in range(MAX_ROUNDS):
        num_steps, answers = steps_of(both.on, *message)
        assert answers == expected
        counts.append(num_steps)
        if num_steps < 0.5 * MAX_TOKENS:
            return
    raise AssertionError(f"steps for {MAX_TOKENS} tokens: {counts}")


def test_what_a_form_forces_takes_few_steps(both: Both) -> None:
    counts = []
    for seed in range(12, 12 + MAX_ROUNDS):
        options = {"sampling": {"temperature": 1.0, "seed": seed, "structured_output": FORM}, "ignore_eos": False}
        options["max_tokens"] = MAX_FORM_TOKENS
        num_steps, [(text, token_ids, _, _)] = steps_of(both.on, PROMPTS[1], options)
        assert ask(both.off, PROMPTS[1], options)[0][:2] == (text, token_ids)
        jsonschema.validate(json.loads(text), SCHEMA)
        counts.append((num_steps, len(token_ids)))
        if num_steps < 0.7 * len(token_ids):
            return
    raise AssertionError(f"steps and tokens of the answers: {counts}")


@pytest.mark.parametrize("role", ["dense_worker", "attn_worker"])
@pytest.mark.parametrize("source", ["both", "medusa", "eagle", "draft"])
def test_a_kill_changes_no_token(
    request: pytest.FixtureRequest, plain_of_kills: list[list[Answer]], source: str, role: str
) -> None:
    both: Both = request.getfixturevalue(source)
    requests = OF_KILLS if source == "both" else OF_KILLS[: len(OF_KILLS) // 2]
    expected = plain_of_kills[: len(requests)]
    num_open = 0  # sequences at the kill
    for _ in range(MAX_ROUNDS):
        with ThreadPoolExecutor(len(requests)) as threads:
            answers = [threads.submit(ask, both.on, *each) for each in requests]
            while not all(answer.done() for answer in answers):
                if num_open := both.on.attention_status().num_sequences:
                    both.on.kill(role)
                    break
            assert [answer.result() for answer in answers] == expected
        both.on.wait_idle()
        if num_open:
            return
    raise AssertionError("the answers ended before each kill")
