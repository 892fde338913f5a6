"""The compose file for attention workers that scale: valid, and the dense worker finds the socket of each container."""

from __future__ import annotations

import fnmatch
import json
import shlex
from itertools import pairwise

import yaml
from check_jsonschema.builtin_schemas import get_builtin_schema
from jsonschema import Draft202012Validator

from services.common.config import Config, load_config
from services.common.several_attention_workers import check_attention_workers
from tests.deploy.compose_file import DEPLOY, load_compose

FILE = "compose.attention.yaml"


def config_of(words: list[str]) -> Config:
    """What the process with these arguments reads."""
    overrides = [after for word, after in pairwise(words) if word == "--set"]
    return load_config(DEPLOY / "config" / "cpu.toml", [*overrides, f"model.path={DEPLOY}/models/tiny-llama"])


def attention_words(hostname: str) -> list[str]:
    """The words of an attention worker's command, as the shell of its container reads them."""
    service = load_compose(FILE)["services"]["attn_worker"]
    assert service["entrypoint"] == ["sh", "-c"]
    [line] = service["command"]
    return shlex.split(line.replace("$$(hostname)", hostname))


def test_the_file_follows_the_specification() -> None:
    document = yaml.safe_load((DEPLOY / FILE).read_text())
    validator = Draft202012Validator(get_builtin_schema("vendor.compose-spec"))
    assert [error.message for error in validator.iter_errors(document)] == []
    assert "${" not in json.dumps(load_compose(FILE)), "a variable without a default"


def test_the_dense_worker_finds_each_container() -> None:
    dense = config_of(load_compose(FILE)["services"]["dense_worker"]["command"])
    attention = [config_of(attention_words(name)) for name in ("3f2a", "77b0")]
    for config in (dense, *attention):
        check_attention_workers(config)
    [pattern] = dense.attention.addresses
    addresses = [config.attention.address for config in attention]
    assert len(set(addresses)) == 2 and all(fnmatch.fnmatch(each, pattern) for each in addresses)
    assert len({config.attention.host_kv_path for config in attention}) == 2, "a host tier is one worker's"
    assert [config.launch.services for config in attention] == [("attn_worker",)] * 2


def test_the_health_check_asks_the_same_socket() -> None:
    kind, line = load_compose(FILE)["services"]["attn_worker"]["healthcheck"]["test"]
    assert kind == "CMD-SHELL"
    asked = shlex.split(line.replace("$$(hostname)", "3f2a"))[-1]
    assert asked == config_of(attention_words("3f2a")).attention.address


def test_the_rest_is_that_of_the_common_file() -> None:
    """The overlay replaces whole lists, so that what it does not change must be repeated."""
    common, own = (load_compose(each)["services"] for each in ("compose.yaml", FILE))
    command = common["dense_worker"]["command"]
    assert own["dense_worker"]["command"][: len(command)] == command
    overrides = [after for word, after in pairwise(common["attn_worker"]["command"]) if word == "--set"]
    changed = {"launch.standby_attention"}
    words = attention_words("3f2a")
    assert {each for each in overrides if each.partition("=")[0] not in changed} <= set(words)
