"""Forms that explode: each is answered, within its bounds, and a normal stream goes on meanwhile."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from tests.support.clients.http_clients import client
from tests.support.cluster import Cluster, running_cluster
from tests.support.undisturbed import assert_undisturbed

PATH = "/v1/completions"
BODY = {"prompt": "a", "max_tokens": 5}
BAD_FORMS: dict[str, tuple[int, dict[str, Any]]] = {
    "a schema of a megabyte": (400, {"guided_json": {"type": "string", "description": "x" * 2**20}}),
    "a schema of a megabyte as text": (400, {"guided_json": json.dumps({"enum": ["x" * 2**20]})}),
    "10,000 properties": (400, {"guided_json": {"properties": {f"p{i}": {"type": "string"} for i in range(10_000)}}}),
    "a reference to itself": (400, {"guided_json": {"$ref": "#"}}),
    "a million repetitions": (400, {"guided_regex": "a{1000000}"}),
    "repeated repetitions": (400, {"guided_regex": "((a{100}){100}){100}"}),
    "100,000 choices": (400, {"guided_choice": [str(i) for i in range(60_000)]}),
    "no choices": (400, {"structured_outputs": {"choice": []}}),
    "an empty choice": (400, {"structured_outputs": {"choice": [""]}}),
    "deep parentheses": (400, {"guided_grammar": "start: " + "(" * 100_000 + '"a"' + ")" * 100_000}),
    "an endless text": (400, {"guided_grammar": 'start: "a" start'}),
    "a tag that is no JSON": (400, {"structured_outputs": {"structural_tag": "[" * 100_000}}),
    "10,000 values": (200, {"guided_json": {"enum": [f"value {i}" for i in range(10_000)]}}),
    "catastrophic for others": (200, {"guided_regex": "(a+)+b"}),
}  # fmt: skip
SLOW = ["a million repetitions", "repeated repetitions", "deep parentheses"]  # each takes 2 s of processor time
GROUPS = {name: [name] for name in SLOW} | {"others": [name for name in BAD_FORMS if name not in SLOW]}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, on_one_core: tuple[str, ...]) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("forms"), wrapper=on_one_core, is_warm=True) as cluster:
        with client(cluster.http_address) as http:  # so that the process that tries forms is there
            assert http.post(PATH, json=BODY | {"guided_choice": ["a"]}).status_code == 200
        yield cluster
        cluster.wait_idle()
        # Processes that try forms have begun and ended meanwhile: gRPC must not have warned of a fork, for instance.
        lines = cluster.log_file.read_text().splitlines()
        raw = [line for line in lines if line and not line.startswith(("timestamp=", "Serving ", "  "))]
        assert not raw, "only the services write to the log"


@pytest.mark.parametrize("names", GROUPS.values(), ids=GROUPS)
def test_a_form_disturbs_nobody(cluster: Cluster, names: list[str]) -> None:
    dense_worker = cluster.pid_of("dense_worker")

    def attack() -> None:
        with client(cluster.http_address) as http:
            for name in names:
                status, form = BAD_FORMS[name]
                for _ in range(3):  # answers are kept, so only the first one is expensive
                    check(http.post(PATH, json=BODY | form), status, next(iter(form)), name)

    assert_undisturbed(cluster, attack)
    assert cluster.pid_of("dense_worker") == dense_worker


def check(response: httpx2.Response, status: int, field: str, name: str) -> None:
    assert response.status_code == status, (name, response.text[:500])
    if status >= 400:
        message = response.json()["error"]["message"]
        assert field in message, (name, message)
        assert len(message) < 500


def test_new_forms_one_after_the_other(cluster: Cluster) -> None:
    """Each is another one, so that no result is kept, and takes 0.2 s of processor time at a low priority."""

    def attack() -> None:
        bodies = [BODY | {"guided_regex": f"a{{25000}}b{{{i}}}"} for i in range(4)]
        with client(cluster.http_address) as http:
            for body in bodies:
                assert http.post(PATH, json=body).status_code in (200, 400, 429)

    assert_undisturbed(cluster, attack)


def test_a_form_of_bytes_that_are_no_text(cluster: Cluster) -> None:
    with client(cluster.http_address) as http:
        for text in (b"\xff", b"\\ud800"):
            data = b'{"prompt": "a", "max_tokens": 2, "guided_regex": "' + text + b'"}'
            response = http.post(PATH, content=data, headers={"content-type": "application/json"})
            assert response.status_code == 400, response.text
