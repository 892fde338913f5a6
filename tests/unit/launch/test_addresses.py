"""The addresses of the launcher's services, and the errors for addresses that cannot work."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from services.common.config import load_config
from services.common.errors import ConfigError
from services.launch.addresses import check_addresses, check_chat_template, check_free, place_sockets
from services.launch.child import Child
from services.launch.lifelines import Lifelines
from services.launch.service_configs import gateway_configs


def test_the_error_names_a_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(ConfigError, match=f"gateway.http_address 127.0.0.1:{port}: port in use; .* by --port$"):
            check_free(f"127.0.0.1:{port}", "gateway.http_address")
        both = r"another port by --set gateway.address=127.0.0.1:PORT; a second server needs another --port, too$"
        with pytest.raises(ConfigError, match=both):
            check_addresses(load_config(None, [f"gateway.address=127.0.0.1:{port}"]))


def test_an_address_of_another_host_is_not_called_in_use() -> None:
    with pytest.raises(ConfigError, match=r"http_address 192\.0\.2\.1:8080: address not of this host; .* by --host$"):
        check_free("192.0.2.1:8080", "gateway.http_address")  # an address for documentation, which no host has


def test_the_error_names_an_unknown_host() -> None:
    with pytest.raises(ConfigError, match=r"gateway\.address no-such-host\.invalid:8080"):
        check_free("no-such-host.invalid:8080", "gateway.address")


def test_a_unix_socket_that_cannot_be_made_is_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "letter").write_text("dear")
    own = f"gateway.address=unix:{tmp_path}/gateway"
    for name, reason in (("nowhere/http", "there is no directory"), ("letter", "the file there is not a socket")):
        with pytest.raises(ConfigError, match=f"cannot listen on unix:{tmp_path}/{name}: {reason}"):
            check_addresses(load_config(None, [own, f"gateway.http_address=unix:{tmp_path}/{name}"]))


def test_a_template_that_is_not_there_is_refused_before_anything_starts(tmp_path: Path) -> None:
    check_chat_template(load_config(None))
    with pytest.raises(ConfigError, match=r"gateway\.chat_template '/nowhere\.jinja' cannot be read"):
        check_chat_template(load_config(None, ["gateway.chat_template=/nowhere.jinja"]))
    workers = "launch.services=['dense_worker', 'attn_worker']"
    check_chat_template(load_config(None, ["gateway.chat_template=/nowhere.jinja", workers]))


def test_port_0_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1:0: nobody would find it; ports are from 1 to 65535"):
        check_free("127.0.0.1:0", "gateway.address")


@pytest.mark.parametrize("num_processes", [1, 2])
def test_the_launcher_has_a_private_socket_to_every_gateway(tmp_path: Path, num_processes: int) -> None:
    config = load_config(None, [f"launch.gateway_processes={num_processes}"])
    configs = gateway_configs(place_sockets(config, tmp_path, is_private=False), tmp_path, tmp_path)
    own = {"run_dir": tmp_path, "environment": None, "lifelines": Lifelines()}
    children = [Child("gateway", "gateway", *each, **own) for each in configs]
    addresses = [child.address for child in children]
    assert addresses == [f"unix:{tmp_path}/gateway-{index}.sock" for index in range(num_processes)]


def test_a_configured_socket_is_kept(tmp_path: Path) -> None:
    config = load_config(None, ["gateway.local_address=unix:/mine.sock"])
    assert place_sockets(config, tmp_path, is_private=False).gateway.local_address == "unix:/mine.sock"
