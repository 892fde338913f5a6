"""The kernel of short chunks compiled for Hopper, which needs triton but no GPU: what it takes of an SM."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="needs triton")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from services.attn_worker.layers.mha.triton_short_chunks import _short_chunk_kernel, choose_chunk_tiles
from services.attn_worker.layers.mha.work_items import NUM_FIELDS

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")
HOPPER = GPUTarget("cuda", 90, 32)
SM_BYTES, BLOCK_OVERHEAD = 227 << 10, 1 << 10  # of shared memory
CACHES = {torch.bfloat16: ("plain", "*bf16"), torch.float8_e4m3fn: ("fp8", "*fp8e4nv"), torch.int8: ("int8", "*i8")}
INTEGERS = ("angle_rows", "items", "block_tables", "counters", "slots")


@pytest.mark.parametrize("cache_dtype", CACHES, ids=str)
@pytest.mark.parametrize(("num_kv_heads", "head_dim"), [(32, 128), (8, 128), (8, 256)])
@pytest.mark.parametrize("max_num_tokens", [2, 64])
def test_two_programs_share_an_sm(
    num_kv_heads: int, head_dim: int, max_num_tokens: int, cache_dtype: torch.dtype, tmp_path: Path
) -> None:
    number_format, cache_type = CACHES[cache_dtype]
    group = 32 // num_kv_heads
    tiles = choose_chunk_tiles(head_dim, torch.bfloat16, cache_dtype, group, max_num_tokens)
    constants = {
        "slopes": None,
        "sinks": None,
        "FORMAT": number_format,
        "IS_INTERPRETED": False,
        "SCALE": 0.1,
        "RAW_SCALE": 0.07,
        "SOFTCAP": 0.0,
        "ROTARY_DIM": head_dim,
        "HAS_PAIRS": False,
        "NUM_FIELDS": NUM_FIELDS,
        "NUM_KV_HEADS": num_kv_heads,
        "GROUP": group,
        "GROUP_PADDED": group,
        "NUM_ROWS": tiles.num_rows,
        "BLOCK_SIZE": 16,
        "HEAD_DIM": head_dim,
        "HEAD_DIM_PADDED": head_dim,
        "HALF": head_dim // 2,
        "WINDOW": 0,
        "BLOCK_N": tiles.block_n,
        "MERGE_N": max(1, 2048 * tiles.num_warps // (tiles.num_rows * head_dim)),
        "NUM_STAGES": tiles.num_stages,
        "PDL": True,
        **({"scales": None} if number_format == "plain" else {}),
    }
    types = {"qkv": "*bf16", "out": "*bf16", "cache": cache_type, "qkv_stride": "i32", "out_stride": "i32"}
    types |= dict.fromkeys(INTEGERS, "*i32")
    names = _short_chunk_kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "*fp32") for name in names}
    values = {(i,): constants[name] for i, name in enumerate(names) if name in constants}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name not in constants}
    source = ASTSource(_short_chunk_kernel, signature, values, aligned)
    compiled = triton.compile(source, target=HOPPER, options={"num_warps": tiles.num_warps})
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    usage = subprocess.run([tool, "-res-usage", cubin], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found is not None and int(found[2]) <= 8, usage  # two registers, by chance of the compiler's
    assert 2 * int(found[1]) * 32 * tiles.num_warps <= 1 << 16, usage
    assert 2 * (compiled.metadata.shared + BLOCK_OVERHEAD) <= SM_BYTES
