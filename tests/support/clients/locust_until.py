"""A locustfile beside another one: ends the run once HTTP and gRPC users have had `--until-requests` requests each."""

from __future__ import annotations

from argparse import ArgumentParser
from collections import Counter
from typing import Any

import gevent
from locust import events
from locust.env import Environment

PROTOCOLS = ("POST", "gRPC")


@events.init_command_line_parser.add_listener
def add_options(parser: ArgumentParser) -> None:
    parser.add_argument("--until-requests", type=int, required=True)


@events.init.add_listener
def count_requests(environment: Environment, **_: Any) -> None:
    num_left = Counter(dict.fromkeys(PROTOCOLS, environment.parsed_options.until_requests))

    def count(request_type: str, **_: Any) -> None:
        num_left[request_type] -= 1
        if all(num_left[protocol] <= 0 for protocol in PROTOCOLS):
            gevent.spawn(environment.runner.quit)

    environment.events.request.add_listener(count)
