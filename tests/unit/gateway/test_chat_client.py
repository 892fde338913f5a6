"""The terminal client as a user runs it: a separate process that talks to a whole gateway."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pty
import signal
import socket
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from services.common.config import EMBEDDED_MODEL
from services.gateway import chat_client
from services.pb import dense_pb2
from tests.support.running_gateway import ServiceProcess, run, running_gateway, until
from tests.support.workers.fake_dense import FakeDense

BIDI_CONTROLS = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}  # of Unicode's annex 9
REFERENCE = AutoTokenizer.from_pretrained(EMBEDDED_MODEL)


def ids(text: str) -> list[int]:
    return REFERENCE(text, add_special_tokens=False)["input_ids"]


def chat_ids(*messages: tuple[str, str]) -> list[int]:
    conversation = [{"role": role, "content": content} for role, content in messages]
    return REFERENCE.apply_chat_template(conversation, add_generation_prompt=True, return_dict=False)


def start(*arguments: str) -> ServiceProcess:
    return ServiceProcess("services.gateway.chat_client", *arguments)


def test_a_prompt_prints_only_its_continuation(tmp_path: Path) -> None:
    async def test() -> None:
        answer = " city in 日本"
        dense = FakeDense(lambda submit: ids(answer))
        async with running_gateway(tmp_path, dense) as gateway:
            flags = [f"--max_tokens={len(ids(answer))}", "--seed", "5", "--stop", "_x_"]
            client = start("--address", gateway.address, "--prompt", "San_Francisco is a", *flags)
            assert await client.outcome() == (0, answer + "\n", "")
            [submit] = dense.submits
            assert submit.spec.prompt_token_ids == REFERENCE("San_Francisco is a")["input_ids"]
            assert submit.spec.sampling.temperature == 0
            assert submit.spec.sampling.seed == 5

    run(test())


def test_a_key_that_is_missing_or_unknown_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text('[[keys]]\nname = "team"\nkey = "0123456789abcdef"\n')

    async def test() -> None:
        async with running_gateway(tmp_path, FakeDense(lambda submit: ids(" a")), api_keys_file=keys) as gateway:
            asked = ["--address", gateway.address, "--prompt", "a", "--max-tokens", "1"]
            for given, said in (
                ([], "set TWOSTROKE_API_KEY, or give --api-key KEY"),
                (["--api-key", "wrong"], "it does not know the key of --api-key"),
            ):
                capsys.readouterr()
                assert await asyncio.to_thread(chat_client.main, [*asked, *given]) == 1
                [line] = capsys.readouterr().err.splitlines()
                assert line.startswith(f"services.gateway.chat_client: gateway at {gateway.address}: UNAUTHENTICATED: ")
                assert line.endswith(said)
            monkeypatch.setenv("TWOSTROKE_API_KEY", "0123456789abcdef")
            assert await asyncio.to_thread(chat_client.main, asked) == 0

    monkeypatch.delenv("TWOSTROKE_API_KEY", raising=False)
    run(test())


def test_a_prompt_can_be_a_message_of_a_chat(tmp_path: Path) -> None:
    async def test() -> None:
        dense = FakeDense(lambda submit: [*ids("Hi."), REFERENCE.eos_token_id])
        async with running_gateway(tmp_path, dense) as gateway:
            chat = ["--chat", "--system", "Be brief.", "--prompt", "Hello"]
            client = start("--address", gateway.address, *chat)
            assert await client.outcome() == (0, "Hi.\n", "")
            assert dense.submits[0].spec.prompt_token_ids == chat_ids(("system", "Be brief."), ("user", "Hello"))

    run(test())


def test_stop_after_ms_ends_the_request(tmp_path: Path) -> None:
    async def test() -> None:
        dense = FakeDense(lambda submit: ids("begin"))  # and then nothing more
        async with running_gateway(tmp_path, dense) as gateway:
            for stop_after_ms in (300, 1000, 3000, 9000):
                client = start("--address", gateway.address, "--prompt", "x", "--stop_after_ms", str(stop_after_ms))
                outcome = await client.outcome()
                if outcome[1] == "begin\n":  # on a busy machine it may come later
                    break
            assert outcome == (0, "begin\n", "")
            await until(lambda: len(dense.cancelled_seq_ids) == len(dense.submits))

    run(test())


@pytest.mark.parametrize(
    ("flags", "expected"),
    [(["--stop-after-ms", "300"], (0, 0)), (["--max-tokens", "0"], (1, 1))],  # status, lines on standard error
    ids=["stop", "error"],
)
def test_the_process_ends_although_its_other_threads_are_slow(
    tmp_path: Path, flags: list[str], expected: tuple[int, int]
) -> None:
    """The interpreter ends gRPC's thread, which then holds the lock of the ended call forever."""

    async def test() -> None:
        async with running_gateway(tmp_path, FakeDense(lambda submit: ids("begin"))) as gateway:
            arguments = ["--address", gateway.address, "--prompt", "x", *flags]
            client = ServiceProcess("tests.support.clients.slow_chat_client", *arguments)
            status, _, stderr = await client.outcome()
            assert (status, stderr.count("\n")) == expected

    run(test())


def test_a_refused_request_prints_one_line_and_ends_with_status_1(tmp_path: Path) -> None:
    async def test() -> None:
        async with running_gateway(tmp_path, FakeDense(lambda submit: [])) as gateway:
            client = start("--address", gateway.address, "--prompt", "x", "--max-tokens", "0")
            status, stdout, stderr = await client.outcome()
            assert (status, stdout) == (1, "")
            assert stderr.count("\n") == 1
            assert "INVALID_ARGUMENT: max_tokens is 0" in stderr

    run(test())


def test_the_error_names_a_missing_gateway(capsys: pytest.CaptureFixture[str]) -> None:
    for mode in (["--prompt", "x"], []):
        assert chat_client.main(["--address", "127.0.0.1:1", *mode], "twostroke chat") == 1
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.count("\n") == 1
        said = "nobody answers at 127.0.0.1:1: start a server, as `twostroke serve` does, or name"
        assert captured.err.startswith(f"twostroke chat: {said}")


@pytest.mark.parametrize("address", ["", "127.0.0.1", "http://127.0.0.1:8080"])
def test_what_is_no_address_is_refused(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        chat_client.main(["--address", address, "--prompt", "x"])
    assert f"--address {address!r} must be unix:PATH or HOST:PORT" in capsys.readouterr().err


def test_ctrl_c_ends_the_wait_for_a_gateway_that_does_not_answer() -> None:
    async def test() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            client = start("--address", f"127.0.0.1:{listener.getsockname()[1]}")
            connection, _ = await asyncio.to_thread(listener.accept)
            with connection:
                client.send_signal(signal.SIGINT)
                assert await client.outcome() == (130, "", "")

    run(test())


WILD = "a\x1b]0;owned\x07\x1b[2J\x9b31m\rb\t\u202ec\u2066\x7f\u0085\u2028日本\u200d\n"


def test_control_characters_in_an_answer_do_not_reach_a_terminal(tmp_path: Path) -> None:
    async def test() -> None:
        dense = FakeDense(lambda submit: [*ids(WILD), REFERENCE.eos_token_id])
        async with running_gateway(tmp_path, dense) as gateway:
            arguments = ["--address", gateway.address, "--prompt", "x"]
            assert await start(*arguments).outcome() == (0, WILD + "\n", ""), "a pipe gets the text unchanged"
            shown = await asyncio.to_thread(run_on_terminal, *arguments)
        text = shown.decode().replace("\r\n", "\n")  # a terminal writes both at the end of a line
        assert [each for each in text if unicodedata.category(each) == "Cc"] == ["\t", "\n", "\n"]
        assert [each for each in text if unicodedata.bidirectional(each) in BIDI_CONTROLS] == []
        assert text == (
            r"a\x1b]0;owned\x07\x1b[2J\x9b31m\rb" + "\t" + r"\u202ec\u2066\x7f\x85\u2028" + "日本\u200d\n\n"
        )

    run(test())


def run_on_terminal(*arguments: str) -> bytes:
    """Everything that the client writes to its terminal."""
    master, terminal = pty.openpty()
    command = [sys.executable, "-m", "services.gateway.chat_client", *arguments]
    data = b""
    with subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal) as client:
        os.close(terminal)
        with open(master, "rb", buffering=0) as screen, contextlib.suppress(OSError):  # EIO: the client has ended
            while piece := screen.read(4096):
                data += piece
    assert client.returncode == 0
    return data


def test_a_conversation_remembers_until_it_is_reset(tmp_path: Path) -> None:
    def script(submit: dense_pb2.Submit) -> list[int]:
        return [*ids(f"Answer {len(dense.submits)}."), REFERENCE.eos_token_id]

    async def test() -> None:
        async with running_gateway(tmp_path, dense) as gateway:
            client = start("--address", gateway.address, "--system", "Be brief.")
            status, stdout, stderr = await client.outcome("One?\n\n  Two?\n/reset\nThree?\n")
            assert (status, stderr) == (0, "")
            assert [f"Answer {i}." in stdout for i in (1, 2, 3, 4)] == [True, True, True, False]
            opening = ("system", "Be brief.")
            assert [list(submit.spec.prompt_token_ids) for submit in dense.submits] == [
                chat_ids(opening, ("user", "One?")),
                chat_ids(opening, ("user", "One?"), ("assistant", "Answer 1."), ("user", "Two?")),
                chat_ids(opening, ("user", "Three?")),
            ]

    dense = FakeDense(script)
    run(test())


def test_a_refused_message_is_dropped_and_the_conversation_continues(tmp_path: Path) -> None:
    async def test() -> None:
        async with running_gateway(tmp_path, dense) as gateway:
            client = start("--address", gateway.address)
            status, stdout, stderr = await client.outcome("word " * 3000 + "\nShort?\n")
            assert status == 0
            assert "maximum context length is 2048 tokens" in stderr
            assert stderr.count("\n") == 1
            assert "Yes." in stdout
            assert [list(submit.spec.prompt_token_ids) for submit in dense.submits] == [chat_ids(("user", "Short?"))]

    dense = FakeDense(lambda submit: [*ids("Yes."), REFERENCE.eos_token_id])
    run(test())


def test_ctrl_c_stops_the_answer_and_keeps_the_conversation(tmp_path: Path) -> None:
    def script(submit: dense_pb2.Submit) -> list[int]:
        if len(dense.submits) == 1:
            return ids("Once upon")  # and then nothing more
        return [*ids("Done."), REFERENCE.eos_token_id]

    async def test() -> None:
        async with running_gateway(tmp_path, dense) as gateway:
            client = start("--address", gateway.address)
            client.write("Tell me a story\n")
            await client.read_until("Once upon", "stdout")
            client.send_signal(signal.SIGINT)
            await until(lambda: len(dense.cancelled_seq_ids) == 1)
            status, stdout, stderr = await client.outcome("Stop?\n")
            assert (status, stderr) == (0, "")
            assert "Done." in stdout
            assert dense.submits[1].spec.prompt_token_ids == chat_ids(
                ("user", "Tell me a story"), ("assistant", "Once upon"), ("user", "Stop?")
            )

    dense = FakeDense(script)
    run(test())
