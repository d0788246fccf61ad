"""How requests begin: what is refused at once, and the sequences of what is not."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from kvcore.engine import policy
from kvcore.engine.beams import BeamSearch
from kvcore.engine.interfaces import Adapter, EncoderInput, Handle
from kvcore.engine.logits import Adjuster, Constraint
from kvcore.engine.metrics import RequestMetrics
from kvcore.engine.sampler import make_generator
from kvcore.engine.sampling_params import BeamSearchParams, SamplingParams
from kvcore.engine.sequence import Sequence
from kvcore.engine.space import Space
from kvcore.engine.speculation import Drafts, SpeculativeConfig
from kvcore.errors import InvalidArgument, OutOfBlocks

Marks = tuple[tuple[int, float | None], ...]
"""(tokens from the beginning, seconds) to keep."""

BEAMS = SamplingParams(temperature=0.0, max_tokens=None)
"""What a beam's sequence has for parameters: nothing is sampled."""


class Intake:
    """Checks requests and makes sequences of them; ``Engine`` documents the arguments."""

    def __init__(
        self,
        space: Space,
        *,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        max_model_len: int | None,
        max_num_seqs: int,
        scheduling_policy: str,
        mark_prefixes: bool,
        seed: int | None,
        speculation: SpeculativeConfig | None = None,
    ) -> None:
        self._space = space
        self.vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._max_model_len = max_model_len
        self._max_num_seqs = max_num_seqs
        self._policy = scheduling_policy
        self._mark_prefixes = mark_prefixes
        self._seed = seed
        self._speculation = speculation

    def check(
        self, prompt_token_ids: Any, params: SamplingParams | BeamSearchParams, encoder: EncoderInput | None = None
    ) -> list[int]:
        """Say whether a request can be answered, and return its prompt as a list.

        Raises:
            InvalidArgument: an empty prompt, one longer than ``max_model_len``, an id that the vocabulary lacks, more
                beams than may run at once.
            OutOfBlocks: a prompt that would not fit into the cache even if nothing else were in it.
            TypeError: something that is no list of token ids.
        """
        token_ids = self.check_prompt(prompt_token_ids, encoder)
        if isinstance(params, SamplingParams):
            params.check_vocab(self.vocab_size)
            return token_ids
        space, width = self._space, params.beam_width
        if width > self._max_num_seqs:
            raise InvalidArgument(
                f"BeamSearchParams.beam_width: expected at most {self._max_num_seqs} (max_num_seqs), got {width}"
            )
        needed, available = width * space.blocks(len(token_ids) + 1), space.blocks(space.capacity)
        if needed > available:
            raise OutOfBlocks(
                f"{width} beams behind a prompt of {len(token_ids)} tokens can never fit: {needed} blocks of "
                f"{space.block_size} needed, {available} available"
            )
        return token_ids

    def check_prompt(self, prompt_token_ids: Any, encoder: EncoderInput | None = None) -> list[int]:
        """Say whether a prompt can ever be computed, and return it as a list. Raises as ``check``."""
        token_ids = as_token_ids(prompt_token_ids, self.vocab_size)
        length, space = len(token_ids), self._space
        if self._max_model_len is not None and length > self._max_model_len:
            raise InvalidArgument(
                f"prompt: expected at most {self._max_model_len} tokens (max_model_len), got {length} tokens"
            )
        if space.cross is not None:
            self._check_encoder(encoder, space.cross)
        needed, blocks = space.blocks(length), space.blocks(space.capacity)
        if needed > blocks:
            raise OutOfBlocks(
                f"a prompt of {length} tokens can never fit: {needed} blocks of {space.block_size} needed, "
                f"{blocks} available"
            )
        return token_ids

    def _check_encoder(self, encoder: EncoderInput | None, available: int) -> None:
        if encoder is None:
            raise InvalidArgument("prompt: expected an input for the encoder, got none")
        needed = self._space.blocks(encoder.num_tokens)
        if needed > available:
            raise OutOfBlocks(
                f"an encoder input of {encoder.num_tokens} tokens can never fit: {needed} blocks of "
                f"{self._space.block_size} needed, {available} available"
            )

    def make(
        self,
        request_id: str,
        prompt_token_ids: Any,
        params: SamplingParams | BeamSearchParams,
        *,
        use_cache: bool,
        arrival: int,
        priority: int,
        salt: str | None,
        marks: Marks,
        make_constraint: Callable[[], Constraint] | None,
        adapter: Adapter | None = None,
        encoder: EncoderInput | None = None,
        keep: list[Handle] | None = None,
    ) -> list[Sequence]:
        """The sequences of a request, ``arrival`` being its number; the first computes the prompt."""
        token_ids = self.check(prompt_token_ids, params, encoder)
        beams = params.beam_width if isinstance(params, BeamSearchParams) else 1
        max_new_tokens = self._max_new_tokens(len(token_ids), params.max_tokens, beams)
        count = params.num_sequences if isinstance(params, SamplingParams) else beams
        now = time.perf_counter()
        place = policy.order(self._policy, priority, arrival)
        sequences = []
        for index in range(count):
            sampling = params if isinstance(params, SamplingParams) else BEAMS
            seq = Sequence(
                request_id,
                sampling,
                list(token_ids),
                len(token_ids),
                max_new_tokens,
                use_cache,
                self._generator(sampling, arrival, index),
                RequestMetrics(now),
                use_prefix=use_cache and sampling.prompt_logprobs is None,
                salt=salt,
                index=index,
                order=(*place, index),
                marks=marks if use_cache and self._mark_prefixes and sampling.prompt_logprobs is None else (),
                adjust=self._adjuster(sampling, token_ids, make_constraint),
                logprobs=None if sampling.logprobs is None else [],
                adapter=adapter,
                drafts=self._drafts(use_cache and beams == 1),
                encoder=encoder,
                keep=keep,
            )
            sequences.append(seq)
        first = sequences[0]
        first.siblings = sequences[1:]
        first.seats = min(count, self._max_num_seqs)
        if sampling.prompt_logprobs is not None:
            first.prompt_logprobs = [None]
        if isinstance(params, BeamSearchParams):
            search = BeamSearch(params, self._eos_token_ids, max_new_tokens)
            for seq in sequences:
                seq.search = search
        return sequences

    def _max_new_tokens(self, length: int, wanted: int | None, beams: int) -> int:
        space = self._space
        # beams may part anywhere, so each counts whole
        slots = space.blocks(space.capacity) // beams * space.block_size if beams > 1 else space.capacity
        most = slots - length + 1
        if self._max_model_len is not None:
            most = min(most, max(1, self._max_model_len - length))
        return most if wanted is None else min(most, wanted)

    def _generator(self, params: SamplingParams, arrival: int, index: int) -> np.random.Generator | None:
        if params.greedy:
            return None
        # separate streams: a request seeded with 7 is not the LLM seeded with 7, and each answer has its own
        key = (1, arrival) if params.seed is None else (0,)
        return make_generator(self._seed if params.seed is None else params.seed, *key, *([index] if index else []))

    def _drafts(self, useful: bool) -> Drafts | None:
        return Drafts(self._speculation) if useful and self._speculation is not None else None

    def _adjuster(
        self, params: SamplingParams, prompt: list[int], make_constraint: Callable[[], Constraint] | None
    ) -> Adjuster | None:
        if make_constraint is None and not Adjuster.wanted(params):
            return None
        ends = {*self._eos_token_ids, *params.stop_ids}
        return Adjuster(params, prompt, ends, self.vocab_size, make_constraint() if make_constraint else None)


def as_token_ids(prompt: Any, vocab_size: int) -> list[int]:
    """Check that ``prompt`` is a list (or array) of token ids, at least one, and return it as a list of ints.

    Raises:
        InvalidArgument: it is empty, or an id is negative or not below ``vocab_size``.
        TypeError: it is something else.
    """
    expected = "a list of token ids"
    if isinstance(prompt, np.ndarray):
        if prompt.ndim != 1 or prompt.dtype.kind not in "iu":
            raise TypeError(f"prompt: expected {expected}, got an array of {prompt.dtype} with shape {prompt.shape}")
        token_ids = prompt.tolist()
    elif isinstance(prompt, (str, bytes, dict)) or not isinstance(prompt, Iterable):
        raise TypeError(f"prompt: expected {expected}, got {type(prompt).__name__}")
    else:
        token_ids = list(prompt)
    for kind in set(map(type, token_ids)):
        if kind is not int and not issubclass(kind, np.integer):
            raise TypeError(f"prompt: expected {expected}, got a list with {kind.__name__} in it")
    if not token_ids:
        raise InvalidArgument("prompt: expected at least one token, got none")
    low, high = min(token_ids), max(token_ids)
    if low < 0 or high >= vocab_size:
        got = low if low < 0 else high
        raise InvalidArgument(f"prompt: expected token ids from 0 to {vocab_size - 1} (the vocabulary), got {got}")
    return [int(token_id) for token_id in token_ids]
