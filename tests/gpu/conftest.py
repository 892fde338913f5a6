"""Tests that need a CUDA device are marked `gpu`. Without such a device they are skipped.

With TRITON_INTERPRET=1 in the environment, kernel tests run on the CPU in Triton's interpreter.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Generator
from pathlib import Path

import pytest
import torch

from tests.support.reference import make_served_model


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a CUDA device")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="no CUDA device")
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(skip)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Frees what earlier tests left in cycles: a CUDA graph that is freed while another is captured breaks that."""
    if torch.cuda.is_available():  # it takes a third of a second in a process that has run many tests
        gc.collect()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Prints each failure at once: a run on a GPU may be cut off before pytest's summary.

    An error "at setup" of a parametrized module fixture may be that of the one before, which ends then.
    """
    report = yield
    if report.failed:
        terminal = item.config.pluginmanager.get_plugin("terminalreporter")
        terminal.write_line(f"\nFAILED at {report.when} of {item.nodeid}\n{report.longreprtext}")
    return report


@pytest.fixture(scope="session")
def kernel_device() -> torch.device:
    """The device on which Triton kernels can run."""
    if torch.cuda.is_available():
        return torch.device("cuda", 0)
    if os.environ.get("TRITON_INTERPRET") == "1":
        return torch.device("cpu")
    pytest.skip("no CUDA device")


@pytest.fixture(scope="session")
def llama_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random model with a tokenizer, for clusters."""
    directory = tmp_path_factory.mktemp("llama-gqa")
    return make_served_model(directory, "llama", hidden_size=128, head_dim=32, max_position_embeddings=2048)
