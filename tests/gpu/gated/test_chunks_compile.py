"""The kernels of chunks compiled for Hopper, which needs triton but no GPU: what they take of an SM."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="needs triton")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from services.attn_worker.layers.recurrent.triton_gated_delta_chunks import _run_chunks, _solve_chunks
from services.attn_worker.layers.recurrent.triton_state_space import _run_chunks as _run_state_space_chunks

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")
HOPPER = GPUTarget("cuda", 90, 32)
BLOCK_BYTES = 227 << 10  # of shared memory
MAX_STACK_BYTES = 32  # of a thread, for what does not stay in registers
PUBLISHED = {
    "NUM_KEY_HEADS": 16,
    "NUM_VALUE_HEADS": 32,
    "KEY_DIM": 128,
    "VALUE_DIM": 128,
    "KEY_BLOCK": 128,
    "CHUNK": 64,
}
STATE_SPACE = {  # as Codestral Mamba 7B
    "NUM_HEADS": 128,
    "HEAD_DIM": 64,
    "STATE_SIZE": 128,
    "NUM_GROUPS": 8,
    "STATE_BLOCK": 128,
    "HEAD_BLOCK": 32,
    "CHUNK": 64,
}
INTEGERS = ("chunks_ptr", "parts_ptr")
MODEL_VALUES = ("rows_ptr", "out_ptr", "qkv_ptr", "convolved_ptr")
NUMBERS = dict.fromkeys(("least_time_step", "greatest_time_step"), "fp32")


@pytest.mark.parametrize(
    ("kernel", "constants", "num_stages"),
    [
        (_solve_chunks, {**PUBLISHED, "SUBSTITUTED": 16, "NUM_DOUBLINGS": 2}, 2),
        (_run_chunks, {**PUBLISHED, "VALUE_BLOCK": 32, "PRECISION": "tf32"}, 2),
        (_run_state_space_chunks, {**STATE_SPACE, "PRECISION": "tf32"}, 1),
    ],
    ids=["systems", "chunks", "state space"],
)
def test_chunks_in_bfloat16_stay_in_registers(
    kernel: Any, constants: dict[str, Any], num_stages: int, tmp_path: Path
) -> None:
    pointers = [name for name in kernel.arg_names if name.endswith("_ptr")]
    types = {name: "*bf16" if name in MODEL_VALUES else "*i32" if name in INTEGERS else "*fp32" for name in pointers}
    signature = {name: (types | NUMBERS).get(name, "constexpr") for name in kernel.arg_names}
    values = {(i,): constants[name] for i, name in enumerate(kernel.arg_names) if name in constants}
    aligned = {(i,): [["tt.divisibility", 16]] for i in range(len(pointers))}
    source = ASTSource(kernel, signature, values, aligned)
    compiled = triton.compile(source, target=HOPPER, options={"num_warps": 4, "num_stages": num_stages})
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    usage = subprocess.run([tool, "-res-usage", cubin], capture_output=True, text=True, check=True).stdout
    found = re.search(r"STACK:(\d+)", usage)
    assert found is not None and int(found[1]) <= MAX_STACK_BYTES, usage
    assert compiled.metadata.shared + 1024 <= BLOCK_BYTES
    assert "wgmma.mma_async" in compiled.asm["ptx"], "tensor cores multiply tiles"
