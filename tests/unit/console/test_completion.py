"""`twostroke completion`: what shells propose with its scripts."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from services.console import completion
from services.console.__main__ import COMMANDS
from services.launch.flags import FLAGS
from tests.support.cluster import REPOSITORY

TIMEOUT_S = 20.0
# Bash sets these variables and calls the function that the script has registered, whenever somebody presses the key.
PROPOSE = """
. "$1"; shift
function=$(complete -p twostroke | sed 's/.* -F \\([^ ]*\\) .*/\\1/')
COMP_WORDS=("$@"); COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); "$function" twostroke "${COMP_WORDS[COMP_CWORD]}"
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("completion") / "script"
    with pytest.MonkeyPatch.context() as patch, file.open("w") as output:
        patch.setattr("sys.stdout", output)
        assert completion.main(["bash"]) == 0
    return file


def proposals(script: Path, *words: str) -> set[str]:
    """What bash proposes for the last word."""
    command = ["bash", "-c", PROPOSE, "bash", str(script), "twostroke", *words]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    assert not done.stderr
    return set(done.stdout.split())


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("",), set(COMMANDS)),
        (("serve", "--kv-"), {"--kv-cache-dtype"}),
        (("serve", "--kv-cache-dtype", ""), {"auto", "model", "fp8", "int8", "fp8_e4m3"}),
        (("serve", "--port", "80", "--served"), {"--served-model-name"}),
        (("serve", "deplo"), {"deploy"}),
        (("doctor", "--uvicorn-log"), set()),
        (("ctl", ""), {"add-attention", "drain-attention", "replace-dense", "status"}),
        (("ctl", "replace-dense", "--open-requests", "k"), {"keep"}),
        (("models", "p"), {"pull"}),
        (("completion", ""), {"bash", "zsh", "fish"}),
    ],
)
def test_bash_proposes_commands_options_values_and_directories(
    words: tuple[str, ...], expected: set[str], script: Path
) -> None:
    assert proposals(script, *words) == expected


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_get_every_flag(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert completion.main([shell]) == 0
    script = capsys.readouterr().out
    assert [flag.name for flag in FLAGS if flag.name.removeprefix("--") not in script] == []


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("twostroke ", set(COMMANDS)),
        ("twostroke serve --kv-", {"--kv-cache-dtype"}),
        ("twostroke serve --kv-cache-dtype ", {"auto", "model", "fp8", "int8", "fp8_e4m3"}),
        ("twostroke models p", {"pull"}),
    ],
)
def test_fish_proposes_commands_options_and_values(
    line: str, expected: set[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert completion.main(["fish"]) == 0
    file = tmp_path / "twostroke.fish"
    file.write_text(capsys.readouterr().out)
    environment = os.environ | {"HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path)}
    done = subprocess.run(
        ["fish", "--no-config", "-c", 'source $argv[1]; complete --do-complete "$argv[2]"', str(file), line],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=True,
    )  # fmt: skip
    assert not done.stderr
    assert {each.partition("\t")[0] for each in done.stdout.splitlines()} >= expected
    if line.endswith("--kv-"):
        assert len(done.stdout.splitlines()) == len(expected)


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
def test_zsh_completes_what_only_one_command_option_or_value_begins_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert completion.main(["zsh"]) == 0
    (tmp_path / "_twostroke").write_text(capsys.readouterr().out)
    process, terminal = pty.fork()
    if not process:
        os.chdir(tmp_path)
        os.execvpe("zsh", ["zsh", "-f", "-i"], os.environ | {"TERM": "dumb", "HOME": str(tmp_path), "PS1": "> "})
    try:
        os.write(terminal, b"fpath=($PWD $fpath); autoload -U compinit; compinit -u -D; echo rea''dy\n")
        wait_for(terminal, b"ready")
        for typed, expected in (
            (b"twostroke comp\t", b"twostroke completion "),
            (b"twostroke serve --kv-\t", b"twostroke serve --kv-cache-dtype "),
            (b"twostroke serve --kv-cache-dtype in\t", b"--kv-cache-dtype int8 "),
        ):
            os.write(terminal, typed)
            wait_for(terminal, expected)
            os.write(terminal, b"\x15")  # erases the line
    finally:
        os.write(terminal, b"\x15exit\n")
        os.waitpid(process, 0)
        os.close(terminal)


def wait_for(terminal: int, text: bytes) -> None:
    """Reads what a shell writes until it has written `text`."""
    seen, deadline = b"", time.monotonic() + TIMEOUT_S
    while text not in seen:
        assert time.monotonic() < deadline and select.select([terminal], [], [], TIMEOUT_S)[0], seen
        seen += os.read(terminal, 4096)


def test_an_unknown_shell_names_those_that_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        completion.main(["tcsh"])
    error = capsys.readouterr().err
    assert all(name in error for name in completion.SHELLS)
