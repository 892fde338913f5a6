"""Every fenced block of README.md runs against a live cluster; only the addresses are replaced."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from tests.support.cluster import REPOSITORY, REQUEST_TIMEOUT_S, Cluster
from tests.support.documents import README, Block, fenced_blocks

BLOCKS = fenced_blocks(README)
COMMANDS = {"python": (sys.executable, "-c"), "sh": ("bash", "-euo", "pipefail", "-c")}


@pytest.mark.parametrize("block", BLOCKS, ids=map(str, BLOCKS))
def test_a_block_runs_and_prints_an_answer(cluster: Cluster, block: Block) -> None:
    code = block.code
    for written, real in {
        "127.0.0.1:50051": cluster.address,
        "127.0.0.1:8080": cluster.http_address,
        ".venv/bin/python": sys.executable,
    }.items():
        code = code.replace(written, real)
    result = subprocess.run(
        [*COMMANDS[block.language], code], cwd=REPOSITORY, capture_output=True, text=True, timeout=REQUEST_TIMEOUT_S
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip(), "it printed nothing"
    assert "error" not in result.stdout.lower()
    if "San Francisco is a" in code and "max_tokens=32" in code:
        assert result.stdout == cluster.generate("San Francisco is a", 32).text
    if "What is the capital of France?" in code:
        assert "Paris" in text_of(result.stdout)


def text_of(output: str) -> str:
    """The text of the answer, also where the block prints the events of a streamed chat."""
    events = re.findall("^data: ({.*})$", output, re.MULTILINE)
    if not events:
        return output
    assert output.endswith("data: [DONE]\n\n")
    choices = [choice for event in events for choice in json.loads(event)["choices"]]
    return "".join(choice["delta"].get("content", "") for choice in choices)


def test_there_are_blocks_for_both_kinds_of_grpc_client() -> None:
    code = [block.code for block in BLOCKS if "GenerateStream" in block.code]
    assert [("asyncio" in piece) for piece in code] == [False, True]
