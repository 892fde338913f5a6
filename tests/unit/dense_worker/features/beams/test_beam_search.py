"""The choice of beams against `transformers.generate` with the same logits."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from services.common.beams.options import BeamSearchOptions, EarlyStopping
from services.common.token_logprobs import TokenLogprobs
from services.dense_worker.features.beams.search import BeamSearch, Hypothesis
from tests.support.examples import examples

VOCAB_SIZE = 60
MAX_TOKENS = 10
PROMPTS = ((5,), (17, 3, 44, 9), (2, 8, 2, 8, 2, 8))
STOPPING = {
    EarlyStopping.HEURISTIC: False,
    EarlyStopping.ALWAYS: True,
    EarlyStopping.NEVER: "never",
}
TOLERANCE = 1e-4  # transformers adds up in float32


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        config = AutoConfig.for_model(
            "llama",
            vocab_size=VOCAB_SIZE,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            initializer_range=0.2,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=0,
        )
        return AutoModelForCausalLM.from_config(config).eval()


@torch.inference_mode()
def search(model: torch.nn.Module, prompt: tuple[int, ...], search: BeamSearch, num_top: int) -> list[Hypothesis]:
    """Runs a search with the model's own log-probabilities, without a cache."""
    while not search.is_done:
        inputs = torch.tensor([[*prompt, *beam.token_ids] for beam in search.beams])
        logprobs = model(inputs).logits[:, -1].float().log_softmax(-1)
        values, token_ids = logprobs.topk(num_top)
        rows = [
            TokenLogprobs(0.0, tuple(zip(*row, strict=True)))
            for row in zip(token_ids.tolist(), values.tolist(), strict=True)
        ]
        before = search.beams
        parents = search.advance(rows).parents
        if not search.is_done:
            assert [before[parent].token_ids for parent in parents] == [each.token_ids[:-1] for each in search.beams]
    return search.hypotheses


@torch.inference_mode()
def reference(
    model: torch.nn.Module,
    prompt: tuple[int, ...],
    options: BeamSearchOptions,
    stop_token_ids: list[int],
    min_tokens: int,
) -> list[tuple[list[int], float]]:
    """Token ids and score of each answer, by transformers."""
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=MAX_TOKENS,
        min_new_tokens=min_tokens or None,
        do_sample=False,
        num_beams=options.num_beams,
        num_return_sequences=options.num_answers,
        length_penalty=options.length_penalty,
        early_stopping=STOPPING[options.early_stopping],
        eos_token_id=stop_token_ids or None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    answers = []
    for row, score in zip(output.sequences[:, len(prompt) :].tolist(), output.sequences_scores.tolist(), strict=True):
        end = next((i + 1 for i, token_id in enumerate(row) if token_id in stop_token_ids), len(row))
        answers.append((row[:end], score))
    return answers


@cache
def likely_tokens(model: torch.nn.Module, prompt: tuple[int, ...]) -> list[int]:
    """Three tokens in the middle of likely answers, so that searches for which they are stop tokens meet them."""
    free = [token_ids for token_ids, _ in reference(model, prompt, BeamSearchOptions(4, 4), [], 0)]
    return list(dict.fromkeys([free[0][4], free[1][6], free[2][2], *free[0]]))[:3]


@pytest.mark.hypothesis  # so that `make chaos` tries all of them
@pytest.mark.parametrize("stopping", STOPPING, ids=lambda each: each.value)
@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.0, -0.5])
@pytest.mark.parametrize("num_beams", [2, 4, 8])
def test_answers_and_scores_equal_those_of_transformers(
    model: torch.nn.Module, num_beams: int, length_penalty: float, stopping: EarlyStopping
) -> None:
    num_stopped = 0
    # The first six have each prompt and each number of stop tokens twice, in other pairs for each `stopping`.
    turn = list(STOPPING).index(stopping)
    searches = [(PROMPTS[(i + i // 3) % 3], (0, 1, 3)[(i + turn) % 3]) for i in reversed(range(9))]
    assert len(set(searches)) == 9
    for prompt, num_stop_tokens in searches[: examples(9, 6)]:
        stop_token_ids = likely_tokens(model, prompt)[:num_stop_tokens]
        num_answers = max(1, num_beams - len(stop_token_ids))
        options = BeamSearchOptions(num_beams, num_answers, length_penalty, stopping)
        expected = reference(model, prompt, options, stop_token_ids, 0)
        beams = BeamSearch(options, MAX_TOKENS, frozenset(stop_token_ids))
        found = search(model, prompt, beams, beams.num_candidates)
        assert [each.token_ids for each in found] == [token_ids for token_ids, _ in expected]
        assert [each.score for each in found] == pytest.approx([score for _, score in expected], abs=TOLERANCE)
        assert [each.is_stopped for each in found] == [each.token_ids[-1] in stop_token_ids for each in found]
        num_stopped += sum(each.is_stopped for each in found)
    assert num_stopped or length_penalty > 1.0, "no answer ended with a stop token, so the test shows little"


def test_no_answer_is_shorter_than_min_tokens(model: torch.nn.Module) -> None:
    options = BeamSearchOptions(4, 4)
    for prompt in PROMPTS:
        stop_token_ids = likely_tokens(model, prompt)
        expected = reference(model, prompt, options, stop_token_ids, 6)
        beams = BeamSearch(options, MAX_TOKENS, frozenset(stop_token_ids), min_tokens=6)
        found = search(model, prompt, beams, beams.num_candidates)
        assert [each.token_ids for each in found] == [token_ids for token_ids, _ in expected]


def test_log_probabilities_of_an_answer_are_those_of_its_tokens(model: torch.nn.Module) -> None:
    options = BeamSearchOptions(3, 3, length_penalty=0.0)
    beams = BeamSearch(options, MAX_TOKENS, frozenset([7]), num_logprobs=2)
    for each in search(model, PROMPTS[1], beams, beams.num_candidates):
        with torch.inference_mode():
            logits = model(torch.tensor([[*PROMPTS[1], *each.token_ids]])).logits[0, len(PROMPTS[1]) - 1 : -1]
        expected = logits.float().log_softmax(-1)
        assert [value.logprob for value in each.logprobs] == pytest.approx(
            expected.gather(1, torch.tensor(each.token_ids)[:, None]).squeeze(1).tolist(), abs=TOLERANCE
        )
        assert [[token_id for token_id, _ in value.top] for value in each.logprobs] == expected.topk(2).indices.tolist()
        assert each.score == pytest.approx(sum(value.logprob for value in each.logprobs), abs=TOLERANCE)
