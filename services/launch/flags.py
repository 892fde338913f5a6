"""The flags of a server that are short forms of config keys. Most have the names by which users of vLLM know them.

`FLAGS` is the only list of them: the parser is made of it, and so is their table in docs/configuration.md.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from services.common.config import Config
from services.common.errors import ConfigError
from services.common.nearest import nearest
from services.common.shorten import quote, show
from services.gateway.access.api_keys import MIN_KEY_CHARACTERS
from services.gateway.request.sampling_defaults import NO_DEFAULTS, override
from services.launch.speculative_config import read_speculative_config


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag and the keys that it sets.

    values: what reads its value, or by word what the key gets; a single word `""` makes it a flag without a value.
    is_combined: it depends on other flags, and `read_flags` or `read_http_address` reads it by name.
    short: a second name.
    """

    name: str
    keys: tuple[str, ...]
    help: str
    values: Callable[[str], object] | Mapping[str, object]
    metavar: str | None = None
    is_list: bool = False
    is_combined: bool = False
    short: str | None = None

    @property
    def is_switch(self) -> bool:
        """Whether it has no value."""
        return isinstance(self.values, Mapping) and set(self.values) == {""}

    @property
    def attribute(self) -> str:
        """Its name in the namespace of argparse."""
        return self.name.removeprefix("--").replace("-", "_")


_TOOL_PARSERS = ("auto", "none", "harmony", "hermes", "llama3_json", "mistral", "pythonic", "qwen3_coder")
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}
_BASE_MODEL = "base_model_name"  # a key of vLLM's --lora-modules, without effect
_REASONING_PARSERS = ("auto", "none", "deepseek_r1", "harmony", "qwen3")


def _same(names: Sequence[str], **others: str) -> dict[str, object]:
    return dict(zip(names, names, strict=True)) | others


def _number_or_auto(text: str) -> int | str:
    if text == "auto":
        return text
    try:
        return int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{quote(text)} is neither a number nor auto") from error


def _count(text: str) -> int:
    """As vLLM reads long numbers: 8k is 8,000 and 8K 8,192; before k, m and g there may be a decimal point."""
    found = re.fullmatch(r"(\d{1,18}(?:\.\d{1,9})?)([kmgKMG]?)", text, re.ASCII)
    if found is None:
        raise argparse.ArgumentTypeError(f"{quote(text)} is not a number such as 8192, 8k (8000) or 8K (8192)")
    digits, unit = found.groups()
    number = Fraction(digits) * _UNITS[unit]
    if number.denominator != 1 or ("." in digits and unit not in ("k", "m", "g")):
        raise argparse.ArgumentTypeError(f"{quote(text)} is not a whole number")
    return int(number)


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # also for a number of more than 4,300 digits
        raise argparse.ArgumentTypeError(f"{quote(text)} is not JSON: {error}") from error


def _num_images(text: str) -> int:
    """The number of pictures in vLLM's JSON of limits. It may name other media with 0, since none are taken."""
    limits = _json(text)
    if not isinstance(limits, dict) or "image" not in limits:
        raise argparse.ArgumentTypeError(f"{quote(text)} is not an object with the key image")
    for name, limit in limits.items():
        if type(limit) is not int or limit < 0:
            raise argparse.ArgumentTypeError(f"{quote(name)} is {show(limit)}, must be a number from 0")
        if name != "image" and limit > 0:
            raise argparse.ArgumentTypeError(f"{quote(name)} is {limit}, but only pictures are taken: it can be 0")
    if limits["image"] == 0:
        raise argparse.ArgumentTypeError("'image' is 0: --language-model-only takes no pictures")
    return limits["image"]


def _json_object(text: str) -> str:
    if not isinstance(_json(text), dict):
        raise argparse.ArgumentTypeError(f"{quote(text)} is not an object")
    return text


def _sampling_overrides(text: str) -> tuple[str, ...]:
    given = json.loads(_json_object(text))
    entries = tuple(f"{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in given.items())
    try:
        override(NO_DEFAULTS, entries)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return entries


def _on(value: object = True) -> dict[str, object]:
    return {"": value}


FLAGS = (
    Flag("--model", ("model.path",), "a directory or a name at the Hub, the same as MODEL", str, "DIR"),
    Flag(
        "--load-format",
        ("model.load_format",),
        "dummy: random weights",
        _same(["safetensors", "dummy"], auto="safetensors"),
    ),
    Flag("--num-layers", ("model.num_layers",), "run only the first N layers", int, "N"),
    Flag(
        "--dtype",
        ("model.dtype",),
        "of weights and KV cache; auto: float32 on a CPU",
        _same(["auto", "float32", "bfloat16", "float16"], float="float32", half="float16"),
    ),
    Flag("--max-model-len", ("model.max_model_len",), "tokens of prompt and output together, such as 8K", _count, "N"),
    Flag(
        "--runner",
        ("model.runner",),
        "pooling: make vectors of inputs, too; auto: if the checkpoint is made for it",
        _same(["auto", "generate", "pooling"]),
    ),
    Flag(
        "--convert",
        ("model.runner",),
        "embed: the same as --runner pooling",
        {"auto": "auto", "none": "auto", "embed": "pooling"},
    ),
    Flag(
        "--task",
        ("model.runner",),
        "the same by vLLM's older names",
        {"auto": "auto", "generate": "generate", "embed": "pooling", "embedding": "pooling"}
        | dict.fromkeys(("classify", "score", "reward"), "auto"),
    ),
    Flag(
        "--classifier-from-token",
        ("model.classifier_from_token",),
        "two tokens, such as no yes: inputs are scored by how much likelier the second is to follow",
        str,
        "TOKEN",
        is_list=True,
    ),
    Flag(
        "--reranker",
        ("model.reranker",),
        "qwen3, gemma: the model is Qwen3-Reranker or bge-reranker-v2-gemma, and reads pairs in its template",
        _same(["auto", "none", "qwen3", "gemma"]),
    ),
    Flag(
        "--language-model-only",
        ("model.images",),
        "of a model that sees pictures only the text part is loaded",
        _on(False),
    ),
    Flag("--seed", ("model.dummy_seed",), "of random weights; for answers each request has its own", int, "N"),
    Flag(
        "--quantization",
        ("dense.quantization",),
        "made of 16-bit weights; quantized checkpoints need no flag",
        _same(["fp8"]),
        short="-q",
    ),
    Flag(
        "--tensor-parallel-size",
        ("dense.tensor_parallel_size",),
        "GPUs, of which each has a part of each layer",
        int,
        "N",
        short="-tp",
    ),
    Flag(
        "--pipeline-parallel-size",
        ("dense.pipeline_parallel_size",),
        "GPUs, of which each has some layers",
        int,
        "N",
        short="-pp",
    ),
    Flag("--host", ("gateway.http_address",), "where the HTTP API listens (127.0.0.1)", str, "HOST", is_combined=True),
    Flag("--port", ("gateway.http_address",), "its TCP port (8080)", int, "PORT", is_combined=True),
    Flag("--uds", ("gateway.http_address",), "a Unix socket instead of both", str, "PATH", is_combined=True),
    Flag("--root-path", ("gateway.root_path",), "prefix of all HTTP routes", str, "PATH"),
    Flag(
        "--served-model-name",
        ("gateway.served_model_names",),
        "names that clients may use for the model",
        str,
        "NAME",
        is_list=True,
    ),
    Flag(
        "--api-key",
        ("TWOSTROKE_API_KEYS",),
        "clients must send one of these, of at least 16 characters; visible to other users of this machine, unlike "
        "the environment variable",
        str,
        "KEY",
        is_list=True,
        is_combined=True,
    ),
    Flag("--ssl-certfile", ("gateway.tls_certificate",), "PEM file of the certificate, for HTTP and gRPC", str, "FILE"),
    Flag("--ssl-keyfile", ("gateway.tls_key",), "PEM file of its key", str, "FILE"),
    Flag(
        "--ssl-ca-certs",
        ("gateway.tls_client_ca",),
        "PEM file of a CA: clients must have certificates of it, as with vLLM's --ssl-cert-reqs 2",
        str,
        "FILE",
    ),
    Flag("--chat-template", ("gateway.chat_template",), "file of a template instead of the model's", str, "FILE"),
    Flag(
        "--default-chat-template-kwargs",
        ("gateway.chat_template_kwargs",),
        'variables of the template for chats that do not set them, such as {"enable_thinking": false}',
        _json_object,
        "JSON",
    ),
    Flag(
        "--chat-template-kwargs", ("gateway.chat_template_kwargs",), "the same as with llama.cpp", _json_object, "JSON"
    ),
    Flag(
        "--enable-auto-tool-choice",
        ("gateway.tool_parser",),
        "what the server does anyway if the model's chat template has tools",
        _on("auto"),
        is_combined=True,
    ),
    Flag(
        "--tool-call-parser",
        ("gateway.tool_parser",),
        "how the model writes calls of tools",
        _same(_TOOL_PARSERS, openai="harmony"),
    ),
    Flag(
        "--reasoning-parser",
        ("gateway.reasoning_parser",),
        "how the model marks its reasoning",
        _same(_REASONING_PARSERS, openai_gptoss="harmony"),
    ),
    Flag(
        "--generation-config",
        ("gateway.sampling_defaults",),
        "auto: requests sample as the checkpoint's generation_config.json says where they say nothing",
        {"auto": "model", "vllm": "none"},
    ),
    Flag(
        "--override-generation-config",
        ("gateway.sampling_overrides",),
        'what requests sample with where they say nothing, such as {"temperature": 0.5}',
        _sampling_overrides,
        "JSON",
    ),
    Flag(
        "--sampling-defaults",
        ("gateway.sampling_defaults",),
        "the same as with SGLang",
        {"model": "model", "openai": "none"},
    ),
    Flag("--max-logprobs", ("gateway.max_logprobs",), "most likely tokens that a request may ask for", int, "N"),
    Flag("--enable-prompt-embeds", ("gateway.enable_prompt_embeds",), "clients may send embeddings", _on()),
    Flag(
        "--trust-request-chat-template",
        ("gateway.trust_request_chat_template",),
        "requests may have chat templates of their own",
        _on(),
    ),
    Flag(
        "--limit-mm-per-prompt",
        ("gateway.max_images",),
        'pictures in one request, such as {"image": 4}',
        _num_images,
        "JSON",
    ),
    Flag(
        "--allowed-media-domains",
        ("gateway.image_hosts",),
        "hosts from which pictures are fetched by URL; unlike vLLM, from none without this",
        str,
        "HOST",
        is_list=True,
    ),
    Flag("--max-image-bytes", ("gateway.max_image_bytes",), "size of a picture's file", int, "N"),
    Flag("--max-image-pixels", ("gateway.max_image_pixels",), "of a picture as it is sent", int, "N"),
    Flag("--max-audio-bytes", ("gateway.max_audio_bytes",), "size of a file of sound", int, "N"),
    Flag("--max-audio-seconds", ("gateway.max_audio_seconds",), "length of its sound", int, "N"),
    Flag("--max-inputs", ("gateway.max_inputs",), "inputs of one request for vectors, scores or classes", int, "N"),
    Flag("--max-num-seqs", ("scheduler.max_num_seqs",), "maximum number of sequences in one step", int, "N"),
    Flag("--max-num-batched-tokens", ("scheduler.max_num_batched_tokens",), "the same of tokens", _count, "N"),
    Flag(
        "--speculative-config",
        ("scheduler.speculation", "scheduler.speculation_model", "scheduler.draft_model"),
        'such as {"method": "ngram"}; docs/speculation.md has the keys',
        str,
        "JSON",
        is_combined=True,
    ),
    Flag(
        "--gpu-memory-utilization",
        ("attention.kv_cache_memory_fraction",),
        "KV cache as a fraction of the memory that the weights leave free, unlike vLLM's, which is of all memory",
        float,
        "FRACTION",
    ),
    Flag(
        "--kv-cache-dtype",
        ("attention.kv_cache_dtype",),
        "auto: as the checkpoint says, else model",
        _same(["auto", "model", "fp8", "int8"], fp8_e4m3="fp8"),
    ),
    Flag("--block-size", ("attention.block_size",), "tokens of one KV cache block", int, "N"),
    Flag(
        "--enable-prefix-caching",
        ("attention.enable_prefix_cache",),
        "what the server does anyway",
        _on(),
    ),
    Flag(
        "--no-enable-prefix-caching",
        ("attention.enable_prefix_cache",),
        "requests with the same prefix share no blocks",
        _on(False),
    ),
    Flag(
        "--enable-lora",
        ("dense.max_loras",),
        "serve LoRA adapters: as many as --max-loras and --lora-modules say, one at least",
        _on(),
        is_combined=True,
    ),
    Flag("--max-loras", ("dense.max_loras",), "adapters in memory at the same time", int, "N", is_combined=True),
    Flag("--max-lora-rank", ("dense.max_lora_rank",), "the highest rank of an adapter", int, "N"),
    Flag(
        "--lora-modules",
        ("gateway.lora_modules",),
        'adapters from the start: NAME=DIR or {"name": NAME, "path": DIR}',
        str,
        "ADAPTER",
        is_list=True,
        is_combined=True,
    ),
    Flag(
        "--gateway-processes",
        ("launch.gateway_processes",),
        "gateways at the same ports; auto: by the number of cores (1)",
        _number_or_auto,
        "N",
    ),
    Flag("--access-log", ("log.access",), "log each answer", _on()),
)


# Flags of vLLM that this server does not take, and why, or what does the same.
OTHER_FLAGS = {
    "--trust-remote-code": "leave it out: this server runs no code of a checkpoint",
    "--enforce-eager": "leave it out: no flag switches CUDA graphs off; --set dense.captures_lazily=true and "
    "--set attention.captures_lazily=true capture each when a step first needs it",
    "--swap-space": "--set attention.host_kv_bytes=BYTES keeps blocks of the KV cache in host memory, and with "
    "--set scheduler.policy=take_turns those of sequences that wait for others",
    "--cpu-offload-gb": "weights are not offloaded: --quantization fp8 makes them smaller",
    "--device": "--set dense.device=DEVICE and --set attention.device=DEVICE do the same: auto, cpu, cuda, cuda:N",
    "--disable-log-requests": "leave it out: requests are not logged, and answers only with --access-log",
    "--no-enable-log-requests": "leave it out: requests are not logged, and answers only with --access-log",
    "--enable-log-requests": "requests are not logged; --access-log logs each answer",
    "--disable-log-stats": "leave it out: nothing is logged at intervals",
    "--enable-chunked-prefill": "leave it out: long prompts are always computed in chunks of at most "
    "--max-num-batched-tokens",
    "--no-enable-chunked-prefill": "long prompts are always computed in chunks: --max-num-batched-tokens N makes them "
    "longer",
    "--allowed-origins": "--set 'gateway.cors_origins=[\"ORIGIN\"]' does the same",
    "--api-server-count": "--gateway-processes N does the same",
    "--enable-tokenizer-info-endpoint": "--set gateway.tokenizer_info=true does the same",
    "--tokenizer": "the tokenizer is always the one in the model's directory",
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds all flags. One that is not given is None; `--no-` and the name of a switch give the opposite, or None."""
    all_names = {flag.name for flag in FLAGS}
    for flag in FLAGS:
        about = flag.help.replace("%", "%%")
        names = [flag.name] if flag.short is None else [flag.name, flag.short]
        if not isinstance(flag.values, Mapping):
            number = "+" if flag.is_list else None
            parser.add_argument(*names, type=flag.values, nargs=number, metavar=flag.metavar, help=about)
        elif flag.is_switch:
            parser.add_argument(*names, action="store_const", const=flag.values[""], help=about)
            opposite = _opposite(flag.name)
            if opposite not in all_names:
                value, hidden = flag.values[""], argparse.SUPPRESS
                undone = not value if isinstance(value, bool) else None
                parser.add_argument(opposite, dest=flag.attribute, action="store_const", const=undone, help=hidden)
        else:
            words = ",".join(flag.values)
            parser.add_argument(*names, type=_word_of(flag.values, about), metavar=f"{{{words}}}", help=about)


def _opposite(name: str) -> str:
    return f"--{name.removeprefix('--no-')}" if name.startswith("--no-") else f"--no-{name.removeprefix('--')}"


def read_flags(arguments: argparse.Namespace) -> dict[str, object]:
    """The keys of the config that the flags set, with their values, all but `gateway.http_address`.

    Raises `ConfigError` for an invalid value, and for flags that contradict each other.
    """
    given = {flag.name: getattr(arguments, flag.attribute) for flag in FLAGS}
    values = {
        flag.keys[0]: tuple(given[flag.name]) if flag.is_list else given[flag.name]
        for flag in FLAGS
        if not flag.is_combined and given[flag.name] is not None
    }
    if short := [key for key in given["--api-key"] or () if len(key) < MIN_KEY_CHARACTERS]:
        raise ConfigError(f"--api-key: a key has at least {MIN_KEY_CHARACTERS} characters, and one has {len(short[0])}")
    if any("," in key for key in given["--api-key"] or ()):
        raise ConfigError("--api-key has a key with a comma; only gateway.api_keys_file may have such a key")
    if given["--enable-prefix-caching"] and given["--no-enable-prefix-caching"] is not None:
        raise ConfigError("--enable-prefix-caching and --no-enable-prefix-caching contradict each other")
    if given["--enable-auto-tool-choice"] is not None:
        values.setdefault("gateway.tool_parser", "auto")
    modules = tuple(map(_read_module, given["--lora-modules"] or ()))
    if modules:
        values["gateway.lora_modules"] = modules
    if given["--enable-lora"]:
        values["dense.max_loras"] = max(1, len(modules), given["--max-loras"] or 0)
    elif given["--max-loras"] is not None:
        raise ConfigError(f"--max-loras {given['--max-loras']} needs --enable-lora")
    elif given["--enable-lora"] is not None:
        values["dense.max_loras"] = 0
    if given["--speculative-config"] is not None:
        values |= read_speculative_config(given["--speculative-config"])
    return values


def read_http_address(arguments: argparse.Namespace, config: Config) -> str | None:
    """The address that `--host`, `--port` and `--uds` name; None without them. What they leave open `config` says.

    Raises `ConfigError` if they contradict each other, or leave open what `config` does not say.
    """
    host, port, path = arguments.host, arguments.port, arguments.uds
    if path is not None:
        if host is not None or port is not None:
            raise ConfigError(f"--uds {quote(path)} has neither --host nor --port")
        return f"unix:{path}"
    if host is None and port is None:
        return None
    present = config.gateway.http_address
    if present.startswith("unix:") and (host is None or port is None):
        raise ConfigError(f"--host and --port belong together where gateway.http_address is {present}")
    present_host, _, present_port = present.rpartition(":")
    if host is None:
        host = present_host
    elif ":" in host and not host.startswith("["):
        host = f"[{host}]"  # an IPv6 address
    return f"{host}:{present_port if port is None else port}"


def describe_unknown(unknown: Sequence[str], known: Collection[str]) -> str:
    """An error for arguments that no flag takes: says what to do about one of vLLM's, else names the nearest flag."""
    name = next((word for word in unknown if word.startswith("-")), unknown[0]).partition("=")[0]
    if name in OTHER_FLAGS:
        return f"argument {name} of vLLM is not one of this server: {OTHER_FLAGS[name]}"
    if name.startswith("--") and _opposite(name) in OTHER_FLAGS:
        return f"argument {name} of vLLM is not one of this server: leave it out, as {_opposite(name)}"
    words = {flag.removeprefix("--"): flag for flag in known}  # with their dashes all short names are alike
    meant = nearest(name.removeprefix("--"), words)
    return f"unknown argument {quote(name)}" + (f": did you mean {words[meant]}?" if meant is not None else "")


def _word_of(values: Mapping[str, object], about: str) -> Callable[[str], object]:
    def read(text: str) -> object:
        if text not in values:
            raise argparse.ArgumentTypeError(f"{quote(text)} is not one of {', '.join(values)} ({about})")
        return values[text]

    return read


def _read_module(text: str) -> str:
    """`NAME=DIRECTORY`, also of the JSON that vLLM takes. The base model of an adapter is always the served one."""
    if not text.startswith("{"):
        return text
    try:
        module: dict[str, Any] = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--lora-modules {quote(text)} is not JSON: {error}") from error
    for key, value in module.items():
        if key == _BASE_MODEL and value is None:
            continue
        if key not in ("name", "path", _BASE_MODEL) or not isinstance(value, str):
            raise ConfigError(f"--lora-modules has {key} {show(value)}; supported are the strings name and path")
    module.pop(_BASE_MODEL, None)
    if set(module) != {"name", "path"}:
        raise ConfigError(f"--lora-modules {quote(text)} needs name and path")
    return f"{module['name']}={module['path']}"
