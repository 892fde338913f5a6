"""`DraftCounts`: how many draft tokens steps have verified, and its metrics."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric


@dataclass(slots=True, eq=False)
class DraftCounts:
    """Total counts, which `collect` reports to Prometheus when a scraper asks."""

    num_drafts: int = 0  # sequences with drafts in a step
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_at: list[int] = field(default_factory=lambda: [0])  # by place of the draft in its step

    def add(self, num_draft_tokens: int, num_accepted_tokens: int) -> None:
        """Counts the drafts of a sequence in a step, at least one."""
        self.num_drafts += 1
        self.num_draft_tokens += num_draft_tokens
        self.num_accepted_tokens += num_accepted_tokens
        self.num_accepted_at += [0] * (num_draft_tokens - len(self.num_accepted_at))
        for place in range(num_accepted_tokens):
            self.num_accepted_at[place] += 1

    def collect(self) -> Iterator[Metric]:
        """The metrics. Called on the scraper's thread."""
        yield CounterMetricFamily(
            "twostroke_dense_spec_decode_num_drafts",
            "Sequences that got drafts in a step, once for each such step.",
            self.num_drafts,
        )
        yield CounterMetricFamily(
            "twostroke_dense_spec_decode_num_draft_tokens", "Drafts that steps have verified.", self.num_draft_tokens
        )
        yield CounterMetricFamily(
            "twostroke_dense_spec_decode_num_accepted_tokens", "Drafts that were right.", self.num_accepted_tokens
        )
        at_place = CounterMetricFamily(
            "twostroke_dense_spec_decode_num_accepted_tokens_per_pos",
            "Drafts that were right, by their place among the drafts of their step; the first is 0.",
            labels=["position"],
        )
        for place, num_accepted in enumerate(self.num_accepted_at):
            at_place.add_metric([str(place)], num_accepted)
        yield at_place
