"""Greedy tokens of stages that all work at once equal Hugging Face's."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from services.channel import Channel
from services.common.attention.rope import length_dependent_beyond
from services.common.config import Config
from services.common.errors import ConfigError
from services.common.model_config import load_model_config
from services.common.sampling_params import SamplingParams
from services.common.several_ranks import check_stages
from services.dense_worker.ranks.stage_links import StageLinks
from services.dense_worker.runner.model_runner import LayerRun
from services.dense_worker.runner.stage_runner import StageModelRunner
from services.dense_worker.runner.step_input import StepInput
from services.step import StepPlan
from tests.support.dense.family_models import VARIANTS, make_family_model
from tests.support.dense.sequences import new_sequence
from tests.support.lane_pair import TIMEOUT_S, check_shared_prefix_and_preemption
from tests.support.reference import VOCAB_SIZE, random_prompts, reference_model, reference_tokens
from tests.support.stage_pipeline import stage_pipeline

torch.set_num_threads(1)
MAX_TOKENS = 24
FEW = ("smollm3", "gemma2", "deepseek_v2")
# Each stage has a layer without a window.
FOUR_LAYERS = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}


def config_of(path: Path, *, num_stages: int = 2, num_blocks: int = 96, **scheduler: object) -> Config:
    attention = {"block_size": 8, "num_blocks": num_blocks, "num_threads": 1}
    sizes = {"num_lanes": num_stages, "max_num_seqs": 16, "max_num_batched_tokens": 24, **scheduler}
    dense = {"num_threads": 1, "pipeline_parallel_size": num_stages}
    sections = {"model": {"path": path}, "dense": dense, "attention": attention, "scheduler": sizes}
    return Config.model_validate(sections)


def make(path: Path, variant: str, **fields: object) -> Path:
    make_family_model(path, variant, vocab_size=VOCAB_SIZE, max_position_embeddings=256, **fields)
    return path


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "variant" in metafunc.fixturenames:
        is_long = metafunc.config.getoption("--all-families")
        metafunc.parametrize("variant", VARIANTS if is_long else FEW)


def test_tokens_of_each_family_equal_hugging_face(tmp_path: Path, variant: str) -> None:
    path = make(tmp_path / "two", variant)
    model = load_model_config(path)
    if model.recurrent_layers or model.parts.layer_inputs is not None:
        pytest.skip("`check_lanes` or `check_ranks` refuses it")
    if length_dependent_beyond(model.rope) is not None:
        pytest.skip("Hugging Face rotates otherwise once a prompt with its answer is long")
    try:
        check_stages(model, 2)
    except ConfigError:
        doubled = {name: each * 2 for name, each in VARIANTS[variant][1].items() if isinstance(each, list)}
        path = make(tmp_path / "four", variant, **FOUR_LAYERS | doubled)
    prompts = dict(enumerate(random_prompts(8, longest=60, seed=3), start=1))
    expected = {seq_id: reference_tokens(path, prompt, MAX_TOKENS) for seq_id, prompt in prompts.items()}
    with stage_pipeline(config_of(path)) as pipeline:
        assert pipeline.generate(prompts, MAX_TOKENS) == expected


def test_three_stages_have_a_step_each(tmp_path: Path) -> None:
    path = make(tmp_path, "smollm3", num_hidden_layers=5, no_rope_layers=[1, 0, 1, 0, 1])
    prompts = dict(enumerate(random_prompts(9, longest=40, seed=8), start=1))
    expected = {seq_id: reference_tokens(path, prompt, MAX_TOKENS) for seq_id, prompt in prompts.items()}
    with stage_pipeline(config_of(path, num_stages=3)) as pipeline:
        assert pipeline.generate(prompts, MAX_TOKENS) == expected


def test_prompts_that_share_a_prefix_and_sequences_that_are_preempted_keep_their_tokens(tmp_path: Path) -> None:
    path = make(tmp_path, "smollm3")
    with stage_pipeline(config_of(path, policy="max_utilization", num_blocks=36)) as pipeline:
        check_shared_prefix_and_preemption(pipeline, path)


def test_what_is_cancelled_leaves_all_stages_and_the_others_keep_their_tokens(tmp_path: Path) -> None:
    path = make(tmp_path, "smollm3")
    prompts = dict(enumerate(random_prompts(8, longest=30, seed=9), start=1))
    cancelled = [seq_id for seq_id in prompts if seq_id % 3 == 0]
    expected = {
        seq_id: reference_tokens(path, prompt, MAX_TOKENS)
        for seq_id, prompt in prompts.items()
        if seq_id not in cancelled
    }
    with stage_pipeline(config_of(path)) as pipeline:
        for seq_id in cancelled:
            endless = new_sequence(seq_id, "r", prompts[seq_id], SamplingParams(), max_tokens=200)
            pipeline.engine.submit(endless)
        begun = set[int]()
        while begun != {*cancelled}:
            begun |= {each.sequence.seq_id for each in pipeline.next_report().outputs}
        for seq_id in cancelled:
            pipeline.engine.cancel(seq_id)
        assert pipeline.generate({seq_id: prompts[seq_id] for seq_id in expected}, MAX_TOKENS) == expected
        assert pipeline.engine.counts.num_running == 0


def test_further_rows_are_those_of_their_lane(tmp_path: Path) -> None:
    """The last stage has begun another lane's step when the first one asks for them."""
    path = make(tmp_path, "smollm3")
    prompts = dict(enumerate(random_prompts(6, longest=40, seed=10), start=1))
    with torch.inference_mode():
        expected = {each: reference_model(path)(torch.tensor([prompt])).logits[0] for each, prompt in prompts.items()}
    with stage_pipeline(config_of(path)) as pipeline:
        for seq_id, prompt in prompts.items():
            asked = new_sequence(seq_id, "r", prompt, SamplingParams(), max_tokens=8, features={"context_logits": b""})
            pipeline.engine.submit(asked)
        found = {seq_id: torch.zeros(len(prompt), VOCAB_SIZE) for seq_id, prompt in prompts.items()}
        ended = set[int]()
        while ended != prompts.keys():
            report = pipeline.next_report()
            for _, each in report.reports:
                found[each.seq_id][each.start : each.end] = torch.from_numpy(each.rows)
            ended |= {each.sequence.seq_id for each in report.outputs if each.finish_reason is not None}
    for seq_id, logits in found.items():
        torch.testing.assert_close(logits[: len(logits) - 1], expected[seq_id][:-1], rtol=0, atol=1e-3)


@pytest.mark.parametrize("num_stages", [2, 3])
def test_no_stage_waits_for_the_step_of_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_stages: int
) -> None:
    """The last stage gives no logits of a step before the first one has begun the next steps of all other lanes."""
    path = make(tmp_path, "smollm3", num_hidden_layers=3, no_rope_layers=[1, 0, 1])
    begun, has_begun = list[int](), threading.Condition()
    run_first = StageModelRunner.begin

    def begin(runner: StageModelRunner, step: StepInput, channel: Channel) -> LayerRun:
        with has_begun:
            begun.append(step.bound.plan.step_id)
            has_begun.notify_all()
        return run_first(runner, step, channel)

    monkeypatch.setattr(StageModelRunner, "begin", begin)
    prompts = dict(enumerate(random_prompts(3 * num_stages, longest=8, seed=6), start=1))
    with stage_pipeline(config_of(path, num_stages=num_stages)) as pipeline:
        last, num_held, plan = pipeline.shards[-1].runner, 0, StepPlan(0)
        run_step, send_logits = last.run_step, StageLinks.send_logits

        def noted_step(of_step: StepPlan, num_rows: int, num_sampled: int) -> None:
            nonlocal plan
            plan = of_step
            run_step(of_step, num_rows, num_sampled)

        def held_logits(links: StageLinks, logits: torch.Tensor) -> None:
            nonlocal num_held
            if len(plan.entries) == plan.num_tokens == 3 and num_held < 12:  # all lanes have their sequences by now
                with has_begun:
                    index = begun.index(plan.step_id)
                    assert has_begun.wait_for(lambda: len(begun) >= index + num_stages, TIMEOUT_S)
                num_held += 1
            send_logits(links, logits)

        monkeypatch.setattr(last, "run_step", noted_step)
        monkeypatch.setattr(StageLinks, "send_logits", held_logits)
        pipeline.generate(prompts, MAX_TOKENS)
    assert num_held == 12
