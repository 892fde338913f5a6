"""Config: one TOML file and overrides. Every mistake is an error that names it, before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.common.config import EMBEDDED_MODEL, Config, ModelSection, PeerSection, dump_config, load_config
from services.common.errors import ConfigError


def test_defaults_serve_the_embedded_model() -> None:
    assert load_config(None) == Config()
    assert load_config(None).model.path == EMBEDDED_MODEL


def test_a_file_and_overrides_combine_and_the_last_override_wins(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text('[model]\ndtype = "float16"\nnum_layers = 2\n[scheduler]\nmax_num_seqs = 5\n')
    config = load_config(file, ["model.num_layers=3", "scheduler.max_num_seqs=7", "scheduler.max_num_seqs=9"])
    assert (config.model.dtype, config.model.num_layers, config.scheduler.max_num_seqs) == ("float16", 3, 9)


def test_override_values_are_toml_or_plain_strings() -> None:
    config = load_config(
        None, ["model.dtype=bfloat16", 'log.level="debug"', "attention.enable_prefix_cache=false"]
    )
    assert (config.model.dtype, config.log.level) == ("bfloat16", "debug")
    assert config.attention.enable_prefix_cache is False


@pytest.mark.parametrize("name", ['a "quoted" \\ name', "two\nlines\tand a tab", "\x00\x1f\x7f", "é 😀"])
def test_a_dumped_config_reads_back_equal(name: str, tmp_path: Path) -> None:
    config = Config(model=ModelSection(name=name, num_layers=1), peers=PeerSection(rpc_timeout_s=0.25))
    file = tmp_path / "config.toml"
    file.write_text(dump_config(config))
    assert load_config(file) == config


def test_several_services_may_listen_at_any_free_port() -> None:
    config = load_config(None, ["gateway.address=127.0.0.1:0", "gateway.http_address=127.0.0.1:0"])
    assert config.gateway.address == config.gateway.http_address


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("nothing.xyz=1", ["unknown config key nothing"]),
        ("model.pth=x", ["unknown config key model.pth: did you mean model.path?"]),
        ("model.gateway_proceses=1", ["gateway_proceses: did you mean launch.gateway_processes?"]),
        ("schedulr.policy=x", ["unknown config key schedulr: did you mean scheduler.policy?"]),
        ("gatway.address=x", ["unknown config key gatway: did you mean gateway.address?"]),  # others have one, too
        ("dens.addres=x", ["unknown config key dens: did you mean dense.address?"]),
        ("gateway.http_port=9090", ["unknown config key gateway.http_port: did you mean gateway.http_address?"]),
        ("gateway.grpc_address=x", ["unknown config key gateway.grpc_address: did you mean gateway.address?"]),
        ("gatway.port=9090", ["unknown config key gatway: did you mean gateway.http_address?"]),
        ("gatway.xyz=x", ["unknown config key gatway: did you mean gateway?"]),
        ("model.num_layers=0", ["model.num_layers", "0", "greater than or equal to 1"]),
        ("model.num_layers=two", ["model.num_layers", "two", "integer"]),
        ("channel.wait_timeout_s=0", ["channel.wait_timeout_s", "greater than 0"]),
        ("peers.rpc_timeout_s=inf", ["peers.rpc_timeout_s", "inf", "less than or equal to 1000000000"]),
        ("gateway.drain_timeout_s=1e10", ["gateway.drain_timeout_s", "less than or equal to 1000000000"]),
        ("gateway.max_message_bytes=2147483648", ["gateway.max_message_bytes", "less than or equal to 2147483647"]),
        ("peers.max_message_bytes=0", ["peers.max_message_bytes", "greater than or equal to 1"]),
        ("scheduler.policy=never", ["scheduler.policy", "guaranteed_no_evict", "max_utilization"]),
        ("scheduler.policy=take_turns", ["scheduler.policy is take_turns", "attention.host_kv_bytes is 0"]),
        ("scheduler.max_num_seqs=513", ["513", "512"]),
        ("model.path=/does/not/exist", ["/does/not/exist", "not a directory"]),
        ("dense.address=127.0.0.1:50051", ["must differ", "127.0.0.1:50051"]),
        ("dense.address=unix:", ["dense.address", "'unix:'", "must be unix:PATH or HOST:PORT"]),
        ("gateway.address=127.0.0..1:50051", ["gateway.address", "127.0.0..1:50051", "HOST:PORT"]),
        ("launch.metrics_address=.local:9103", ["launch.metrics_address", ".local:9103", "HOST:PORT"]),
        ("attention.devices=cuda:0", ["attention.devices", "cuda:0", 'a list, such as ["a", "b"]']),
        ("model", ["section.key=value"]),
        ("model=3", ["section.key=value"]),
    ],
)
def test_a_mistake_is_named(override: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(None, [override])
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize("several", ["attention.workers=2", "attention.elastic=true", 'attention.addresses=["h:1"]'])
def test_turns_are_for_one_attention_worker(several: str) -> None:
    with pytest.raises(ConfigError, match="take_turns, which is for one attention worker"):
        load_config(None, ["scheduler.policy=take_turns", "attention.host_kv_bytes=1000000", several])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("model = [", "is not TOML"),
        (None, "cannot be read"),
        ('model = "tiny"', r": model is a value, must be a section: \[model\]$"),
        ("[[model]]\nnum_layers = 1", r": model is a value, must be a section: \[model\]$"),
        ("max_num_seqs = 3", r": max_num_seqs is in no section: did you mean scheduler\.max_num_seqs\?$"),
        ("xyz = 3", r": xyz is in no section$"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(tmp_path: Path, text: str | None, words: str) -> None:
    file = tmp_path / "config.toml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=f"^config file {str(file)!r}.*{words}"):
        load_config(file, ["model.num_layers=2"])


def test_sections_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        load_config(None).model.num_layers = 3  # type: ignore[misc]
