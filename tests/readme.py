"""What README.md claims in a form that tests can check: blocks to run, names of code, of files, of settings."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from tests.cluster import REPOSITORY

README = (REPOSITORY / "README.md").read_text()


@dataclass(frozen=True)
class Block:
    """A fenced block. Blocks that no test shall run are indented instead."""

    language: str
    code: str

    def __str__(self) -> str:
        return f"{self.language}: {self.code.strip().splitlines()[0][:50]}"


def fenced_blocks() -> list[Block]:
    """In order."""
    return [Block(*match) for match in re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)]


def function_references() -> list[tuple[str, str]]:
    """Each `path.py:name`."""
    return re.findall(r"`([\w/.-]+\.py):(\w+)`", README)


def mentioned_paths() -> list[str]:
    """Each path with a folder and an ending, and each entry of the layout."""
    without_blocks = re.sub(r"^```.*?^```$", "", README, flags=re.MULTILINE | re.DOTALL)
    endings = "py|md|toml|ya?ml|json|proto|html|txt|svg|png"
    named = re.findall(rf"(?<![\w/.-])((?:[\w-]+/)+[\w-]+\.(?:{endings}))\b", without_blocks)
    layout = re.search(r"^## Layout\n(.*?)(?:^## |\Z)", README, re.MULTILINE | re.DOTALL)
    assert layout is not None, "README.md has no layout"
    return named + re.findall(r"^    ([\w/.-]+/|[\w/-]+\.py) ", layout[1], re.MULTILINE)


def mentioned_settings(sections: Collection[str]) -> list[str]:
    """Each `section.key` of a `--set`, and each one in backticks that begins with one of `sections`."""
    in_options = re.findall(r"--set (\w+\.\w+)=", README)
    in_text = re.findall(rf"`((?:{'|'.join(sections)})\.\w+)`", README)
    return [setting for setting in in_options + in_text if setting != "section.key"]


def mentioned_make_targets() -> list[str]:
    """Each `make target`."""
    return re.findall(r"(?:`|^    )make (\w+)", README, re.MULTILINE)
