"""Measures the delay of the gateway's event loop: while one callback runs, no stream gets its tokens."""

from __future__ import annotations

import asyncio

from services.gateway.metrics.gateway_metrics import GatewayMetrics

INTERVAL_S = 0.02


async def measure_loop_delay(metrics: GatewayMetrics) -> None:
    """Records how late each of many short sleeps ends, until cancelled."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + INTERVAL_S
        await asyncio.sleep(INTERVAL_S)
        metrics.on_loop_delay(max(0.0, loop.time() - due))
