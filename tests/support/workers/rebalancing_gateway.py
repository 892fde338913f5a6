"""A gateway that looks ten times as often for dense workers to which none of its streams leads."""

from __future__ import annotations

import functools

from services.gateway import service
from services.gateway.__main__ import main
from services.gateway.link.dense_pool import REBALANCE_INTERVAL_S, DensePool

if __name__ == "__main__":
    service.DensePool = functools.partial(DensePool, rebalance_interval_s=REBALANCE_INTERVAL_S / 10)  # type: ignore[misc, assignment]
    main()
