"""Settings of every test process."""

from __future__ import annotations

import gc
import signal

import hypothesis
import pytest
import torch

# A shell's background job ignores Ctrl-C, and so would every process that a test starts.
signal.signal(signal.SIGINT, signal.default_int_handler)
torch.set_num_threads(1)  # the services under test need the other cores
# No test may depend on how fast the machine is.
hypothesis.settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any machine")

# What is imported lives as long as this process. To look for garbage in it again and again takes a tenth of the time.
gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all-families", action="store_true", help="not only the families that together have all parts")
