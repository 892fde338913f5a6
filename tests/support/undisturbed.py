"""Measures what an attack costs others: gaps in another client's stream, delays of the event loop, and memory."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping

from tests.support.clients.http_clients import client
from tests.support.clients.steady_stream import SteadyStream
from tests.support.cluster import Cluster
from tests.support.process_memory import resident_bytes

MAX_GAP_S = 0.3  # between two events of the other client's stream
MAX_DELAY_S = "0.2"  # of the gateway's event loop; it must be a bucket bound of the histogram
MAX_GROWTH_BYTES = 64 * 2**20
NUM_TRIES = 5  # a busy machine may stop any process for longer than that, but not in every try
METRIC = "twostroke_gateway_event_loop_delay_seconds"


def assert_undisturbed(
    cluster: Cluster,
    attack: Callable[[], object],
    *,
    headers: Mapping[str, str] | None = None,
    max_growth_bytes: int = MAX_GROWTH_BYTES,
) -> None:
    """Runs `attack` while another client streams (with `headers`). In at least one of NUM_TRIES runs the stream and the
    event loop must stay within their limits, and the gateway may grow by at most `max_growth_bytes`.

    The attack's own assertions must hold in every run.
    """
    gateway, reasons = cluster.pid_of("gateway"), []
    for _ in range(NUM_TRIES):
        steady = SteadyStream(cluster.http_address, headers)
        try:
            time.sleep(0.3)
            start, resident, num_late = time.monotonic(), resident_bytes(gateway), num_late_wakes(cluster)
            attack()
            gap = steady.longest_gap(start)
            num_late = num_late_wakes(cluster) - num_late
            growth = resident_bytes(gateway) - resident
        finally:
            steady.stop()
        assert cluster.pid_of("gateway") == gateway, "the gateway died"
        if gap <= MAX_GAP_S and num_late == 0 and growth <= max_growth_bytes:
            return
        reasons.append(
            f"the stream stood still for {gap:.2f} s, the event loop {num_late:g} times for more than {MAX_DELAY_S} s, "
            f"the gateway grew by {growth >> 20} MiB"
        )
    raise AssertionError("; ".join(reasons))


def num_late_wakes(cluster: Cluster) -> float:
    """How often the gateway's event loop was delayed by more than `MAX_DELAY_S`."""
    with client(cluster.http_address) as http:
        text = http.get("/metrics").text
    names = ("count", f'bucket{{le="{MAX_DELAY_S}"}}')
    count, in_time = [re.search(rf"^{METRIC}_{re.escape(name)} (\S+)$", text, re.MULTILINE) for name in names]
    assert count is not None and in_time is not None
    return float(count[1]) - float(in_time[1])
