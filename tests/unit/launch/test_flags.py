"""The flags that are short forms of config keys, by the names of vLLM where it has them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from services.common.config import API_KEYS_VARIABLE, Config
from services.launch.arguments import parse_args
from services.launch.flags import FLAGS

# As vLLM's users write them, and what they mean here.
MEANINGS = {
    ("--max-model-len", "4096"): {"model.max_model_len": 4096},
    ("--max_model_len", "2K", "--max-num-batched-tokens=1.5k"): {
        "model.max_model_len": 2048,
        "scheduler.max_num_batched_tokens": 1500,
    },
    ("-tp", "2", "-q=fp8"): {"dense.tensor_parallel_size": 2, "dense.quantization": "fp8"},
    ("-pp", "2"): {"dense.pipeline_parallel_size": 2},
    ("--enable-lora", "--no-enable-lora", "--no-language-model-only", "--no-access-log"): {
        "dense.max_loras": 0,
        "log.access": False,
    },
    ("--no_enable_prompt_embeds", "--enable-prompt-embeds"): {"gateway.enable_prompt_embeds": True},
    ("--dtype", "half"): {"model.dtype": "float16"},
    ("--dtype", "bfloat16"): {"model.dtype": "bfloat16"},
    ("--load-format", "auto"): {"model.load_format": "safetensors"},
    ("--seed", "7"): {"model.dummy_seed": 7},
    ("--quantization", "fp8"): {"dense.quantization": "fp8"},
    ("--kv-cache-dtype", "fp8_e4m3"): {"attention.kv_cache_dtype": "fp8"},
    ("--kv-cache-dtype", "auto"): {"attention.kv_cache_dtype": "auto"},
    ("--gpu-memory-utilization", "0.8"): {"attention.kv_cache_memory_fraction": 0.8},
    ("--max-num-seqs", "32"): {"scheduler.max_num_seqs": 32},
    ("--tensor-parallel-size", "2"): {"dense.tensor_parallel_size": 2},
    ("--pipeline-parallel-size", "2"): {"dense.pipeline_parallel_size": 2},
    ("--max-num-batched-tokens", "2048"): {"scheduler.max_num_batched_tokens": 2048},
    ("--no-enable-prefix-caching",): {"attention.enable_prefix_cache": False},
    ("--served-model-name", "a", "b=c"): {"gateway.served_model_names": ("a", "b=c")},
    ("--ssl-certfile", "c", "--ssl-keyfile", "k"): {
        "gateway.tls_certificate": Path("c"),
        "gateway.tls_key": Path("k"),
    },
    ("--ssl-ca-certs", "a", "--ssl-certfile", "c", "--ssl-keyfile", "k"): {
        "gateway.tls_client_ca": Path("a"),
        "gateway.tls_certificate": Path("c"),
        "gateway.tls_key": Path("k"),
    },
    ("--default-chat-template-kwargs", '{"enable_thinking": false}'): {
        "gateway.chat_template_kwargs": '{"enable_thinking": false}'
    },
    ("--chat-template-kwargs", "{}"): {"gateway.chat_template_kwargs": "{}"},
    ("--chat-template", "t.jinja"): {"gateway.chat_template": Path("t.jinja")},
    ("--enable-auto-tool-choice", "--tool-call-parser", "openai"): {"gateway.tool_parser": "harmony"},
    ("--enable-auto-tool-choice", "--set", "gateway.reasoning_parser=none"): {"gateway.tool_parser": "auto"},
    ("--reasoning-parser", "deepseek_r1"): {"gateway.reasoning_parser": "deepseek_r1"},
    ("--generation-config", "vllm"): {"gateway.sampling_defaults": "none"},
    ("--override-generation-config", '{"temperature": 0.5, "top_k": 20}'): {
        "gateway.sampling_overrides": ("temperature=0.5", "top_k=20")
    },
    ("--sampling-defaults", "openai"): {"gateway.sampling_defaults": "none"},
    ("--enable-lora",): {"dense.max_loras": 1},
    ("--enable-lora", "--max-loras", "4", "--max-lora-rank", "16"): {"dense.max_loras": 4, "dense.max_lora_rank": 16},
    ("--enable-lora", "--lora-modules", "sql=/a", '{"name": "c", "path": "/b", "base_model_name": "m/x"}'): {
        "dense.max_loras": 2,
        "gateway.lora_modules": ("sql=/a", "c=/b"),
    },
    ("--enable-lora", "--lora-modules", '{"name": "c", "path": "/b", "base_model_name": null}'): {
        "dense.max_loras": 1,
        "gateway.lora_modules": ("c=/b",),
    },
    ("--language-model-only",): {"model.images": False},
    ("--limit-mm-per-prompt", '{"image": 4, "video": 0}'): {"gateway.max_images": 4},
    ("--allowed-media-domains", "a.org", "b.org"): {"gateway.image_hosts": ("a.org", "b.org")},
    ("--max-image-bytes", "1000", "--max-image-pixels", "90"): {
        "gateway.max_image_bytes": 1000,
        "gateway.max_image_pixels": 90,
    },
    ("--max-audio-bytes", "5000", "--max-audio-seconds", "30"): {
        "gateway.max_audio_bytes": 5000,
        "gateway.max_audio_seconds": 30,
    },
    ("--max-inputs", "12"): {"gateway.max_inputs": 12},
    ("--host", "0.0.0.0", "--port", "8000"): {"gateway.http_address": "0.0.0.0:8000"},
    ("--host", "::"): {"gateway.http_address": "[::]:8080"},
    ("--port", "9000"): {"gateway.http_address": "127.0.0.1:9000"},
    ("--uds", "/run/a.sock"): {"gateway.http_address": "unix:/run/a.sock"},
}


@pytest.mark.parametrize(("argv", "meaning"), MEANINGS.items(), ids=" ".join)
def test_a_flag_of_vllm_means_a_key_of_the_config(argv: tuple[str, ...], meaning: Mapping[str, object]) -> None:
    config, _ = parse_args(argv)
    assert {key: value_of(config, key) for key in meaning} == meaning


def test_flags_set_only_keys_that_exist_and_each_flag_is_tested_here_or_has_an_own_name() -> None:
    assert {key for flag in FLAGS for key in flag.keys if not has_key(key)} == {API_KEYS_VARIABLE}
    assert len({flag.name for flag in FLAGS}) == len(FLAGS)
    tested = {word for argv in MEANINGS for word in argv if word.startswith("--")}
    simple = {flag.name for flag in FLAGS if flag.is_combined}
    assert simple - tested == {"--api-key", "--speculative-config"}  # a running server; test_arguments.py


WORDS = [(flag.name, word) for flag in FLAGS if isinstance(flag.values, Mapping) for word in flag.values]


@pytest.mark.parametrize(("name", "word"), WORDS)
def test_every_word_of_a_flag_is_a_valid_value_of_its_key(name: str, word: str) -> None:
    parse_args([name, word] if word else [name])


def test_the_file_says_what_flags_leave_open_and_set_wins_over_both(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text('[gateway]\nhttp_address = "10.0.0.1:1234"\ntool_parser = "none"\n[model]\nmax_model_len = 5\n')
    config, _ = parse_args(["--config", str(file), "--host", "localhost", "--max-model-len", "6"])
    assert (config.gateway.http_address, config.model.max_model_len) == ("localhost:1234", 6)
    config, _ = parse_args(["--config", str(file), "--port", "1", "--set", "gateway.http_address=a:2"])
    assert (config.gateway.http_address, config.gateway.tool_parser) == ("a:2", "none")


def test_a_switch_that_is_undone_wins_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    switches = {"log.access": True, "gateway.enable_prompt_embeds": True, "model.images": False, "dense.max_loras": 2}
    sections = [key.split(".") for key in switches]
    file.write_text("".join(
        f"[{section}]\n{key} = {json.dumps(switches[f'{section}.{key}'])}\n" for section, key in sections
    ))  # fmt: skip
    undone = ["--no-access-log", "--no-enable-prompt-embeds", "--no-language-model-only", "--no-enable-lora"]
    for argv, of_switches in ([], switches), (undone, {key: not value for key, value in switches.items()}):
        config, _ = parse_args(["--config", str(file), *argv])
        assert {key: value_of(config, key) for key in switches} == of_switches


@pytest.mark.parametrize("argv", [["DIR"], ["--port", "1", "DIR"], ["--model", "DIR"], ["DIR", "--port=1"]])
def test_the_model_may_be_given_without_a_flag(
    argv: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("DIR").mkdir()
    assert parse_args(argv)[0].model.path == Path("DIR")


@pytest.mark.parametrize(
    ("argv", "status", "named"),
    [
        (["--max-model-length", "5"], 2, "unknown argument '--max-model-length': did you mean --max-model-len?"),
        (["--gpu_memory_util=0.5", "--enable-auto-tools"], 2, "did you mean --enable-auto-tool-choice?"),
        (["--promt", "a"], 2, "unknown argument '--promt': did you mean --prompt?"),
        (["--prot", "8000"], 2, "unknown argument '--prot': did you mean --port?"),
        (["nope"], 1, "model 'nope' is neither a directory or GGUF file here nor the name of a model at the Hub, ORG"),
        (["--model", "/no such"], 1, "model '/no such' is neither a directory"),
        (["--trust-remote-code"], 2, "argument --trust-remote-code of vLLM is not one of this server: leave it out"),
        (["--no_trust_remote_code"], 2, "argument --no-trust-remote-code of vLLM is not one of this server: leave it"),
        (["--max-model-len", "1.5K"], 2, "'1.5K' is not a whole number"),
        (["--max-model-len", "1.0005k"], 2, "'1.0005k' is not a whole number"),
        (["--max-model-len", "-1"], 2, "-1"),
        (["--max-model-len", "8 K"], 2, "'8 K' is not a number such as 8192, 8k (8000) or 8K (8192)"),
        (["--swap-space", "4"], 2, "--set attention.host_kv_bytes=BYTES"),
        (["--device=cuda"], 2, "--set dense.device=DEVICE and --set attention.device=DEVICE"),
        (["a/b", "--enforce_eager"], 2, "--set dense.captures_lazily=true"),
        (["--xyz"], 2, "unknown argument '--xyz'\n"),
        (["--bogus"], 2, "unknown argument '--bogus'\n"),
        (["a", "b"], 2, "unknown argument 'b'"),
        (["a", "--model", "b"], 2, "MODEL 'a' and --model 'b' mean the same"),
        (["--quantization", "awq"], 2, "'awq' is not one of fp8 (made of 16-bit weights; quantized checkpoints need"),
        (["--dtype", "float64"], 2, "'float64' is not one of auto, float32, bfloat16, float16, float, half"),
        (["--max-num-seqs", "many"], 2, "invalid int value: 'many'"),
        (["--gateway-processes", "many"], 2, "'many' is neither a number nor auto"),
        (["--max-audio-seconds", "0"], 1, "gateway.max_audio_seconds = 0"),
        (["--override-generation-config", "top_p=1"], 2, "'top_p=1' is not JSON"),
        (["--override-generation-config", "[1]"], 2, "'[1]' is not an object"),
        (["--default-chat-template-kwargs", "null"], 2, "'null' is not an object"),
        (["--override-generation-config", '{"top_p": 1.5}'], 2, "top_p is 1.5, must be"),
        (["--override-generation-config", '{"max_new_tokens": 5}'], 2, "has 'max_new_tokens'; it may have temperature"),
        (["--override-generation-config", '{"top_k": ' + "9" * 5000 + "}"], 2, "is not JSON: Exceeds"),
        (["--override-generation-config", '{"top_k": 2147483648}'], 2, "top_k is 2147483648, at most 2147483647"),
        (["--default-chat-template-kwargs", '{"a": "\udcff"}'], 2, "is not UTF-8"),
        (["--limit-mm-per-prompt", "image=4"], 2, "'image=4' is not JSON"),
        (["--limit-mm-per-prompt", '{"video": 1}'], 2, "is not an object with the key image"),
        (["--limit-mm-per-prompt", '{"image": 1.5}'], 2, "'image' is 1.5, must be a number from 0"),
        (["--limit-mm-per-prompt", '{"image": 1, "video": 2}'], 2, "'video' is 2, but only pictures are taken"),
        (["--limit-mm-per-prompt", '{"image": 0}'], 2, "--language-model-only takes no pictures"),
        (["--uds", "/a", "--port", "1"], 1, "--uds '/a' has neither --host nor --port"),
        (["--port", "1", "--set", "gateway.http_address=unix:/a"], 1, "where gateway.http_address is unix:/a"),
        (["--port", "65536"], 1, "65536"),
        (["--max-loras", "2"], 1, "--max-loras 2 needs --enable-lora"),
        (["--lora-modules", "a=/b"], 1, "need dense.max_loras of at least 1 (--enable-lora)"),
        (["--lora-modules", '{"name": "a"}'], 1, "needs name and path"),
        (["--lora-modules", '{"name": "a", "path": "/b", "rank": 3}'], 1, "has rank 3"),
        (["--lora-modules", '{"name": '], 1, "is not JSON"),
        (["--gpu-memory-utilization", "1.5"], 1, "attention.kv_cache_memory_fraction = 1.5"),
        (["--enable-prefix-caching", "--no-enable-prefix-caching"], 1, "contradict each other"),
        (["--ssl-certfile", "c"], 1, "gateway.tls_certificate and gateway.tls_key belong together"),
    ],
)
def test_what_is_wrong_is_named_in_one_line(
    argv: list[str], status: int, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_args(argv, "twostroke serve")
    error = capsys.readouterr().err
    assert ended.value.code == status
    assert named in error and error.splitlines()[-1].startswith("twostroke serve: ") and error.count("\n") <= 2


def test_a_key_with_a_comma_is_refused_without_being_quoted(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_args(["--api-key", "abcdefgh,ijklmnopq"])
    error = capsys.readouterr().err
    assert "comma" in error and "abc" not in error


def test_a_short_key_is_refused_with_the_name_of_its_flag_and_not_quoted(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_args(["--api-key", "a-key-of-16-char", "sekret"])
    error = capsys.readouterr().err
    assert "--api-key: a key has at least 16 characters, and one has 6" in error and "sekret" not in error


@pytest.mark.parametrize("text", ["x", json.dumps({"name": "x", "path": "/y", "revision": "z"})])
def test_a_module_in_another_form_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_args(["--enable-lora", "--lora-modules", text])
    assert ended.value.code == 1 and "lora" in capsys.readouterr().err


def value_of(config: Config, key: str) -> object:
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)


def has_key(key: str) -> bool:
    section, _, name = key.partition(".")
    return section in Config.model_fields and name in type(getattr(Config(), section)).model_fields
