"""What several attention workers do not run with is refused at start, by name, with what to do."""

from __future__ import annotations

import pytest

from services.common.config import load_config
from services.common.errors import ConfigError
from services.common.several_attention_workers import check_attention_workers


def check(*overrides: str) -> None:
    check_attention_workers(load_config(None, overrides))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("dense.tensor_parallel_size=2", "dense.tensor_parallel_size is 2: ranks have one attention worker each"),
        ("dense.pipeline_parallel_size=2", "dense.pipeline_parallel_size is 2: ranks have one attention worker each"),
        ("attention.kv_events=tcp://*:5557", "attention.kv_events is 'tcp://\\*:5557'.*: leave it out"),
        ("launch.standby_attention=imports", "launch.standby_attention is 'imports': set it to off"),
        ('launch.services=["attn_worker"]', "launch.services is attn_worker: one launcher must start the dense worker"),
    ],
)
def test_what_is_in_the_way_is_named(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"attention.workers is 2, but {message}"):
        check("attention.workers=2", override)


def test_an_address_that_is_named_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"attention\.addresses names 2, but two of them are the same"):
        check('attention.addresses=["127.0.0.1:1", "127.0.0.1:1"]')


def test_all_this_is_allowed_with_one_worker() -> None:
    check("dense.tensor_parallel_size=2", "launch.standby_attention=imports")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("attention.workers=2", "attention.device=cuda:0"), "cuda:0, cuda:1, and attention.device 'cuda:0': leave"),
        ((), "cuda:0, cuda:1, and attention.workers 1: set it to 2 or more, or attention.elastic to true"),
    ],
)
def test_gpus_without_a_worker_are_refused(overrides: tuple[str, ...], message: str) -> None:
    devices = 'attention.devices=["cuda:0", "cuda:1"]'
    with pytest.raises(ConfigError, match=f"attention.devices is {message}"):
        check(devices, *overrides)
    check(devices, "attention.workers=2")
    check(devices, "attention.elastic=true")
