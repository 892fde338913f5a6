"""Reads the claims of README.md and docs/ that tests can check: links, files, functions, settings, commands."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from tests.support.cluster import REPOSITORY

README = REPOSITORY / "README.md"
DOCS = REPOSITORY / "docs"
LIFE_OF_A_TOKEN = DOCS / "life-of-a-token.md"
PAGES = (README, *sorted(DOCS.rglob("*.md")))


@dataclass(frozen=True)
class Block:
    """A fenced block of code. Tests run these; a block that no test runs is indented in the page instead."""

    language: str
    code: str

    def __str__(self) -> str:
        return f"{self.language}: {self.code.strip().splitlines()[0][:50]}"


def page_name(page: Path) -> str:
    """The path from the root of the repository; it appears in the names of tests."""
    return page.relative_to(REPOSITORY).as_posix()


def fenced_blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, in its order."""
    return [Block(*match) for match in re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)]


def function_references(page: Path) -> list[tuple[str, str]]:
    """Each `path.py:name`."""
    return re.findall(r"`([\w/.-]+\.py):(\w+)`", page.read_text())


def mentioned_paths(page: Path) -> list[str]:
    """All paths with a folder and an ending, and all entries of the section "Layout" of docs/adding.md."""
    text = _without_blocks(page)
    endings = "py|md|toml|ya?ml|json|proto|html|txt|svg|png"
    named = re.findall(rf"(?<![\w/.-])((?:[\w-]+/)+[\w-]+\.(?:{endings}))\b", text)
    layout = re.search(r"^## Layout\n(.*?)(?:^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert layout is not None or page.name != "adding.md", "docs/adding.md has no layout"
    return named + (re.findall(r"^    ([\w/.-]+/|[\w/-]+\.py) ", layout[1], re.MULTILINE) if layout else [])


def mentioned_settings(page: Path, sections: Collection[str]) -> list[str]:
    """Each `section.key` after `--set`, and each one in backticks whose section is one of `sections`."""
    text = page.read_text()
    in_options = re.findall(r"--set (\w+\.\w+)=", text)
    in_text = re.findall(rf"`((?:{'|'.join(sections)})\.\w+)`", text)
    return [setting for setting in in_options + in_text if setting != "section.key"]


def mentioned_make_targets(page: Path) -> list[str]:
    """Each `make target`."""
    return re.findall(r"(?:`|^    )make (\w+)", page.read_text(), re.MULTILINE)


def links(page: Path) -> list[str]:
    """The targets of all links except those to other sites."""
    text = re.sub(r"`[^`\n]*`", "", _without_blocks(page))
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    return [target for target in targets if not re.match(r"[a-z]+:", target)]


def linked_file(page: Path, link: str) -> Path:
    """The file to which a link of this page leads. It may not exist."""
    path = link.partition("#")[0]
    return (page.parent / path).resolve() if path else page


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings by GitHub's rule: lower case, only letters, digits, hyphens and underscores."""
    headings = re.findall(r"^#+ (.*)$", _without_blocks(page), re.MULTILINE)
    found: set[str] = set()
    for heading in headings:
        anchor = re.sub(r"[^\w -]", "", heading.strip().lower()).replace(" ", "-")
        found.add(next(name for name in _numbered(anchor) if name not in found))
    return found


def _numbered(anchor: str) -> Iterable[str]:
    yield anchor
    yield from (f"{anchor}-{number}" for number in range(1, 1000))


def _without_blocks(page: Path) -> str:
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
