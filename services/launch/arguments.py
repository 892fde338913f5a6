"""The command line of `twostroke serve` and `python -m services.launch`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

import structlog

from services.common.cli import add_config_arguments, dashed
from services.common.config import EMBEDDED_MODEL, Config, load_config, toml_value
from services.common.errors import ConfigError, TwostrokeError
from services.common.logs import configure_logs
from services.common.shorten import quote
from services.launch.flags import FLAGS, add_flags, describe_unknown, read_flags, read_http_address
from services.launch.gguf import convert_model, is_gguf
from services.launch.hub import HUBS, fetch_model, is_hub_name

log = structlog.get_logger()

DESCRIPTION = "Starts, watches and stops all services on one machine."
OWN_FLAGS = (
    "--help",
    "--config",
    "--set",
    "--revision",
    "--download-dir",
    "--hub",
    "--prompt",
    "--sample-prompt",
    "--max-tokens",
)


def parse_args(
    argv: Sequence[str],
    program: str = "services.launch",
    *,
    downloads: bool = True,
    description: str = DESCRIPTION,
) -> tuple[Config, argparse.Namespace]:
    """Flags are short forms of config keys. An invalid config ends the process with one line and status 1.

    A model that is given by name is downloaded, and a GGUF file converted. Without `downloads` the config has the
    embedded one in their place.
    """
    parser = make_parser(program, description)
    for argument in argv:
        try:
            argument.encode()
        except UnicodeEncodeError:  # it could not be written to the file that the services read
            parser.error(f"argument {quote(argument)} is not UTF-8")
    arguments, unknown = parser.parse_known_args(dashed(argv))
    if unknown:
        parser.error(describe_unknown(unknown, [*OWN_FLAGS, *(flag.name for flag in FLAGS)]))
    if arguments.max_tokens is None:
        arguments.max_tokens = 64
    elif arguments.prompt is None and arguments.sample_prompt is None:
        parser.error("--max-tokens is of the answer to --prompt or --sample-prompt, and neither is given")
    if arguments.directory is not None and arguments.model is not None:
        parser.error(f"MODEL {arguments.directory!r} and --model {arguments.model!r} mean the same: give one of them")
    if arguments.directory is not None:
        arguments.model = arguments.directory
    try:
        config = _load(arguments, downloads=downloads)
        if not config.launch.runs_all and (arguments.prompt, arguments.sample_prompt) != (None, None):
            own = ", ".join(config.launch.services)
            raise ConfigError(f"--prompt and --sample-prompt need all services, launch.services is {own}")
        return config, arguments
    except TwostrokeError as error:
        parser.exit(1, f"{program}: {error}\n")


def make_parser(program: str, description: str = DESCRIPTION) -> argparse.ArgumentParser:
    """The command line, also of `twostroke doctor`, which has a description of its own."""
    parser = argparse.ArgumentParser(
        prog=program,
        usage=f"{program} [MODEL] [OPTIONS]",
        description=description,
    )
    parser.add_argument(
        "directory",
        nargs="?",
        metavar="MODEL",
        help="Hugging Face model directory, a name at the Hub such as Qwen/Qwen3-0.6B, or a GGUF file",
    )
    add_config_arguments(parser)
    parser.add_argument("--revision", metavar="REV", help="branch, tag or commit of a model that is given by name")
    parser.add_argument(
        "--download-dir", type=Path, metavar="DIR", help="for models by name (~/.cache/huggingface/hub)"
    )
    parser.add_argument("--hub", choices=HUBS, default=HUBS[0], help="where models by name come from (%(default)s)")
    parser.add_argument("--prompt", metavar="TEXT", help="stream the answer to TEXT, then stop")
    parser.add_argument("--sample-prompt", metavar="TEXT", help="stream the answer to TEXT, then keep serving")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="tokens of that answer (64)")
    add_flags(parser.add_argument_group("short forms of keys of the config, by the names of vLLM where it has them"))
    return parser


def _load(arguments: argparse.Namespace, *, downloads: bool) -> Config:
    """The config: the file, then flags, then `--set`; the last one of a key wins.

    Raises `ConfigError`, and what `fetch_model` raises: a model is downloaded when nothing else of the config is wrong.
    """
    values = read_flags(arguments)
    name = arguments.model if arguments.model is not None and is_hub_name(arguments.model) else None
    file = Path(arguments.model) if arguments.model is not None and is_gguf(arguments.model) else None
    if name is not None or file is not None:
        values["model.path"] = EMBEDDED_MODEL  # until it is there
    if name is None and (arguments.revision, arguments.download_dir, arguments.hub) != (None, None, HUBS[0]):
        raise ConfigError("--revision, --download-dir and --hub belong to a model by name, such as Qwen/Qwen3-0.6B")
    if arguments.model is not None and name is None and file is None and not Path(arguments.model).is_dir():
        raise ConfigError(
            f"model {quote(arguments.model)} is neither a directory or GGUF file here nor the name of a model at the "
            "Hub, ORGANISATION/NAME, such as Qwen/Qwen3-0.6B"
        )
    config = _load_values(arguments, values)
    http_address = read_http_address(arguments, config)
    if http_address is not None:
        values["gateway.http_address"] = http_address
        config = _load_values(arguments, values)
    if not downloads or (name is None and file is None):
        return config
    configure_logs(config.log, "launch")
    if file is not None:
        log.info("converting the GGUF file, unless that was done before", file=str(file))
        values["model.path"] = convert_model(file)
        if config.model.name is None:
            values["model.name"] = file.stem
        return _load_values(arguments, values)
    log.info("downloading what the cache lacks", model=name)
    values["model.path"] = fetch_model(name, arguments.revision, arguments.download_dir, arguments.hub)
    log.info("model is there", path=str(values["model.path"]))
    if config.model.name is None:
        values["model.name"] = name
    return _load_values(arguments, values)


def _load_values(arguments: argparse.Namespace, values: Mapping[str, object]) -> Config:
    overrides = [f"{key}={toml_value(value)}" for key, value in values.items()]
    return load_config(arguments.config, [*overrides, *arguments.set])
