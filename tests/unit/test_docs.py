"""README.md is short and leads to every page, all links work, and docs/ agrees with the code."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from docs.build_site import copy_pages
from services.common.errors import TwostrokeError
from services.gateway.apis.openai.chat_schema import ChatRequest
from services.gateway.apis.openai.completion_schema import CompletionRequest
from services.gateway.apis.openai.fields import StreamOptions
from services.gateway.apis.openai.token_schema import DetokenizeBody, TokenizeBody
from services.gateway.apis.shared.request_model import RequestModel
from tests.support.cluster import REPOSITORY
from tests.support.documents import DOCS, PAGES, README, anchors, linked_file, links, page_name

MAX_README_LINES = 150
API, CONFIGURATION = DOCS / "api.md", DOCS / "configuration.md"


def test_the_readme_is_short() -> None:
    assert len(README.read_text().splitlines()) <= MAX_README_LINES


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_every_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    for link in links(page):
        target = linked_file(page, link)
        assert target.exists(), f"{page_name(page)} links to {link}, which is not there"
        assert target.is_relative_to(REPOSITORY), f"{page_name(page)} links to {link}, outside of the repository"
        _, has_anchor, anchor = link.partition("#")
        if has_anchor:
            assert anchor in anchors(target), f"{page_name(page)} links to {link}, and there is no such heading"


def test_every_page_can_be_reached_from_the_readme() -> None:
    found, to_read = {README}, [README]
    while to_read:
        page = to_read.pop()
        for target in (linked_file(page, link) for link in links(page)):
            if target.suffix == ".md" and target not in found:
                found.add(target)
                to_read.append(target)
    assert set(PAGES) <= found


PITFALLS = "## What can go wrong"
TASKS = [page for page in DOCS.glob("*.md") if PITFALLS in page.read_text()]
GUIDES = ("serving", "clients", "structured-output", "tools", "lora", "speculation", "quantization", "gpu")
GUIDES += ("several-gpus", "operations", "monitoring", "containers", "kubernetes", "ray")


def test_every_task_has_a_page_that_ends_with_what_can_go_wrong() -> None:
    assert {page.stem for page in TASKS} >= set(GUIDES)
    linked = set(re.findall(r"\(([\w-]+)\.md", (DOCS / "quick-start.md").read_text()))
    assert linked >= set(GUIDES)
    for page in TASKS:
        assert [line for line in page.read_text().splitlines() if line.startswith("## ")][-1] == PITFALLS, page.name


@pytest.mark.parametrize("page", TASKS, ids=page_name)
def test_messages_that_are_quoted_are_those_of_the_code(page: Path) -> None:
    """`…` stands for what a message names; texts that are broken into several literals are joined."""
    code = "".join(file.read_text() for file in (REPOSITORY / "services").rglob("*.py"))
    code = re.sub(r'"\s*\n\s*f?"', "", code) + CONFIGURATION.read_text()
    rows = page.read_text().rpartition(PITFALLS)[2].splitlines()
    for quoted in (text for row in rows for text in re.findall("`([^`]+)`", row.split(" | ")[0])):
        missing = [part for part in quoted.split("…") if part.strip() not in code]
        assert not missing, f"{page.name} quotes {quoted!r}, and no message has {missing}"


def test_the_page_of_the_configuration_is_up_to_date(tmp_path: Path) -> None:
    generated = tmp_path / "configuration.md"
    subprocess.run(
        [sys.executable, "docs/generate_configuration.py", str(generated)], cwd=REPOSITORY, check=True, timeout=60
    )
    assert (DOCS / "configuration.md").read_text() == generated.read_text(), "it is stale: run `make docs`"


def test_every_page_has_its_place_in_the_navigation_of_the_site() -> None:
    listed = re.findall(r"^ +- .*: (docs/\S+\.md)$", (REPOSITORY / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(f"docs/{page.name}" for page in DOCS.glob("*.md"))


def test_the_site_has_every_page_and_what_it_shows_and_links_to(tmp_path: Path) -> None:
    copy_pages(REPOSITORY, tmp_path)
    assert {page.name for page in (tmp_path / "docs").glob("*.md")} == {page.name for page in DOCS.glob("*.md")}
    for page in PAGES:
        place = tmp_path / ("index.md" if page == README else page.relative_to(REPOSITORY))
        for link in links(page):
            target = linked_file(page, link)
            assert (place.is_file() and (tmp_path / target.relative_to(REPOSITORY)).exists()) or target == README


def test_the_picture_of_the_strokes_has_a_light_and_a_dark_form_of_every_colour() -> None:
    picture = (DOCS / "images" / "two-strokes.svg").read_text()
    ElementTree.fromstring(picture)
    light, dark = re.findall(r":root \{ (.*?) \}", picture)
    names = re.findall(r"(--[\w-]+):", light)
    assert names == re.findall(r"(--[\w-]+):", dark) and set(re.findall(r"var\((--[\w-]+)\)", picture)) == set(names)
    assert "prefers-color-scheme: dark" in picture and not re.search(r'(fill|stroke)="#', picture)


@pytest.mark.parametrize("model", [CompletionRequest, ChatRequest, StreamOptions, TokenizeBody, DetokenizeBody])
def test_every_field_of_a_request_is_on_the_page_of_the_api(model: type[RequestModel]) -> None:
    words = set(re.findall(r"`(\w+)`", API.read_text()))
    assert set(model.model_fields) <= words


def test_the_page_of_the_api_lists_errors_with_their_codes() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\d{3}) \| ([A-Z_]+) \|", API.read_text(), re.MULTILINE)
    kinds = [TwostrokeError, *_all_subclasses(TwostrokeError)]
    of_code = {kind.code: (kind.code, str(kind.http_status), kind.status_code.name) for kind in kinds}
    assert rows == [of_code[code] for code, _, _ in rows]
    assert {"invalid_request", "capacity", "unavailable"} <= {code for code, _, _ in rows}


def _all_subclasses(kind: type[TwostrokeError]) -> list[type[TwostrokeError]]:
    return [each for child in kind.__subclasses__() for each in (child, *_all_subclasses(child))]
