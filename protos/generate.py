"""Regenerates `services/pb` from the `.proto` files beside this script: `python protos/generate.py [DIR]`."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import grpc_tools
from grpc_tools import protoc

PROTO_DIR = Path(__file__).parent
PACKAGE = "services.pb"
# Functions that open a channel for each call, beside each service's stub; nobody uses them.
EXPERIMENTAL = re.compile(r"\n\n # This class is part of an EXPERIMENTAL API\.\nclass .*?(?=\n\n\nclass |\Z)", re.S)


def generate(output_dir: Path) -> None:
    """Writes `*_pb2.py`, `*_pb2.pyi` and, of services, `*_pb2_grpc.py` into `output_dir`; raises on a protoc error."""
    protos = sorted(PROTO_DIR.glob("*.proto"))
    arguments = [
        "protoc",
        f"-I{PROTO_DIR}",
        f"-I{Path(grpc_tools.__file__).parent / '_proto'}",
        f"--python_out={output_dir}",
        f"--pyi_out={output_dir}",
        f"--grpc_python_out={output_dir}",
        *map(str, protos),
    ]
    if protoc.main(arguments) != 0:
        raise SystemExit("protoc failed")
    own = "|".join(proto.stem for proto in protos)
    for path in output_dir.glob("*_pb2*.py*"):
        # protoc writes top-level imports between the generated modules, but they live in a package.
        text = re.sub(rf"^import (({own})_pb2)", rf"from {PACKAGE} import \1", path.read_text(), flags=re.M)
        path.write_text(EXPERIMENTAL.sub("", text))
        if path.name.endswith("_grpc.py") and "Stub" not in text:
            path.unlink()


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else PROTO_DIR.parent / "services" / "pb")
