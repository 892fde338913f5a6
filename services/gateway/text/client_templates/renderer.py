"""A process that renders clients' chat templates: `python -m services.gateway.text.client_templates.renderer`.

It is transformers' own sandbox of Jinja2, in a process of its own: `{{ 9**(9**9) }}` or `{{ 'a' * 10**10 }}` is a
single operation that nothing within a process can end. Whatever a template does to time or memory, it does to this
process alone: the limits below end it, and the gateway starts another one. Standard input has one chat per line, as
JSON; each line of the answer has its text or an error.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from typing import Any

import jinja2
from transformers.utils.chat_template_utils import render_jinja_template

MAX_CPU_S = 1.0  # for one template; others wait meanwhile
MAX_MEMORY_BYTES = 2**30  # of address space
MAX_RENDERED_CHARACTERS = 4 * 2**20
MAX_ERROR_CHARACTERS = 300  # of a template's error message
NICENESS = 5  # streams come first


def main() -> None:
    """Serves until standard input ends."""
    os.nice(NICENESS)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the gateway decides when this process ends
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # nobody reads the answer if the gateway has died
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # it has no files to write
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    for line in sys.stdin:
        message = json.loads(line)
        # Ends the process with SIGPROF, also within one long operation.
        signal.setitimer(signal.ITIMER_PROF, MAX_CPU_S)
        answer = _answer(message)
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def _answer(message: dict[str, Any]) -> dict[str, str]:
    try:
        text = _render(**message)
    except (jinja2.TemplateError, ValueError) as error:  # raised by the template or by transformers
        return {"error": f"refuses this chat: {_short(error)}"}
    except Exception as error:  # a template is a program and may raise anything
        return {"error": f"fails on this chat: {type(error).__name__}: {_short(error)}"}
    if len(text) > MAX_RENDERED_CHARACTERS:
        return {"error": f"makes {len(text)} characters, at most {MAX_RENDERED_CHARACTERS} allowed"}
    return {"text": text}


def _render(
    template: str,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]],
    template_kwargs: dict[str, Any],
    add_generation_prompt: bool,
    continue_final_message: bool,
) -> str:
    """The same text as from `apply_chat_template` of a tokenizer; `template_kwargs` has its special tokens, too."""
    [text], _ = render_jinja_template(
        [[{name: value for name, value in each.items() if value is not None} for each in messages]],
        tools=tools or None,
        chat_template=template,
        continue_final_message=continue_final_message,
        add_generation_prompt=add_generation_prompt,
        **template_kwargs,
    )
    return text


def _short(error: Exception) -> str:
    return str(error)[:MAX_ERROR_CHARACTERS]


if __name__ == "__main__":
    main()
