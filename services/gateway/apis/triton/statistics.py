"""`Statistics`: counts of one model's requests, as Triton's statistics extension reports them."""

from __future__ import annotations

import time
from typing import Any

from services.gateway.apis.triton.models import VERSION


class Statistics:
    """Counts and total durations since the start of this gateway process. Times are in nanoseconds."""

    def __init__(self) -> None:
        self.inference_count = 0  # elements of batches
        self.success_count = 0  # requests
        self.success_ns = 0
        self.failure_count = 0
        self.failure_ns = 0
        self.last_inference_ms = 0  # when the last request ended, in milliseconds since 1970

    def count_success(self, batch_size: int, duration_ns: int) -> None:
        """Counts an answered request."""
        self.inference_count += batch_size
        self.success_count += 1
        self.success_ns += duration_ns
        self.last_inference_ms = time.time_ns() // 1_000_000

    def count_failure(self, duration_ns: int) -> None:
        """Counts a request that ended with an error."""
        self.failure_count += 1
        self.failure_ns += duration_ns

    def describe(self, model_name: str) -> dict[str, Any]:
        """The counts with the field names of `ModelStatistics`. Durations of single parts are not measured."""
        success = {"count": self.success_count, "ns": self.success_ns}
        return {
            "name": model_name,
            "version": VERSION,
            "last_inference": self.last_inference_ms,
            "inference_count": self.inference_count,
            "execution_count": self.success_count,
            "inference_stats": {
                "success": success,
                "fail": {"count": self.failure_count, "ns": self.failure_ns},
                **{name: {"count": 0, "ns": 0} for name in ("queue", "compute_input", "compute_output")},
                "compute_infer": success,
            },
            "batch_stats": [],
        }
