"""`GenerationRequest`: what a client has asked for, after everything has been checked; see `read_request`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from services.common.sampling_params import MAX_SEED
from services.gateway.features.feature import RequestSize
from services.gateway.features.installed import REPORTS, features_of
from services.gateway.images.picture import Picture
from services.gateway.text.parsing import Parsing
from services.lora.prompt_embeds import PromptEmbeds
from services.step.sequence_spec import SequenceSpec

# Whose a request with an id that a client has chosen is: the name of the API key, or the number of the client's address
# if there are no keys. Others may use the same id.
Owner = tuple[str, int]


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A valid request with every default filled in: what a dense worker does for it, and what is made of the tokens."""

    spec: SequenceSpec  # of its first answer; see `spec_of`
    wants_output: bool  # False: only the prompt is wanted, which it takes a token nobody sees to compute
    stop: tuple[str, ...]
    include_stop_str_in_output: bool
    skip_special_tokens: bool
    n: int  # answers to return
    best_of: int  # answers to generate; each is a sequence of its own, or a beam
    num_logprobs: int | None  # likeliest tokens to show beside each output token; None: no log-probabilities
    prompt_text: str | None  # as it was given, if it was given as text and is kept whole
    echo: bool
    priority: int | None  # as the client named it; None: none was named
    user: str
    stop_regex: tuple[str, ...] = ()
    caller: str = ""  # name of the API key that was used
    queue_timeout_s: float | None = None  # longest wait at the dense worker for the first step
    parsing: Parsing | None = None  # what is to be found in the answers; None: they are plain text
    prompt_embeds: PromptEmbeds | None = None  # the vectors of `spec.prompt_embeds`
    pictures: Sequence[Picture] = ()  # one for each of `spec.spans`
    num_source_tokens: int = 0  # of the prompt that an encoder reads; 0 also for sound, which has none
    is_stepwise: bool = False  # whether each chunk has one token; see services/gateway/link/stepwise.py

    def spec_of(self, index: int) -> SequenceSpec:
        """What is asked for of an answer. They differ in their seeds; only the first one reports the prompt."""
        if not index:
            return self.spec
        sampling = replace(self.spec.sampling, seed=(self.spec.sampling.seed + index) & MAX_SEED)
        names = [each.name for each in features_of(self.spec.features) if not each.is_of_prompt]
        return replace(self.spec, sampling=sampling, features={name: self.spec.features[name] for name in names})

    @property
    def max_tokens(self) -> int:
        """Output tokens that the client gets at most."""
        return self.spec.max_tokens if self.wants_output else 0

    @property
    def owner(self) -> Owner:
        """Who may end it by its `request_id`."""
        return owner_of(self.caller, self.spec.client)

    @property
    def text_token_ids(self) -> list[int]:
        """The prompt's tokens that have text."""
        table = self.spec.prompt_embeds
        return [each for each in self.spec.prompt_token_ids if table is None or each < table.first_token_id]

    def size(self, vocab_size: int, hidden_size: int, num_messages: int = 0) -> RequestSize:
        """What the memory for its features depends on; the arguments are as in `RequestSize`."""
        sizes = vocab_size, hidden_size, num_messages
        return RequestSize(self.spec, self.best_of, self.max_tokens, *sizes, may_be_cut=self.may_be_cut)

    @property
    def may_be_cut(self) -> bool:
        """Whether an answer may end before the last token that arrives: at a stop string, or after a call."""
        return bool(self.stop or self.stop_regex) or self.parsing is not None

    @property
    def num_sequences(self) -> int:
        """Answers that are generated; a search for the n best ones is one sequence, but has n answers."""
        return self.best_of if self.spec.beam_search is None else self.n

    @property
    def has_parts(self) -> bool:
        """Whether a worker needs more of it than its sequences: pictures, or a table of vectors."""
        return bool(self.pictures) or self.prompt_embeds is not None

    @property
    def returns_prompt(self) -> bool:
        """Whether the answer shows the prompt, or something about it."""
        return self.echo or shows_prompt(self.spec.features)

    @property
    def max_num_logprobs(self) -> int:
        """Those of its answers, each of which may show the prompt's, too; of a search, those of all its beams."""
        of_prompt, of_answer = self._max_num_logprobs_of_parts
        return self.best_of * (of_prompt + of_answer)

    @property
    def max_num_held_logprobs(self) -> int:
        """Those that are kept until it ends: the prompt's are the same for all answers."""
        of_prompt, of_answer = self._max_num_logprobs_of_parts
        return of_prompt + self.best_of * of_answer

    @property
    def _max_num_logprobs_of_parts(self) -> tuple[int, int]:
        """Of the prompt, and of one answer without it."""
        num_named = len(self.spec.sampling.logprob_token_ids)
        num_likeliest = self.spec.num_logprobs
        of_answer = 0 if num_likeliest is None else self.max_tokens * (1 + num_likeliest + num_named)
        return sum(each.num_logprobs(self.spec) for each in features_of(self.spec.features)), of_answer


def owner_of(caller: str, client: int) -> Owner:
    """The owner of the requests of a key, or of an address if there are no keys."""
    return caller, 0 if caller else client


def shows_prompt(features: Iterable[str]) -> bool:
    """Whether an answer with these features shows its prompt."""
    return any([REPORTS[name].is_shown_with_prompt for name in features if name in REPORTS])
