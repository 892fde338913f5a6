"""`twostroke completion`: what shells propose with its scripts."""

from __future__ import annotations

import shutil
import subprocess
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
        (("ctl", ""), {"replace-dense", "status"}),
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
def test_other_shells_get_every_flag(shell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert completion.main([shell]) == 0
    script = capsys.readouterr().out
    assert [flag.name for flag in FLAGS if flag.name.removeprefix("--") not in script] == []
    if shutil.which(shell) is not None:
        file = tmp_path / "script"
        file.write_text(script)
        subprocess.run([shell, "-n", str(file)], timeout=TIMEOUT_S, check=True)


def test_an_unknown_shell_names_those_that_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        completion.main(["tcsh"])
    error = capsys.readouterr().err
    assert all(name in error for name in completion.SHELLS)
