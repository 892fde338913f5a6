"""Several answers to one prompt in the scheduler, with the real KV cache accounting and a simulated model.

The cluster follows the tokens of every sequence from the plans alone, as a runner does. So it notices when an answer is
forked from a sequence with another prompt, at a wrong place, or gets a wrong token.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.sampling_params import SamplingParams
from services.dense_worker.engine.limits import Policy
from services.dense_worker.engine.sequence import Sequence, SequenceStatus
from services.dense_worker.engine.session import ScheduledStep
from services.dense_worker.features.fork_policy import ForkPolicy, ParallelAnswers
from services.step import StepPlan
from tests.support.dense.eager_drafting import EagerDrafting
from tests.support.dense.scheduler_cluster import BLOCK_SIZE, STOP_TOKEN, WINDOWS, Cluster, expected_output
from tests.support.dense.sequences import ask, new_sequence
from tests.support.examples import examples
from tests.support.reports import prompt_logprobs
from tests.unit.dense_worker.features.drafting.test_scheduler_drafts import SomeDrafts

ID_GAP = 10  # between the first answers to two prompts


class AnswerCluster(Cluster):
    """Also follows the tokens of every sequence, and checks the KV cache after every step."""

    def __init__(self, *arguments: object, **options: object) -> None:
        super().__init__(*arguments, **{"forks": ParallelAnswers(), **options})
        self.tokens: dict[int, list[int]] = {}
        self.sequences: dict[int, Sequence] = {}

    def arrive(
        self,
        num_answers: int,
        prompt_len: int,
        max_tokens: int,
        *,
        can_stop: bool = False,
        client: int = 0,
        is_first_alone: bool = False,
    ) -> list[Sequence]:
        """Adds the answers to a new prompt; `is_first_alone`: the later ones are not added."""
        first = ID_GAP * (len(self.sequences) + 1)
        answers = [
            new_sequence(
                seq_id=first + index,
                request_id=f"r{first}",
                prompt_token_ids=[(first + position) % 5 for position in range(prompt_len)],
                sampling=SamplingParams(),
                max_tokens=max_tokens,
                stop_token_ids=frozenset([STOP_TOKEN]) if can_stop else frozenset(),
                group_id=first if num_answers > 1 else 0,
                client=client,
            )
            for index in range(num_answers)
        ]
        for each in answers[:1] if is_first_alone else answers:
            self.scheduler.add(each)
        self.sequences.update({each.seq_id: each for each in answers})
        return answers

    def answer_opens(self) -> None:
        for each in self._opening:
            self.tokens[each.seq_id] = each.spec.prompt_token_ids + each.output_token_ids
        super().answer_opens()

    def check(self, plan: StepPlan) -> None:
        """Without the order of entries: several clients share a step, in which any prompt may get a single token."""
        assert plan.num_tokens <= self.limits.max_num_batched_tokens
        assert sum(entry.num_logits for entry in plan.entries) <= self.limits.max_num_seqs
        assert len({entry.seq_id for entry in plan.entries}) == len(plan.entries)
        assert self.scheduler.num_running <= self.limits.max_num_seqs

    def attach_again(self) -> None:
        super().attach_again()
        for seq_id in self.tokens.keys() - self.cache.orphaned_blocks.keys():
            del self.tokens[seq_id]

    def _complete(self, published: ScheduledStep) -> None:
        plan = published.plan
        for seq_id in plan.close_seq_ids:
            self.tokens.pop(seq_id, None)
        for seq_id, token_id in plan.sampled:
            if seq_id in self.tokens:
                self.tokens[seq_id].append(token_id)
        self.tokens |= {each.seq_id: list(each.token_ids) for each in plan.new_sequences if each.starts_empty}
        for fork in plan.forks:
            assert fork.child_seq_id not in self.tokens
            self.tokens[fork.child_seq_id] = self.tokens[fork.parent_seq_id][: fork.position]
        for seq_id, token_id in plan.forced:
            self.tokens[seq_id].append(token_id)
        for entry in plan.entries:
            sequence, tokens = self.sequences[entry.seq_id], self.tokens[entry.seq_id]
            right = sequence.spec.prompt_token_ids + expected_output(sequence)
            assert tokens == right[: len(tokens)] and len(tokens) >= sequence.num_prompt_tokens
        super()._complete(published)
        self.cache.check_integrity()

    def check_answers(self, answers: SequenceOf[Sequence]) -> None:
        """Each ended once, with its own tokens."""
        ends = [output.sequence.seq_id for output in self.outputs if output.finish_reason is not None]
        delivered: dict[int, list[int]] = {}
        for output in self.outputs:
            assert output.error is None
            delivered.setdefault(output.sequence.seq_id, []).extend(output.token_ids)
        for each in answers:
            assert ends.count(each.seq_id) == 1
            assert delivered[each.seq_id] == expected_output(each)

    def num_prompt_tokens_computed(self, answers: SequenceOf[Sequence]) -> int:
        """How many tokens of the prompts of these answers all plans have computed together."""
        lengths = {each.seq_id: each.num_prompt_tokens for each in answers}
        entries = [entry for plan in self.plans for entry in plan.entries if entry.seq_id in lengths]
        return sum(
            max(0, min(entry.position + entry.num_tokens, lengths[entry.seq_id]) - entry.position) for entry in entries
        )


groups = st.lists(
    st.tuples(
        st.integers(1, 5),  # answers
        st.integers(1, 30),  # prompt
        st.integers(1, 12),  # max_tokens
        st.booleans(),  # can stop
        st.integers(0, 3),  # steps before the next request
        st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9)), max_size=2),  # answers cancelled, after steps
        st.integers(0, 2),  # client
    ),
    min_size=1,
    max_size=5,
)


@settings(max_examples=examples(100), deadline=None)
@given(
    groups,
    st.sampled_from(["guaranteed_no_evict", "max_utilization", "take_turns"]),
    st.integers(16, 40),
    st.integers(1, 6),
    st.integers(6, 24),
    st.integers(1, 3),
    st.sets(st.integers(1, 30), max_size=3),
    WINDOWS,
    st.booleans(),
    st.sampled_from([None, None, 2]),
)
def test_every_answer_gets_its_tokens_and_every_block_is_freed(
    requests: list[tuple[int, int, int, bool, int, list[tuple[int, int]], int]],
    policy: Policy,
    num_blocks: int,
    max_num_seqs: int,
    budget: int,
    answer_every: int,
    resets: set[int],
    window: dict[str, int],
    has_prefix_cache: bool,
    num_drafts: int | None,
) -> None:
    """With cancellations of any answer at any time, preemptions, lost attachments, windows and drafts."""
    cluster = AnswerCluster(
        policy,
        num_blocks,
        max_num_seqs,
        max(budget, max_num_seqs),
        **window,
        enable_prefix_cache=has_prefix_cache,
        drafting=None if num_drafts is None else SomeDrafts(num_drafts, 3),
    )
    kept: list[Sequence] = []
    cancels, num_steps = dict[int, list[Sequence]](), 0
    for num_answers, prompt_len, max_tokens, can_stop, gap, cancelled, client in requests:
        answers = cluster.arrive(num_answers, prompt_len, max_tokens, can_stop=can_stop, client=client)
        kept += answers
        for index, after in cancelled:
            if index < num_answers:
                cancels.setdefault(num_steps + after, []).append(answers[index])
        for _ in range(gap):
            cancel(cluster, kept, cancels.pop(num_steps, []))
            num_steps += 1
            if num_steps in resets:
                cluster.attach_again()
            cluster.step(answer_opens=num_steps % answer_every == 0)
    for now in range(num_steps, num_steps + 10):
        cancel(cluster, kept, cancels.pop(now, []))
        cluster.step()
    cluster.run_until_idle()
    cluster.check_answers(kept)


def cancel(cluster: AnswerCluster, kept: list[Sequence], cancelled: list[Sequence]) -> None:
    for each in cancelled:
        if each.status is not SequenceStatus.FINISHED:
            cluster.scheduler.cancel(each.seq_id)
            kept.remove(each)


@pytest.mark.parametrize("prompt_len", [2, 7, 8, 9, 30])
@pytest.mark.parametrize("num_answers", [2, 4, 6])
def test_the_prompt_is_computed_once_and_its_last_token_by_each_answer(prompt_len: int, num_answers: int) -> None:
    cluster = AnswerCluster(num_blocks=64, max_num_seqs=6, max_num_batched_tokens=16, enable_prefix_cache=False)
    answers = cluster.arrive(num_answers, prompt_len, 5)
    cluster.run_until_idle()
    cluster.check_answers(answers)
    assert cluster.num_prompt_tokens_computed(answers) == prompt_len + num_answers - 1
    assert sum(len(plan.forks) for plan in cluster.plans) == num_answers - 1
    assert {each.num_cached_tokens for each in answers} == {0}, "nothing came from the prefix cache"


def test_the_first_token_of_all_answers_comes_at_most_a_step_after_that_of_the_first() -> None:
    cluster = AnswerCluster(num_blocks=64, max_num_seqs=6, max_num_batched_tokens=16)
    answers = cluster.arrive(4, 20, 5)
    cluster.run_until_idle()
    plans = [[entry.seq_id for entry in plan.entries if entry.num_logits] for plan in cluster.plans]
    sampling = [seq_ids for seq_ids in plans if seq_ids]
    assert sampling[0] == [answers[0].seq_id]
    assert sorted(sampling[1]) == [each.seq_id for each in answers]


def test_answers_share_all_full_blocks_of_the_prompt() -> None:
    """Six answers to 30 tokens need one copy of seven full blocks, and two blocks each for tokens of their own."""
    cluster = AnswerCluster(num_blocks=64, max_num_seqs=6, max_num_batched_tokens=64, enable_prefix_cache=False)
    cluster.arrive(6, 30, 6)
    most = 0
    while cluster.scheduler.num_running or cluster.scheduler.num_waiting:
        cluster.step()
        most = max(most, cluster.cache.num_used_blocks)
    assert most == 30 // BLOCK_SIZE + 6 * 2
    cluster.run_until_idle()


def test_what_answers_share_is_promised_once() -> None:
    """Each answer needs 15 blocks. A cache of 30 has room for six of them, which share the first 12."""
    cluster = AnswerCluster(num_blocks=30, max_num_seqs=6, max_num_batched_tokens=64)
    cluster.arrive(6, 52, 9)
    for _ in range(4):
        cluster.step()
    assert cluster.scheduler.num_running == 6
    cluster.run_until_idle()
    assert cluster.scheduler.num_preemptions == 0


def test_answers_that_come_late_are_forked_from_one_that_runs() -> None:
    """With two places, each answer begins when another one ends; the prompt is computed once all the same."""
    cluster = AnswerCluster(num_blocks=64, max_num_seqs=2, max_num_batched_tokens=16, enable_prefix_cache=False)
    answers = cluster.arrive(5, 21, 6)
    for each in answers[1::2]:
        ask(each, max_tokens=3)  # so that one always runs when another one ends
    cluster.run_until_idle()
    cluster.check_answers(answers)
    assert cluster.num_prompt_tokens_computed(answers) == 21 + 4


@pytest.mark.parametrize(("num_steps", "is_forked"), [(3, True), (30, False)])
def test_a_late_answer_is_forked_as_long_as_the_layers_with_a_window_still_have_it(
    num_steps: int, is_forked: bool
) -> None:
    """Their blocks are dropped by the attention worker alone, which refuses a fork without them."""
    cluster = AnswerCluster(num_blocks=64, layer_window=6, enable_prefix_cache=False)
    answers = cluster.arrive(2, 14, 40, is_first_alone=True)
    for _ in range(num_steps):
        cluster.step()
    cluster.scheduler.add(answers[1])
    cluster.run_until_idle()
    assert any(plan.forks for plan in cluster.plans) is is_forked
    cluster.check_answers(answers)


@pytest.mark.parametrize("num_steps", range(6))
def test_if_the_computing_answer_is_cancelled_the_others_get_their_tokens(num_steps: int) -> None:
    cluster = AnswerCluster(num_blocks=64, max_num_seqs=6, max_num_batched_tokens=8, enable_prefix_cache=False)
    first, *others = cluster.arrive(4, 20, 5)
    for _ in range(num_steps):
        cluster.step()
    cluster.scheduler.cancel(first.seq_id)
    cluster.run_until_idle()
    cluster.check_answers(others)
    assert cluster.num_prompt_tokens_computed(others) <= 20 + 2, "another one computes it for the rest"


class CautiousDrafting(EagerDrafting):
    """Waits for drafts whenever the next step may have some, but never has any."""

    def waits_for(self, step: Any, running: SequenceOf[Sequence], num_rows: int, max_num_drafts: int) -> bool:
        return max_num_drafts > 0

    def draft(self, sequence: Sequence, max_num_tokens: int) -> list[int]:
        return []


@pytest.mark.parametrize("drafting", [None, CautiousDrafting()], ids=["none", "cautious"])
def test_answers_of_one_token_compute_their_prompt_once(drafting: CautiousDrafting | None) -> None:
    """The first one ends with the step that computes the prompt. The plan that forks the others comes before that."""
    options = {"max_num_seqs": 6, "max_num_batched_tokens": 8, "enable_prefix_cache": False}
    cluster = AnswerCluster(num_blocks=64, drafting=drafting, **options)
    answers = cluster.arrive(5, 20, 1)
    cluster.run_until_idle()
    cluster.check_answers(answers)
    assert cluster.num_prompt_tokens_computed(answers) == 20 + 4


def test_an_answer_that_reports_its_prompt_computes_it_and_the_others_are_forked_from_it() -> None:
    cluster = AnswerCluster(num_blocks=64, max_num_seqs=6, max_num_batched_tokens=16)
    first, second, third = answers = cluster.arrive(3, 20, 5)
    ask(second, features=prompt_logprobs(2))
    cluster.run_until_idle()
    cluster.check_answers(answers)
    joined = {fork.child_seq_id for plan in cluster.plans for fork in plan.forks}
    assert joined == {third.seq_id}
    assert cluster.num_prompt_tokens_computed([first]) == cluster.num_prompt_tokens_computed([second]) == 20


def test_suspects_are_opened_by_themselves() -> None:
    """They run alone, so that another crash shows which one is the cause."""
    cluster = AnswerCluster(num_blocks=64, max_num_seqs=6, max_num_batched_tokens=32)
    answers = cluster.arrive(3, 20, 5, is_first_alone=True)
    for _ in range(3):
        cluster.step()
    for each in answers[1:]:
        each.num_crashes = 2
        cluster.scheduler.add(each)
    cluster.run_until_idle()
    cluster.check_answers(answers)
    assert not any(plan.forks for plan in cluster.plans)


def test_streams_give_way_to_a_new_client_whatever_number_of_answers_it_wants() -> None:
    """No plan is made before the first answer of the new client is open, and the next one computes its prompt alone."""
    cluster = AnswerCluster(num_blocks=128, max_num_seqs=16, max_num_batched_tokens=32, enable_prefix_cache=False)
    for _ in range(10):
        cluster.arrive(1, 4, 20, client=1)
    for _ in range(5):
        cluster.step()
    answers = cluster.arrive(4, 20, 3, client=2)
    num_plans = len(cluster.plans)
    cluster.step(answer_opens=False)
    assert len(cluster.scheduler.session.to_fork) == 3 and len(cluster.plans) == num_plans
    cluster.step()
    [entry] = cluster.plans[-1].entries
    assert (entry.seq_id, entry.num_tokens) == (answers[0].seq_id, 20)
    cluster.run_until_idle()


def test_a_client_is_charged_once_for_the_prompt_of_its_answers() -> None:
    """Client 1 asks for four answers to 40 tokens, client 2 for four prompts of 10: they have cost about the same."""
    cluster = AnswerCluster(num_blocks=128, max_num_seqs=8, max_num_batched_tokens=64)
    answers = cluster.arrive(4, 40, 6, client=1)
    others = [cluster.arrive(1, 10, 6, client=2)[0] for _ in range(4)]
    while not all(each.status is SequenceStatus.RUNNING for each in (*answers, *others)):
        cluster.step()
    while cluster.scheduler.session.to_fork:
        cluster.step()
    costs = [each.get_flow().num_tokens for each in (answers[0], others[0])]
    assert costs[0] - costs[1] == pytest.approx(40 + 3 - 40, abs=1.0)
    cluster.run_until_idle()


def test_each_answer_computes_its_prompt_if_prompts_cannot_be_forked() -> None:
    """As in models with gated delta layers, whose states exist at the end of what is computed alone."""
    cluster = AnswerCluster(num_blocks=64, enable_prefix_cache=False, forks=ForkPolicy())
    answers = cluster.arrive(4, 30, 5)
    cluster.run_until_idle()
    cluster.check_answers(answers)
    assert not any(plan.forks for plan in cluster.plans)
    assert cluster.num_prompt_tokens_computed(answers) == 4 * 30
