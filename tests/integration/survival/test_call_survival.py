"""Workers die while a model reasons within a budget, and while it writes a call: the streams go on as without it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import jsonschema
import pytest

from services.pb import gateway_pb2, sampling_pb2
from tests.support.chats.chat_models import EOS, TEMPLATES, TOKENIZER
from tests.support.clients.streams import STREAM_TIMEOUT_S
from tests.support.models import make_model_dir
from tests.support.plain_services import PlainServices, plain_services

pytestmark = pytest.mark.timeout(400)  # processes start several times, and the machine may be slow

SCHEMA = {
    "type": "object",
    "properties": {
        "days": {"type": "array", "items": {"type": "integer", "maximum": 99}, "minItems": 15, "maxItems": 15},
        "code": {"type": "string", "pattern": "^([a-f]{3} ){15}$"},
    },
    "required": ["days", "code"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "plan", "parameters": SCHEMA}}]
BUDGET = 60  # tokens of reasoning
NUM_CHARACTERS = 40  # of the reasoning or the arguments, before the kill
MAX_ROUNDS = 5  # until a client reads a piece in the right place: on a busy machine a piece may be long
SEEDS = (1, 2, 3)


@dataclass
class Answer:
    """What a client of a stream has at the end, and how far the stream is meanwhile."""

    token_ids: list[int] = field(default_factory=list)
    reasoning: str = ""
    text: str = ""
    names: list[str] = field(default_factory=list)
    arguments: str = ""
    num_reasoning_tokens: int = 0
    reason: int = 0


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlainServices]:
    """A random model that always reasons."""
    directory = tmp_path_factory.mktemp("calls")
    with plain_services(directory, f"model.path={make_model(directory)}", "gateway.reasoning_parser=deepseek_r1") as it:
        yield it


def make_model(directory: Path) -> Path:
    eos = TOKENIZER.convert_tokens_to_ids(EOS)
    path = make_model_dir(
        directory / "model", "llama", vocab_size=len(TOKENIZER), num_hidden_layers=2, eos_token_id=eos,
        max_position_embeddings=2048,
    )  # fmt: skip
    TOKENIZER.save_pretrained(path)
    (path / "chat_template.jinja").write_text((TEMPLATES / "qwen3.jinja").read_text())
    return path


def read(services: PlainServices, seed: int, on_chunk: Callable[[Answer], object]) -> Answer:
    chat = gateway_pb2.Chat(
        messages=[gateway_pb2.ChatMessage(role="user", content="Make a plan.")],
        tools=json.dumps(TOOLS),
        tool_choice="required",
        parallel_tool_calls=False,
        max_reasoning_tokens=BUDGET,
    )
    message = gateway_pb2.GenerateRequest(
        chat=chat, max_tokens=900, ignore_eos=True, sampling=sampling_pb2.SamplingParams(temperature=1.0, seed=seed)
    )
    answer = Answer()
    for chunk in services.gateway.GenerateStream(message, timeout=STREAM_TIMEOUT_S):
        answer.token_ids += chunk.token_ids
        answer.reasoning += chunk.reasoning
        answer.text += chunk.text
        for piece in chunk.tool_calls:
            answer.names += [piece.name] if piece.name else []
            answer.arguments += piece.arguments
        if chunk.HasField("finish"):
            answer.reason = chunk.finish.reason
            answer.num_reasoning_tokens = chunk.finish.usage.num_reasoning_tokens
        on_chunk(answer)
    return answer


def read_all(services: PlainServices, on_chunk: Callable[[Answer], object] = lambda answer: None) -> list[Answer]:
    with ThreadPoolExecutor(len(SEEDS)) as threads:
        return list(threads.map(lambda seed: read(services, seed, on_chunk), SEEDS))


@pytest.fixture(scope="module")
def undisturbed(services: PlainServices) -> list[Answer]:
    answers = read_all(services)
    for answer in answers:
        assert (answer.names, answer.text, answer.reason) == (["plan"], "", gateway_pb2.FINISH_REASON_TOOL_CALLS)
        jsonschema.validate(json.loads(answer.arguments), SCHEMA)
    end = TOKENIZER.convert_tokens_to_ids("</think>")
    lengths = [answer.token_ids.index(end) for answer in answers]
    assert BUDGET in lengths and max(lengths) < BUDGET + 4, "the last character is completed, one token for each byte"
    assert min(len(answer.arguments) for answer in answers) > 2 * NUM_CHARACTERS
    return answers


@pytest.mark.parametrize("place", ["reasoning", "arguments"])
@pytest.mark.parametrize("role", ["dense_worker", "attn_worker"])
def test_streams_end_as_without_the_kill(
    services: PlainServices, undisturbed: list[Answer], role: str, place: str
) -> None:
    starts, is_killed = services.num_starts[role], threading.Lock()

    def kill_within(answer: Answer) -> None:
        is_there = bool(answer.names) == (place == "arguments") and len(getattr(answer, place)) >= NUM_CHARACTERS
        if is_there and not answer.reason and is_killed.acquire(blocking=False):
            services.kill(role)

    for _ in range(MAX_ROUNDS):
        answers = read_all(services, kill_within)
        for answer, expected in zip(answers, undisturbed, strict=True):
            assert answer.token_ids == expected.token_ids
            assert (answer.reasoning, answer.text) == (expected.reasoning, expected.text)
            calls = [(each.names, each.arguments, each.reason) for each in (answer, expected)]
            assert calls[0] == calls[1]
            assert answer.num_reasoning_tokens == expected.num_reasoning_tokens
        services.wait_idle()
        if is_killed.locked():
            break
    assert is_killed.locked(), "no stream was in the right place for the kill"
    assert services.num_starts[role] == starts + 1
