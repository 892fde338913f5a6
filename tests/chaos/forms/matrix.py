"""Runs cases on servers with every source of drafts, 32 at once, while workers are killed, and judges each answer.

The truth for the tokens is a server that drafts nothing, also not what a form forces, and that nobody disturbs.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import grpc

from services.pb import gateway_pb2, sampling_pb2
from tests.chaos.drafts import speculation_settings
from tests.chaos.forms.answers import Answer, ask
from tests.chaos.forms.cases import Case
from tests.chaos.forms.thinking_model import give_markers
from tests.support.plain_services import PlainServices, plain_services

NUM_STREAMS = 32
STEP_LOG = "steps.jsonl"
NUM_LAYERS = 4  # of the embedded model
SPECULATION = ("off", "ngram", "suffix", "draft_model", "eagle3")
UNDRAFTED = "undrafted"  # in place of one of these
MIN_STEPS_BETWEEN_KILLS = 100  # so that every stream gets a token in between
MAX_PAUSE_S = 2.0
RECOVERY_S = 120.0
ROLES = (("dense_worker",), ("attn_worker",), ("dense_worker", "attn_worker"))


@dataclass
class Count:
    """What a run has found. The first texts of each kind of mistake are kept."""

    num_answers: int = 0
    num_whole: int = 0  # that end with their form
    num_kills: int = 0
    invalid: list[str] = field(default_factory=list)
    different: list[str] = field(default_factory=list)

    @property
    def is_wrong(self) -> bool:
        return bool(self.invalid or self.different)

    def __str__(self) -> str:
        return (
            f"{self.num_answers} answers, {self.num_whole} of them to the end of their form, {self.num_kills} kills: "
            f"{len(self.invalid)} invalid, {len(self.different)} different"
        )


@contextlib.contextmanager
def server(directory: Path, model: Path, speculation: str, num_layers: int = NUM_LAYERS) -> Iterator[PlainServices]:
    """A server of the first layers of this model; where drafts are possible, steps have some, whatever they cost."""
    worker = "undrafted_dense_worker" if speculation == UNDRAFTED else "speculating_dense_worker"
    settings = [
        f"model.path={model}",
        f"model.num_layers={num_layers}",
        "gateway.reasoning_parser=qwen3",
        "scheduler.max_num_seqs=128",  # a row for each stream, and more for drafts
        f"dense.step_log={directory / STEP_LOG}",
    ]
    if speculation == UNDRAFTED:
        settings.append("scheduler.speculation=off")
    else:
        settings += speculation_settings(speculation, directory, num_layers)
    if speculation == "draft_model":
        give_markers(directory / "draft")
    modules = {"dense_worker": f"tests.support.workers.{worker}"}
    with plain_services(directory, *settings, modules=modules) as services:
        yield services


def answer_all(services: PlainServices, cases: Sequence[Case]) -> list[list[Answer]]:
    """The answers of all cases, 32 at once; every second case is streamed."""
    with ThreadPoolExecutor(NUM_STREAMS) as threads:
        def answer(index: int) -> list[Answer]:
            return ask(services.gateway, cases[index].message, is_streamed=index % 2 == 0)

        return list(threads.map(answer, range(len(cases))))


def answer_whole(services: PlainServices, cases: Sequence[Case]) -> dict[int, list[Answer]]:
    """The answers without stop strings of the cases that have some, by the case's index."""
    indexes = [index for index, case in enumerate(cases) if case.whole is not None]
    with ThreadPoolExecutor(NUM_STREAMS) as threads:
        answers = threads.map(lambda index: ask(services.gateway, cases[index].whole, is_streamed=False), indexes)
        return dict(zip(indexes, answers, strict=True))


def judge(
    cases: Sequence[Case],
    found: Sequence[Sequence[Answer]],
    expected: Sequence[Sequence[Answer]],
    whole: Mapping[int, Sequence[Answer]],
    count: Count,
) -> None:
    """Adds to `count` what is wrong with these answers. whole: see `answer_whole`"""
    for index, (case, answers) in enumerate(zip(cases, found, strict=True)):
        assert len(answers) == case.message.n
        for number, (answer, other) in enumerate(zip(answers, expected[index], strict=True)):
            count.num_answers += 1
            if error := _mistake(case, answer, whole[index][number] if index in whole else None, count):
                count.invalid.append(f"{case.name}: {error}: {answer}")
            if not answer.is_like(other):
                count.different.append(f"{case.name}: {answer} and not {other}")


def _mistake(case: Case, answer: Answer, whole: Answer | None, count: Count) -> str | None:
    """What is wrong with an answer; None: nothing."""
    if case.message.HasField("logprobs") and len(answer.logprobs) != len(answer.token_ids):
        return f"{len(answer.logprobs)} log-probabilities for {len(answer.token_ids)} tokens"
    if answer.stop:
        return _mistake_before_stop(answer, whole)
    if answer.reason == gateway_pb2.FINISH_REASON_LENGTH:
        if case.reasons:
            return None  # a long reasoning, which has no form, has left too few tokens
        if not case.may_be_cut:
            return "it was cut off"
        answer = Answer(calls=answer.calls[:-1])
        if not answer.calls:
            return None
    count.num_whole += 1
    try:
        case.check(answer)
    except Exception as error:  # of any judge
        return repr(error)
    return None


def _mistake_before_stop(answer: Answer, whole: Answer | None) -> str | None:
    if whole is None:
        return "there was no stop string to find"
    if not whole.text.startswith(answer.text + answer.stop) or answer.reasoning != whole.reasoning:
        return f"not what is before the first {answer.stop!r} of {whole.text!r}"
    return None


class Killer:
    """Kills workers at random moments until it is closed."""

    def __init__(self, services: PlainServices, random: Random) -> None:
        self.num_kills = 0
        self._services, self._random = services, random
        self._is_over = threading.Event()
        self._thread = ThreadPoolExecutor(1)
        self._work = self._thread.submit(self._run)

    def close(self) -> None:
        """Raises what has gone wrong."""
        self._is_over.set()
        self._work.result()
        self._thread.shutdown()

    def _run(self) -> None:
        while not self._is_over.wait(self._random.uniform(0.2, MAX_PAUSE_S)):
            before = self._num_steps()
            roles = self._random.choice(ROLES)
            self._services.kill(*roles)
            self.num_kills += 1
            least = MIN_STEPS_BETWEEN_KILLS + (0 if "dense_worker" in roles else before)
            deadline = time.monotonic() + RECOVERY_S
            while not self._is_over.wait(0.05) and self._num_steps() < least:
                assert time.monotonic() < deadline, f"not recovered from a kill of {roles}"

    def _num_steps(self) -> int:
        with contextlib.suppress(grpc.RpcError):
            return self._services.dense_status().num_steps
        return 0


def num_steps_with_drafts(directory: Path) -> int:
    """How many steps without prompts have had more tokens than sequences, by the step log."""
    steps = map(json.loads, (directory / STEP_LOG).read_text().splitlines())
    return sum(step["num_tokens"] == step["num_sampled"] > step["num_seqs"] for step in steps)


def check_beams(services: PlainServices) -> str | None:
    """Beams choose tokens by themselves: a form beside them is refused by name. Returns what is wrong."""
    message = gateway_pb2.GenerateRequest(prompt="a", max_tokens=4, n=2, beam_search=sampling_pb2.BeamSearch())
    message.sampling.structured_output.json_schema = json.dumps({"type": "object"})
    try:
        services.gateway.Generate(message, timeout=RECOVERY_S)
    except grpc.RpcError as error:
        is_named = error.code() is grpc.StatusCode.INVALID_ARGUMENT and "structured_output" in error.details()
        return None if is_named else repr(error)
    return "a beam search with a form was answered"
