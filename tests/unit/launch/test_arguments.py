"""The flags of `python -m services.launch`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from services.launch.arguments import parse_args


@pytest.mark.parametrize("name", ["1000", "2025-01-01", "true", '"quoted"'])
def test_a_model_directory_may_have_any_name(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    config, _ = parse_args(["--model", name, "--num-layers", "2"])
    assert (config.model.path, config.model.num_layers) == (Path(name), 2)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}', ("ngram", 5, 4, 4)),
        ('{"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4}', ("ngram", 7, 2, 4)),
        ('{"model": "[ngram]", "num_speculative_tokens": 3}', ("ngram", 3, 3, 5)),
        ('{"method": "suffix", "num_speculative_tokens": 32}', ("suffix", 32, 3, 5)),
    ],
)
def test_speculation_is_configured_as_for_vllm(text: str, expected: tuple[str, int, int, int]) -> None:
    for flag in ("--speculative-config", "--speculative_config"):
        section = parse_args([flag, text])[0].scheduler
        assert expected == (
            section.speculation,
            section.num_speculative_tokens,
            section.prompt_lookup_min,
            section.prompt_lookup_max,
        )


@pytest.mark.parametrize("method", ["medusa", "eagle3"])
@pytest.mark.parametrize("name", ["heads", "7", "true"])
def test_heads_are_named_as_for_vllm(name: str, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    text = json.dumps({"method": method, "model": name, "num_speculative_tokens": 4})
    section = parse_args(["--speculative-config", text])[0].scheduler
    assert (section.speculation, section.speculation_model, section.num_speculative_tokens) == (method, Path(name), 4)


@pytest.mark.parametrize("method", [{"method": "draft_model"}, {}])
def test_a_draft_model_is_named_as_for_vllm(method: dict[str, str], tmp_path: Path) -> None:
    text = json.dumps(method | {"model": str(tmp_path), "num_speculative_tokens": 4})
    section = parse_args(["--speculative-config", text])[0].scheduler
    assert (section.speculation, section.draft_model, section.num_speculative_tokens) == ("draft_model", tmp_path, 4)
    assert section.speculation_model is None


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["scheduler.draft_model=/"], "draft_model '/' belongs to 'draft_model', speculation is 'off'"),
        (["scheduler.speculation=medusa", "scheduler.draft_model=/"], "'medusa' needs scheduler.speculation_model"),
        (["scheduler.speculation=draft_model", "scheduler.speculation_model=/"], "'/' belongs to 'medusa' or 'eagle3'"),
        (["scheduler.draft_cache_bytes=0"], "draft_cache_bytes = 0"),
        (
            ["scheduler.speculation_model=/"],
            "speculation_model '/' belongs to 'medusa' or 'eagle3', speculation is 'off'",
        ),
        (["scheduler.speculation=ngram", "scheduler.speculation_model=/"], "speculation is 'ngram'"),
        (
            ["scheduler.speculation=medusa", "scheduler.speculation_model=/", "dense.backend=tensorrt"],
            "'medusa': TensorRT gives no hidden states",
        ),
        (
            ["scheduler.speculation=eagle3", "scheduler.speculation_model=/", "dense.backend=tensorrt"],
            "'eagle3': TensorRT gives no hidden states",
        ),
        (["scheduler.speculation=eagle3", "scheduler.draft_model=/"], "'eagle3' needs scheduler.speculation_model"),
    ],
)
def test_weights_without_their_method_or_with_tensorrt_are_refused(
    overrides: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse_args([argument for override in overrides for argument in ("--set", override)])
    assert named in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('{"method": "eagle", "model": "x", "num_speculative_tokens": 2}', "'eagle'"),
        ('{"method": "eagle3", "model": "/no such"}', "speculation_model '/no such' is not a directory"),
        ('{"method": "eagle3", "num_speculative_tokens": 3}', "'eagle3' needs scheduler.speculation_model"),
        ('{"method": "eagle3", "model": "/", "draft_tensor_parallel_size": 1}', "'draft_tensor_parallel_size'"),
        ('{"method": "medusa", "num_speculative_tokens": 3}', "'medusa' needs scheduler.speculation_model"),
        ('{"method": "medusa", "model": ["heads"]}', 'model ["heads"], which is not a string'),
        ('{"method": "medusa", "model": "/no such"}', "speculation_model '/no such' is not a directory"),
        ('{"method": "medusa", "model": "/", "draft_tensor_parallel_size": 1}', "'draft_tensor_parallel_size'"),
        ('{"method": "suffix", "model": "/"}', "'model'"),
        ('{"model": "facebook/opt-125m", "num_speculative_tokens": 5}', "draft_model 'facebook/opt-125m' is not a dir"),
        ('{"method": "draft_model", "num_speculative_tokens": 5}', "'draft_model' needs scheduler.draft_model"),
        ('{"model": 3}', "model 3, which is not a string"),
        ('{"model": "/", "draft_tensor_parallel_size": 1}', "'draft_tensor_parallel_size'"),
        ('{"model": "/", "num_speculative_tokens": 65}', "num_speculative_tokens = 65"),
        ("{}", "names no method"),
        ('{"method": ["ngram"]}', '["ngram"]'),
        ('{"method": "ngram", "disable_by_batch_size": 4}', "'disable_by_batch_size'"),
        ('{"method": "suffix", "prompt_lookup_max": 4}', "'prompt_lookup_max'"),
        ('{"method": "ngram", "num_speculative_tokens": "5"}', "num_speculative_tokens '5'"),
        ('{"method": "ngram", "num_speculative_tokens": true}', "num_speculative_tokens true"),
        ('{"method": "ngram", "num_speculative_tokens": 0}', "num_speculative_tokens = 0"),
        ('{"method": "ngram", "num_speculative_tokens": 65}', "num_speculative_tokens = 65"),
        ('{"method": "ngram", "prompt_lookup_min": 9, "prompt_lookup_max": 3}', "prompt_lookup_min is 9"),
        ('{"method": "ngram", "prompt_lookup_max": 17}', "prompt_lookup_max = 17"),
        ("ngram", "not JSON"),
        ('["ngram"]', "not a JSON object"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(text: str, named: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_args(["--speculative-config", text])
    assert ended.value.code == 1
    error = capsys.readouterr().err
    assert named in error and error.startswith("services.launch: ") and len(error.splitlines()) == 1


def test_a_length_without_a_prompt_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse_args(["--max-tokens", "7"])
    assert stopped.value.code == 2
    assert "--max-tokens is of the answer to --prompt or --sample-prompt" in capsys.readouterr().err
    assert [parse_args([flag, "a"])[1].max_tokens for flag in ("--prompt", "--sample-prompt")] == [64, 64]
