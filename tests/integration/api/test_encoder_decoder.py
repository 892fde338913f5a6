"""Models with an encoder in a cluster, compared with transformers: batches, beams, log-probabilities, kills."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from subprocess import CompletedProcess

import openai
import pytest
import torch
from transformers import PreTrainedModel

from services.pb import gateway_pb2, sampling_pb2
from tests.support.clients.openai_client import openai_client
from tests.support.clients.streams import collect_all
from tests.support.cluster import Cluster, ctl, request, running_cluster
from tests.support.dense.encoder_decoder_models import (
    load_true_encoder_decoder,
    make_encoder_decoder,
    random_source,
    true_decoder_logits,
)

MAX_TOKENS = 24
LENGTHS = (3, 40, 17, 64, 9, 30)


@pytest.fixture(scope="module", params=["t5-gated", "bart"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Cluster]]:
    path = make_encoder_decoder(tmp_path_factory.mktemp("model"), request.param, seed=3)
    settings = (
        f"model.path={path}",
        "scheduler.max_num_seqs=12",
        "scheduler.max_num_batched_tokens=50",
        "attention.block_size=4",
        "attention.num_blocks=56",  # so that twelve sequences have not enough, and some are preempted
        "scheduler.policy=max_utilization",
    )
    with running_cluster(tmp_path_factory.mktemp("cluster"), *settings, is_warm=True) as cluster:
        yield path, cluster


@pytest.fixture(scope="module")
def truth(served: tuple[Path, Cluster]) -> PreTrainedModel:
    return load_true_encoder_decoder(served[0])


@pytest.fixture(scope="module")
def prompts(truth: PreTrainedModel) -> list[list[int]]:
    return [random_source(truth, length, seed).tolist() for seed, length in enumerate(LENGTHS)]


def generate(truth: PreTrainedModel, prompt: list[int], **options: object) -> list[list[int]]:
    """What transformers generates, without the token that outputs begin with."""
    with torch.inference_mode():
        output = truth.generate(
            torch.tensor([prompt]),
            max_new_tokens=MAX_TOKENS,
            do_sample=False,
            use_cache=False,
            forced_eos_token_id=None,
            **{"num_beams": 1} | options,
        )
    return [row[1:] for row in output.tolist()]


def true_tokens(truth: PreTrainedModel, prompt: list[int]) -> list[int]:
    [tokens] = generate(truth, prompt, eos_token_id=None)
    return tokens


def messages(prompts: list[list[int]]) -> list[gateway_pb2.GenerateRequest]:
    return [request(prompt, MAX_TOKENS, ignore_eos=True) for prompt in prompts]


def test_streams_equal_transformers_over_the_death_of_each_worker(
    served: tuple[Path, Cluster], truth: PreTrainedModel, prompts: list[list[int]]
) -> None:
    cluster = served[1]
    expected = 2 * [true_tokens(truth, prompt) for prompt in prompts]
    num_preemptions = cluster.dense_status().num_preemptions
    for _ in range(5):  # how many streams run at once, and so whether blocks run out, depends on when they arrive
        assert [each.token_ids[0] for each in collect_all(cluster.gateway, messages(2 * prompts))] == expected
        if cluster.dense_status().num_preemptions > num_preemptions:
            break
    assert cluster.dense_status().num_preemptions > num_preemptions
    for role in ("dense_worker", "attn_worker"):
        pid = cluster.pid_of(role)
        found = collect_all(cluster.gateway, messages(2 * prompts), lambda pid=pid: os.kill(pid, signal.SIGKILL))
        assert [each.token_ids[0] for each in found] == expected
        cluster.wait_idle()
        assert cluster.pid_of(role) != pid


def test_the_dense_worker_is_replaced_under_streams(
    served: tuple[Path, Cluster], truth: PreTrainedModel, prompts: list[list[int]]
) -> None:
    cluster, replaced = served[1], list[CompletedProcess[str]]()
    pid = cluster.pid_of("dense_worker")
    found = collect_all(cluster.gateway, messages(prompts), lambda: replaced.append(ctl(cluster, "replace-dense")))
    assert replaced[0].returncode == 0, replaced[0].stderr
    assert [each.token_ids[0] for each in found] == [true_tokens(truth, prompt) for prompt in prompts]
    assert cluster.pid_of("dense_worker") != pid
    cluster.wait_idle()


def test_several_answers_and_log_probabilities(
    served: tuple[Path, Cluster], truth: PreTrainedModel, prompts: list[list[int]]
) -> None:
    message = request(prompts[2], 8, ignore_eos=True, n=3, logprobs=2)
    message.sampling.temperature, message.sampling.seed = 1.0, 11
    answer = served[1].gateway.Generate(message, timeout=60)
    assert len({tuple(each.token_ids) for each in answer.completions}) > 1
    start = truth.generation_config.decoder_start_token_id
    for completion in answer.completions:
        tokens = list(completion.token_ids)
        logits = true_decoder_logits(truth, torch.tensor(prompts[2]), [start, *tokens])
        expected = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert [each.logprob for each in completion.logprobs] == pytest.approx(expected.tolist(), abs=1e-4)


@pytest.mark.parametrize("num_beams", [2, 4])
def test_beams_equal_those_of_transformers(
    served: tuple[Path, Cluster], truth: PreTrainedModel, prompts: list[list[int]], num_beams: int
) -> None:
    cluster, end = served[1], truth.config.eos_token_id
    for prompt in prompts[:3]:
        expected = generate(truth, prompt, num_beams=num_beams, num_return_sequences=num_beams)
        message = request(prompt, MAX_TOKENS, n=num_beams, best_of=num_beams)
        message.beam_search.CopyFrom(sampling_pb2.BeamSearch())
        answer = cluster.gateway.Generate(message, timeout=60)
        found = [list(each.token_ids) for each in answer.completions]
        cut = [row[: row.index(end) + 1] if end in row else row for row in expected]
        assert found == cut
    cluster.wait_idle()


def test_openai_with_text_and_a_prompt_of_the_decoder(
    served: tuple[Path, Cluster], truth: PreTrainedModel, prompts: list[list[int]]
) -> None:
    path, cluster = served
    with openai_client(cluster) as client:
        text, tokens = " ".join(f"w{each}" for each in prompts[0]), true_tokens(truth, prompts[0])
        options = {"model": path.name, "max_tokens": 6, "temperature": 0, "extra_body": {"ignore_eos": True}}
        answer = client.completions.create(prompt=text, **options)
        assert answer.choices[0].text.split() == [f"w{each}" for each in tokens[:6]]
        assert answer.usage.prompt_tokens == len(prompts[0]) + 1 and answer.usage.completion_tokens == 6
        options["extra_body"] = {"ignore_eos": True, "decoder_prompt": " ".join(f"w{each}" for each in tokens[:3])}
        forced = client.completions.create(prompt=text, **options)
        assert forced.choices[0].text.split() == [f"w{each}" for each in tokens[3:9]]
        options["extra_body"] = {"ignore_eos": True, "decoder_prompt": tokens[:3]}
        assert client.completions.create(prompt=text, **options).choices[0].text == forced.choices[0].text
        with pytest.raises(openai.BadRequestError, match="echo cannot be used"):
            client.completions.create(prompt=text, model=path.name, echo=True)
        longest = truth.config.to_dict().get("max_position_embeddings") or 512
        with pytest.raises(openai.BadRequestError, match=f"context length is {longest} tokens"):
            client.completions.create(prompt=[7] * (longest + 1), model=path.name)


def test_openai_with_several_prompts_answers_and_log_probabilities(
    served: tuple[Path, Cluster], truth: PreTrainedModel, prompts: list[list[int]]
) -> None:
    path, cluster = served
    with openai_client(cluster) as client:
        create, options = client.completions.create, {"model": path.name, "max_tokens": 5, "logprobs": 2}
        options["extra_body"] = {"ignore_eos": True, "return_token_ids": True}
        prompts = [[each for each in prompt if each // 10 != 3] for prompt in prompts]  # "w3" is unknown words
        prompts[3] += 64 * [7]
        del prompts[3][64:]  # BART's encoder reads no more
        texts = [" ".join(f"w{each}" for each in prompt) for prompt in prompts[:3]]
        for given in (prompts[:3], texts):
            answer = create(prompt=given, temperature=0, **options)
            assert [each.index for each in answer.choices] == [0, 1, 2]
            for prompt, choice in zip(prompts, answer.choices, strict=False):
                assert choice.token_ids == true_tokens(truth, prompt)[:5]
                check_log_probabilities(truth, prompt, choice)
        several = create(prompt=prompts[2:4], n=2, best_of=3, temperature=1.0, seed=5, **options)
        assert [each.index for each in several.choices] == [0, 1, 2, 3]
        assert len({tuple(each.token_ids) for each in several.choices}) == 4
        for index, choice in enumerate(several.choices):
            check_log_probabilities(truth, prompts[2 + index // 2], choice)
        for first, second in (several.choices[:2], several.choices[2:]):
            assert sum(first.logprobs.token_logprobs) >= sum(second.logprobs.token_logprobs)
        body = {"decoder_prompt": true_tokens(truth, prompts[1])[:4], "prompt_logprobs": 0}
        [choice] = create(prompt=prompts[1], model=path.name, max_tokens=1, extra_body=body).choices
        tokens = [truth.generation_config.decoder_start_token_id, *body["decoder_prompt"]]
        rows = true_decoder_logits(truth, torch.tensor(prompts[1]), tokens).log_softmax(-1)
        assert choice.prompt_logprobs[0] is None  # of the decoder's prompt: a text is scored against its source
        for row, token, found in zip(rows, tokens[1:], choice.prompt_logprobs[1:], strict=False):
            assert found[str(token)]["logprob"] == pytest.approx(row[token].item(), abs=1e-4)
        assert len(choice.prompt_logprobs) == 5
        refused = {"echo": True, "suffix": "w7"}
        for field, value in refused.items():
            with pytest.raises(openai.BadRequestError) as error:
                create(prompt=texts[0], model=path.name, extra_body={field: value})
            assert error.value.param == field and f"{field} cannot be used" in error.value.message
        with pytest.raises(openai.BadRequestError) as error:
            create(prompt=[7, 99_999], model=path.name)
        assert error.value.param == "prompt" and "99999" in error.value.message


def check_log_probabilities(truth: PreTrainedModel, prompt: list[int], choice: openai.types.CompletionChoice) -> None:
    """In OpenAI's form, those of transformers."""
    start, tokens, found = truth.generation_config.decoder_start_token_id, choice.token_ids, choice.logprobs
    expected = true_decoder_logits(truth, torch.tensor(prompt), [start, *tokens])[:-1].log_softmax(-1)
    own = expected.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    assert found.token_logprobs == pytest.approx(own.tolist(), abs=1e-4)
    assert [each.strip() for each in found.tokens] == [f"w{each}" for each in tokens]
    for row, top in zip(expected, found.top_logprobs, strict=True):
        likeliest = {f"w{each}": value for value, each in zip(*map(torch.Tensor.tolist, row.topk(2)), strict=True)}
        given = {name.strip(): value for name, value in top.items()}
        assert {name: given.get(name) for name in likeliest} == pytest.approx(likeliest, abs=1e-4)
    assert len(found.text_offset) == len(tokens)
