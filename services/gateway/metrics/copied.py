"""A metric under another name, for those who read another server's."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping

from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Sample


def copied(
    family: Metric, name: str, labels: Mapping[str, str], of_outcome: Callable[[str], Mapping[str, str]]
) -> Metric:
    """The same samples with further `labels`. Those whose labels are the same then are added.

    of_outcome: the labels in place of `outcome`
    """
    copy = Metric(name, family.documentation, family.type)
    values: dict[tuple[str, tuple[tuple[str, str], ...]], float] = defaultdict(float)
    for sample in family.samples:
        found = {**labels, **sample.labels}
        if (outcome := found.pop("outcome", None)) is not None:
            found |= of_outcome(outcome)
        values[name + sample.name.removeprefix(family.name), tuple(found.items())] += sample.value
    copy.samples = [Sample(each, dict(own), value) for (each, own), value in values.items()]
    return copy
