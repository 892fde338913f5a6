"""Predicts tokens/s and time per token of a model on several GPUs from measured strokes, and chooses the arrangement.

    python bench/ratio.py                                        # checks the predictions against all measured points
    python bench/ratio.py --gpus 4 --prompt 1024 --output 512 --max-tpot 30
    python bench/ratio.py --gpus 8 --lengths conversations.csv --plot ratio.png      # a line: prompt,output

A decode step is a dense stroke, whose time depends on its rows alone, and an attention stroke, whose time depends on
the tokens of context alone. Both were measured by themselves (`bench/dense.py`, `bench/attention.py`); what the strokes
lose to each other is the seam's (`bench/seam.py`). A server's step takes a little longer, by its rows. A run of so many
requests is filled and drained step by step. docs/several-gpus.md says which arrangements there are.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from services.common.batch_buckets import bucket_for, token_buckets

RESULTS = Path(__file__).parent / "results"
LANES = 2  # micro-batches in flight, if there are several
ONE_GPU, SPLIT, RANKS, REPLICAS = "one GPU", "attention workers", "tensor ranks", "replicas"


@dataclass(frozen=True, slots=True)
class Lengths:
    """The lengths of requests, each equally likely."""

    prompts: np.ndarray  # tokens, [num_requests]
    outputs: np.ndarray

    @classmethod
    def of(cls, prompt: int, output: int) -> Lengths:
        return cls(np.array([prompt]), np.array([output]))

    @property
    def context(self) -> float:
        """Tokens of context of a row in an average decode step, in a server that is always full.

        A request is in such a step in each of its output tokens: so long answers count more often, and with all lengths
        on their way. This is the mean reward of a renewal process for each step.
        """
        steps = self.outputs.sum()
        return float((self.prompts * self.outputs + self.outputs * (self.outputs + 1) / 2).sum() / steps)


@dataclass(frozen=True, slots=True)
class Strokes:
    """Measured times of one model on one kind of GPU, in ms for all layers."""

    num_layers: int
    dense_rows: Sequence[float]  # ascending
    dense_ms: Sequence[float]
    attention_tokens: Sequence[float]  # of context, of all sequences of a step; ascending
    attention_ms: Sequence[float]
    prompt_attention_ms: float  # for each token of a prompt, within prompts of a few hundred tokens
    seam_rows: Sequence[float]
    seam_ms: Sequence[float]  # the handoffs of all layers, within a GPU
    far_seam_rows: Sequence[float]
    far_seam_ms: Sequence[float]  # the same between two GPUs
    sum_rows: Sequence[float]  # of a sum over two ranks
    sum_us: Sequence[float]
    after_ms: float  # sampler, upload and whatever else a server's step has beside its strokes
    after_row_ms: float  # the same for each row
    rank_efficiency: float  # rate at which a rank reads its part of the weights, of that of whole ones
    rank_after_layer_us: float  # norm and addition as kernels of their own, twice a layer
    cache_tokens: int  # that a GPU holds beside all weights
    cache_tokens_alone: int  # that a GPU without weights holds

    def dense(self, rows: float) -> float:
        """A dense stroke of so many rows; beyond those measured, in proportion: then products bound it."""
        last = self.dense_rows[-1]
        if rows > last:
            return self.dense_ms[-1] * rows / last
        return float(np.interp(rows, self.dense_rows, self.dense_ms))

    def attention(self, tokens: float) -> float:
        """An attention stroke over so many tokens of context, of all sequences together."""
        last = self.attention_tokens[-1]
        if tokens > last:
            return self.attention_ms[-1] * tokens / last
        return float(np.interp(tokens, self.attention_tokens, self.attention_ms))

    def seam(self, rows: float) -> float:
        """The handoffs of all layers within a GPU."""
        return float(np.interp(rows, self.seam_rows, self.seam_ms))

    def far_seam(self, rows: float) -> float:
        """The handoffs of all layers between two GPUs."""
        return float(np.interp(rows, self.far_seam_rows, self.far_seam_ms))

    def sums(self, rows: float) -> float:
        """The sums over ranks of a step: two in a layer, and one of the embedding."""
        us = float(np.interp(rows, self.sum_rows, self.sum_us))
        return (2 * self.num_layers + 1) * us / 1000

    def after(self, rows: float) -> float:
        """What a server's step of so many rows has beside its strokes."""
        return self.after_ms + self.after_row_ms * rows

    def of_layers(self, num_layers: int) -> Strokes:
        """Those of a model with so many of the layers; the vocabulary's part of a dense stroke is a fiftieth."""
        part = num_layers / self.num_layers
        scaled = {
            name: [part * each for each in getattr(self, name)]
            for name in ("dense_ms", "attention_ms", "seam_ms", "far_seam_ms")
        }
        return replace(self, num_layers=num_layers, prompt_attention_ms=part * self.prompt_attention_ms, **scaled)

    @property
    def linear_dense(self) -> tuple[float, float]:
        """(base, ms per row) for the closed form: of the line from one row to the most rows that were measured."""
        per_row = (self.dense_ms[-1] - self.dense_ms[0]) / (self.dense_rows[-1] - self.dense_rows[0])
        return self.dense_ms[0] - per_row * self.dense_rows[0], per_row


@dataclass(frozen=True, slots=True)
class Arrangement:
    """GPUs that together run a model."""

    kind: str
    num_attention: int = 1  # attention workers with a GPU of their own, for each dense worker
    num_dense: int = 1  # dense workers, ranks or replicas
    num_lanes: int = 1

    @property
    def num_gpus(self) -> int:
        return self.num_dense * (1 + self.num_attention) if self.kind == SPLIT else self.num_dense

    def __str__(self) -> str:
        if self.kind == SPLIT:
            lanes = f", {self.num_lanes} lanes" * (self.num_lanes > 1)
            return f"{self.num_dense} x (1 dense + {self.num_attention} attention{lanes})"
        return self.kind if self.num_dense == 1 else f"{self.num_dense} {self.kind}"

    def most_rows(self, strokes: Strokes, context: float) -> int:
        """The sequences whose keys and values fit, if each has so many tokens of context."""
        match self.kind:
            case x if x == SPLIT:
                tokens = self.num_dense * self.num_attention * strokes.cache_tokens_alone
            case x if x == RANKS:  # the weights take up memory once
                tokens = strokes.cache_tokens + (self.num_dense - 1) * strokes.cache_tokens_alone
            case _:
                tokens = self.num_dense * strokes.cache_tokens
        return int(tokens / context)

    def step_ms(self, strokes: Strokes, rows: float, context: float, prompt_tokens: float = 0.0) -> float:
        """A step of `rows` sequences in all, each with so many tokens of context, and of parts of prompts."""
        match self.kind:
            case x if x == RANKS:
                return _step_of_ranks(strokes, rows, context, prompt_tokens, self.num_dense)
            case x if x == SPLIT:
                return _step_of_workers(strokes, self, rows / self.num_dense, context, prompt_tokens / self.num_dense)
        own, prompts = rows / self.num_dense, prompt_tokens / self.num_dense
        attention = strokes.attention(own * context) + strokes.prompt_attention_ms * prompts
        return strokes.dense(own + prompts) + attention + strokes.seam(own + prompts) + strokes.after(own)


def _step_of_ranks(strokes: Strokes, rows: float, context: float, prompts: float, count: int) -> float:
    """Each rank has 1/count of each product and of the heads; sums join them."""
    all_rows = rows + prompts
    dense = strokes.dense(all_rows) / (count * strokes.rank_efficiency) if count > 1 else strokes.dense(all_rows)
    attention = strokes.attention(rows * context / count) + strokes.prompt_attention_ms * prompts / count
    joined = 0.0
    if count > 1:
        grown = 2 * (count - 1) / count  # of the sum over two ranks: what a ring moves
        joined = strokes.sums(all_rows) * grown + strokes.num_layers * strokes.rank_after_layer_us / 1000
    return dense + attention + strokes.seam(all_rows) + joined + strokes.after(rows)


def _step_of_workers(strokes: Strokes, split: Arrangement, rows: float, context: float, prompts: float) -> float:
    """One dense worker, and attention workers that share the sequences; the step waits for the slowest of them.

    With two lanes one half of the rows is in a dense stroke while the other one is in attention. A step then takes as
    long as the longer of both strokes for all halves, or as one lane takes alone.
    """
    lanes, workers = split.num_lanes, split.num_attention
    own, own_prompts = rows / lanes, prompts / lanes
    dense = strokes.dense(own + own_prompts) + strokes.after(own)
    attention = strokes.attention(own * context / workers) + strokes.prompt_attention_ms * own_prompts / workers
    alone = dense + attention + strokes.far_seam((own + own_prompts) / workers)
    return max(alone, lanes * dense, lanes * attention)


def best_num_attention(strokes: Strokes, rows_each: float, context: float) -> float:
    """The number of attention workers for one dense worker that gives the most tokens/s for each GPU: a closed form.

    Each attention worker brings `rows_each` rows. With lanes a step takes the longer stroke. While attention bounds it,
    another worker adds rows for nothing, until the dense stroke b + a * n * rows_each reaches the attention stroke,
    where b are the parts of both lanes that do not depend on rows. From there n / ((n + 1)(b + a * n * rows_each)) is
    greatest where n * n = b / (a * rows_each): more workers than that lengthen the step by more than their rows are
    worth. So it is the larger of the two. arXiv:2601.21351 has a rule of the same regimes (attention, the other stroke,
    communication); this derivation is our own.
    """
    base, per_row = strokes.linear_dense
    base *= LANES
    balanced = (strokes.attention(rows_each * context) - base) / (per_row * rows_each)
    return max(balanced, math.sqrt(base / (per_row * rows_each)))


@dataclass(frozen=True, slots=True)
class Prediction:
    """What an arrangement gives under a load that keeps `rows` sequences running."""

    arrangement: Arrangement
    rows: int
    tpot_ms: float
    tokens_per_s: float  # output tokens, with the prompts of those that begin computed between


def predict(strokes: Strokes, arrangement: Arrangement, lengths: Lengths, rows: int) -> Prediction:
    """The steady state: each output token takes a decode step, and each prompt token its part of a step of prompts.

    Prompts are computed in the same steps as tokens, so they make these longer: their dense strokes are in proportion
    to their rows. Attention within a prompt is that of a few hundred tokens, some percent of it.
    """
    decode_ms = arrangement.step_ms(strokes, rows, lengths.context)
    num_dense = arrangement.num_dense
    efficiency = strokes.rank_efficiency if arrangement.kind == RANKS and num_dense > 1 else 1.0
    per_prompt_token_ms = strokes.dense_ms[-1] / strokes.dense_rows[-1] / (num_dense * efficiency)
    per_prompt_token_ms += strokes.prompt_attention_ms / (num_dense * arrangement.num_attention)
    prompts_per_token = float(lengths.prompts.sum() / lengths.outputs.sum())
    tpot_ms = decode_ms + rows * prompts_per_token * per_prompt_token_ms
    return Prediction(arrangement, rows, tpot_ms, 1000 * rows / tpot_ms)


@dataclass(frozen=True, slots=True)
class Run:
    """A load as it was measured: all requests come at once, and so many of them run at a time."""

    num_requests: int
    at_once: int
    prompt: int
    output: int
    step_tokens: int  # that a step of a lane may have
    capture_ms: float = 0.0  # by which the first step of each size was longer, if graphs were captured then

    def tokens_per_s(self, strokes: Strokes, arrangement: Arrangement) -> float:
        """Output tokens by the time from the first step to the last one.

        Steps have a token of each running sequence, and parts of prompts as far as there is room, in the order of their
        coming.
        """
        sizes = token_buckets(self.at_once, self.step_tokens)
        seen = set[int]()
        left = np.zeros(0, int)  # tokens of prompts, by running sequence, that are to be computed
        written = np.zeros(0, int)
        num_waiting, total_ms = self.num_requests, 0.0
        while num_waiting or len(left):
            num_new = min(num_waiting, self.at_once - len(left))
            num_waiting -= num_new
            left, written = np.append(left, np.full(num_new, self.prompt)), np.append(written, np.zeros(num_new, int))
            decodes = left == 0
            num_rows = int(decodes.sum())
            room = max(0, self.step_tokens * arrangement.num_lanes - num_rows)
            parts = np.clip(room - (np.cumsum(left) - left), 0, left)
            context = self.prompt + float(written[decodes].mean()) if num_rows else 0.0
            total_ms += arrangement.step_ms(strokes, num_rows, context, float(parts.sum()))
            size = bucket_for(sizes, min(num_rows + int(parts.sum()), sizes[-1]))
            total_ms += 0.0 if size in seen else self.capture_ms
            seen.add(size)
            left = left - parts
            written = written + (left == 0)
            goes_on = written < self.output
            left, written = left[goes_on], written[goes_on]
        return 1000 * self.num_requests * self.output / total_ms


def arrangements(num_gpus: int) -> Iterator[Arrangement]:
    """All that use exactly so many GPUs."""
    yield Arrangement(ONE_GPU if num_gpus == 1 else REPLICAS, num_dense=num_gpus)
    if num_gpus == 1:
        return
    yield Arrangement(RANKS, num_dense=num_gpus)
    for num_dense in range(1, num_gpus // 2 + 1):
        if num_gpus % num_dense == 0:
            for lanes in (1, LANES):
                yield Arrangement(SPLIT, num_gpus // num_dense - 1, num_dense, lanes)


def choose(strokes: Strokes, lengths: Lengths, num_gpus: int, max_tpot_ms: float, max_rows: int) -> list[Prediction]:
    """The best load of each arrangement: the most tokens/s within `max_tpot_ms`; the best arrangement comes first.

    One that cannot keep the bound, or hold the context, even for one sequence is left out.
    """
    found = []
    for arrangement in arrangements(num_gpus):
        most = min(max_rows, arrangement.most_rows(strokes, lengths.context))
        rows = {most, *(2**power for power in range(most.bit_length()))} if most else set()
        kept = [p for n in rows if (p := predict(strokes, arrangement, lengths, n)).tpot_ms <= max_tpot_ms]
        if kept:
            found.append(max(kept, key=lambda each: each.tokens_per_s))
    return sorted(found, key=lambda each: -each.tokens_per_s)


def read_strokes(results: Path = RESULTS) -> Strokes:
    """Those of Llama-2-7B in bfloat16 on an H200."""
    dense, attention, seam, far, ranks = (
        json.loads((results / f"{name}.json").read_text())
        for name in ("dense-llama-2-7b", "attention", "seam", "seam-two-gpus", "two-gpus")
    )
    layers = dense["num_layers"]
    by_tokens: dict[int, list[float]] = {}
    for each in attention["rows"]:
        if each["kind"] == "decode":
            by_tokens.setdefault(_num_tokens(each), []).append(layers * each["microseconds"] / 1000)
    tokens = sorted(by_tokens)
    prompts = [each for each in attention["rows"] if each["step"] == "34 x 235"]  # appended, then attended
    prompt_us = sum(each["microseconds"] for each in prompts) / _num_tokens(prompts[0])
    strokes = Strokes(
        num_layers=layers,
        dense_rows=[each["batch"] for each in dense["steps"]],
        dense_ms=[each["own_ms"] for each in dense["steps"]],
        attention_tokens=tokens,
        attention_ms=[float(np.mean(by_tokens[each])) for each in tokens],
        prompt_attention_ms=layers * prompt_us / 1000,
        seam_rows=[int(each) for each in seam["seam_us_per_layer"]],
        seam_ms=[layers * each / 1000 for each in seam["seam_us_per_layer"].values()],
        far_seam_rows=[int(each) for each in far["seam_us_per_layer"]],
        far_seam_ms=[layers * each / 1000 for each in far["seam_us_per_layer"].values()],
        sum_rows=[each["rows"] for each in ranks["sums"]],
        sum_us=[each["nccl_us"] for each in ranks["sums"]],
        after_ms=0.0,
        after_row_ms=0.0,
        rank_efficiency=ranks["rank_efficiency"],
        rank_after_layer_us=ranks["rank_after_layer_us"],
        cache_tokens=ranks["cache_tokens"],
        cache_tokens_alone=ranks["cache_tokens_alone"],
    )
    fitted = [each for each in ranks["servers"] if each.get("is_fitted")]
    return _with_after(strokes, fitted)


def _with_after(strokes: Strokes, servers: Sequence[dict[str, Any]]) -> Strokes:
    """With what is left of a server's step beside its strokes: the line through two of one GPU."""
    rows = [each["rows"] for each in servers]
    left = [
        each["step_ms"]
        - Arrangement(ONE_GPU).step_ms(strokes, each["rows"], Lengths.of(each["prompt"], each["output"]).context)
        for each in servers
    ]
    (first, last), (low, high) = rows, left
    per_row = (high - low) / (last - first)
    return replace(strokes, after_ms=low - per_row * first, after_row_ms=per_row)


def _num_tokens(row: dict[str, Any]) -> int:
    """Of a row of bench/attention.py's file: sequences times their context."""
    return math.prod(map(int, row["step"].split(" x ")))


@dataclass(frozen=True, slots=True)
class Check:
    """A measured figure beside the predicted one."""

    what: str
    unit: str
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def checks(strokes: Strokes, results: Path = RESULTS) -> list[Check]:
    """All measured points of the model that there are: steps alone, and servers under load."""
    found = []
    one, two = Arrangement(ONE_GPU), Arrangement(SPLIT)
    for file, arrangement in (("seam", one), ("seam-two-gpus", two)):
        measured = json.loads((results / f"{file}.json").read_text())
        for rows, ms in measured["two_processes_ms"].items():
            context, what = measured["task"]["context"], f"{arrangement}: a step of {rows} rows"
            predicted = arrangement.step_ms(strokes, int(rows), context) - strokes.after(int(rows))  # no server's step
            found.append(Check(what, "ms", ms, predicted))
    for each in json.loads((results / "two-gpus.json").read_text())["servers"]:
        found += _checks_of_server(strokes, each)
    return found


def _checks_of_server(strokes: Strokes, run: dict[str, Any]) -> Iterator[Check]:
    """`prompt` of a run may be a list: as many sequences of each. Several attention workers on one GPU are one: they
    share its memory. One beside the dense worker is as good as one on a GPU of its own: with one lane they take turns.
    """
    rows, prompt, output = run["rows"], run["prompt"], run["output"]
    counts = {name: run.get(name, 1) for name in ("num_attention", "num_dense", "num_lanes")}
    arrangement = Arrangement(run["kind"], **counts)
    own = strokes.of_layers(run.get("num_layers", strokes.num_layers))
    of_layers = "" if own.num_layers == strokes.num_layers else f", {own.num_layers} layers"
    note = f", {run['note']}" if "note" in run else ""
    what = f"{arrangement}{note}{of_layers}: {rows} at once, {prompt}/{output}"
    if "step_ms" in run:
        prompts = np.array(prompt).reshape(-1)
        context = Lengths(prompts, np.full(len(prompts), output)).context
        predicted = arrangement.step_ms(own, rows, context)
        yield Check(f"{what}, a step", "ms", run["step_ms"], predicted)
    if "tokens_per_s" in run:
        load = Run(run["requests"], rows, prompt, output, run["step_tokens"], run.get("late_capture_ms", 0.0))
        yield Check(
            f"{what}, {load.num_requests} requests", "tok/s", run["tokens_per_s"], load.tokens_per_s(own, arrangement)
        )


def read_lengths(path: Path) -> Lengths:
    """From lines with the tokens of a prompt and of its answer. Raises `ValueError`, which names the line."""
    rows = []
    with path.open(newline="") as file:
        for number, line in enumerate(csv.reader(file), 1):
            if len(line) != 2 or not all(each.strip().isdigit() and int(each) > 0 for each in line):
                raise ValueError(f"{path}:{number}: {','.join(line)!r} is not prompt,output with numbers above 0")
            rows.append([int(each) for each in line])
    if not rows:
        raise ValueError(f"{path} has no line")
    prompts, outputs = np.array(rows).T
    return Lengths(prompts, outputs)


def draw(strokes: Strokes, lengths: Lengths, num_gpus: int, path: Path) -> None:
    """Left: tokens/s for each GPU by time per token; right: by the number of attention workers for a dense worker."""
    from bench.load.plots import STYLE, pyplot  # it needs matplotlib

    with pyplot.rc_context(STYLE):
        figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
        for arrangement in arrangements(num_gpus):
            curve = [predict(strokes, arrangement, lengths, 2**power) for power in range(12)]
            speeds = [each.tokens_per_s / num_gpus for each in curve]
            left.plot([each.tpot_ms for each in curve], speeds, marker=".", label=str(arrangement))
        left.set(title=f"{num_gpus} GPUs", xlabel="time per output token, ms", ylabel="tokens/s for each GPU")
        left.set_xscale("log")
        left.legend(fontsize=7)
        counts = range(1, 13)
        for rows in (64, 128, 256):
            splits = [Arrangement(SPLIT, count, 1, LANES) for count in counts]
            steps = [split.step_ms(strokes, rows * split.num_attention, lengths.context) for split in splits]
            speeds = [1000 * rows * n / ms / (n + 1) for n, ms in zip(counts, steps, strict=True)]
            [line] = right.plot(counts, speeds, marker=".", label=f"{rows} rows for each attention worker")
            right.axvline(best_num_attention(strokes, rows, lengths.context), color=line.get_color(), linestyle=":")
        title = f"context {lengths.context:.0f}; dotted: closed form"
        right.set(title=title, xlabel="attention workers for a dense worker", ylabel="tokens/s for each GPU")
        right.legend(fontsize=7)
        figure.savefig(path)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, help="how many there are; without it, predictions are checked")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of each prompt")
    parser.add_argument("--output", type=int, default=256, help="tokens of each answer")
    parser.add_argument("--lengths", type=Path, help="a file with the lengths of requests instead: prompt,output")
    parser.add_argument("--max-tpot", type=float, default=math.inf, metavar="MS")
    parser.add_argument("--max-rows", type=int, default=2048, help="sequences at once, at most")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the folder with the measured strokes")
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args(argv)
    strokes = read_strokes(args.results)
    if args.gpus is None:
        for check in checks(strokes, args.results):
            print(f"{check.what:103} {check.measured:9.2f} {check.predicted:9.2f} {check.unit:6} {check.error:+6.1%}")
        return 0
    try:
        lengths = Lengths.of(args.prompt, args.output) if args.lengths is None else read_lengths(args.lengths)
    except (OSError, ValueError) as error:
        print(f"ratio: {error}", file=sys.stderr)
        return 1
    found = choose(strokes, lengths, args.gpus, args.max_tpot, args.max_rows)
    print(f"context of an average row: {lengths.context:.0f} tokens")
    for each in found:
        print(f"{each.arrangement!s:36} {each.rows:5} at once  {each.tpot_ms:7.2f} ms  {each.tokens_per_s:9.0f} tok/s")
    if not found:
        print(f"no arrangement of {args.gpus} GPUs gives a token in {args.max_tpot:g} ms")
    elif args.gpus > 1:
        rows = max(1, found[0].rows // args.gpus)
        best = best_num_attention(strokes, rows, lengths.context)
        print(f"closed form, {rows} rows for each attention worker: {best:.1f} of them for a dense worker")
    if args.plot is not None:
        draw(strokes, lengths, args.gpus, args.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
