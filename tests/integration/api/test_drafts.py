"""Drafts give several tokens per step: the answers are the same as without drafts, in fewer steps."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from services.pb import gateway_pb2
from tests.support.cluster import REQUEST_TIMEOUT_S, request
from tests.support.plain_services import PlainServices, plain_services
from tests.support.reference import make_served_model, random_prompts, reference_model, reference_tokens
from tests.support.workers.drafting_dense_worker import NUM_DRAFTS, ONE_WRONG_IN, VARIABLE

MAX_TOKENS = 60
MAX_ROUNDS = 20  # on a busy machine the answers may end before the kill
TOLERANCE = 1e-4  # for log-probabilities in float32; the reference sums in another order


@dataclass
class Served:
    services: PlainServices
    model: Path
    prompts: list[list[int]]
    answers: list[list[int]]  # greedy; the source of drafts knows them


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("drafts")
    model = make_served_model(directory / "model", "llama")
    prompts = random_prompts(4, 40, seed=5)
    answers = [reference_tokens(model, prompt, MAX_TOKENS) for prompt in prompts]
    file = directory / "answers.json"
    file.write_text(json.dumps(list(zip(prompts, answers, strict=True))))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, str(file))
        modules = {"dense_worker": "tests.support.workers.drafting_dense_worker"}
        with plain_services(directory, f"model.path={model}", "attention.block_size=4", modules=modules) as services:
            yield Served(services, model, prompts, answers)


def test_greedy_answers_equal_the_reference_in_fewer_steps(served: Served) -> None:
    served.services.wait_idle()
    num_steps = served.services.dense_status().num_steps
    answer = served.services.generate(served.prompts[2], MAX_TOKENS, ignore_eos=True)
    num_steps = served.services.dense_status().num_steps - num_steps
    assert answer.token_ids == served.answers[2]
    # One draft in ONE_WRONG_IN is wrong: the step drops it and the drafts behind it, and samples the right token.
    # One or two more steps only close sequences.
    assert num_steps <= MAX_TOKENS / (NUM_DRAFTS + 1) + MAX_TOKENS / ONE_WRONG_IN + 3
    together = served.services.generate_all(served.prompts, [MAX_TOKENS] * len(served.prompts))
    assert [answer.token_ids for answer in together] == served.answers
    served.services.wait_idle()


def test_log_probabilities_of_accepted_drafts_equal_those_of_the_model(served: Served) -> None:
    message = request(served.prompts[1], 30, ignore_eos=True)
    message.logprobs = 2
    response = served.services.gateway.Generate(message, timeout=REQUEST_TIMEOUT_S)
    [completion] = response.completions
    assert list(completion.token_ids) == served.answers[1][:30] and len(completion.logprobs) == 30
    tokens = torch.tensor([served.prompts[1] + served.answers[1][:30]])
    with torch.inference_mode():
        expected = reference_model(served.model)(tokens).logits[0].float().log_softmax(-1)
    for index, (token_id, given) in enumerate(zip(completion.token_ids, completion.logprobs, strict=True)):
        row = expected[len(served.prompts[1]) - 1 + index]
        assert given.logprob == pytest.approx(row[token_id].item(), abs=TOLERANCE)
        assert list(given.top_token_ids) == row.topk(2).indices.tolist()


def test_blocks_filled_by_drafts_are_found_again_with_the_right_content(served: Served) -> None:
    """The second prompt repeats the first one and most of its answer, whose blocks were filled by drafts."""
    prompt, answer = served.prompts[3], served.answers[3]
    served.services.generate(prompt, 40, ignore_eos=True)
    served.services.wait_idle()
    longer = prompt + answer[:37]
    again = served.services.generate(longer, 20, ignore_eos=True)
    assert again.finish.usage.num_cached_tokens > len(prompt) + 24
    assert again.token_ids == reference_tokens(served.model, longer, 20)


def test_options_mean_the_same_with_drafts_and_without(served: Served, tmp_path: Path) -> None:
    """Compares with services without drafts. Requests run one at a time, so that batches have the same shapes."""
    plain = [
        {"sampling": {"temperature": 1.0, "seed": 3}},
        {"sampling": {"temperature": 0.7, "seed": 4, "top_p": 0.9}, "n": 2},
        {"sampling": {"temperature": 0.0, "presence_penalty": 0.5}},
        {"sampling": {"temperature": 0.0, "logit_bias": {5: 30.0}}},
        {"sampling": {"temperature": 0.0, "structured_output": {"regex": "(a long text|a longer one){3}"}}},
        {"sampling": {"temperature": 0.0, "min_tokens": 9}, "stop_token_ids": [served.answers[2][4]]},
        {"sampling": {"temperature": 0.0}, "stop_token_ids": [served.answers[2][11]]},
    ]

    def answers(services: PlainServices) -> list[list[tuple[str, list[int], object]]]:
        given = []
        for options in plain:
            message = gateway_pb2.GenerateRequest(max_tokens=40, ignore_eos=True, **options)
            message.prompt_token_ids.ids.extend(served.prompts[2])
            response = services.gateway.Generate(message, timeout=REQUEST_TIMEOUT_S)
            given.append([(each.text, list(each.token_ids), each.finish.reason) for each in response.completions])
        return given

    with plain_services(tmp_path, f"model.path={served.model}", "attention.block_size=4") as services:
        expected = answers(services)
    assert answers(served.services) == expected


def test_a_kill_in_the_middle_of_drafts_changes_no_token(served: Served) -> None:
    for role in ("dense_worker", "attn_worker"):
        assert any(is_killed_in_time(served, role) for _ in range(MAX_ROUNDS)), "the answers ended before each kill"


def is_killed_in_time(served: Served, role: str) -> bool:
    """Kills a worker under streams, which must get the right tokens. Returns whether one was open at the kill."""
    services, num_open = served.services, 0
    with ThreadPoolExecutor(1) as thread:
        answers = thread.submit(services.generate_all, served.prompts, [MAX_TOKENS] * len(served.prompts))
        while not answers.done():
            if num_open := services.attention_status().num_sequences:
                services.kill(role)
                break
        assert [answer.token_ids for answer in answers.result()] == served.answers
    services.wait_idle()
    return num_open > 0
