"""`python -m services.dense_worker.tensorrt.export` writes a model's segments as ONNX, its embedding and its tokenizer.

It needs no GPU. The ONNX files contain no weights, so a model of any size is exported in seconds.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import safetensors.torch
import torch

from services.common.cli import dashed
from services.common.errors import ConfigError, ModelError, TwostrokeError
from services.common.model_config import ModelConfig, load_model_config
from services.common.vision.vision_config import VisionConfig, load_vision_config
from services.dense_worker.model.on_the_fly import with_quantization
from services.dense_worker.model.segments import segment_names
from services.dense_worker.model.weights import load_weights, random_weights
from services.dense_worker.tensorrt.api import require
from services.dense_worker.tensorrt.files.atomic_file import make_directory, write_atomically
from services.dense_worker.tensorrt.files.manifest import FILE, Manifest, read_manifest, read_networks, write_manifest

PARTS = ("batchful", "embed_tokens", "tokenizer")
EMBED_FILE = "embed_tokens.safetensors"
VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")  # a tokenizer has at least one of these
TOKENIZER_FILES = (
    *VOCABULARY_FILES,
    "merges.txt",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)
CPU = torch.device("cpu")


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, or 1 after an error or if `--test` finds a difference."""
    parser = _parser()
    arguments = parser.parse_args(dashed(sys.argv[1:] if argv is None else argv))
    if arguments.test and arguments.input is None:
        parser.error("--test needs --input TEXT")
    if not arguments.test and arguments.output_dir is None:
        parser.error("--output-dir is needed, except with --test")
    try:
        return run(arguments)
    except TwostrokeError as error:
        print(f"services.dense_worker.tensorrt.export: {error}", file=sys.stderr)
        return 1


def run(arguments: argparse.Namespace) -> int:
    """Exports, then tests if asked to. Raises ModelError or ConfigError for files that cannot be used."""
    require("onnx")
    config = load_model_config(arguments.model, arguments.num_layers)
    config = with_quantization(config, arguments.quantization, arguments.model)
    dtype = _resolve_dtype(arguments.dtype, config, arguments.test)
    parts = PARTS if arguments.export == "all" else (arguments.export,)
    if arguments.test:
        if arguments.load_format == "dummy":
            raise ConfigError(
                "--test compares with Hugging Face, which needs the model's weights, not dummy ones"
            )
        if config.quantization is not None:
            method = config.quantization.method
            raise ConfigError(f"--test compares with Hugging Face without quantization, the weights are {method}")
        if "batchful" not in parts:
            raise ConfigError(f"--test runs the exported segments, --export {arguments.export} makes none")
    with ExitStack() as stack:
        directory = arguments.output_dir or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        make_directory(directory)
        export_parts(parts, arguments.model, config, dtype, arguments.load_format == "dummy", directory)
        return _test(arguments, config, dtype, directory) if arguments.test else 0


def export_parts(
    parts: Sequence[str],
    model: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    is_dummy: bool,
    directory: Path,
) -> None:
    """Writes the `parts` of the model in directory `model`, then the manifest; prints a line for each."""
    dtype_name = str(dtype).removeprefix("torch.")
    manifest = Manifest(config.fingerprint, asdict(config), dtype_name)
    if "batchful" in parts:
        vision = load_vision_config(model)
        manifest = replace(manifest, segments=_export_segments(config, vision, dtype, directory))
    if "embed_tokens" in parts:
        manifest = replace(
            manifest, embed_tokens=_export_embedding(model, config, dtype, is_dummy, directory)
        )
    if "tokenizer" in parts:
        is_optional = is_dummy and len(parts) > 1
        manifest = replace(manifest, tokenizer=_copy_tokenizer(model, directory, is_optional))
    write_manifest(directory, manifest)
    print(
        f"{FILE}: {config.family}, {config.num_layers} layers, {manifest.dtype}, in {directory}", flush=True
    )


def _export_segments(
    config: ModelConfig, vision: VisionConfig | None, dtype: torch.dtype, directory: Path
) -> dict[str, dict[str, object]]:
    """Those of the text part, then those of the tower, if the model has one."""
    from services.dense_worker.encoders.vision.tensorrt.tower_networks import TowerNetworks
    from services.dense_worker.tensorrt.onnx_segments import describe_tensors, export_segment

    segments: dict[str, dict[str, object]] = {}
    exports = {name: partial(export_segment, name, config, dtype) for name in segment_names(config)}
    if vision is not None:
        tower = TowerNetworks(vision, dtype)
        exports |= {name: partial(tower.export, name) for name in tower.names}
    for number, (name, export) in enumerate(exports.items(), start=1):
        start = time.monotonic()
        model = export()
        network = model.SerializeToString(deterministic=True)
        write_atomically(directory / f"{name}.onnx", network)
        segments[name] = {
            "file": f"{name}.onnx",
            "opset": model.opset_import[0].version,
            "sha256": hashlib.sha256(network).hexdigest(),
            "inputs": describe_tensors(model.graph.input),
            "outputs": describe_tensors(model.graph.output),
        }
        took = f"{len(model.graph.node)} nodes, {len(network)} bytes, {time.monotonic() - start:.1f} s"
        print(f"[{number}/{len(exports)}] {name}.onnx: {took}", flush=True)
    return segments


def _export_embedding(
    model: Path, config: ModelConfig, dtype: torch.dtype, is_dummy: bool, directory: Path
) -> dict[str, object]:
    without_layers = replace(config, num_layers=0)
    if is_dummy:
        weights = random_weights(without_layers, dtype, CPU, seed=0)
    else:
        weights = load_weights(model, without_layers, dtype, CPU)
    embed = weights.embedding.table.data
    write_atomically(directory / EMBED_FILE, safetensors.torch.save({"embed_tokens.weight": embed}))
    print(f"{EMBED_FILE}: {list(embed.shape)}, {embed.nbytes / 1e6:.1f} MB", flush=True)
    return {"file": EMBED_FILE, "tensor": "embed_tokens.weight", "shape": list(embed.shape)}


def _copy_tokenizer(model: Path, directory: Path, is_optional: bool) -> list[str] | None:
    if not any((model / name).is_file() for name in VOCABULARY_FILES):
        if not is_optional:
            raise ModelError(f"{model} has no tokenizer: none of {', '.join(VOCABULARY_FILES)}")
        print(f"tokenizer: {model} has none, left out", flush=True)
        return None
    names = [name for name in TOKENIZER_FILES if (model / name).is_file()]
    for name in names:
        write_atomically(directory / name, (model / name).read_bytes())
    print(f"tokenizer: {', '.join(names)}", flush=True)
    return names


def _test(arguments: argparse.Namespace, config: ModelConfig, dtype: torch.dtype, directory: Path) -> int:
    from services.dense_worker.backends.onnxruntime_backend import OnnxRuntimeBackend
    from services.dense_worker.tensorrt.export_check import compare_with_hugging_face

    weights = load_weights(arguments.model, config, dtype, CPU)
    networks = read_networks(directory, read_manifest(directory))
    backend = OnnxRuntimeBackend({name: networks[name] for name in segment_names(config)}, weights)
    comparison = compare_with_hugging_face(
        arguments.model, config, dtype, backend, arguments.input, arguments.max_tokens
    )
    print(f"Hugging Face: {comparison.expected_text}")
    print(f"exported:     {comparison.found_text}")
    if comparison.first_difference is None:
        print(f"equal: {len(comparison.found_ids)} tokens")
        return 0
    ids = f"{comparison.expected_ids} != {comparison.found_ids}"
    print(f"different from token {comparison.first_difference}: {ids}")
    return 1


def _resolve_dtype(name: str, config: ModelConfig, is_test: bool) -> torch.dtype:
    if name == "auto":
        name = "float32" if is_test else config.checkpoint_dtype
    return getattr(torch, name)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="services.dense_worker.tensorrt.export", description=__doc__)
    parser.add_argument(
        "--model", type=Path, required=True, metavar="DIR", help="Hugging Face model directory"
    )
    parser.add_argument(
        "--output-dir", type=Path, metavar="OUT", help="created if it is missing; --test needs none"
    )
    parser.add_argument("--export", choices=(*PARTS, "all"), default="all", help="default: all")
    parser.add_argument("--num-layers", type=int, metavar="N", help="export only the first N layers")
    parser.add_argument(
        "--quantization",
        choices=("checkpoint", "fp8"),
        default="checkpoint",
        help="fp8: as dense.quantization makes it of an unquantized checkpoint",
    )
    parser.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16", "float16"),
        default="auto",
        help="auto: the dtype of the checkpoint, or float32 with --test",
    )
    parser.add_argument(
        "--load-format",
        choices=("safetensors", "dummy"),
        default="safetensors",
        help="dummy: export a random embedding; the model directory needs only config.json",
    )
    parser.add_argument(
        "--test",
        action="store_true",
        help="continue --input with the exported segments and with Hugging Face, and compare the tokens",
    )
    parser.add_argument("--input", metavar="TEXT", help="the prompt of --test, which needs one")
    parser.add_argument("--max-tokens", type=int, default=16, metavar="N", help="length of --test; default: 16 tokens")
    return parser


if __name__ == "__main__":
    sys.exit(main())
