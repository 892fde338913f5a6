"""One normal client whose stream must keep its pace, whatever other clients do to the gateway."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Mapping

from tests.support.clients.http_clients import client

LATE_S = 30.0  # limit of every wait of these tests; a busy machine may be slow
MAX_GAP_S = 15.0  # a step takes milliseconds; only a gateway that has stopped stays silent for so long
PATH = "/v1/completions"
LONG = {"prompt": "San Francisco is a", "max_tokens": 1500, "ignore_eos": True, "stream": True}


class SteadyStream:
    """Streams one answer after another, and records the time of each event."""

    def __init__(self, address: str, headers: Mapping[str, str] | None = None) -> None:
        self._address = address
        self._headers = headers
        self._times: list[float] = []
        self._is_stopping = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def check(self, since: float) -> None:
        """Checks that events have arrived without a long gap since then, and that one more arrives now."""
        gap = self.longest_gap(since)
        assert gap < MAX_GAP_S, f"the normal stream stood still for {gap:.1f} s"

    def longest_gap(self, since: float) -> float:
        """The longest time without an event since then, in seconds; waits for one more. Fails if there was an error."""
        count = len(self._times)
        wait_until(lambda: len(self._times) > count + 1 or self._error is not None)
        assert self._error is None, self._error
        times = [since, *(at for at in self._times if at >= since)]
        return max(later - earlier for earlier, later in itertools.pairwise(times))

    def stop(self) -> None:
        self._is_stopping.set()
        self._thread.join(LATE_S)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        try:
            with client(self._address) as http:
                while not self._is_stopping.is_set():
                    body = LONG | {"temperature": 0}
                    with http.stream("POST", PATH, json=body, headers=self._headers) as response:
                        assert response.status_code == 200
                        for line in response.iter_lines():
                            if line:
                                assert '"error"' not in line, line
                                self._times.append(time.monotonic())
                            if self._is_stopping.is_set():
                                break
        except BaseException as error:
            self._error = error


def wait_until(condition: Callable[[], object], limit_s: float = LATE_S) -> None:
    """Waits until the condition holds."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
