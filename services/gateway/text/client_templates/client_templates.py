"""`ClientTemplates`: renders chat templates that clients send, one at a time, in a process that they cannot outlast.

Clients take turns, so each waits for one template of each other one at most. The memory of their bodies bounds how many
wait.
"""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import structlog
from pydantic_core import to_json

from services.common.errors import InvalidRequest, TwostrokeError
from services.common.fairness import ClientTurns
from services.gateway.resources.heavy_work import current_client
from services.gateway.resources.piped_processes import PipedProcesses, close_process, write_and_read
from services.gateway.text.chat_template import Chat
from services.gateway.text.client_templates.renderer import MAX_CPU_S, MAX_MEMORY_BYTES, MAX_RENDERED_CHARACTERS

log = structlog.get_logger()

FIELD = "chat_template"
MAX_WAIT_S = 600.0  # for a turn. A template takes milliseconds, and `MAX_CPU_S` at most
TIMEOUT_S = 30.0  # for one template and a start of the process; far above the limit of CPU time, for a busy machine
_MAX_LINE_BYTES = 12 * MAX_RENDERED_CHARACTERS + 2**16  # JSON writes a character as twelve bytes at most
_MODULE = "services.gateway.text.client_templates.renderer"


class ClientTemplates:
    """Runs in the event loop. The process starts with the first template; `close` ends it."""

    def __init__(self) -> None:
        # The environment may have API keys.
        self._processes = PipedProcesses(_MODULE, task="renders clients' chat templates", env={})
        self._turns = ClientTurns(1, MAX_WAIT_S, "the chat template")

    async def render(
        self,
        chat: Chat,
        messages: Sequence[Mapping[str, Any]],
        template_kwargs: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]],
        special_tokens: Mapping[str, str],
    ) -> str:
        """The text that `chat.template` makes of the other arguments.

        Raises `InvalidRequest` if the template refuses, fails or exceeds a limit, and `CapacityError` if it waits too
        long.
        """
        message = {
            "template": chat.template,
            "messages": messages,
            "tools": tools,
            "template_kwargs": {**special_tokens, **template_kwargs},
            "add_generation_prompt": chat.add_generation_prompt,
            "continue_final_message": chat.continue_final_message,
        }
        async with self._turns.turn(current_client()):
            answer = await self._ask(message)
        if "error" in answer:
            raise InvalidRequest(f"{FIELD} {answer['error']}", FIELD)
        return answer["text"]

    async def close(self) -> None:
        """Ends the process."""
        await self._processes.close()

    async def _ask(self, message: Mapping[str, Any]) -> dict[str, str]:
        exchange = partial(_exchange, message=message)
        return await self._processes.run(exchange, TIMEOUT_S, "the chat template was not rendered")


def _exchange(process: subprocess.Popen[bytes], message: Mapping[str, Any]) -> dict[str, str]:
    """The process's answer; an error in its stead if the template has ended the process. On a thread."""
    line = write_and_read(process, _MAX_LINE_BYTES, to_json(message), b"\n")
    if line.endswith(b"\n"):
        return json.loads(line)
    status = close_process(process)
    log.warning("the process that renders clients' chat templates has ended", status=status)
    if status == -signal.SIGPROF:
        return {"error": f"takes more than {MAX_CPU_S:g} s of CPU time, the limit"}
    if status >= 0 or status in (-signal.SIGTERM, -signal.SIGHUP):
        raise TwostrokeError("chat templates of clients cannot be rendered: see the gateway's log")
    return {"error": f"needs more than {MAX_MEMORY_BYTES} bytes of memory, the limit, or is nested too deeply"}
