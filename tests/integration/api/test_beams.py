"""Beam search end to end against `transformers.generate`: gRPC, HTTP and Triton, in shared steps, and over kills."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from services.pb import gateway_pb2, sampling_pb2
from tests.support.clients.http_clients import client, events
from tests.support.cluster import REQUEST_TIMEOUT_S, Cluster, ctl, request, running_cluster
from tests.support.reference import make_served_model, random_prompts, reference_beams, reference_tokens

pytestmark = pytest.mark.timeout(400)  # processes start several times, and the machine may be slow

STOPPING = {
    False: sampling_pb2.EARLY_STOPPING_HEURISTIC,
    True: sampling_pb2.EARLY_STOPPING_ALWAYS,
    "never": sampling_pb2.EARLY_STOPPING_NEVER,
}
MAX_TOKENS = 12
NUM_LONG_TOKENS = 200  # so many that a kill comes in the middle
MAX_NUM_SEQS = 16
MAX_ROUNDS = 5  # on a fast machine a search may end before the kill comes
PROMPTS = random_prompts(3, 40, seed=9)
TOLERANCE = 1e-3  # of scores: float32 sums in another order

Answers = list[tuple[list[int], float]]


@dataclass
class Server:
    cluster: Cluster
    model: Path
    eos_token_id: int

    def search(self, prompt: Sequence[int], num_beams: int, max_tokens: int = MAX_TOKENS, **options: Any) -> Answers:
        """Token ids and scores that the server answers."""
        message = beams_request(prompt, num_beams, max_tokens, **options)
        response = self.cluster.gateway.Generate(message, timeout=REQUEST_TIMEOUT_S)
        return [(list(each.token_ids), each.finish.beam_score) for each in response.completions]

    def check(self, found: Answers, expected: Answers) -> None:
        assert [token_ids for token_ids, _ in found] == [token_ids for token_ids, _ in expected]
        assert [score for _, score in found] == pytest.approx([score for _, score in expected], abs=TOLERANCE)

    def reference(
        self,
        prompt: Sequence[int],
        num_beams: int,
        max_tokens: int = MAX_TOKENS,
        *,
        n: int | None = None,
        length_penalty: float = 1.0,
        early_stopping: bool | str = False,
    ) -> Answers:
        return reference_beams(
            self.model,
            prompt,
            num_beams,
            max_tokens,
            self.eos_token_id,
            num_return_sequences=n or num_beams,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
        )


def beams_request(
    prompt: Sequence[int],
    num_beams: int,
    max_tokens: int,
    *,
    n: int | None = None,
    length_penalty: float = 1.0,
    early_stopping: bool | str = False,
) -> gateway_pb2.GenerateRequest:
    search = sampling_pb2.BeamSearch(length_penalty=length_penalty, early_stopping=STOPPING[early_stopping])
    message = gateway_pb2.GenerateRequest(
        best_of=num_beams, n=n or num_beams, max_tokens=max_tokens, beam_search=search
    )
    message.prompt_token_ids.ids.extend(prompt)
    return message


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("beams")
    shape = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "head_dim": 8}
    plain = make_served_model(directory / "plain", "llama", **shape)
    # A token that likely answers have in their middle, so that they end at different lengths.
    eos_token_id = reference_tokens(plain, PROMPTS[1], 8)[5]
    model = make_served_model(directory / "model", "llama", **shape, eos_token_id=eos_token_id, pad_token_id=0)
    (model / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    settings = {
        "model.path": model,
        "attention.block_size": 4,
        "scheduler.max_num_seqs": MAX_NUM_SEQS,
        "scheduler.max_beam_width": 12,
        "launch.max_restarts": 100,
    }
    with running_cluster(directory, *(f"{key}={value}" for key, value in settings.items()), is_warm=True) as cluster:
        yield Server(cluster, model, eos_token_id)
        cluster.wait_idle()


@pytest.mark.parametrize("num_beams", [2, 4, 8])
def test_ids_and_scores_equal_those_of_transformers(server: Server, num_beams: int) -> None:
    cases = itertools.product(PROMPTS[1:], (0.0, 1.0, 2.0), (False, True, "never"))
    for number, (prompt, length_penalty, early_stopping) in enumerate(cases):
        options = {"length_penalty": length_penalty, "early_stopping": early_stopping}
        options["n"] = num_beams if number % 2 else 1
        server.check(server.search(prompt, num_beams, **options), server.reference(prompt, num_beams, **options))
    server.cluster.wait_idle()


def test_searches_share_steps_with_each_other_and_with_streams(server: Server) -> None:
    plain = server.cluster.generate(PROMPTS[2], 40, ignore_eos=True).token_ids
    widths = [2, 3, 5, 8, 2, 4]
    prompts = [PROMPTS[index % 3] for index in range(len(widths))]
    with ThreadPoolExecutor(len(widths) + 1) as pool:
        stream = pool.submit(server.cluster.generate, PROMPTS[2], 40, ignore_eos=True)
        found = list(pool.map(server.search, prompts, widths))
        assert stream.result().token_ids == plain
    for prompt, width, answers in zip(prompts, widths, found, strict=True):
        server.check(answers, server.reference(prompt, width))
    server.cluster.wait_idle()


def test_searches_survive_a_kill_of_both_workers(server: Server) -> None:
    roles = ("dense_worker", "attn_worker")
    check_survival(server, lambda: [os.kill(server.cluster.pid_of(role), signal.SIGKILL) for role in roles])


def test_a_search_goes_on_over_kills_of_one_worker_after_the_other(server: Server) -> None:
    """A stream beside it shows when the gateway has got steps of both: they come in the same messages."""
    options = {"early_stopping": "never", "length_penalty": 2.0}
    num_tokens = 200
    expected = server.reference(PROMPTS[0], 4, num_tokens, **options)
    plain = server.cluster.generate(PROMPTS[2], num_tokens, ignore_eos=True).token_ids

    def attempt() -> None:
        message = request(PROMPTS[2], num_tokens, ignore_eos=True)
        stream = server.cluster.gateway.GenerateStream(message, timeout=REQUEST_TIMEOUT_S)
        token_ids: list[int] = []
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(server.search, PROMPTS[0], 4, num_tokens, **options)
            for number, role in enumerate(("dense_worker", "attn_worker", "dense_worker"), start=1):
                while len(token_ids) < 30 * number:
                    token_ids += next(stream).token_ids
                check_runs(answer)
                server.cluster.kill(role)
            server.check(answer.result(), expected)
            for chunk in stream:
                token_ids += chunk.token_ids
        assert token_ids == plain

    until_in_time(attempt)
    server.cluster.wait_idle(timeout_s=60.0)


def test_searches_survive_the_replacement_of_the_dense_worker(server: Server) -> None:
    check_survival(server, lambda: ctl(server.cluster, "replace-dense"))


def test_log_probabilities_and_answers_to_triton_survive_a_kill_of_both_workers(server: Server) -> None:
    options = {"early_stopping": "never", "length_penalty": 2.0}
    expected = server.reference(PROMPTS[1], 4, NUM_LONG_TOKENS, **options)
    for_triton = server.reference(PROMPTS[2], 4, NUM_LONG_TOKENS, length_penalty=0.0, early_stopping=True)
    search = {
        "prompt": PROMPTS[1],
        "max_tokens": NUM_LONG_TOKENS,
        "use_beam_search": True,
        "best_of": 4,
        "n": 4,
        **options,
    }
    inputs = {"input_ids": PROMPTS[2], "input_lengths": len(PROMPTS[2]), "request_output_len": NUM_LONG_TOKENS}
    of_triton = {
        **inputs,
        "beam_width": 4,
        "runtime_top_k": 1,
        "return_log_probs": True,
        "exclude_input_in_output": True,
    }

    def attempt() -> None:
        with client(server.cluster.http_address) as http, ThreadPoolExecutor(2) as pool:

            def post(path: str, body: dict[str, Any]) -> dict[str, Any]:
                return http.post(path, json=body, timeout=REQUEST_TIMEOUT_S).raise_for_status().json()

            found = pool.submit(post, "/v1/completions", {**search, "return_token_ids": True, "logprobs": 1})
            beside = pool.submit(post, "/v2/models/tensorrt_llm/generate", of_triton)
            wait_for_beams(server, 8, found)
            for role in ("dense_worker", "attn_worker"):
                os.kill(server.cluster.pid_of(role), signal.SIGKILL)
            choices = found.result()["choices"]
            server.check([(each["token_ids"], each["beam_score"]) for each in choices], expected)
            for each, (token_ids, score) in zip(choices, expected, strict=True):
                total = sum(each["logprobs"]["token_logprobs"])
                assert total == pytest.approx(score * len(token_ids) ** 2, rel=1e-3)
            answer = beside.result()
            assert answer["sequence_length"] == [len(token_ids) for token_ids, _ in for_triton]
            assert answer["cum_log_probs"] == pytest.approx([score for _, score in for_triton], abs=TOLERANCE)

    until_in_time(attempt)
    server.cluster.wait_idle(timeout_s=60.0)


def check_survival(server: Server, strike: Any) -> None:
    options = {"early_stopping": "never", "length_penalty": 2.0}
    # Normal noise of 1e-4 in the logits does not change these answers, so sums in another order do not either.
    sent = [(PROMPTS[1], 4), (PROMPTS[0], 6)]
    expected = [server.reference(prompt, width, NUM_LONG_TOKENS, **options) for prompt, width in sent]
    plain = server.cluster.generate(PROMPTS[0], 40, ignore_eos=True).token_ids

    def attempt() -> None:
        with ThreadPoolExecutor(3) as pool:
            found = [pool.submit(server.search, *each, NUM_LONG_TOKENS, **options) for each in sent]
            stream = pool.submit(server.cluster.generate, PROMPTS[0], 40, ignore_eos=True)
            wait_for_beams(server, 10, found[0])
            strike()
            assert stream.result().token_ids == plain
            for each, answers in zip(found, expected, strict=True):
                server.check(each.result(), answers)

    until_in_time(attempt)
    server.cluster.wait_idle(timeout_s=60.0)


class EndedEarlyError(Exception):
    """A search was over before the test could disturb it."""


def until_in_time(attempt: Callable[[], None]) -> None:
    """Runs `attempt` until its strikes come before the end of the searches."""
    for _ in range(MAX_ROUNDS):
        with contextlib.suppress(EndedEarlyError):
            return attempt()
    raise AssertionError(f"the searches ended before the strikes in all of {MAX_ROUNDS} rounds")


def check_runs(answer: Future[Any]) -> None:
    if answer.done():
        answer.result()  # a failure fails the test
        raise EndedEarlyError


def wait_for_beams(server: Server, num_beams: int, answer: Future[Any]) -> None:
    """Waits until the attention worker has so many sequences."""
    pause = threading.Event()
    while True:
        check_runs(answer)
        try:
            if server.cluster.attention_status().num_sequences >= num_beams:
                return
        except grpc.RpcError:
            pass  # it starts
        pause.wait(0.002)


def test_http_answers_have_ids_and_scores(server: Server) -> None:
    expected = server.reference(PROMPTS[1], 4, n=2, length_penalty=0.5, early_stopping=True)
    body = {
        "prompt": PROMPTS[1],
        "max_tokens": MAX_TOKENS,
        "use_beam_search": True,
        "best_of": 4,
        "n": 2,
        "length_penalty": 0.5,
        "early_stopping": True,
        "return_token_ids": True,
        "logprobs": 1,
    }
    with client(server.cluster.http_address) as http:
        whole = http.post("/v1/completions", json=body, timeout=REQUEST_TIMEOUT_S).json()
        server.check([(each["token_ids"], each["beam_score"]) for each in whole["choices"]], expected)
        for each, (token_ids, score) in zip(whole["choices"], expected, strict=True):
            values = each["logprobs"]["token_logprobs"]
            assert sum(values) / len(token_ids) ** 0.5 == pytest.approx(score, abs=TOLERANCE)
        assert whole["usage"]["completion_tokens"] == sum(len(token_ids) for token_ids, _ in expected)
        streamed = events(http.post("/v1/completions", json=body | {"stream": True}, timeout=REQUEST_TIMEOUT_S).text)
        texts = ["", ""]
        for event in streamed:
            for choice in event["choices"]:
                texts[choice["index"]] += choice["text"]
        assert texts == [each["text"] for each in whole["choices"]]
        chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 5, "use_beam_search": True, "n": 3}
        answers = http.post("/v1/chat/completions", json=chat, timeout=REQUEST_TIMEOUT_S).json()["choices"]
        scores = [each["beam_score"] for each in answers]
        assert len(scores) == 3 and scores == sorted(scores, reverse=True)


def test_triton_returns_all_beams(server: Server) -> None:
    """With TensorRT-LLM's defaults: no length penalty, and an early end."""
    expected = server.reference(PROMPTS[2], 4, length_penalty=0.0, early_stopping=True)
    inputs = {"input_ids": PROMPTS[2], "input_lengths": len(PROMPTS[2]), "request_output_len": MAX_TOKENS}
    body = {**inputs, "beam_width": 4, "runtime_top_k": 1, "return_log_probs": True, "exclude_input_in_output": True}
    with client(server.cluster.http_address) as http:
        answer = http.post("/v2/models/tensorrt_llm/generate", json=body, timeout=REQUEST_TIMEOUT_S).json()
    assert answer["sequence_length"] == [len(token_ids) for token_ids, _ in expected]
    assert answer["cum_log_probs"] == pytest.approx([score for _, score in expected], abs=TOLERANCE)


def test_a_search_too_wide_for_the_cache_or_the_limit_is_refused(server: Server) -> None:
    for options, words in (
        ((PROMPTS[0], 13, 4), "best_of is 13, the number of beams must be from 1 to 12 (scheduler.max_beam_width)"),
    ):
        with pytest.raises(grpc.RpcError) as refused:
            server.search(*options)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT and words in refused.value.details()


def test_a_cancelled_search_frees_its_blocks(server: Server) -> None:
    call = server.cluster.gateway.Generate.future(
        beams_request(PROMPTS[1], 8, 400, early_stopping="never", length_penalty=2.0), timeout=REQUEST_TIMEOUT_S
    )
    wait_for_beams(server, 8, call)
    call.cancel()
    server.cluster.wait_idle()


def test_a_search_of_one_beam_is_greedy(server: Server) -> None:
    message = beams_request(PROMPTS[1], 1, MAX_TOKENS)
    message.ignore_eos = True
    response = server.cluster.gateway.Generate(message, timeout=REQUEST_TIMEOUT_S)
    plain = server.cluster.gateway.Generate(request(PROMPTS[1], MAX_TOKENS, ignore_eos=True), timeout=REQUEST_TIMEOUT_S)
    assert response.completions[0].token_ids == plain.completions[0].token_ids
