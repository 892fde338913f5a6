"""The server of a benchmark: one that runs already, or its own, of the embedded model or with random weights."""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import string
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from bench.gpu.models import SHAPES, write_model
from services.common.config import EMBEDDED_MODEL
from tests.support.cluster import running_cluster

SPECIAL_TOKEN_IDS = {"bos_token_id": 1, "eos_token_id": 2}  # of the embedded model's tokenizer


@dataclass(frozen=True)
class OwnServer:
    """Where a server's gRPC API is, and the directory of its model."""

    address: str
    model: Path


def add_server_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that `open_server` reads."""
    parser.add_argument("--address", help="of a running gateway's gRPC API; default: a server of its own")
    parser.add_argument("--model", type=Path, default=EMBEDDED_MODEL, help="directory of the model that is served")
    parser.add_argument("--shape", choices=SHAPES, help="serves a model of this shape with random weights instead")
    settings = {"action": "append", "default": [], "metavar": "SECTION.KEY=VALUE"}
    parser.add_argument("--set", **settings, help="a setting of its own server")


@contextlib.contextmanager
def open_server(
    options: argparse.Namespace, *settings: str, modules: Mapping[str, str] | None = None
) -> Iterator[OwnServer]:
    """The running server that `options` name, or one of its own with `settings`, which ends with the context.

    modules: that it runs in place of some of its own, by module
    """
    if options.address is not None:
        yield OwnServer(options.address, options.model)
        return
    with tempfile.TemporaryDirectory() as directory:
        model, path = options.model, Path(directory)
        if options.shape is not None:
            model = write_model(path / "model", options.shape, "stored")
            write_vocabulary(model)
            settings = (*settings, "model.load_format=dummy")
        with running_cluster(path, f"model.path={model}", *settings, *options.set, modules=modules) as cluster:
            yield OwnServer(cluster.address, model)


def write_vocabulary(model: Path) -> None:
    """Gives a model as many tokens as it has logits: those of the embedded model that fit, and random words."""
    config, tokenizer = (json.loads((model / name).read_text()) for name in ("config.json", "tokenizer.json"))
    (model / "config.json").write_text(json.dumps(config | SPECIAL_TOKEN_IDS))
    size, bpe, generator = config["vocab_size"], tokenizer["model"], random.Random(0)
    vocabulary = bpe["vocab"] = {token: token_id for token, token_id in bpe["vocab"].items() if token_id < size}
    bpe["merges"] = [pair for pair in bpe["merges"] if "".join(pair) in vocabulary]
    while len(vocabulary) < size:
        letters = generator.choices(string.ascii_lowercase, k=generator.randint(3, 9))
        vocabulary.setdefault(generator.choice(["", "Ġ"]) + "".join(letters), len(vocabulary))
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
