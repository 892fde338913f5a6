"""Makes the site of all pages in .site/html: `make site`. A link that leads nowhere ends it with an error.

Pages link to files beside docs/, so mkdocs gets a copy of the pages, and of every file that they link to, in the places
that they have in the repository; README.md is the first page. Links to other files of the repository, which are no
pages, lead to copies of these.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / ".site" / "source"
LINK = re.compile(r"\]\(([^)#\s]+)(#[^)\s]*)?\)|(?:src|srcset|href)=\"([^\"#]+)\"")


def main() -> int:
    """Returns mkdocs' exit status."""
    copy_pages(ROOT, SOURCE)
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", str(ROOT / "mkdocs.yml")]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


def copy_pages(root: Path, target: Path) -> None:
    """Copies README.md, the pages of docs/ and whatever they link to, directly or by another page."""
    shutil.rmtree(target, ignore_errors=True)
    to_copy, copied = [root / "README.md", *sorted((root / "docs").glob("*.md"))], set[Path]()
    while to_copy:
        file = to_copy.pop()
        if file in copied or not file.is_file() or not file.is_relative_to(root):
            continue  # mkdocs names a link to what is not there
        copied.add(file)
        place = target / ("index.md" if file == root / "README.md" else file.relative_to(root))
        place.parent.mkdir(parents=True, exist_ok=True)
        if file.suffix != ".md":
            shutil.copyfile(file, place)
            continue
        text = file.read_text(encoding="utf-8")
        place.write_text(text.replace("README.md", "index.md") if file.parent != root else text, encoding="utf-8")
        links = (match[1] or match[3] for match in LINK.finditer(text))
        to_copy += [(file.parent / link).resolve() for link in links if "://" not in link]


if __name__ == "__main__":
    sys.exit(main())
