"""The command line of `twostroke build-engines` and `python -m services.dense_worker.tensorrt.build`, without torch."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from services.common.config import DenseSection

PROGRAM = "services.dense_worker.tensorrt.build"
DESCRIPTION = """Builds the TensorRT plans of a model's segments, or shows plans. Plans that exist are not built again,
and no weights are read: they are inputs of a plan. On a GPU it also measures for which sizes torch is faster. A server
with the same settings finds the plans and starts without building."""


def make_parser(program: str) -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog=program, description=DESCRIPTION)
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--model", type=Path, metavar="DIR", help="Hugging Face model directory")
    source.add_argument("--onnx", type=Path, metavar="OUT", help="directory that the export wrote, instead of --model")
    parser.add_argument(
        "--output-dir",
        type=Path,
        default=DenseSection().plan_dir,
        metavar="PLANS",
        help="default: dense.plan_dir",
    )
    parser.add_argument("--load-format", choices=("safetensors", "dummy"), default="safetensors")
    parser.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16", "float16"),
        default="auto",
        help="auto: the model's own",
    )
    parser.add_argument(
        "--profiles",
        default=DenseSection().profiles,
        metavar="RANGES",
        help="numbers of tokens, each range FROM-TO or FROM-TO@BEST; default: %(default)s",
    )
    limits = {"type": _count, "metavar": "N", "help": "builds no plans that a server with this setting has no use for"}
    parser.add_argument("--max-num-batched-tokens", **limits)
    parser.add_argument("--max-num-seqs", **limits)
    parser.add_argument(
        "--device", type=_device, default="cuda", help="the GPU to build for; default: %(default)s, the first one"
    )
    parser.add_argument(
        "--quantization",
        choices=("checkpoint", "fp8"),
        default="checkpoint",
        help="fp8: as dense.quantization makes it of an unquantized checkpoint",
    )
    parser.add_argument("--num-layers", type=int, metavar="N", help="use only the first N layers")
    parser.add_argument("--inspect", action="store_true", help="print profiles, inputs, layers and fused kernels")
    return parser


def _count(text: str) -> int:
    if re.fullmatch(r"0*[1-9]\d*", text) is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 on")
    return int(text)


def _device(text: str) -> str:
    if re.fullmatch(r"cpu|cuda(:\d+)?", text) is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form cuda or cuda:1")
    return text
