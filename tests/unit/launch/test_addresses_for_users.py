"""How the launcher names the gateway's addresses when all services serve."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import structlog

from services.common.config import Config, GatewaySection, LogSection
from services.common.logs import configure_logs
from services.launch.summary import print_addresses

GATEWAY = GatewaySection(address="127.0.0.1:1234", http_address="127.0.0.1:5678")


@pytest.fixture
def kept_log_config() -> Iterator[None]:
    """Undoes what a test configures for the logs of this process."""
    config = structlog.get_config()
    yield
    structlog.configure(**config)


def test_the_addresses_are_printed_for_a_person(capfd: pytest.CaptureFixture[str]) -> None:
    print_addresses(Config(gateway=GATEWAY), "twostroke chat")
    text = capfd.readouterr().err
    assert "Serving tiny-llama for gRPC clients at 127.0.0.1:1234" in text
    assert "http://127.0.0.1:5678/" in text
    assert "a chat:     twostroke chat --address 127.0.0.1:1234" in text


@pytest.mark.usefixtures("kept_log_config")
def test_with_logs_in_json_every_line_is_json(capfd: pytest.CaptureFixture[str]) -> None:
    section = LogSection(format="json")
    configure_logs(section, "launch")
    print_addresses(Config(gateway=GATEWAY, log=section), "twostroke chat")
    [line] = capfd.readouterr().err.splitlines()
    logged = json.loads(line)
    assert (logged["service"], logged["event"], logged["model"]) == ("launch", "serving", "tiny-llama")
    assert (logged["address"], logged["http_address"]) == ("127.0.0.1:1234", "127.0.0.1:5678")
