"""One request on its way: its tokens become text, stop strings are found, and outputs are made of both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from kvcore.engine.sampler import Logprob
from kvcore.engine.sampling_params import SamplingParams
from kvcore.engine.sequence import Sequence
from kvcore.errors import InvalidState, KvcoreError
from kvcore.outputs import CompletionOutput, RequestOutput

if TYPE_CHECKING:
    from kvcore.text.tokenizer import Tokenizer


class Reply:
    """Follows a sequence of the engine.

    Attributes:
        request_id: the request.
        seq: the sequence, as soon as the engine has taken the request.
        finished: whether everything, text included, is there.
        error: what went wrong here, in making text of the tokens.
    """

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        params: SamplingParams,
        tokenizer: Tokenizer | None,
        stop: Callable[[str, str | None], None],
    ) -> None:
        """``stop(request_id, stop_string)`` is called when a stop string was found."""
        self.request_id = request_id
        self.seq: Sequence | None = None
        self.finished = False
        self.error: Exception | None = None
        self._prompt = prompt
        self._params = params
        self._stop = stop
        self._stopped_by: str | None = None
        self._text: list[str] = []
        self._num_tokens = 0
        self._given_pieces = 0
        self._given_tokens = 0
        self._tokenizer = tokenizer
        if tokenizer is not None:
            from kvcore.text.detokenizer import Detokenizer, StopChecker

            self._detokenizer = Detokenizer(tokenizer, params.skip_special_tokens)
            self._checker = StopChecker(params.stop_strings, params.include_stop_str_in_output)

    def advance(self) -> None:
        """Take in the tokens that the sequence got since the last call, and its end."""
        seq = self.seq
        if seq is None or self.finished:
            return
        while self._num_tokens < seq.num_generated and self._stopped_by is None:
            token_id = seq.token_ids[seq.prompt_len + self._num_tokens]
            self._num_tokens += 1
            # the token that ended it is not part of the text, unless asked for
            is_end = seq.finish_reason == "stop" and self._num_tokens == seq.num_generated
            if self._tokenizer is not None and (not is_end or self._params.include_stop_str_in_output):
                self._push(self._detokenizer.push(token_id))
        if seq.finished and self._stopped_by is None and self._tokenizer is not None:
            self._push(self._detokenizer.finish())
            if self._stopped_by is None:
                self._text.append(self._checker.finish())
        if self._stopped_by is not None:
            self._stop(self.request_id, self._stopped_by)
            # a stop string that the last token completed is the reason, whatever else that token was
            seq.finish_reason, seq.stop_reason = "stop", self._stopped_by
        self.finished = seq.finished

    def raise_error(self) -> None:
        """Raise what ended the request, if an error did."""
        if self.error is not None:
            raise self.error
        error = self.seq.error if self.seq is not None else None
        if isinstance(error, KvcoreError):
            raise error
        if error is not None:
            raise InvalidState(
                f"request {self.request_id!r} was ended by an error in a batch that it shared: {error!r}"
            ) from error

    @property
    def has_news(self) -> bool:
        """Whether ``output(new=True)`` has anything to tell."""
        return self.finished or self._given_tokens < self._num_tokens

    def output(self, *, new: bool = False) -> RequestOutput:
        """The request as it stands; with ``new`` only the text and tokens since the last such call."""
        seq = self.seq
        assert seq is not None
        first_token, first_piece = (self._given_tokens, self._given_pieces) if new else (0, 0)
        logprobs, cumulative = None, None
        if seq.logprobs is not None:
            start = seq.prompt_len
            sampled = seq.token_ids[start : start + self._num_tokens]
            cumulative = sum(p[i].logprob for p, i in zip(seq.logprobs, sampled, strict=False))
            logprobs = [self._decoded(p) for p in seq.logprobs[first_token : self._num_tokens]]
        completion = CompletionOutput(
            0,
            "".join(self._text[first_piece:]),
            seq.token_ids[seq.prompt_len + first_token : seq.prompt_len + self._num_tokens],
            cumulative,
            logprobs,
            seq.finish_reason if self.finished else None,
            seq.stop_reason if self.finished else None,
        )
        if new:
            self._given_tokens, self._given_pieces = self._num_tokens, len(self._text)
        return RequestOutput(
            self.request_id,
            self._prompt,
            seq.token_ids[: seq.prompt_len],
            [completion],
            self.finished,
            seq.num_cached_tokens,
            seq.num_computed_tokens,
            replace(seq.metrics),
        )

    def _push(self, text: str) -> None:
        piece, stopped = self._checker.push(text)
        if piece:
            self._text.append(piece)
        if stopped:
            self._stopped_by = self._checker.matched or ""

    def _decoded(self, logprobs: dict[int, Logprob]) -> dict[int, Logprob]:
        tokenizer = self._tokenizer
        if tokenizer is None:
            return logprobs
        return {
            i: replace(p, decoded_token=tokenizer.decode([i], skip_special_tokens=False)) for i, p in logprobs.items()
        }
