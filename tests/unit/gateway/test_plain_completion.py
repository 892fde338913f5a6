"""A streamed completion without any feature runs the files that its page lists, and no other one of the gateway."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from tests.support.clients.http_clients import async_client
from tests.support.clients.http_gateway import say
from tests.support.cluster import REPOSITORY
from tests.support.documents import LIFE_OF_A_TOKEN
from tests.support.running_gateway import RunningGateway, run, running_gateway
from tests.support.workers.fake_dense import FakeDense

SECTION = r"^## A plain completion over HTTP\n(.*?)^## "
SERVICES = f"{REPOSITORY / 'services'}/"
# It starts the gateway, and measures how late its event loop is.
NOT_OF_THE_REQUEST = "gateway/service.py"
NUM_RUNS = 3  # what runs in only some of them belongs to a timer


async def files_of_a_completion(gateway: RunningGateway) -> set[str]:
    """The files of the gateway, from `services/`, of which a function runs for one completion."""
    files = set[str]()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(SERVICES):
            files.add(frame.f_code.co_filename.removeprefix(SERVICES))

    async with async_client(gateway.http_address) as client:
        body = {"prompt": "Hello there", "max_tokens": 5, "stream": True}
        before = sys.getprofile()
        sys.setprofile(note)
        try:
            async with client.stream("POST", "/v1/completions", json=body) as response:
                assert response.status_code == 200
                lines = [line async for line in response.aiter_lines() if line]
        finally:
            sys.setprofile(before)
    assert len(lines) > 2 and lines[-1] == "data: [DONE]"
    return {each for each in files if each.startswith("gateway/")} - {NOT_OF_THE_REQUEST}


def test_a_plain_completion_runs_the_files_that_its_page_lists_and_no_others(tmp_path: Path) -> None:
    section = re.search(SECTION, LIFE_OF_A_TOKEN.read_text(), re.MULTILINE | re.DOTALL)
    assert section is not None
    table = "".join(re.findall(r"^\|.*", section[1], re.MULTILINE))
    listed = set(re.findall(r"`(gateway/[\w/]+\.py)", table))

    async def test() -> None:
        dense = FakeDense(say("One two three four five six."), step_s=0.005)
        async with running_gateway(tmp_path, dense) as gateway:
            await files_of_a_completion(gateway)  # the first one also prepares what later ones find
            runs = [await files_of_a_completion(gateway) for _ in range(NUM_RUNS)]
        found = set.intersection(*runs)
        assert sorted(found - listed) == [], "a plain completion runs them: list them, or keep it away from them"
        assert sorted(listed - found) == [], "no plain completion runs them"

    run(test())
