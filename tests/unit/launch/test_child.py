"""A child process of the launcher."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from services.common.config import Config
from services.common.errors import PeerError
from services.launch.child import Child

TIMEOUT_S = 60.0


def test_an_end_is_noticed_however_busy_the_loops_own_threads_are(tmp_path: Path) -> None:
    is_over = threading.Event()

    async def watch() -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        busy = asyncio.ensure_future(asyncio.to_thread(is_over.wait))
        child = Child("nobody", "nobody", Config(), tmp_path, None)  # a module that does not exist
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await child.watch()
        finally:
            is_over.set()
            await busy

    with pytest.raises(PeerError, match="nobody ended before the cluster could serve: exit code 1"):
        asyncio.run(watch())
