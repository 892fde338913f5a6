"""Codex and Claude Code themselves, where they are installed: one task with a tool, whose output they send back.

    npm install @openai/codex@0.169.0 @anthropic-ai/claude-code@2.1.328    # and node_modules/.bin in PATH
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import openai
import pytest

from tests.support.chats.chat_models import prompt_text, with_chat_model
from tests.support.running_gateway import RunningGateway

SECRET, TASK = "the secret word is plum", "Say what is in the file note.txt."
LIMIT_S = 90.0
CODEX_CONFIG = """
model = "model"
model_provider = "twostroke"
[model_providers.twostroke]
name = "Twostroke"
base_url = "{url}/v1"
wire_api = "responses"
[analytics]
enabled = false
"""


@contextlib.asynccontextmanager
async def tcp_address(unix_address: str) -> AsyncIterator[str]:
    """A URL at which the agents, which know no Unix sockets, reach the gateway."""

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        its_reader, its_writer = await asyncio.open_unix_connection(unix_address.removeprefix("unix:"))
        await asyncio.gather(copy(reader, its_writer), copy(its_reader, writer))

    async with await asyncio.start_server(connect, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def run_agent(command: list[str], directory: Path, **environment: str) -> str:
    """Its output. Home and working directory are its own; it must end with status 0."""
    variables = {"HOME": str(directory), "PATH": os.environ["PATH"], "NO_PROXY": "127.0.0.1", **environment}
    outputs = {"stdout": asyncio.subprocess.PIPE, "stderr": asyncio.subprocess.STDOUT}
    process = await asyncio.create_subprocess_exec(
        *command, cwd=directory, env=variables, stdin=asyncio.subprocess.DEVNULL, **outputs
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(), LIMIT_S)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, output.decode()
    return output.decode()


async def codex(url: str, directory: Path) -> str:
    (directory / ".codex").mkdir()
    (directory / ".codex" / "config.toml").write_text(CODEX_CONFIG.format(url=url))
    options = ["--skip-git-repo-check", "-s", "danger-full-access"]  # the test writes what it runs: cat note.txt
    return await run_agent(["codex", "exec", *options, TASK], directory)


async def claude(url: str, directory: Path) -> str:
    names = {"ANTHROPIC_MODEL": "model", "ANTHROPIC_DEFAULT_HAIKU_MODEL": "model"}
    quiet = dict.fromkeys(("CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC", "DISABLE_TELEMETRY", "DISABLE_AUTOUPDATER"), "1")
    access = {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_AUTH_TOKEN": "none-needed"}
    return await run_agent(["claude", "-p", TASK, "--allowedTools", "Bash"], directory, **names, **quiet, **access)


@pytest.mark.parametrize(
    ("agent", "tool", "arguments"),
    [
        (codex, "exec_command", {"cmd": "cat note.txt"}),
        (claude, "Bash", {"command": "cat note.txt", "description": "Reads it"}),
    ],
    ids=["codex", "claude"],
)
def test_a_coding_agent_runs_a_tool_and_sends_its_output_back(
    tmp_path: Path, agent: Callable[[str, Path], Awaitable[str]], tool: str, arguments: dict[str, str]
) -> None:
    if shutil.which(agent.__name__) is None:
        pytest.skip(f"{agent.__name__} is not installed")
    directory = tmp_path / "home"
    directory.mkdir()
    (directory / "note.txt").write_text(SECRET)

    async def test(_: openai.AsyncOpenAI, gateway: RunningGateway) -> None:
        async with tcp_address(gateway.http_address) as url:
            assert "It is plum." in await agent(url, directory)

    call = f"<tool_call>\n{json.dumps({'name': tool, 'arguments': arguments})}\n</tool_call>"
    dense = with_chat_model(tmp_path, "hermes", [call, "It is plum."], test, max_model_len=400_000)
    first, second = map(prompt_text, dense.submits)
    assert TASK in first and f'"name": "{tool}"' in first and SECRET not in first
    assert f"<tool_response>\n{SECRET}" in second or f"Output:\n{SECRET}" in second
    assert second.startswith(first.removesuffix("<|im_start|>assistant\n")), "the prefix cache applies"
