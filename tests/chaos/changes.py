"""`python -m tests.chaos.changes --seeds N`: what outlives a request changes under streams, and workers are killed.

Conversations of stored responses go on, adapters are loaded and unloaded while their streams run, the prefix cache is
flushed, and the dense worker gets other weights. These differ only in what no text here has, so every answer, with its
`usage` and what is stored of it, must be that of an undisturbed run. Afterwards nothing may be left.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import httpx2
from safetensors.torch import load_file, save_file

from services.common.config import EMBEDDED_MODEL
from tests.chaos.ends import read_ends, unexpected_ends
from tests.chaos.monkey import ATTENTION, DENSE, Monkey
from tests.support.adapters import make_adapter
from tests.support.clients.http_clients import client, socket_path
from tests.support.cluster import Cluster, children_of, running_cluster
from tests.support.prompt_vectors import make_prompt_tuning, random_vectors

LORAS, VIRTUAL = ("first", "second", "third"), "virtual"  # the last one has virtual tokens
ADAPTERS = (*LORAS, VIRTUAL)
NUM_VIRTUAL_TOKENS = 40
MAX_LORAS = 2  # they take turns
MODELS = ("a", "b")
PAD_ID = 0
NUM_BLOCKS, BLOCK_SIZE = 400, 16
CONVERSATIONS = (
    ("What is the capital of France?", "And of Italy?", "Who are you?"),
    ("Who are you?", "What is the capital of Japan?", "How are you?"),
    ("Count from 1 to 50.", "What is the capital of Norway?", "Thank you."),
)
PROMPTS = ("San Francisco is a", "The capital of France is Paris. The capital of Italy is Rome. " * 6)
TIMEOUT_S = 200.0
IDLE_TIMEOUT_S = 90.0
MAX_CHANGE_S = 4.0  # of weights; kills come before


@dataclass(frozen=True)
class Size:
    """How much happens in a run."""

    num_rounds: int  # of each client, at least
    max_tokens: int  # per answer
    max_actions: int
    num_layers: int = 4  # of the embedded model, which has no more


SHORT = Size(num_rounds=1, max_tokens=40, max_actions=2, num_layers=2)
LONG = Size(num_rounds=3, max_tokens=150, max_actions=8)


@dataclass(frozen=True)
class Turn:
    """What a client sees of a response of a conversation."""

    output: list[Any]  # without ids
    usage: dict[str, Any]  # without what was cached
    num_input_items: int


@dataclass(frozen=True)
class Completion:
    """What a client sees of a completion."""

    token_ids: list[int]
    text: str
    reason: str
    counts: tuple[int, int]  # of the prompt and the answer


@dataclass(frozen=True)
class Arena:
    """A cluster, and the undisturbed answers."""

    cluster: Cluster
    size: Size
    conversations: list[list[Turn]]
    completions: dict[tuple[str, str], Completion]  # by the directory of an adapter, or "", and the prompt
    has_standbys: bool


@contextlib.contextmanager
def arena(directory: Path, size: Size, *, has_standbys: bool, is_warm: bool = False) -> Iterator[Arena]:
    """Starts a cluster with a high limit of restarts, and gets the undisturbed answers."""
    models, adapters = directory / "models", directory / "adapters"
    make_models(models)
    for seed, name in enumerate(LORAS):
        make_adapter(adapters / name, EMBEDDED_MODEL, seed=seed)
    make_prompt_tuning(adapters / VIRTUAL, random_vectors(EMBEDDED_MODEL, NUM_VIRTUAL_TOKENS, seed=1))
    settings = [
        f"model.path={models / MODELS[0]}",
        "model.dtype=float32",
        "model.name=tiny-llama",
        f"model.num_layers={size.num_layers}",
        f"attention.num_blocks={NUM_BLOCKS}",
        f"attention.block_size={BLOCK_SIZE}",
        f"dense.max_loras={MAX_LORAS}",
        f"gateway.lora_directory={adapters}",
        f"gateway.weights_directory={models}",
        "gateway.store_responses=true",
        "launch.max_restarts=1000",
        "launch.restart_window_s=2",
        "launch.restart_delay_s=0.05",
    ]
    if has_standbys:
        settings += ["launch.standby_dense=auto", "launch.standby_attention=auto"]
    with running_cluster(directory, *settings, is_warm=is_warm) as cluster, client(cluster.http_address) as http:
        http.timeout = TIMEOUT_S
        for name in ADAPTERS:
            change_adapter(http, "load", lora_name=name, lora_path=name)
        conversations = [converse(http, questions, size.max_tokens, Random(1)) for questions in CONVERSATIONS]
        completions = {
            (name, prompt): complete(http, name or "tiny-llama", prompt, size.max_tokens, is_streamed=False)
            for name in ("", *ADAPTERS)
            for prompt in PROMPTS
        }
        cluster.wait_idle(IDLE_TIMEOUT_S)
        yield Arena(cluster, size, conversations, completions, has_standbys)


def make_models(directory: Path) -> None:
    """Models whose weights differ in the vector of a token that is in no text."""
    for name in MODELS:
        shutil.copytree(EMBEDDED_MODEL, directory / name)
    file = directory / MODELS[1] / "model.safetensors"
    weights = load_file(file)
    weights["model.embed_tokens.weight"][PAD_ID] *= 0.5
    save_file(weights, file, metadata={"format": "pt"})


def converse(http: httpx2.Client, questions: Sequence[str], max_tokens: int, random: Random) -> list[Turn]:
    """A conversation of stored responses, streamed or not. Each must be found as it was given, until it is deleted."""
    turns, found_ids = list[Turn](), list[str]()
    for question in questions:
        body = {"model": "tiny-llama", "input": question, "temperature": 0, "max_output_tokens": max_tokens}
        if found_ids:
            body["previous_response_id"] = found_ids[-1]
        response = respond(http, body, is_streamed=random.random() < 0.5)
        assert response["status"] in ("completed", "incomplete"), response
        path = f"/v1/responses/{response['id']}"
        assert get(http, path) == response
        items = get(http, f"{path}/input_items?limit=100")["data"]
        assert len({item["id"] for item in items}) == len(items), items
        output = [{key: value for key, value in item.items() if key != "id"} for item in response["output"]]
        usage = response["usage"]
        check_cached(usage.pop("input_tokens_details")["cached_tokens"], usage["input_tokens"])
        turns.append(Turn(output, usage, len(items)))
        found_ids.append(response["id"])
    for each in found_ids:
        assert http.delete(f"/v1/responses/{each}").json()["deleted"]
        assert http.get(f"/v1/responses/{each}").status_code == 404
    return turns


def respond(http: httpx2.Client, body: dict[str, Any], *, is_streamed: bool) -> Any:
    """The response. Of a stream, its pieces must be the text of the last event."""
    if not is_streamed:
        answer = http.post("/v1/responses", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()
    pieces, events = "", list[Any]()
    with http.stream("POST", "/v1/responses", json=body | {"stream": True}) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if line.startswith("data: "):
                events.append(json.loads(line.removeprefix("data: ")))
                if events[-1]["type"] == "response.output_text.delta":
                    pieces += events[-1]["delta"]
    assert [event["sequence_number"] for event in events] == list(range(len(events))), events
    response = events[-1]["response"]
    assert pieces == "".join(part["text"] for item in response["output"] for part in item["content"]), response
    return response


def complete(
    http: httpx2.Client,
    model: str,
    prompt: str,
    max_tokens: int,
    *,
    is_streamed: bool,
    on_begin: Callable[[], object] = lambda: None,
) -> Completion:
    """A completion. `on_begin` is called after the first chunk of a stream."""
    body = {"model": model, "prompt": prompt, "temperature": 0, "max_tokens": max_tokens, "return_token_ids": True}
    body |= {"ignore_eos": True, "logit_bias": {str(PAD_ID): -100}}  # random adapters could choose it
    token_ids, text, reason, usage = list[int](), "", None, None
    if not is_streamed:
        answer = http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        chunks = [answer.json()]
        usage = chunks[0]["usage"]
    else:
        chunks = _streamed(http, body | {"stream": True, "stream_options": {"include_usage": True}})
    for number, chunk in enumerate(chunks):
        assert "error" not in chunk, chunk
        for choice in chunk["choices"]:
            assert reason is None, "nothing may follow the finish"
            token_ids += choice["token_ids"]
            text += choice["text"]
            reason = choice["finish_reason"]
        usage = chunk["usage"] if chunk.get("usage") else usage
        if number == 0:
            on_begin()
    assert usage is not None and reason is not None
    check_cached(usage["prompt_tokens_details"]["cached_tokens"], usage["prompt_tokens"])
    return Completion(token_ids, text, reason, (usage["prompt_tokens"], usage["completion_tokens"]))


def _streamed(http: httpx2.Client, body: dict[str, Any]) -> Iterator[Any]:
    with http.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if line == "data: [DONE]":
                return
            if line:
                yield json.loads(line.removeprefix("data: "))
    raise AssertionError("the stream broke off")


def check_cached(num_cached: int, num_prompt_tokens: int) -> None:
    """Whole blocks, and never the last token, which must be computed."""
    assert num_cached % BLOCK_SIZE == 0 and 0 <= num_cached < num_prompt_tokens, (num_cached, num_prompt_tokens)


def change_adapter(http: httpx2.Client, change: str, **body: object) -> None:
    answer = http.post(f"/v1/{change}_lora_adapter", json=body)
    assert answer.status_code == 200, answer.text


def get(http: httpx2.Client, path: str) -> Any:
    answer = http.get(path)
    assert answer.status_code == 200, answer.text
    return answer.json()


class Changer(Monkey):
    """A monkey that also changes the weights."""

    def __init__(self, arena: Arena, random: Random) -> None:
        super().__init__(arena.cluster, random, arena.size.max_actions, None, None, has_standbys=arena.has_standbys)
        replacements = (self._replace, self._replace_and_kill)
        self._kinds = [each for each in self._kinds if each not in replacements]
        self._kinds += 4 * [self._change_weights] + 6 * [self._change_weights_and_kill]

    def _change_weights(self) -> bool:
        self._ask_for_weights()
        return True

    def _change_weights_and_kill(self) -> bool:
        """The dense worker that serves, or the one that comes, or the attention worker."""
        with ThreadPoolExecutor(1) as threads:
            change = threads.submit(self._ask_for_weights)
            time.sleep(self._random.uniform(0.0, MAX_CHANGE_S))
            self._signal(signal.SIGKILL, self._random.choice([DENSE, DENSE, ATTENTION]))
            change.result()
        return True

    def _ask_for_weights(self) -> None:
        """If they cannot be changed, the reason is given, and nothing has changed."""
        body = {"model": self._random.choice(MODELS), "mode": self._random.choice(["keep", "keep", "wait"])}
        body["keep_caches"] = self._random.random() < 0.3
        with client(self._cluster.http_address) as http:
            answer = http.post("/admin/weights", json=body, timeout=TIMEOUT_S)
        assert answer.status_code in (200, 409), answer.text
        self.actions[-1] += f" ({body}: {'done' if answer.status_code == 200 else answer.json()['error']['message']})"


class Clients:
    """What many clients do at the same time, until the monkey is done and each has done its rounds."""

    def __init__(self, arena: Arena, seed: int, is_over: threading.Event) -> None:
        self._arena = arena
        self._seed = seed
        self._is_over = is_over
        self.counts = dict.fromkeys(("conversations", "completions", "adapters", "flushes"), 0)

    def all(self) -> list[Callable[[], None]]:
        """Each is to run in a thread of its own."""
        numbers = iter(range(100))
        return [
            *(self._client(next(numbers), self._converse) for _ in range(3)),
            *(self._client(next(numbers), self._complete) for _ in range(4)),
            *(self._client(next(numbers), self._use_own_adapter) for _ in range(3)),
            self._client(next(numbers), self._flush),
        ]

    def _client(self, number: int, act: Callable[[httpx2.Client, Random, str], None]) -> Callable[[], None]:
        def work() -> None:
            random, num_rounds = Random(self._seed * 100 + number), 0
            transport = httpx2.HTTPTransport(uds=socket_path(self._arena.cluster.http_address))
            with httpx2.Client(transport=transport, base_url="http://gateway", timeout=TIMEOUT_S) as http:
                while num_rounds < self._arena.size.num_rounds or not self._is_over.is_set():
                    time.sleep(random.uniform(0.0, 0.5))
                    act(http, random, f"{number}-{num_rounds}")
                    num_rounds += 1

        return work

    def _converse(self, http: httpx2.Client, random: Random, name: str) -> None:
        index = random.randrange(len(CONVERSATIONS))
        found = converse(http, CONVERSATIONS[index], self._arena.size.max_tokens, random)
        assert found == self._arena.conversations[index], (found, self._arena.conversations[index])
        self.counts["conversations"] += 1

    def _complete(self, http: httpx2.Client, random: Random, name: str) -> None:
        self._check(http, random, random.choice(["", *ADAPTERS]), random.choice(PROMPTS))
        self.counts["completions"] += 1

    def _use_own_adapter(self, http: httpx2.Client, random: Random, name: str) -> None:
        """Loads one of the adapters by a name of its own, and unloads it, or gives the name to another one, when the
        stream has begun.
        """
        directory, other = random.sample(ADAPTERS, 2)
        change_adapter(http, "load", lora_name=name, lora_path=directory)
        is_replaced = random.random() < 0.5

        def change() -> None:
            with client(self._arena.cluster.http_address) as another:
                another.timeout = TIMEOUT_S
                if is_replaced:
                    change_adapter(another, "load", lora_name=name, lora_path=other, load_inplace=True)
                else:
                    change_adapter(another, "unload", lora_name=name)

        prompt = random.choice(PROMPTS)
        found = complete(http, name, prompt, self._arena.size.max_tokens, is_streamed=True, on_begin=change)
        assert found == self._arena.completions[directory, prompt], (directory, prompt, found)
        if is_replaced:
            found = complete(http, name, prompt, self._arena.size.max_tokens, is_streamed=True)
            assert found == self._arena.completions[other, prompt], (other, prompt, found)
            change_adapter(http, "unload", lora_name=name)
        assert http.post("/v1/completions", json={"model": name, "prompt": prompt}).status_code == 404
        self.counts["adapters"] += 1

    def _flush(self, http: httpx2.Client, random: Random, name: str) -> None:
        """Without a dense worker that confirms it, it is to be asked for again."""
        answer = http.post(random.choice(["/flush_cache", "/reset_prefix_cache"]))
        assert answer.status_code in (200, 503), answer.text
        self.counts["flushes"] += answer.status_code == 200

    def _check(self, http: httpx2.Client, random: Random, adapter: str, prompt: str) -> None:
        is_streamed = random.random() < 0.7
        found = complete(http, adapter or "tiny-llama", prompt, self._arena.size.max_tokens, is_streamed=is_streamed)
        assert found == self._arena.completions[adapter, prompt], (adapter, prompt, found)


def run(arena: Arena, seed: int) -> tuple[list[str], dict[str, int]]:
    """Runs one seed. Returns what the monkey and the clients did. Raises `AssertionError` for what is wrong or left."""
    cluster = arena.cluster
    monkey = Changer(arena, Random(seed))
    gateway_pid, log_size = cluster.pid_of("gateway"), cluster.log_file.stat().st_size
    is_over = threading.Event()
    clients = Clients(arena, seed, is_over)
    work = clients.all()
    with ThreadPoolExecutor(len(work) + 1) as threads:
        running = [threads.submit(each) for each in work]
        actions = threads.submit(monkey.run)
        try:
            actions.result()
        finally:
            is_over.set()
        errors = [error for each in running if (error := each.exception()) is not None]
    assert not errors, f"{len(errors)} of {len(work)} clients after {monkey.actions}: {errors[0]!r}"
    assert cluster.pid_of("gateway") == gateway_pid, "the gateway has died"
    check_nothing_left(arena)
    ends = read_ends(cluster.log_file.read_bytes()[log_size:].decode())
    assert not (wrong := unexpected_ends(ends, monkey.signals)), f"unexpected ends {wrong} after {monkey.actions}"
    return monkey.actions, clients.counts


def check_nothing_left(arena: Arena) -> None:
    """No sequence, block, answer or adapter of the run; three services, and standbys."""
    cluster = arena.cluster
    cluster.wait_idle(IDLE_TIMEOUT_S)
    status = cluster.dense_status()
    assert (status.num_running, status.num_waiting) == (0, 0), status
    with client(cluster.http_address) as http:
        names = {model["id"] for model in get(http, "/v1/models")["data"]}
        metrics = http.get("/metrics").text.splitlines()
    assert names == {"tiny-llama", *ADAPTERS}, names
    records = [each for each in (cluster.log_file.parent / "adapters" / ".twostroke").rglob("*") if each.is_file()]
    assert len(records) == len(ADAPTERS), records
    for name in ("twostroke_gateway_answers_open", "twostroke_gateway_answers_waiting"):
        [value] = [line.split()[1] for line in metrics if line.startswith(name + " ")]
        assert float(value) == 0, f"{name} {value}"
    if not arena.has_standbys:
        assert len(children_of(cluster.process.pid)) == 3


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tests.chaos.changes", description=__doc__)
    parser.add_argument("--seeds", type=int, default=8, metavar="N", help="number of runs, %(default)s by default")
    parser.add_argument("--first-seed", type=int, default=1, metavar="S", help="of the first run; the next adds 1")
    parser.add_argument("--short", action="store_true", help="runs of fewer rounds and actions")
    arguments = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as an exception, so that everything is closed
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    for has_standbys in (False, True):
        seed, directory = None, Path(tempfile.mkdtemp(prefix="changes-"))
        try:
            with arena(directory, SHORT if arguments.short else LONG, has_standbys=has_standbys) as where:
                for seed in seeds:
                    start_s = time.monotonic()
                    actions, counts = run(where, seed)
                    print(f"seed {seed}, standbys {has_standbys}: {', '.join(actions)}: "
                          f"{', '.join(f'{count} {name}' for name, count in counts.items())}: "
                          f"{time.monotonic() - start_s:.1f} s", flush=True)
        except Exception:
            traceback.print_exc()
            print(f"FAILED: seed {seed}, standbys {has_standbys}; again: python -m tests.chaos.changes "
                  f"--first-seed {seed} --seeds 1{' --short' * arguments.short}\nlogs: {directory}", file=sys.stderr)
            return 1
        shutil.rmtree(directory)
    return 0


if __name__ == "__main__":
    sys.exit(main())
