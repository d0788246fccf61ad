"""One request on its way: its tokens become text, stop strings are found, and outputs are made of both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kvcore.engine.logits import Constraint
from kvcore.engine.sampler import Logprob
from kvcore.engine.sampling_params import BeamSearchParams, SamplingParams
from kvcore.engine.sequence import Sequence
from kvcore.errors import InvalidState, KvcoreError
from kvcore.outputs import BeamSearchOutput, BeamSearchSequence, CompletionOutput, RequestOutput, Usage
from kvcore.prompts import Asked

if TYPE_CHECKING:
    from kvcore.text.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Submission:
    """What a call asks for, for one prompt; ``LLM.generate`` and ``Engine.add_request`` explain the fields."""

    asked: Asked
    params: SamplingParams | BeamSearchParams
    use_cache: bool = True
    priority: int = 0
    timeout: float | None = None
    make_constraint: Callable[[], Constraint] | None = None
    adapter: Any = None
    callback: Callable[[RequestOutput], Any] | None = None


class Reply:
    """Follows a request of the engine.

    Attributes:
        request_id: the request.
        submission: what was asked for.
        seq: the request's first sequence, as soon as the engine has taken it.
        finished: whether everything, text included, is there.
        error: what went wrong here, in making text of the tokens.
        callback_error: what the request's callback raised.
        told_end: whether the callback knows of the end.
    """

    def __init__(
        self,
        request_id: str,
        submission: Submission,
        tokenizer: Tokenizer | None,
        stop: Callable[[str, str, int], None],
    ) -> None:
        """``stop(request_id, stop_string, index)`` is called when a stop string was found in an answer."""
        self.request_id = request_id
        self.submission = submission
        self.seq: Sequence | None = None
        self.finished = False
        self.error: Exception | None = None
        self.callback_error: Exception | None = None
        self.told_end = False
        self._tokenizer = tokenizer
        self._stop = stop
        self._answers: list[_Answer] = []
        self._is_search = isinstance(submission.params, BeamSearchParams)

    def begin(self, seq: Sequence) -> None:
        """The engine has taken the request."""
        params = self.submission.params
        if isinstance(params, SamplingParams):
            sequences = [seq, *seq.siblings]
            self._answers = [_Answer(s, params, self._tokenizer) for s in sequences]
        else:
            shown = SamplingParams(include_stop_str_in_output=params.include_stop_str_in_output)
            self._answers = [_Answer(s, shown, self._tokenizer) for s in [seq, *seq.siblings]]
        self.seq = seq

    def advance(self) -> None:
        """Take in the tokens that the sequences got since the last call, and their ends."""
        if self.seq is None or self.finished:
            return
        for answer in self._answers:
            # the tokens of beams change until the search has ended
            if not self._is_search or answer.seq.finished:
                stopped_by = answer.advance()
                if stopped_by is not None:
                    self._stop(self.request_id, stopped_by, answer.seq.index)
                    answer.take_end(stopped_by)
        self.finished = all(answer.finished for answer in self._answers)

    @property
    def failed(self) -> bool:
        """Whether an error ended the request."""
        return self.error is not None or any(answer.seq.error is not None for answer in self._answers)

    def raise_error(self) -> None:
        """Raise what ended the request, if an error did."""
        if self.error is not None:
            raise self.error
        for answer in self._answers:
            error = answer.seq.error
            if isinstance(error, KvcoreError):
                raise error
            if error is not None:
                raise InvalidState(
                    f"request {self.request_id!r} was ended by an error in a batch that it shared: {error!r}"
                ) from error

    @property
    def has_news(self) -> bool:
        """Whether ``output(new=True)`` has anything to tell."""
        if self._chooses or self._is_search:
            return self.finished
        return self.finished or any(answer.has_news for answer in self._answers)

    def output(self, *, new: bool = False) -> RequestOutput:
        """The request as it stands; with ``new`` only the text and tokens since the last such call."""
        seq = self.seq
        assert seq is not None
        answers = self._answers
        if self._chooses:
            assert isinstance(self.submission.params, SamplingParams)
            best = sorted(answers, key=lambda answer: -answer.seq.cumulative_logprob)
            answers = best[: self.submission.params.n]
        completions = [answer.output(new=new) for answer in answers]
        if self._chooses:
            for index, completion in enumerate(completions):
                completion.index = index
        prompt_logprobs = None
        if seq.prompt_logprobs is not None:
            prompt_logprobs = [p if p is None else self._answers[0].decoded(p) for p in seq.prompt_logprobs]
        return RequestOutput(
            self.request_id,
            self.submission.asked.text,
            seq.token_ids[: seq.prompt_len],
            completions,
            self.finished,
            seq.num_cached_tokens,
            sum(answer.seq.num_computed_tokens for answer in self._answers),
            replace(seq.metrics),
            sum(answer.seq.num_recomputed_tokens for answer in self._answers),
            prompt_logprobs,
            self._usage(seq),
            self.callback_error,
        )

    def beams(self) -> BeamSearchOutput:
        """The result of a finished beam search."""
        seq = self.seq
        assert seq is not None
        assert seq.search is not None
        found = seq.search.finished
        sequences = [
            BeamSearchSequence(
                list(answer.seq.token_ids),
                hypothesis.logprob,
                hypothesis.score,
                answer.output().text if self._tokenizer is not None else None,
                hypothesis.reason,
            )
            for answer, hypothesis in zip(self._answers, found, strict=False)
        ]
        return BeamSearchOutput(sequences, replace(seq.metrics))

    @property
    def _chooses(self) -> bool:
        params = self.submission.params
        return isinstance(params, SamplingParams) and params.num_sequences > params.n

    def _usage(self, seq: Sequence) -> Usage:
        read = seq.num_cached_tokens
        written = {300.0: 0, 3600.0: 0}
        start = read
        for end, ttl in self.submission.asked.marks:
            kept = 3600.0 if ttl is None or ttl > 300.0 else 300.0
            written[kept] += max(0, end - start)
            start = max(start, end)
        created = sum(written.values())
        output_tokens = sum(answer.num_tokens for answer in self._answers)
        return Usage(seq.prompt_len - read - created, read, created, written[300.0], written[3600.0], output_tokens)


class _Answer:
    """Follows one sequence."""

    def __init__(self, seq: Sequence, params: SamplingParams, tokenizer: Tokenizer | None) -> None:
        self.seq = seq
        self.finished = False
        self.num_tokens = 0
        self._params = params
        self._stopped_by: str | None = None
        self._text: list[str] = []
        self._given_pieces = 0
        self._given_tokens = 0
        self._tokenizer = tokenizer
        if tokenizer is not None:
            from kvcore.text.detokenizer import Detokenizer, StopChecker

            self._detokenizer = Detokenizer(tokenizer, params.skip_special_tokens)
            self._checker = StopChecker(params.stop_strings, params.include_stop_str_in_output)

    @property
    def has_news(self) -> bool:
        """Whether there are tokens, or an end, that ``output(new=True)`` has not told."""
        return self._given_tokens < self.num_tokens

    def advance(self) -> str | None:
        """Take in new tokens; the stop string, if one was found."""
        seq = self.seq
        if self.finished:
            return None
        while self.num_tokens < seq.num_generated and self._stopped_by is None:
            token_id = seq.token_ids[seq.prompt_len + self.num_tokens]
            self.num_tokens += 1
            # the token that ended it is not part of the text, unless asked for
            is_last = seq.finish_reason == "stop" and self.num_tokens == seq.num_generated
            is_end = is_last and not seq.last_is_text
            if self._tokenizer is not None and (not is_end or self._params.include_stop_str_in_output):
                self._push(self._detokenizer.push(token_id))
        if seq.finished and self._stopped_by is None and self._tokenizer is not None:
            self._push(self._detokenizer.finish())
            if self._stopped_by is None:
                self._text.append(self._checker.finish())
        self.finished = seq.finished
        return self._stopped_by

    def take_end(self, stopped_by: str) -> None:
        """A stop string that the last token completed is the reason, whatever else that token was."""
        self.seq.finish_reason, self.seq.stop_reason = "stop", stopped_by
        self.finished = self.seq.finished

    def output(self, *, new: bool = False) -> CompletionOutput:
        """The answer as it stands; with ``new`` what has come since the last such call."""
        seq = self.seq
        first_token, first_piece = (self._given_tokens, self._given_pieces) if new else (0, 0)
        found, cumulative = None, None
        if seq.logprobs is not None:
            found = [self.decoded(p) for p in seq.logprobs[first_token : self.num_tokens]]
        if seq.logprobs is not None or self._params.best_of is not None or seq.search is not None:
            cumulative = seq.cumulative_logprob
        completion = CompletionOutput(
            seq.index,
            "".join(self._text[first_piece:]),
            seq.token_ids[seq.prompt_len + first_token : seq.prompt_len + self.num_tokens],
            cumulative,
            found,
            seq.finish_reason if self.finished else None,
            seq.stop_reason if self.finished else None,
        )
        if new:
            self._given_tokens, self._given_pieces = self.num_tokens, len(self._text)
        return completion

    def decoded(self, logprobs: dict[int, Logprob]) -> dict[int, Logprob]:
        """The same with the tokens as text."""
        tokenizer = self._tokenizer
        if tokenizer is None:
            return logprobs
        return {
            i: replace(p, decoded_token=tokenizer.decode([i], skip_special_tokens=False)) for i, p in logprobs.items()
        }

    def _push(self, text: str) -> None:
        if self.num_tokens <= self._params.min_tokens:  # no stop string counts yet
            self._text.append(text)
            return
        piece, stopped = self._checker.push(text)
        if piece:
            self._text.append(piece)
        if stopped:
            self._stopped_by = self._checker.matched or ""
