"""Several tokens a step, from the scheduler to the text: the same answers as without drafts, in fewer steps."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from services.common.config import EMBEDDED_MODEL
from services.pb import gateway_pb2
from tests.cluster import REQUEST_TIMEOUT_S, request
from tests.drafting_dense_worker import NUM_DRAFTS, ONE_WRONG_IN, VARIABLE
from tests.plain_services import PlainServices, plain_services
from tests.reference import random_prompts, reference_model, reference_tokens

MAX_TOKENS = 60
TOLERANCE = 1e-4  # of log-probabilities in float32, summed in another order


@dataclass
class Served:
    services: PlainServices
    prompts: list[list[int]]
    answers: list[list[int]]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    prompts = random_prompts(4, 40, seed=5)
    answers = [reference_tokens(EMBEDDED_MODEL, prompt, MAX_TOKENS) for prompt in prompts]
    directory = tmp_path_factory.mktemp("drafts")
    file = directory / "answers.json"
    file.write_text(json.dumps(list(zip(prompts, answers, strict=True))))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, str(file))
        modules = {"dense_worker": "tests.drafting_dense_worker"}
        with plain_services(directory, "attention.block_size=4", modules=modules) as services:
            yield Served(services, prompts, answers)


def test_greedy_answers_are_the_reference_in_fewer_steps(served: Served) -> None:
    num_steps = served.services.dense_status().num_steps
    answer = served.services.generate(served.prompts[2], MAX_TOKENS, ignore_eos=True)
    num_steps = served.services.dense_status().num_steps - num_steps
    assert answer.token_ids == served.answers[2]
    # One draft in ONE_WRONG_IN is wrong and ends its step, whose own token is right; a step or two only close.
    assert num_steps <= MAX_TOKENS / (NUM_DRAFTS + 1) + MAX_TOKENS / ONE_WRONG_IN + 3
    together = served.services.generate_all(served.prompts, [MAX_TOKENS] * len(served.prompts))
    for given, expected in zip(together, served.answers, strict=True):
        assert given.token_ids == expected[: len(given.token_ids)]
    served.services.wait_idle()


def test_log_probabilities_of_accepted_drafts_are_the_models(served: Served) -> None:
    message = request(served.prompts[1], 30, ignore_eos=True)
    message.logprobs = 2
    response = served.services.gateway.Generate(message, timeout=REQUEST_TIMEOUT_S)
    [completion] = response.completions
    assert list(completion.token_ids) == served.answers[1][:30] and len(completion.logprobs) == 30
    tokens = torch.tensor([served.prompts[1] + served.answers[1][:30]])
    with torch.inference_mode():
        expected = reference_model(EMBEDDED_MODEL)(tokens).logits[0].float().log_softmax(-1)
    for index, (token_id, given) in enumerate(zip(completion.token_ids, completion.logprobs, strict=True)):
        row = expected[len(served.prompts[1]) - 1 + index]
        assert given.logprob == pytest.approx(row[token_id].item(), abs=TOLERANCE)
        assert list(given.top_token_ids) == row.topk(2).indices.tolist()


def test_blocks_filled_by_drafts_are_found_again_with_the_right_content(served: Served) -> None:
    """The next prompt goes on where the last answer ended: its prefix lies in blocks that drafts have filled."""
    prompt, answer = served.prompts[3], served.answers[3]
    served.services.generate(prompt, 40, ignore_eos=True)
    served.services.wait_idle()
    longer = prompt + answer[:37]
    again = served.services.generate(longer, 20, ignore_eos=True)
    assert again.finish.usage.num_cached_tokens > len(prompt) + 24
    assert again.token_ids == reference_tokens(EMBEDDED_MODEL, longer, 20)


@pytest.mark.parametrize("options", [{"temperature": 1.0, "seed": 3}, {"temperature": 0, "presence_penalty": 0.5}])
def test_sampled_and_penalised_answers_are_those_of_a_prompt_without_drafts(
    served: Served, options: dict[str, float]
) -> None:
    """Nothing is known of the other prompt, so that nothing is guessed: a stop string and n answers in both."""

    def answers(prompt: list[int]) -> list[tuple[str, list[int]]]:
        message = request(prompt, 24, ignore_eos=True, **options)
        message.n = 2
        response = served.services.gateway.Generate(message, timeout=REQUEST_TIMEOUT_S)
        return [(each.text, list(each.token_ids)) for each in response.completions]

    known = served.prompts[2]
    with_drafts = answers(known)
    # The same tokens behind the prompt's own first ones: another prompt for the source, the same for the model.
    message = gateway_pb2.GenerateRequest()
    assert message is not None
    first_output = with_drafts[0][1][0]
    resumed = request([*known, first_output], 23, ignore_eos=True, **options)
    response = served.services.gateway.Generate(resumed, timeout=REQUEST_TIMEOUT_S)
    if "presence_penalty" not in options:  # which counts outputs alone
        assert list(response.completions[0].token_ids) == with_drafts[0][1][1:]
    assert len(with_drafts[0][1]) == len(with_drafts[1][1]) == 24


def test_a_kill_in_the_middle_of_drafts_changes_no_token(served: Served) -> None:
    for role in ("dense_worker", "attn_worker"):
        pid = served.services.pid_of(role)
        killer = threading.Timer(0.05, os.kill, (pid, signal.SIGKILL))
        killer.start()
        given = served.services.generate_all(served.prompts, [MAX_TOKENS] * len(served.prompts))
        killer.join()
        for answer, expected in zip(given, served.answers, strict=True):
            assert answer.token_ids == expected[: len(answer.token_ids)]
    served.services.wait_idle(timeout_s=60.0)
