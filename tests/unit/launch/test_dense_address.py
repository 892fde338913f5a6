"""The address of the present dense worker, as a link that gateways follow."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from services.common.errors import ConfigError
from services.launch.dense_address import DenseAddress


def listen(address: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address.removeprefix("unix:"))
    listener.listen()
    return listener


def who_answers(path: Path, listeners: list[socket.socket]) -> int:
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
        for number, listener in enumerate(listeners):
            listener.setblocking(False)
            try:
                listener.accept()[0].close()
            except BlockingIOError:
                continue
            return number
    raise AssertionError("nobody got the connection")


def test_a_connection_goes_to_the_worker_last_pointed_to(tmp_path: Path) -> None:
    run_dir, path = tmp_path / "run", tmp_path / "dense.sock"
    run_dir.mkdir()
    place = DenseAddress(f"unix:{path}", run_dir)
    addresses = [place.new_address(), place.new_address()]
    listeners = [listen(address) for address in addresses]
    for number in (0, 1, 0):
        place.point_to(addresses[number])
        assert who_answers(path, listeners) == number
    place.remove()
    assert not path.is_symlink()
    for listener in listeners:
        listener.close()


def test_what_a_dead_launcher_left_is_replaced_and_what_serves_or_is_a_file_is_not(tmp_path: Path) -> None:
    path = tmp_path / "dense.sock"
    path.symlink_to(tmp_path / "gone.sock")
    DenseAddress(f"unix:{path}", tmp_path)
    path.unlink()
    listen(f"unix:{path}").close()
    place = DenseAddress(f"unix:{path}", tmp_path)
    address = place.new_address()
    with listen(address):
        place.point_to(address)
        with pytest.raises(ConfigError, match="another process serves there"):
            DenseAddress(f"unix:{path}", tmp_path)
    path.unlink()
    path.write_text("a letter")
    with pytest.raises(ConfigError, match="the file there is not a socket"):
        DenseAddress(f"unix:{path}", tmp_path)
    assert path.read_text() == "a letter"


def test_another_ones_link_is_not_removed(tmp_path: Path) -> None:
    path = tmp_path / "dense.sock"
    place = DenseAddress(f"unix:{path}", tmp_path)
    place.point_to(place.new_address())
    path.unlink()
    path.symlink_to(tmp_path / "somebody.sock")
    place.remove()
    assert path.is_symlink()


def test_at_a_port_there_is_one_worker_only(tmp_path: Path) -> None:
    place = DenseAddress("127.0.0.1:50052", tmp_path)
    assert not place.can_switch
    assert place.new_address() == "127.0.0.1:50052"
    place.point_to(place.new_address())
    place.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"cannot listen on unix:{tmp_path}/no/dense.sock: there is no directory"):
        DenseAddress(f"unix:{tmp_path}/no/dense.sock", tmp_path)
