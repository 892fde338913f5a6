"""Answers to llama.cpp's /completion."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from services.common.token_logprobs import TokenLogprobs
from services.gateway.apis.llama_cpp.errors import LlamaCppErrorBody, llama_cpp_error
from services.gateway.apis.llama_cpp.schema import (
    ALL,
    LlamaCppBody,
    LlamaCppObject,
    TokenProbability,
)
from services.gateway.apis.shared.answer import Format
from services.gateway.apis.shared.logprobs import LEAST_LOGPROB
from services.gateway.apis.shared.timings import TimingsSoFar, prompt_progress, timings
from services.gateway.core.chunks import Chunk, Completion, Finish, Prompt
from services.gateway.core.request_service import RequestService
from services.gateway.http.headers import REQUEST_ID_HEADER
from services.gateway.link.journal_entry import FinishReason
from services.gateway.text.detokenizer import token_bytes

NO_SLOT = -1
MAX_STEPS = 64  # of a path in `response_fields`; a schema of JSON may be nested so deep
RANDOM_SEED = 2**32 - 1
_MISSING = object()


class LlamaCppFormat(Format):
    """The `Format` of llama.cpp's answers. It belongs to one request, because it keeps what each answer has so far.

    Nothing follows the last event of a stream, which has `stop`.
    """

    def __init__(self, service: RequestService, body: LlamaCppBody) -> None:
        names = {
            "bad_words": "logit_bias",
            "logprobs": "n_probs" if body.n_probs is not None else "logprobs",
            "messages": "prompt",
            "max_tokens": "n_predict" if body.max_tokens is None else "max_tokens",
            "n": "n_cmpl" if body.n_cmpl is not None else "n",
            "prompt_token_ids": "prompt",
            "repetition_penalty": "repeat_penalty" if body.repeat_penalty is not None else "repetition_penalty",
            "request_id": REQUEST_ID_HEADER,
        }
        self.param_names: Mapping[str, str] = names
        self._tokenizer = service.tokenizer
        self._names = service.names
        self._eos_token_ids = service.eos_token_ids
        self._max_model_len = service.model.max_model_len
        self._body = body
        self._used = body.resolved
        self._num_answers = self._used.n or 1  # to each prompt
        self._prompts: Sequence[list[int]] = ()
        self._texts: Sequence[str] = ()  # of the prompts
        self._timings = TimingsSoFar()
        self._with_new_line: set[int] = set()  # indexes of streamed answers

    async def begin(self, prompts: Sequence[list[int]]) -> None:
        self._timings.begin(prompts)
        self._prompts = prompts
        self._texts = [await self._tokenizer.write_text(each, False) for each in prompts]

    def chunk(self, prompt_index: int, chunk: Chunk) -> Sequence[LlamaCppObject]:
        index = prompt_index * self._num_answers + chunk.index
        text = self._text(chunk)
        if "\n" in text:
            self._with_new_line.add(index)
        objects: list[LlamaCppObject] = []
        for progress in prompt_progress(chunk.reports):
            objects.append(
                {
                    "index": index,
                    "content": "",
                    "tokens": [],
                    "stop": False,
                    "id_slot": NO_SLOT,
                    "tokens_predicted": 0,
                    "tokens_evaluated": len(self._prompts[prompt_index]),
                    "prompt_progress": progress,
                }
            )
        if text or chunk.token_ids:
            piece: LlamaCppObject = {
                "index": index,
                "content": text,
                "tokens": chunk.token_ids,
                "stop": False,
                "id_slot": NO_SLOT,
                "tokens_predicted": chunk.num_output_tokens,
                "tokens_evaluated": len(self._prompts[prompt_index]),
            }
            if self._body.timings_per_token:
                piece["timings"] = self._timings.of(prompt_index, chunk)
            objects += [piece] if self._used.logprobs is None else self._with_probabilities(piece, chunk)
        if chunk.finish is not None:
            objects.append(self._last(index, prompt_index, chunk.finish, "", [], index in self._with_new_line))
        return objects

    def _with_probabilities(self, piece: LlamaCppObject, chunk: Chunk) -> Iterator[LlamaCppObject]:
        """An object for each token, as there; the first one has the text of all that arrived together."""
        if not chunk.token_ids:
            yield {**piece, "completion_probabilities": []}
        probabilities = self._probabilities(chunk.token_ids, chunk.logprobs or ())
        for i, (token_id, each) in enumerate(zip(chunk.token_ids, probabilities, strict=True)):
            num_later = len(chunk.token_ids) - 1 - i
            yield {
                **piece,
                "content": "" if i else piece["content"],
                "tokens": [token_id],
                "tokens_predicted": piece["tokens_predicted"] - num_later,
                "completion_probabilities": [each],
            }

    def failure(self, error: Exception) -> Sequence[LlamaCppErrorBody]:
        return [llama_cpp_error(error)]

    def whole(self, answers: Sequence[tuple[Sequence[Completion], Prompt | None]]) -> Any:
        objects = (
            self._whole(prompt_index, each)
            for prompt_index, (completions, _) in enumerate(answers)
            for each in completions
        )
        return objects if sum(len(completions) for completions, _ in answers) > 1 else next(objects)

    def _whole(self, prompt_index: int, completion: Completion) -> LlamaCppObject:
        assert completion.finish is not None
        text = self._text(completion)
        return self._last(
            prompt_index * self._num_answers + completion.index,
            prompt_index,
            completion.finish,
            text,
            completion.token_ids if self._body.return_tokens else [],
            "\n" in text,
            None if self._used.logprobs is None else (completion.token_ids, completion.logprobs),
        )

    def _text(self, piece: Chunk | Completion) -> str:
        return "" if self._used.max_tokens == 0 else piece.text  # then it is the prompt's

    def _last(
        self,
        index: int,
        prompt_index: int,
        finish: Finish,
        text: str,
        token_ids: list[int],
        has_new_line: bool,
        logprobs: tuple[Sequence[int], Sequence[TokenLogprobs]] | None = None,
    ) -> LlamaCppObject:
        """The object with all fields; `logprobs` with the tokens that they belong to."""
        num_tokens = finish.num_prompt_tokens + finish.num_output_tokens
        last: LlamaCppObject = {
            "index": index,
            "content": text,
            "tokens": token_ids,
            "id_slot": NO_SLOT,
            "stop": True,
            "model": self._body.model or self._names.first,
            "tokens_predicted": finish.num_output_tokens,
            "tokens_evaluated": finish.num_prompt_tokens,
            "tokens_cached": finish.num_cached_tokens,
            "generation_settings": generation_settings(self._body, finish.seed, self._eos_token_ids),
            "prompt": self._texts[prompt_index],
            "has_new_line": has_new_line,
            "truncated": finish.reason is FinishReason.LENGTH and num_tokens >= self._max_model_len,
            "stop_type": _stop_type(finish),
            "stopping_word": finish.stop_string or "",
            "timings": timings(finish),
        }
        if logprobs is not None:
            last["completion_probabilities"] = self._probabilities(*logprobs)
        names = self._body.response_fields
        return _chosen(last, names) if names else last  # type: ignore[return-value]

    def _probabilities(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]
    ) -> Iterator[TokenProbability]:
        top = "top_probs" if self._body.post_sampling_probs else "top_logprobs"
        return (
            {
                **self._probability(token_id, each.logprob),
                top: [self._probability(*pair) for pair in each.top[: self._used.logprobs]],
            }
            for token_id, each in zip(token_ids, logprobs, strict=False)
        )

    def _probability(self, token_id: int, logprob: float) -> TokenProbability:
        data = token_bytes(self._tokenizer.hf_tokenizer, token_id)
        found: TokenProbability = {"id": token_id, "token": data.decode(errors="ignore"), "bytes": list(data)}
        if self._body.post_sampling_probs:
            return {**found, "prob": math.exp(logprob)}
        return {**found, "logprob": max(logprob, LEAST_LOGPROB)}


def generation_settings(
    body: LlamaCppBody, seed: int = RANDOM_SEED, eos_token_ids: Sequence[int] = ()
) -> dict[str, Any]:
    """The options of a request with their defaults, under llama.cpp's names."""
    used = body.resolved
    max_tokens = ALL if body.max_new_tokens is None else body.max_new_tokens
    never = [(token_id, None) for token_id in eos_token_ids] if used.ignore_eos else []
    return {
        "n_predict": max_tokens,
        "max_tokens": max_tokens,
        "seed": seed,
        "temperature": used.temperature,
        "top_k": used.top_k,
        "top_p": used.top_p,
        "min_p": used.min_p,
        "repeat_last_n": 0 if body.repeat_last_n == 0 else ALL,
        "repeat_penalty": 1.0 if used.repetition_penalty is None else used.repetition_penalty,
        "presence_penalty": used.presence_penalty or 0.0,
        "frequency_penalty": used.frequency_penalty or 0.0,
        "dynatemp_range": 0.0,
        "typical_p": 1.0,
        "xtc_probability": 0.0,
        "dry_multiplier": 0.0,
        "mirostat": 0,
        "samplers": body.applied_samplers,
        "stop": used.stop,
        "ignore_eos": bool(used.ignore_eos),
        "logit_bias": [{"token": token, "bias": bias} for token, bias in [*body.biases, *never]],
        "n_probs": used.logprobs or 0,
        "post_sampling_probs": bool(body.post_sampling_probs),
        "n_cmpl": used.n or 1,
        "lora": [{"id": each.id, "scale": each.scale} for each in body.lora or ()],
        "grammar": used.grammar or "",
        "json_schema": used.json_schema,
        "stream": bool(used.stream),
        "timings_per_token": bool(body.timings_per_token),
    }


def _stop_type(finish: Finish) -> Literal["none", "eos", "limit", "word"]:
    if finish.reason is FinishReason.STOP:
        return "eos" if finish.stop_string is None else "word"
    return "limit" if finish.reason is FinishReason.LENGTH else "none"


def _chosen(last: LlamaCppObject, names: Sequence[str]) -> dict[str, Any]:
    """The fields of these names that there are; a name may be a path with slashes."""
    found: dict[str, Any] = {}
    for name in names:
        value: Any = last
        steps = name.split("/", MAX_STEPS)  # no path of the answer is as long
        for step in steps:
            value = value[step] if isinstance(value, Mapping) and step in value else _MISSING
        if value is not _MISSING:
            found[name] = value
    return found
