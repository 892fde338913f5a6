"""Forms on a GPU, where a step's layers run before the tokens of the step before are known."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import jsonschema
import pytest

from services.pb import gateway_pb2, sampling_pb2
from tests.gpu.gpu_cluster import gpu_cluster
from tests.support.clients.streams import collect_all
from tests.support.cluster import Cluster, request

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
PATTERN = r"([a-f]{3} ){30}\."


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    # In float32 the tokens do not depend on the batch.
    with gpu_cluster(tmp_path_factory.mktemp("forms"), "model.dtype=float32") as cluster:
        yield cluster


def message(seed: int, **form: object) -> gateway_pb2.GenerateRequest:
    return request(
        "Hello", 300, temperature=1.0, seed=seed, structured_output=sampling_pb2.StructuredOutput(**form)
    )


def test_every_answer_has_its_form_beside_answers_without_one(cluster: Cluster) -> None:
    plain = [cluster.generate(f"Number {i} is", 80, temperature=1.0, seed=i).token_ids for i in range(8)]
    messages = [message(i, json_schema=json.dumps(PERSON)) for i in range(8)]
    messages += [message(i, regex=PATTERN) for i in range(8)]
    with ThreadPoolExecutor(8) as threads:
        beside = [threads.submit(cluster.generate, f"Number {i} is", 80, temperature=1.0, seed=i) for i in range(8)]
        collected = collect_all(cluster.gateway, messages)
        assert [each.result().token_ids for each in beside] == plain
    assert all(each.reasons[0][0] == gateway_pb2.FINISH_REASON_STOP for each in collected)
    for each in collected[:8]:
        jsonschema.validate(json.loads(each.text[0]), PERSON)
    assert all(re.fullmatch(PATTERN, each.text[0]) for each in collected[8:])


def test_forms_go_on_after_a_kill(cluster: Cluster) -> None:
    messages = [message(i, regex=PATTERN) for i in range(4)]
    expected = collect_all(cluster.gateway, messages)
    found = collect_all(
        cluster.gateway, messages, lambda: os.kill(cluster.pid_of("dense_worker"), signal.SIGKILL)
    )
    for each, other in zip(found, expected, strict=True):
        assert re.fullmatch(PATTERN, each.text[0])
        assert each.reasons == other.reasons
