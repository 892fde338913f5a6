"""`check_over_deaths`: streams over the death of each worker of plain services."""

from __future__ import annotations

from collections.abc import Sequence

from services.pb import gateway_pb2
from tests.support.clients.streams import collect_all
from tests.support.plain_services import PlainServices


def check_over_deaths(
    services: PlainServices, messages: Sequence[gateway_pb2.GenerateRequest], expected: Sequence[Sequence[int]]
) -> None:
    """All streams give the expected tokens while each worker is killed in turn. Nothing else starts again."""
    for role in ("dense_worker", "attn_worker"):
        starts = dict(services.num_starts)
        found = collect_all(services.gateway, messages, lambda role=role: services.kill(role))
        assert [each.token_ids[0] for each in found] == expected
        assert {name for name in starts if services.num_starts[name] > starts[name]} == {role}
    services.wait_idle()
