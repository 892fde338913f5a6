"""Calls to a running gateway with a scripted dense worker, and the reference tokenizer's results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpc_health.v1 import health_pb2
from transformers import AutoTokenizer

from services.common.config import EMBEDDED_MODEL
from services.pb import dense_pb2, gateway_pb2
from tests.support.running_gateway import RunningGateway, run, running_gateway
from tests.support.workers.fake_dense import FakeDense

REFERENCE = AutoTokenizer.from_pretrained(EMBEDDED_MODEL)
EOS = REFERENCE.eos_token_id
ANSWER = " Łódź, 東京 and 서울 🙂🙃 — e\u0301 are\n\ncities.  Two  spaces."
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def ids(text: str) -> list[int]:
    return REFERENCE(text, add_special_tokens=False)["input_ids"]


def text_of(token_ids: Sequence[int]) -> str:
    return REFERENCE.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def say(token_ids: Sequence[int]) -> Callable[[dense_pb2.Submit], Sequence[int]]:
    """A script: the same tokens for every request."""
    return lambda submit: token_ids


def request(**fields: Any) -> gateway_pb2.GenerateRequest:
    return gateway_pb2.GenerateRequest(**{"prompt": "Tell me about", **fields})


@dataclass
class Answer:
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish: gateway_pb2.Finish | None = None


async def stream(gateway: RunningGateway, **fields: Any) -> Answer:
    """Calls GenerateStream and puts all chunks together."""
    answer = Answer()
    async for chunk in gateway.stub.GenerateStream(request(**fields)):
        assert answer.finish is None
        answer.text += chunk.text
        answer.token_ids += chunk.token_ids
        if chunk.HasField("finish"):
            answer.finish = chunk.finish
    assert answer.finish is not None
    return answer


def with_gateway(
    tmp_path: Path, dense: FakeDense, test: Callable[[RunningGateway], Any], **options: Any
) -> None:
    """Runs `test` against a serving gateway."""

    async def body() -> None:
        async with running_gateway(tmp_path, dense, **options) as gateway:
            await test(gateway)

    run(body())
