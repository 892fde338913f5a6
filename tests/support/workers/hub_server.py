"""`python -m tests.support.workers.hub_server DIRECTORY`: a Hub on loopback with the model `org/tiny`, until killed.

Prints its address. Needs nothing but Python, for containers without the packages of the tests.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from tests.support.hub import Hub, Repository


def main(directory: Path) -> None:
    """Serves the files of a directory."""
    files = {file.name: file.read_bytes() for file in directory.iterdir() if file.is_file()}
    with Hub({"org/tiny": Repository(files)}).serving() as hub:
        print(hub.address, flush=True)
        signal.pause()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
