"""The address of the present worker of a role is a symbolic link that others follow."""

from __future__ import annotations

import errno
import socket
from pathlib import Path

import pytest

from services.common.errors import ConfigError
from services.launch.switched_address import SwitchedAddress


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
    path = tmp_path / "dense.sock"
    link = SwitchedAddress(f"unix:{path}")
    addresses = [link.new_address(), link.new_address()]
    listeners = [listen(address) for address in addresses]
    for number in (0, 1, 0):
        link.point_to(addresses[number])
        assert who_answers(path, listeners) == number
    for listener in listeners:
        listener.close()  # as a killed worker does, which leaves the file
    link.remove()
    assert not list(tmp_path.iterdir())


def test_without_room_for_a_link_all_stays_and_is_removed_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "dense.sock"
    link = SwitchedAddress(f"unix:{path}")
    addresses = [link.new_address(), link.new_address()]
    link.point_to(addresses[0])

    def is_full(self: Path, target: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "symlink_to", is_full)
    with pytest.raises(OSError, match="No space left"):
        link.point_to(addresses[1])
    assert f"unix:{path.with_name(str(path.readlink()))}" == addresses[0]
    link.remove()
    assert not list(tmp_path.iterdir())


def test_a_switch_that_is_prepared_needs_no_room_any_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "dense.sock"
    link = SwitchedAddress(f"unix:{path}")
    addresses = [link.new_address(), link.new_address()]
    link.point_to(addresses[0])
    point_back = link.prepare(addresses[0])
    link.prepare(link.new_address())  # and it stays at that
    link.point_to(addresses[1])

    def is_full(self: Path, target: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "symlink_to", is_full)
    assert f"unix:{path.with_name(str(path.readlink()))}" == addresses[1]
    point_back()
    assert f"unix:{path.with_name(str(path.readlink()))}" == addresses[0]
    link.remove()
    assert not list(tmp_path.iterdir())


def test_who_sees_the_address_under_another_name_of_its_directory_reaches_the_worker(tmp_path: Path) -> None:
    """As in another container, which has nothing of the launcher's but this directory."""
    (tmp_path / "here").mkdir()
    link = SwitchedAddress(f"unix:{tmp_path}/here/dense.sock")
    address = link.new_address()
    with listen(address) as listener:
        link.point_to(address)
        (tmp_path / "here").rename(tmp_path / "there")
        assert who_answers(tmp_path / "there" / "dense.sock", [listener]) == 0


def test_only_a_dead_launchers_link_or_socket_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "dense.sock"
    path.symlink_to(tmp_path / "gone.sock")
    SwitchedAddress(f"unix:{path}")
    path.unlink()
    listen(f"unix:{path}").close()
    link = SwitchedAddress(f"unix:{path}")
    address = link.new_address()
    with listen(address):
        link.point_to(address)
        with pytest.raises(ConfigError, match="another process serves there"):
            SwitchedAddress(f"unix:{path}")
    path.unlink()
    path.write_text("a letter")
    with pytest.raises(ConfigError, match="the file there is not a socket"):
        SwitchedAddress(f"unix:{path}")
    assert path.read_text() == "a letter"


def test_what_a_killed_launcher_has_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "dense.sock"
    killed = SwitchedAddress(f"unix:{path}")
    addresses = [killed.new_address(), killed.new_address(), killed.new_address()]
    listen(addresses[0]).close()
    listen(addresses[1]).close()
    killed.point_to(addresses[1])
    (tmp_path / "dense.sock-notes").write_text("a letter")
    with listen(addresses[2]):
        SwitchedAddress(f"unix:{path}")
        left = {each.name for each in tmp_path.iterdir()}
        assert left == {"dense.sock", "dense.sock-notes", Path(addresses[2]).name}


def test_the_link_of_another_process_is_not_removed(tmp_path: Path) -> None:
    path = tmp_path / "dense.sock"
    link = SwitchedAddress(f"unix:{path}")
    link.point_to(link.new_address())
    other = SwitchedAddress(f"unix:{path}")
    address = other.new_address()
    with listen(address) as listener:
        other.point_to(address)
        link.remove()
        assert who_answers(path, [listener]) == 0


def test_a_worker_at_a_port_cannot_be_switched(tmp_path: Path) -> None:
    link = SwitchedAddress("127.0.0.1:50052")
    assert not link.can_switch
    assert link.new_address() == "127.0.0.1:50052"
    link.point_to(link.new_address())
    link.remove()
    assert list(tmp_path.iterdir()) == []


def test_the_error_names_a_missing_directory(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"cannot listen on unix:{tmp_path}/no/dense.sock: there is no directory"):
        SwitchedAddress(f"unix:{tmp_path}/no/dense.sock")
