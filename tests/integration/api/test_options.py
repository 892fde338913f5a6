"""All sampling options and log-probabilities of a real cluster equal those of Hugging Face, also after a kill."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Sequence
from functools import lru_cache

import grpc
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LogitsProcessor,
    LogitsProcessorList,
    PrefixConstrainedLogitsProcessor,
    PreTrainedModel,
)

from services.common.config import EMBEDDED_MODEL
from services.pb import dense_pb2, sampling_pb2
from tests.support.clients.dense_stream import EOS, ReceivedSequence, run_all, stream_steps, submit
from tests.support.clients.http_clients import client
from tests.support.cluster import Cluster, request, running_cluster

VOCAB_SIZE = 1024
# Cluster and reference compute in float32, but sum in different orders (merged projections, paged attention, chunks
# of the prompt). The logits of this model then differ by about 1e-5, and log-probabilities by at most twice that.
LOGPROB_TOLERANCE = 1e-4
RESTART_TIMEOUT_S = 60.0
MAX_ROUNDS = 5  # until requests come at the same time: on a busy machine one may be late


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Prompts are cut into chunks of 40 tokens, and there are too few blocks for many sequences at a time."""
    settings = (
        "scheduler.max_num_batched_tokens=40",
        "scheduler.max_num_seqs=16",
        "scheduler.policy=max_utilization",
        "attention.block_size=8",
        "attention.num_blocks=40",
        f"gateway.max_logprobs={VOCAB_SIZE}",
    )
    with running_cluster(tmp_path_factory.mktemp("options"), *settings, is_warm=True) as cluster:
        yield cluster


@lru_cache
def reference_model() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(EMBEDDED_MODEL, dtype=torch.float32).eval()


@torch.inference_mode()
def reference_logprobs(token_ids: Sequence[int]) -> torch.Tensor:
    """float32 [num_tokens, VOCAB_SIZE]: row i is the distribution of token i + 1."""
    return reference_model()(torch.tensor([list(token_ids)])).logits[0].log_softmax(-1)


@torch.inference_mode()
def reference_tokens(prompt: list[int], max_tokens: int, *processors: LogitsProcessor, **options: object) -> list[int]:
    """What Hugging Face generates greedily with the embedded model."""
    output = reference_model().generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=max_tokens,
        do_sample=False,
        logits_processor=LogitsProcessorList(processors),
        **options,
    )
    return output[0, len(prompt) :].tolist()


class OpenAIPenalties(LogitsProcessor):
    """logit - frequency * count - presence * (count > 0) over the output, which transformers does not have."""

    def __init__(self, num_prompt_tokens: int, frequency: float, presence: float) -> None:
        self.num_prompt_tokens, self.frequency, self.presence = num_prompt_tokens, frequency, presence

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        counts = input_ids[0, self.num_prompt_tokens :].bincount(minlength=scores.shape[1])
        return scores - self.frequency * counts - self.presence * (counts > 0)


def random_prompt(num_tokens: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB_SIZE, (num_tokens,), generator=generator).tolist()


def check_logprobs(reported: sampling_pb2.TokenLogprobs, token_id: int, expected: torch.Tensor, num_top: int) -> None:
    """`expected`: float32 [VOCAB_SIZE]. Tokens that tie within the tolerance may come in any order."""
    assert reported.logprob == pytest.approx(expected[token_id].item(), abs=LOGPROB_TOLERANCE)
    least, most = ((expected >= expected[token_id] + 2 * s * LOGPROB_TOLERANCE).sum().item() for s in (1, -1))
    assert max(1, least) <= reported.rank <= most
    assert len(reported.top_token_ids) == len(set(reported.top_token_ids)) == num_top
    top = torch.tensor(reported.top_logprobs)
    torch.testing.assert_close(top, expected.topk(num_top).values, rtol=0, atol=LOGPROB_TOLERANCE)
    torch.testing.assert_close(top, expected[list(reported.top_token_ids)], rtol=0, atol=LOGPROB_TOLERANCE)


def check_received(
    received: ReceivedSequence, prompt: list[int], num_top: int, num_prompt_top: int | None = None
) -> None:
    """All log-probabilities of a finished sequence equal those of one pass over its tokens."""
    expected = reference_logprobs(prompt + received.token_ids)
    assert len(received.logprobs) == len(received.token_ids)
    for i, (token_id, reported) in enumerate(zip(received.token_ids, received.logprobs, strict=True), len(prompt) - 1):
        check_logprobs(reported, token_id, expected[i], num_top)
    if num_prompt_top is not None:
        assert sorted(received.prompt_logprobs) == list(range(1, len(prompt)))
        for i, reported in received.prompt_logprobs.items():
            check_logprobs(reported, prompt[i], expected[i - 1], num_prompt_top)


def test_greedy_logprobs_equal_hugging_face(cluster: Cluster) -> None:
    prompt = random_prompt(100, seed=1)
    received = run_all(cluster.dense, [submit(1, prompt, 30, num_logprobs=5)])[1]
    assert received.token_ids == reference_tokens(prompt, 30)
    check_received(received, prompt, num_top=5)
    assert [each.top_token_ids[0] for each in received.logprobs] == received.token_ids
    assert not received.prompt_logprobs


def test_logprobs_of_the_whole_vocabulary_equal_hugging_face(cluster: Cluster) -> None:
    prompt = random_prompt(30, seed=12)
    body = {"prompt": prompt, "max_tokens": 12, "logprobs": -1, "return_tokens_as_token_ids": True, "temperature": 0}
    with client(cluster.http_address) as http:
        choice = http.post("/v1/completions", json=body | {"return_token_ids": True}).json()["choices"][0]
    expected = reference_logprobs(prompt + choice["token_ids"])[len(prompt) - 1 : -1]
    names = [f"token_id:{token_id}" for token_id in range(VOCAB_SIZE)]
    reported = torch.tensor([[top[name] for name in names] for top in choice["logprobs"]["top_logprobs"]])
    torch.testing.assert_close(reported, expected, rtol=0, atol=LOGPROB_TOLERANCE)


def test_logprobs_are_of_the_model_whatever_the_options(cluster: Cluster) -> None:
    prompt = random_prompt(20, seed=2)
    options = {
        "temperature": 3.0,
        "top_p": 0.9,
        "repetition_penalty": 1.5,
        "frequency_penalty": 1.0,
        "logit_bias": {7: 20.0, 8: 20.0},
        "bad_words": [sampling_pb2.TokenSequence(token_ids=[7])],
    }
    received = run_all(cluster.dense, [submit(1, prompt, 20, num_logprobs=3, **options)])[1]
    assert 8 in received.token_ids and 7 not in received.token_ids
    check_received(received, prompt, num_top=3)


def test_prompt_logprobs_equal_hugging_face_though_the_prompt_is_cached_and_cut(cluster: Cluster) -> None:
    prompt = random_prompt(150, seed=3)
    run_all(cluster.dense, [submit(1, prompt, 1)])
    cached = run_all(cluster.dense, [submit(2, prompt, 1)])[2]
    assert cached.start is not None and cached.start.num_cached_tokens > 100
    received = run_all(cluster.dense, [submit(3, prompt, 5, num_logprobs=0, num_prompt_logprobs=4)])[3]
    assert received.start is not None and received.start.num_cached_tokens == 0
    check_received(received, prompt, num_top=0, num_prompt_top=4)


def test_prompt_of_one_token_has_no_prompt_logprobs(cluster: Cluster) -> None:
    received = run_all(cluster.dense, [submit(1, [5], 3, num_logprobs=1, num_prompt_logprobs=1)])[1]
    check_received(received, [5], num_top=1, num_prompt_top=1)


def test_only_requests_that_ask_get_logprobs_also_after_preemption(cluster: Cluster) -> None:
    num_preemptions = cluster.dense_status().num_preemptions
    prompts = {seq_id: random_prompt(10 + 5 * seq_id, seed=10 + seq_id) for seq_id in range(1, 13)}
    submits = [
        submit(
            seq_id,
            prompt,
            30,
            num_logprobs=seq_id % 3 if seq_id % 2 else None,
            num_prompt_logprobs=2 if seq_id % 3 == 0 else None,
            stop_token_ids=[],  # so that the sequences grow until the cache cannot hold them all
        )
        for seq_id, prompt in prompts.items()
    ]
    for _ in range(MAX_ROUNDS):
        together = run_all(cluster.dense, submits)
        if cluster.dense_status().num_preemptions > num_preemptions:
            break
    assert cluster.dense_status().num_preemptions > num_preemptions, "the cache was meant to be too small"
    for seq_id, received in together.items():
        prompt = prompts[seq_id]
        assert received.token_ids == reference_tokens(prompt, 30, eos_token_id=-1)
        if seq_id % 2:
            check_received(received, prompt, num_top=seq_id % 3)
        else:
            assert not received.logprobs
        if seq_id % 3 == 0:
            assert sorted(received.prompt_logprobs) == list(range(1, len(prompt)))
        else:
            assert not received.prompt_logprobs
    cluster.wait_idle()


def test_queue_time_of_a_waiting_sequence_is_reported(cluster: Cluster) -> None:
    queue_us = []
    for round_number in range(MAX_ROUNDS):
        prompts = [random_prompt(200, seed=20 + 2 * round_number + i) for i in range(2)]
        received = run_all(cluster.dense, [submit(1, prompts[0], 60), submit(2, prompts[1], 1)])
        starts = [received[1].start, received[2].start]
        assert all(start is not None and 0 < start.queue_us < 60e6 for start in starts)
        queue_us.append([start.queue_us for start in starts])
        # The second prompt waits for at least five steps, in which the first is computed in chunks.
        if queue_us[-1][0] < queue_us[-1][1]:
            return
    raise AssertionError(f"the second request never waited longer than the first one: {queue_us}")


def test_streams_that_break_at_any_moment_do_not_end_the_dense_worker(cluster: Cluster) -> None:
    pid = cluster.pid_of("dense_worker")
    for i in range(30):
        steps = stream_steps(cluster.dense, [submit(1, [5, 6, 7], 50)], {})
        for _ in range(1 + i % 3):
            next(steps)
        steps.close()
    assert cluster.pid_of("dense_worker") == pid
    cluster.wait_idle()


def test_repetition_penalty_equals_hugging_face(cluster: Cluster) -> None:
    prompt = random_prompt(30, seed=4)
    plain = reference_tokens(prompt, 40)
    expected = reference_tokens(prompt, 40, repetition_penalty=1.4)
    assert expected != plain
    assert cluster.generate(prompt, 40, repetition_penalty=1.4).token_ids == expected


def test_frequency_and_presence_penalty_equal_their_formula(cluster: Cluster) -> None:
    prompt = random_prompt(30, seed=4)
    expected = reference_tokens(prompt, 40, OpenAIPenalties(len(prompt), 0.9, 1.3))
    assert expected != reference_tokens(prompt, 40)
    answer = cluster.generate(prompt, 40, frequency_penalty=0.9, presence_penalty=1.3)
    assert answer.token_ids == expected


def test_logit_bias_equals_hugging_face_sequence_bias(cluster: Cluster) -> None:
    prompt = random_prompt(30, seed=6)
    plain = reference_tokens(prompt, 30)
    bias = {plain[0]: -100.0, plain[3]: -4.0, 400: 3.0, 401: 3.5}
    expected = reference_tokens(prompt, 30, sequence_bias=[[[token_id], value] for token_id, value in bias.items()])
    assert expected != plain
    assert cluster.generate(prompt, 30, logit_bias=bias).token_ids == expected


def test_bad_words_equal_hugging_face(cluster: Cluster) -> None:
    prompt = random_prompt(30, seed=5)
    plain = reference_tokens(prompt, 40)
    # One word of a single token, and some of two to five tokens that the model would generate.
    words = [[plain[0]], plain[5:7], plain[10:13], plain[20:25]]
    # transformers also forbids a word that begins in the prompt. None of these words can begin there.
    assert prompt[-1] not in {token_id for word in words for token_id in word[:-1]}
    expected = reference_tokens(prompt, 40, bad_words_ids=words)
    assert expected != plain
    bad_words = [sampling_pb2.TokenSequence(token_ids=word) for word in words]
    assert cluster.generate(prompt, 40, bad_words=bad_words).token_ids == expected


def test_bad_word_that_begins_in_the_prompt_is_allowed(cluster: Cluster) -> None:
    prompt = random_prompt(30, seed=4)
    plain = reference_tokens(prompt, 10)
    bad_words = [sampling_pb2.TokenSequence(token_ids=[prompt[-1], plain[0]])]
    assert cluster.generate(prompt, 10, bad_words=bad_words).token_ids == plain


def test_allowed_tokens_equal_hugging_face(cluster: Cluster) -> None:
    prompt = random_prompt(30, seed=4)
    plain = reference_tokens(prompt, 40)
    allowed = sorted({*range(10, VOCAB_SIZE, 7), *plain[::2]})
    only_these = PrefixConstrainedLogitsProcessor(lambda batch, tokens: allowed, 1)
    expected = reference_tokens(prompt, 40, only_these)
    assert expected != plain
    assert cluster.generate(prompt, 40, allowed_token_ids=allowed).token_ids == expected
    sampled = cluster.generate(prompt, 40, allowed_token_ids=allowed, temperature=5.0, seed=1).token_ids
    assert set(sampled) <= set(allowed)
    assert len(set(sampled)) > 20


def test_min_tokens_equals_hugging_face(cluster: Cluster) -> None:
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = AutoTokenizer.from_pretrained(EMBEDDED_MODEL).apply_chat_template(chat, add_generation_prompt=True)
    prompt = list(prompt["input_ids"])
    plain = reference_tokens(prompt, 40)
    assert plain[-1] == EOS and len(plain) < 30
    expected = reference_tokens(prompt, 40, min_new_tokens=35)
    assert len(expected) >= 35
    answer = cluster.generate(prompt, 40, min_tokens=35)
    assert answer.token_ids == expected


@pytest.mark.parametrize("temperature", [0.7, 2.0])
def test_sampled_tokens_follow_the_distribution_of_hugging_face(cluster: Cluster, temperature: float) -> None:
    prompt, num_samples = random_prompt(8, seed=8), 800
    submits = [submit(seed, prompt, 1, temperature=temperature, seed=seed) for seed in range(1, num_samples + 1)]
    sampled = torch.tensor([received.token_ids[0] for received in run_all(cluster.dense, submits).values()])
    expected = (reference_logprobs(prompt)[-1] / temperature).softmax(-1) * num_samples
    order = expected.argsort(descending=True)
    num_bins = int((expected >= 10).sum())  # all other tokens share one more bin
    assert num_bins >= 3
    observed = sampled.bincount(minlength=VOCAB_SIZE)[order].double()
    wanted = expected[order].double()
    observed = torch.cat([observed[:num_bins], observed[num_bins:].sum()[None]])
    wanted = torch.cat([wanted[:num_bins], wanted[num_bins:].sum()[None]])
    chi_square = ((observed - wanted) ** 2 / wanted).sum().item()
    # Bound of Wilson and Hilferty, 1931: 3.7 standard deviations, exceeded with probability 1e-4. The seeds are fixed.
    variance = 2 / (9 * num_bins)
    assert chi_square < num_bins * (1 - variance + 3.7 * math.sqrt(variance)) ** 3


def test_killed_dense_worker_gives_the_same_tokens_and_logprobs_when_it_is_back(cluster: Cluster) -> None:
    num_tokens = 60
    prompts = {1: random_prompt(60, seed=30), 2: random_prompt(130, seed=31), 3: random_prompt(20, seed=32)}
    options = {
        1: {"num_logprobs": 4, "frequency_penalty": 0.5},
        2: {"temperature": 1.0, "seed": 99, "num_logprobs": 2, "num_prompt_logprobs": 3, "logit_bias": {9: 4.0}},
        3: {"temperature": 1.5, "seed": 7, "num_logprobs": 0, "repetition_penalty": 1.2},
    }
    for each in options.values():
        each["stop_token_ids"] = []
    plain = run_all(cluster.dense, [submit(i, prompts[i], num_tokens, **options[i]) for i in prompts])
    for i, bad_words in ((1, [[5], plain[1].token_ids[12:15]]), (3, [plain[3].token_ids[9:11]])):
        options[i]["bad_words"] = [sampling_pb2.TokenSequence(token_ids=word) for word in bad_words]
    undisturbed = run_all(cluster.dense, [submit(i, prompts[i], num_tokens, **options[i]) for i in prompts])
    assert undisturbed[1].token_ids != plain[1].token_ids and undisturbed[3].token_ids != plain[3].token_ids

    submits = [submit(10 + i, prompts[i], num_tokens, **options[i]) for i in prompts]
    for _ in range(MAX_ROUNDS):
        before = kill_dense_worker_after(cluster, 10, submits)
        if all(0 < len(each.token_ids) < num_tokens for each in before.values()):
            break
    after = run_all(
        cluster.dense,
        [
            submit(10 + i, prompts[i], num_tokens, output_token_ids=before[10 + i].token_ids, **options[i])
            for i in prompts
        ],
    )
    for i, prompt in prompts.items():
        first, second = before[10 + i], after[10 + i]
        num_before = len(first.token_ids)
        assert 0 < num_before < num_tokens
        joined = ReceivedSequence(
            first.token_ids + second.token_ids, first.logprobs + second.logprobs, second.prompt_logprobs
        )
        assert joined.token_ids == undisturbed[i].token_ids
        check_received(joined, prompt, options[i]["num_logprobs"], options[i].get("num_prompt_logprobs"))
    cluster.wait_idle()


def test_gateway_streams_the_same_logprobs_though_the_dense_worker_is_killed(cluster: Cluster) -> None:
    prompt = random_prompt(90, seed=40)
    options = {"logprobs": 3, "prompt_logprobs": 2, "ignore_eos": True, "repetition_penalty": 1.1}
    options["bad_words"] = [sampling_pb2.TokenSequence(token_ids=word) for word in ([7], [8, 9])]
    for _ in range(MAX_ROUNDS):
        chunks = []
        for chunk in cluster.gateway.GenerateStream(request(prompt, 100, **options), timeout=RESTART_TIMEOUT_S):
            if not chunks:
                cluster.kill("dense_worker")
            chunks.append(chunk)
        if len(chunks) > 1:
            break
    received = ReceivedSequence()
    for chunk in chunks:
        received.token_ids += chunk.token_ids
        received.logprobs += chunk.logprobs
        received.prompt_logprobs.update(enumerate(chunk.prompt.logprobs, 1))
    assert len(chunks) > 1, "each answer came in one piece, which was not before the kill"
    assert received.token_ids == reference_tokens(
        prompt, 100, repetition_penalty=1.1, bad_words_ids=[[7], [8, 9]], eos_token_id=None
    )
    check_received(received, prompt, num_top=3, num_prompt_top=2)


def kill_dense_worker_after(
    cluster: Cluster, num_steps: int, submits: list[dense_pb2.Submit]
) -> dict[int, ReceivedSequence]:
    """Kills the dense worker after `num_steps` steps, once all sequences have tokens; returns what was received.

    Waits until another dense worker serves.
    """
    received: dict[int, ReceivedSequence] = {}
    is_killed = False
    with contextlib.suppress(grpc.RpcError):
        for num_done, _ in enumerate(stream_steps(cluster.dense, submits, received), 1):
            if not is_killed and num_done >= num_steps and all(each.token_ids for each in received.values()):
                cluster.kill("dense_worker")
                is_killed = True
    deadline = time.monotonic() + RESTART_TIMEOUT_S
    while True:
        with contextlib.suppress(grpc.RpcError):
            if cluster.dense_status().state == dense_pb2.DenseStatus.SERVING:
                return received
        assert time.monotonic() < deadline, "no dense worker came back"
        time.sleep(0.1)
