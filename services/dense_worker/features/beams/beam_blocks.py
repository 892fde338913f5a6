"""How many KV cache blocks a sequence with beams needs. Part of the scheduler.

Beams share the full blocks of the prompt, and of their output as far as they have it in common; the scheduler does not
know how far. It counts as if they shared only the prompt, which is never too little: output that beams share stays
shared, so from one token to the next they need at most one block each, besides those that they already have. Nor does
it know which blocks behind a window they drop.
"""

from __future__ import annotations

from services.common.errors import InvalidRequest
from services.dense_worker.engine.block_ledger import BlockLedger
from services.dense_worker.engine.limits import SchedulerLimits
from services.dense_worker.engine.sequence import Sequence
from services.dense_worker.engine.session import Session


def blocks_of_beams(ledger: BlockLedger, sequence: Sequence, num_tokens: int) -> int:
    """The most blocks that hold `num_tokens` tokens of each beam; of the prompt, if they are no more."""
    num_blocks = ledger.blocks_for(num_tokens)
    if num_tokens <= sequence.num_prompt_tokens:
        return num_blocks
    num_shared = sequence.num_prompt_tokens // ledger.block_size
    return num_shared + sequence.num_beams * (num_blocks - num_shared)


def blocks_to_promise(ledger: BlockLedger, sequence: Sequence, num_tokens: int) -> int:
    """The blocks with which a search can get to `num_tokens` tokens.

    Beams are forked before the blocks of those that they replace are known to be free, which takes one block for each.
    """
    num_forks = sequence.num_beams if num_tokens > sequence.num_prompt_tokens else 0
    return blocks_of_beams(ledger, sequence, num_tokens) + num_forks


def check_beams(sequence: Sequence, ledger: BlockLedger, limits: SchedulerLimits) -> None:
    """Raises `InvalidRequest` for a search with too many beams, or one that may need too many blocks.

    It may have half of the cache, or as much as a single sequence of `max_model_len` tokens: it holds its blocks until
    its end.
    """
    if sequence.num_beams > limits.max_num_seqs:
        raise InvalidRequest(f"there are {sequence.num_beams} beams, max_num_seqs is {limits.max_num_seqs}", "n")
    num_blocks = blocks_to_promise(ledger, sequence, sequence.max_num_cached_tokens)
    most = max(ledger.num_blocks // 2, min(ledger.num_blocks, ledger.blocks_for(limits.max_model_len)))
    if num_blocks > most:
        raise InvalidRequest(
            f"{sequence.num_beams} beams with a prompt of {sequence.num_prompt_tokens} tokens and max_tokens "
            f"{sequence.spec.max_tokens} may need {num_blocks} KV cache blocks, a search may have {most} of "
            f"{ledger.num_blocks}",
            "max_tokens",
        )


def take_beam_blocks(session: Session, sequence: Sequence, num_tokens: int) -> list[int] | None:
    """Takes the blocks for the next tokens of each beam; how many for each row. None: there are too few.

    A new block begins for all beams at once. Within a block, each beam that is forked needs a copy of it.
    """
    assert sequence.beams is not None, "only a sequence with beams has rows"
    ledger, position = session.ledger, sequence.num_computed_tokens
    num_after, num_full = ledger.blocks_for(position + num_tokens), position // ledger.block_size
    num_present = ledger.blocks_for(position)
    num_taken = [num_after - (num_present if row.parent_seq_id is None else num_full) for row in sequence.beams.rows]
    num_blocks = sum(num_taken)
    num_reserved = min(num_blocks, sequence.num_reserved_blocks)
    if num_blocks - num_reserved > ledger.num_available_blocks:
        return None
    ledger.unreserve(num_reserved)
    ledger.take(num_blocks)
    sequence.num_reserved_blocks -= num_reserved
    sequence.num_blocks = blocks_of_beams(ledger, sequence, position + num_tokens)
    return num_taken
