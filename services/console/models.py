"""`twostroke models`: the models that are on this machine, in the Hub's cache and in directories, and which can serve.

It reads config files and the headers of weights, and imports no torch.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

from services.common.errors import ModelError, TwostrokeError
from services.common.json_files.read_json import read_json
from services.common.process import importing
from services.common.shorten import shorten
from services.common.terminal import safe_for
from services.common.tokenizer_files import check_tokenizer
from services.launch.checkpoint_bytes import weight_bytes
from services.launch.hub import HUBS, fetch_model

GB = 10**9
HEADINGS = ("NAME", "ARCHITECTURE", "GB", "QUANTIZATION", "SERVES")
COMMANDS = ("list", "pull", "rm")


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the list, in the order of `HEADINGS`."""

    name: str
    architecture: str
    size: str  # of the safetensors
    quantization: str
    serves: str  # "yes", or "no: " with the reason


def main(argv: Sequence[str], program: str = "twostroke models") -> int:
    """Lists, downloads or removes models. Returns the exit status."""
    parser = make_parser(program)
    words = list(argv)
    if not words or (words[0] not in COMMANDS and words[0] not in ("-h", "--help")):
        words.insert(0, "list")
    arguments = parser.parse_args(words)
    try:
        if arguments.command == "list":
            _print_table([describe(name, path) for name, path in find_models(arguments.directories, arguments.cache)])
        elif arguments.command == "pull":
            print(fetch_model(arguments.name, arguments.revision, arguments.cache, arguments.hub))
        else:
            print(f"{arguments.name} is removed, {remove_model(arguments.name, arguments.cache) / GB:.2f} GB are free")
    except TwostrokeError as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 1
    return 0


def make_parser(program: str) -> argparse.ArgumentParser:
    """The command line. Without a command it is `list`."""
    parser = argparse.ArgumentParser(prog=program, description="Models on this machine. Without a command: list.")
    commands = parser.add_subparsers(dest="command", required=True)
    listing = commands.add_parser("list", help="those in the Hub's cache and below directories, and which can serve")
    listing.add_argument("directories", nargs="*", type=Path, metavar="DIR", help="a model, or a directory of models")
    pulling = commands.add_parser("pull", help="download a model into the cache, as serve does; prints its directory")
    pulling.add_argument("--revision", metavar="REV", help="branch, tag or commit")
    pulling.add_argument("--hub", choices=HUBS, default=HUBS[0], help="where it comes from (%(default)s)")
    removing = commands.add_parser("rm", help="remove all revisions of a model from the cache")
    for each in (pulling, removing):
        each.add_argument("name", metavar="NAME", help="such as Qwen/Qwen3-0.6B")
    for each in (listing, pulling, removing):
        each.add_argument("--download-dir", dest="cache", type=Path, metavar="DIR", help="another cache")
    return parser


def find_models(directories: Sequence[Path], cache_dir: Path | None) -> Iterator[tuple[str, Path]]:
    """Names and directories of all models, those of the cache first. Raises `ModelError` for what is no directory."""
    for directory in directories:
        if not directory.is_dir():
            raise ModelError(f"{directory} is not a directory")
    for repository in sorted(_cached_models(cache_dir), key=lambda each: each.repo_id):
        for revision in sorted(repository.revisions, key=lambda each: each.last_modified):
            is_only = len(repository.revisions) == 1
            version = ",".join(sorted(revision.refs)) or revision.commit_hash[:12]
            yield repository.repo_id + ("" if is_only else f"@{version}"), revision.snapshot_path
    for directory in directories:
        for path in (directory, *sorted(each for each in directory.iterdir() if each.is_dir())):
            if (path / "config.json").is_file():
                yield str(path), path


def describe(name: str, path: Path) -> Row:
    """What the files of a model say. Errors in them are in the row."""
    try:
        raw = read_json(path / "config.json") or {}
    except ModelError:
        raw = {}
    architectures = raw.get("architectures") or [raw.get("model_type") or "unknown"]
    quantization = raw.get("quantization_config")
    method = quantization.get("quant_method", "unknown") if isinstance(quantization, dict) else "none"
    num_bytes = sum(file.stat().st_size for file in path.glob("*.safetensors") if file.exists())
    obstacle = obstacle_of(path)
    serves = "yes" if obstacle is None else f"no: {obstacle}"
    return Row(name, str(architectures[0]), f"{num_bytes / GB:.2f}", str(method), serves)


def obstacle_of(path: Path) -> str | None:
    """Why the model in a directory cannot be served; None: it can."""
    with importing():
        from services.common.encoders.encoder_config import read_served_config
    try:
        read_served_config(path)
        weight_bytes(path, "auto")  # reads all headers
        if not any(path.glob("*.safetensors")):
            return "it has no safetensors (a .gguf file is served by its own path)"
        check_tokenizer(path)
    except TwostrokeError as error:
        return shorten(str(error).replace(f"{path}/", "").removeprefix("model directory ").removeprefix(f"{path} "))
    return None


def remove_model(name: str, cache_dir: Path | None) -> int:
    """Removes all revisions from the cache. Returns the number of bytes; raises `ModelError` if there are none."""
    from huggingface_hub import scan_cache_dir

    repositories = [each for each in _cached_models(cache_dir) if each.repo_id == name]
    if not repositories:
        raise ModelError(f"{name!r} is not in the cache: `twostroke models` lists what is")
    commits = [revision.commit_hash for each in repositories for revision in each.revisions]
    deletion = scan_cache_dir(cache_dir).delete_revisions(*commits)
    deletion.execute()
    return deletion.expected_freed_size


def _cached_models(cache_dir: Path | None) -> list:
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        return [each for each in scan_cache_dir(cache_dir).repos if each.repo_type == "model"]
    except CacheNotFound:
        return []


def _print_table(rows: Sequence[Row]) -> None:
    if not rows:
        print("there are no models: `twostroke models pull NAME` downloads one, `twostroke models DIR` looks elsewhere")
        return
    table = [HEADINGS, *(astuple(row) for row in rows)]
    widths = [max(len(line[column]) for line in table) for column in range(len(HEADINGS) - 1)]
    for line in table:
        cells = [text.ljust(width) for text, width in zip(line, widths, strict=False)]
        print(safe_for(sys.stdout, "  ".join([*cells, line[-1]])))
