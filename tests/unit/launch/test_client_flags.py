"""The flags with which the launcher calls the chat client."""

from __future__ import annotations

import pytest

from services.common.cli import dashed
from services.gateway.chat_client import make_parser
from services.launch.summary import client_flags


@pytest.mark.parametrize("text", ["-x", "--stop_at", "-Kd_f8"])
def test_a_prompt_and_a_key_that_begin_with_a_dash_reach_the_client(text: str) -> None:
    arguments = make_parser("chat").parse_args(dashed(client_flags("127.0.0.1:1", text, 7, text)))
    assert (arguments.address, arguments.max_tokens) == ("127.0.0.1:1", 7)
    assert (arguments.prompt, arguments.api_key) == (text, text)
