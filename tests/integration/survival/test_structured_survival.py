"""A killed worker loses no form: its streams go on with the same tokens, and end with the form."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from services.pb import gateway_pb2, sampling_pb2
from tests.support.clients.streams import Collected, collect_all
from tests.support.cluster import request
from tests.support.models import TWO_LAYERS
from tests.support.plain_services import PlainServices, plain_services

pytestmark = pytest.mark.timeout(400)  # processes start several times, and the machine may be slow

MAX_TOKENS = 200
LIST = {"type": "array", "items": {"type": "object", "properties": {"n": {"type": "integer", "maximum": 99}},
                                   "required": ["n"], "additionalProperties": False},
        "minItems": 8, "maxItems": 8}  # fmt: skip
PATTERN = r"([a-f]{3} ){20}\."
FORMS: list[dict[str, Any]] = [{"json_schema": json.dumps(LIST)}, {"regex": PATTERN}]


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlainServices]:
    with plain_services(tmp_path_factory.mktemp("forms"), TWO_LAYERS) as services:
        yield services


@pytest.fixture(scope="module")
def undisturbed(services: PlainServices) -> list[Collected]:
    expected = collect_all(services.gateway, messages())
    check_grammars(expected)
    return expected


def messages() -> list[gateway_pb2.GenerateRequest]:
    sent = [request("Hello", MAX_TOKENS, temperature=1.0, seed=9)]
    for form in FORMS:
        for seed, ignores_eos in ((1, False), (2, True)):
            options = {"structured_output": sampling_pb2.StructuredOutput(**form), "seed": seed, "temperature": 1.0}
            sent.append(request("Hello", MAX_TOKENS, ignore_eos=ignores_eos, n=2, logprobs=1, **options))
    return sent


def check_grammars(collected: list[Collected]) -> None:
    lists, patterns = collected[1:3], collected[3:5]
    for text in (text for each in lists for text in each.text.values()):
        jsonschema.validate(json.loads(text), LIST)
    assert all(re.fullmatch(PATTERN, text) for each in patterns for text in each.text.values())
    reasons = {reason for each in collected[1:] for reason in each.reasons.values()}
    assert reasons == {(gateway_pb2.FINISH_REASON_STOP, "")}


@pytest.mark.parametrize(
    "roles", [("dense_worker",), ("attn_worker",), ("dense_worker", "attn_worker")], ids=" and ".join
)
def test_forms_end_as_without_the_kill(
    services: PlainServices, undisturbed: list[Collected], roles: tuple[str, ...]
) -> None:
    starts = dict(services.num_starts)
    disturbed = collect_all(services.gateway, messages(), lambda: services.kill(*roles))
    for found, expected in zip(disturbed, undisturbed, strict=True):
        found.assert_equals(expected)
    assert {role for role in services.num_starts if services.num_starts[role] > starts[role]} == set(roles)
    services.wait_idle()
