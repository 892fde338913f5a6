"""Output for the launcher's user when all services serve: the answer to a prompt, or a table and the addresses.

The table says what runs where, how much fits, and what is on.
"""

from __future__ import annotations

import asyncio
import sys

import grpc
import structlog

from services.common.config import Config, api_keys_of_environment
from services.common.errors import ConfigError, PeerError
from services.common.logs import print_to_stderr
from services.common.terminal import safe_for
from services.gateway import chat_client
from services.launch.checkpoint_bytes import weight_bytes
from services.launch.child import Child, dense_stub
from services.launch.service_configs import num_gateways
from services.pb import attn_pb2, attn_pb2_grpc, dense_pb2

log = structlog.get_logger()

CALL_TIMEOUT_S = 2.0
GB = 10**9


async def print_summary(config: Config, dense: Child, attention: Child) -> None:
    """Asks both workers and prints the table, if standard error is a terminal and no program reads it as JSON."""
    if not sys.stderr.isatty() or config.log.format == "json":
        return
    try:
        async with dense_stub(dense) as stub:
            info = await stub.GetInfo(dense_pb2.GetInfoRequest(), timeout=CALL_TIMEOUT_S)
        async with attention.open_channel() as channel:
            worker = attn_pb2_grpc.AttentionWorkerStub(channel)
            status = await worker.GetStatus(attn_pb2.GetStatusRequest(), timeout=CALL_TIMEOUT_S)
    except (grpc.aio.AioRpcError, ConfigError) as error:
        log.warning("the workers do not say what there is", reason=str(error))
        return
    rows = summarize(config, info, status)
    width = max(len(name) for name, _ in rows)
    lines = [f"  {name.ljust(width)}  {value}" for name, value in rows]
    print_to_stderr("\n" + "\n".join(safe_for(sys.stderr, line) for line in lines))


def summarize(config: Config, info: dense_pb2.DenseInfo, status: attn_pb2.AttentionStatus) -> list[tuple[str, str]]:
    """The rows of the table: names and values."""
    section, gateway = config.model, config.gateway
    names = gateway.served_model_names or (section.name or section.path.name,)
    rows = [
        ("model", f"{', '.join(names)} ({info.family}, {info.num_layers} layers)"),
        ("device", f"{info.device}, {info.dtype}, {info.backend}"),
        ("weights", "random"),
        ("KV cache", f"{status.num_blocks * status.block_size:,} tokens, up to {info.max_model_len:,} for a sequence"),
        ("gRPC", gateway.address),
        ("HTTP", gateway.http_address),
    ]
    if section.load_format == "safetensors":
        dtype, to_fp8 = info.dtype, config.dense.quantization == "fp8"
        num_bytes = weight_bytes(section.path, dtype, num_layers=section.num_layers, to_fp8=to_fp8)
        rows[2] = ("weights", f"{num_bytes / GB:.2f} GB")
    for name in ("gateway", "dense", "attention", "launch"):
        address = getattr(config, name).metrics_address
        if address is not None:
            rows.append(("metrics", f"http://{address}/metrics of {name}"))
    rows.append(("on", ", ".join(what_is_on(config)) or "nothing that a config can turn off"))
    return rows


def what_is_on(config: Config) -> list[str]:
    """Features of this server that another one may not have."""
    attention, dense, gateway, scheduler = config.attention, config.dense, config.gateway, config.scheduler
    features = {
        "prefix cache": attention.enable_prefix_cache,
        f"host tier of {attention.host_kv_bytes / GB:.2f} GB": attention.host_kv_bytes > 0,
        f"KV cache in {attention.kv_cache_dtype}": attention.kv_cache_dtype not in ("auto", "model"),
        f"weights made {dense.quantization}": dense.quantization != "checkpoint",
        f"speculation by {scheduler.speculation}": scheduler.speculation != "off",
        f"{dense.max_loras} LoRA adapters at a time": dense.max_loras > 0,
        "API keys": gateway.api_keys_file is not None or bool(api_keys_of_environment()),
        "TLS": gateway.tls_certificate is not None,
        f"{num_gateways(config)} gateways": num_gateways(config) > 1,
        "traces": config.tracing.endpoint is not None,
    }
    return [name for name, is_on in features.items() if is_on]


async def answer_prompt(address: str, prompt: str, max_tokens: int, api_key: str | None) -> None:
    """Streams the answer of the gateway at `address` to standard output. Raises `PeerError` if there is none.

    If logs go to the same terminal, it is printed when it is complete, so that no log line comes within it.
    """
    flags = client_flags(address, prompt, max_tokens, api_key)
    if sys.stdout.isatty() and sys.stderr.isatty():
        flags.append("--no-stream")
        log.info("answering", prompt=prompt)
    if await asyncio.to_thread(chat_client.main, flags) not in (0, chat_client.BROKEN_PIPE_STATUS):
        raise PeerError("the prompt was not answered")


def client_flags(address: str, prompt: str, max_tokens: int, api_key: str | None) -> list[str]:
    """Flags of the chat client, each in one argument with its value: prompts, and one key in 64, begin with a dash."""
    flags = [f"--address={address}", f"--prompt={prompt}", f"--max-tokens={max_tokens}"]
    return flags if api_key is None else [*flags, f"--api-key={api_key}"]


def print_addresses(config: Config, chat_command: str) -> None:
    """Prints the gateway's addresses and calls of `chat_command`; with logs in JSON, logs the addresses instead."""
    name = config.model.name or config.model.path.name
    address, http_address = config.gateway.address, config.gateway.http_address
    if config.log.format == "json":  # for a program, which reads every line of standard error as JSON
        log.info("serving", model=name, address=address, http_address=http_address)
        return
    # With TLS the chat client would need certificates for the public address.
    chat_address = address if config.gateway.tls_certificate is None else config.gateway.local_address
    scheme = "http" if config.gateway.tls_certificate is None else "https"
    page = "" if http_address.startswith("unix:") else f"  in a browser: {scheme}://{http_address}/\n"
    print_to_stderr(
        f"\nServing {name} for gRPC clients at {address} and for OpenAI's over HTTP at "
        f"{http_address}. Stop with Ctrl-C.\n{page}"
        f"  one answer: {chat_command} --address {chat_address} "
        "--prompt 'San Francisco is a' --max-tokens 32\n"
        f"  a chat:     {chat_command} --address {chat_address}"
    )
