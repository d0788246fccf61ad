"""LLM: text in, text out.

    prompts --tokenizer--> token ids --engine, step by step--> tokens --detokenizer, stop strings--> text

All calls on an ``LLM`` share one engine, and whoever steps it takes the requests of all calls along. So an iterator of
``stream`` can be left and come back to, and several threads can call at once: their requests run in common batches.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvcore.engine.engine import Engine
from kvcore.engine.interfaces import FloatArray
from kvcore.engine.sampling_params import SamplingParams
from kvcore.errors import InvalidArgument, InvalidState
from kvcore.loading import Options, Parts, load_parts, make_chat_template, parts_from_config
from kvcore.outputs import RequestOutput
from kvcore.reply import Reply

if TYPE_CHECKING:
    from types import TracebackType

    from kvcore.checkpoint.config import GenerationConfig
    from kvcore.text.chat import ChatTemplate
    from kvcore.text.tokenizer import Tokenizer

Prompt = Any
"""A text, a list (or array) of token ids, {"prompt": text} or {"prompt_token_ids": ids}."""

_PROGRESS_FROM = 8


class LLM:
    """A language model with its paged KV cache.

    Thread-safe: calls from several threads take turns at the engine, which advances the requests of all of them in
    common batches. Should the model raise in such a batch, all requests in it end with that error.

    Use it as a context manager or call ``close`` to give its memory back early.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        dtype: str = "auto",
        quantization: str = "auto",
        mla: str = "absorbed",
        kv_cache_dtype: str = "auto",
        kv_cache_scale_mode: str = "auto",
        kv_cache_memory: int | None = None,
        num_kv_blocks: int | None = None,
        block_size: int = 16,
        max_model_len: int | None = None,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 2048,
        enable_prefix_caching: bool = True,
        prefix_ttl: float | None = 300.0,
        num_threads: int | None = None,
        seed: int | None = None,
    ) -> None:
        """Load a model.

        Args:
            model: a folder in Hugging Face's layout, a .gguf file, a name that ``kvcore pull`` knows ("smollm2"), or
                a hub id ("org/name"). A folder without a tokenizer serves token ids; only text raises then.
            dtype: what weights are held in: auto (as they were saved; bfloat16 for quantised files), float32 (f32),
                bfloat16 (bf16) or float16 (f16).
            quantization: int8 or int4: layers' matrices are held in 8 or 4 bits with scales for each 32 inputs, the
                output matrix in 8, and what they are multiplied with is rounded to 8 bits: half or a third of
                bfloat16's memory (the embedding's rows stay), and as much faster to decode with. A GGUF file's
                Q8_0, or Q4_0 and Q4_1, are taken as they are. auto and none: weights are expanded to ``dtype``.
            mla: models with latent attention (DeepSeek) keep one compressed row for each token (absorbed), or the keys
                and values of all heads (expanded): the same but for rounding, in many times the memory.
            kv_cache_dtype: what keys and values are stored in: auto (float32 beside float32 weights, else bfloat16),
                float32 (f32), bfloat16 (bf16), float16 (f16), fp8_e4m3 (fp8), fp8_e5m2, int8 or int4.
            kv_cache_scale_mode: static (fp8: one scale for each layer and head, 1 until ``calibrate``), per_token_head
                (fp8, int8, int4: a scale of its own for each token and head), or auto: static where it can be.
            kv_cache_memory: bytes for the cache. None: enough for ``max_num_seqs`` sequences of the full length, but
                no more than 4 GiB (or one such sequence) and no more than half of the available memory.
            num_kv_blocks: blocks in the cache, instead of ``kv_cache_memory``.
            block_size: tokens in a block, a multiple of 16.
            max_model_len: the most tokens of prompt and answer together. None: the model's own limit.
            max_num_seqs: the most requests that run at once; others wait.
            max_num_batched_tokens: the most tokens of a step; longer prompts go in chunks.
            enable_prefix_caching: share the blocks of equal front parts, also those of ended requests.
            prefix_ttl: seconds that a prefix is kept after the last request that used it; a hit renews it. None: until
                its space is needed.
            num_threads: threads of the kernels. None: one per core that the process may use.
            seed: makes requests without a seed reproducible, given the order of submission.

        Raises:
            CheckpointError: the model's files are bad, missing or not supported.
            InvalidArgument: a bad option.
            OutOfMemory: the cache does not fit.
        """
        options = Options(
            dtype=dtype,
            quantization=quantization,
            mla=mla,
            kv_cache_dtype=kv_cache_dtype,
            kv_cache_scale_mode=kv_cache_scale_mode,
            kv_cache_memory=kv_cache_memory,
            num_kv_blocks=num_kv_blocks,
            block_size=block_size,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            enable_prefix_caching=enable_prefix_caching,
            prefix_ttl=prefix_ttl,
            num_threads=num_threads,
            seed=seed,
        )
        self._assemble(load_parts(model, options), options)

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], random_weights: bool = True, *, seed: int = 0, **options: Any
    ) -> LLM:
        """A model of this shape with random weights, for tests and measurements; it serves token ids.

        Args:
            config: as in config.json.
            random_weights: must be True: a configuration has no others.
            seed: of the weights, and as the option ``seed``.
            options: as for ``LLM``.

        Raises:
            As ``LLM``.
        """
        if random_weights is not True:
            raise InvalidArgument("random_weights: expected True (a config alone has no weights), got False")
        if not isinstance(config, Mapping):
            raise TypeError(f"config: expected a dict, got {type(config).__name__}")
        checked = Options.check({"seed": seed, **options})
        llm = cls.__new__(cls)
        llm._assemble(parts_from_config(config, seed, checked), checked)
        return llm

    @classmethod
    def _from_parts(
        cls,
        decoder: Any,
        tokenizer: Any = None,
        generation: GenerationConfig | None = None,
        *,
        chat_template: Any = None,
        max_model_len: int | None = None,
        name: str = "model",
        **options: Any,
    ) -> LLM:
        """An LLM of parts that are there already; tests give mocks."""
        llm = cls.__new__(cls)
        parts = Parts(decoder, generation, tokenizer, chat_template, max_model_len, name)
        llm._assemble(parts, Options.check(options))
        return llm

    def _assemble(self, parts: Parts, options: Options) -> None:
        self.name = parts.name
        self.max_model_len = parts.max_model_len
        self._decoder = parts.decoder
        self._tokenizer = parts.tokenizer
        self._chat_template = parts.chat_template
        self._engine = Engine(
            parts.decoder,
            eos_token_ids=parts.generation.eos_token_ids if parts.generation is not None else (),
            max_model_len=parts.max_model_len,
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens,
            seed=options.seed,
        )
        self._replies: dict[str, Reply] = {}
        self._ids = map(str, itertools.count())
        self._closed = False
        # Reentrant: a garbage collector may close an iterator of stream() in the middle of a step.
        self._lock = threading.RLock()
        self._here = _Presence()

    # -- calls ----------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | list[Prompt],
        params: SamplingParams | list[SamplingParams] | None = None,
        *,
        use_cache: bool = True,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Answer one or several prompts; several decode together in one batch.

        Args:
            prompts: a text, a list of token ids, a dict with "prompt" or "prompt_token_ids", or a list of these. Texts
                get the special tokens that the tokenizer's configuration says.
            params: for all prompts, or a list with one for each. None: ``SamplingParams()``, whatever the model's
                generation_config.json says about temperature and the like.
            use_cache: False computes everything again for each token, as if there were no KV cache. The tokens are
                the same; ``num_computed_tokens`` tells the difference.
            progress: show a progress bar on stderr. None: on a terminal, from 8 prompts on.

        Returns:
            One output per prompt, in order.

        Raises:
            InvalidArgument: an empty prompt, an id or a length that the model does not take, params that do not fit.
            OutOfBlocks: a prompt that could never fit into the cache.
            TypeError: prompts or params of the wrong type.
            InvalidState: logits that are no numbers, or a closed LLM.
            All are checked for every prompt before any runs. Whatever is raised, Ctrl-C included, ends the whole call
            and returns its blocks.
        """
        return self._run(self._inputs(prompts), params, use_cache, progress)

    def chat(
        self,
        messages: list[Any],
        params: SamplingParams | list[SamplingParams] | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        use_cache: bool = True,
        progress: bool | None = None,
        **template_values: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or several.

        Args:
            messages: a conversation, a list of {"role": ..., "content": ...}; or a list of conversations.
            params, use_cache, progress: as ``generate``.
            chat_template: a Jinja template in place of the model's own.
            add_generation_prompt: end the prompt with the start of the assistant's turn.
            template_values: further variables of the template, such as ``tools``.

        Returns:
            One output per conversation.

        Raises:
            As ``generate``; InvalidArgument if there is no template, or if it refuses the conversation.
        """
        if not isinstance(messages, (list, tuple)):
            raise TypeError(f"messages: expected a list of messages, got {type(messages).__name__}")
        if not messages:
            raise InvalidArgument("messages: expected at least one message, got none")
        conversations = [messages] if isinstance(messages[0], Mapping) else messages
        inputs: list[tuple[str | None, Any]] = []
        for conversation in conversations:
            text = self.render_chat(
                conversation,
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                **template_values,
            )
            inputs.append((text, self._encode(text, add_special_tokens=False)))
        return self._run(inputs, params, use_cache, progress)

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        use_cache: bool = True,
    ) -> Iterator[RequestOutput]:
        """Answer one prompt token by token.

        The prompt is checked here; work begins when the first item is asked for. Leaving the loop, or closing the
        iterator, aborts the request and returns its blocks.

        Args:
            prompt, params, use_cache: as ``generate``, one prompt.

        Yields:
            An output after each step, whose ``outputs[0].text`` and ``.token_ids`` are what is new. (Other calls
            may have advanced the request meanwhile: then it is more than one token.) The pieces of text never split a
            character, and joined they are the whole text. The last item has ``finished`` set.

        Raises:
            As ``generate``.
        """
        inputs = self._inputs(prompt)
        if len(inputs) != 1 or _is_batch(prompt):
            raise InvalidArgument(f"prompt: expected one prompt, got a list of {len(inputs)}")
        return self._stream(*inputs[0], params, use_cache)

    def stream_chat(
        self,
        messages: list[Any],
        params: SamplingParams | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        use_cache: bool = True,
        **template_values: Any,
    ) -> Iterator[RequestOutput]:
        """Answer one conversation token by token: ``chat`` and ``stream`` in one."""
        text = self.render_chat(
            messages, chat_template=chat_template, add_generation_prompt=add_generation_prompt, **template_values
        )
        return self._stream(text, self._encode(text, add_special_tokens=False), params, use_cache)

    def logits(self, token_ids: Any) -> FloatArray:
        """The logits after every position, float32 [len(token_ids), vocab].

        Computed in chunks; nothing is read from the prefix cache or left in it, and no other call runs meanwhile.

        Raises:
            InvalidArgument, TypeError: no list of ids that the model takes, or a list that is too long for it.
            OutOfBlocks: the cache lacks the space, or running requests leave too little of it.
        """
        with self._here, self._lock:
            self._check_open()
            return self._engine.logits(token_ids)

    def calibrate(self, prompts: Prompt | list[Prompt]) -> None:
        """Find static scales of an fp8 cache from what the model writes for some sample text.

        Afterwards the largest K and V of each layer and head in that text are the format's largest values. Give text
        like that which is to come, some thousand tokens. The cache must be empty: call it before anything else.

        Args:
            prompts: as for ``generate``; nothing is answered.

        Raises:
            InvalidState: the cache holds something, or it is not fp8 with static scales.
        """
        with self._here, self._lock:
            self._check_open()
            params = SamplingParams(max_tokens=1, temperature=0.0)
            self._decoder.cache.calibrate(lambda: self.generate(prompts, params))

    def render_chat(
        self,
        messages: Any,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        **template_values: Any,
    ) -> str:
        """The prompt that a conversation becomes, as text. Its special tokens are part of it."""
        template: ChatTemplate | None = self._chat_template
        if chat_template is not None:
            template = make_chat_template(self._tokenizer, chat_template)
        if template is None:
            raise InvalidArgument(f"chat: expected a model with a chat template (or chat_template=), got {self.name}")
        return template.render(messages, add_generation_prompt, **template_values)

    # -- state ----------------------------------------------------------------------------------------------------

    @property
    def cache(self) -> Any:
        """The ``KVCache``. Sequences that you add to it take their blocks from the engine's."""
        self._check_open()
        return self._decoder.cache

    @property
    def weight_bytes(self) -> int:
        """Bytes of the model's weights as they are held."""
        self._check_open()
        return int(self._decoder.nbytes)

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer, or None if the model came without one."""
        return self._tokenizer

    @property
    def chat_template(self) -> ChatTemplate | None:
        """The chat template, or None if the model came without one."""
        return self._chat_template

    def stats(self) -> dict[str, Any]:
        """Counts over the life of this LLM (``EngineMetrics``), of the moment, and of the cache under "cache"."""
        with self._here, self._lock:
            self._check_open()
            return self._engine.stats()

    def close(self) -> None:
        """Abort all requests and give weights and cache back. Later calls raise InvalidState; closing again is fine."""
        with self._here, self._lock:
            if self._closed:
                return
            for request_id in list(self._replies):
                self._engine.abort(request_id)
            self._closed = True
            self._decoder = None
            del self._engine

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<LLM {self.name}{' (closed)' if self._closed else ''}>"

    # -- prompts --------------------------------------------------------------------------------------------------

    def _inputs(self, prompts: Prompt | list[Prompt]) -> list[tuple[str | None, Any]]:
        """Each prompt as its text, if it came as text, and its token ids."""
        if not _is_batch(prompts):
            return [self._input(prompts, "prompt")]
        if len(prompts) == 0:
            raise InvalidArgument("prompts: expected at least one prompt, got an empty list")
        return [self._input(prompt, f"prompts[{i}]") for i, prompt in enumerate(prompts)]

    def _input(self, prompt: Prompt, where: str) -> tuple[str | None, Any]:
        if isinstance(prompt, Mapping):
            known = [key for key in ("prompt_token_ids", "prompt") if key in prompt]
            if len(prompt) != 1 or not known:
                raise InvalidArgument(
                    f"{where}: expected a dict with either 'prompt_token_ids' or 'prompt', got the keys {list(prompt)}"
                )
            prompt = prompt[known[0]]
            if isinstance(prompt, str) != (known[0] == "prompt"):
                kind = "a string" if known[0] == "prompt" else "a list of token ids"
                raise TypeError(f"{where}[{known[0]!r}]: expected {kind}, got {type(prompt).__name__}")
        if isinstance(prompt, str):
            if not prompt:
                raise InvalidArgument(f"{where}: expected a text that is not empty, got ''")
            return prompt, self._encode(prompt, add_special_tokens=True)
        if not isinstance(prompt, (list, tuple, range, np.ndarray)) or getattr(prompt, "ndim", 1) == 0:
            raise TypeError(f"{where}: expected a string, a list of token ids or a dict, got {type(prompt).__name__}")
        if len(prompt) == 0:
            raise InvalidArgument(f"{where}: expected at least one token, got none")
        return None, prompt

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        if self._tokenizer is None:
            raise InvalidArgument(
                f"prompt: expected token ids, because {self.name} came without a tokenizer, got a string"
            )
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def _params(self, params: Any, count: int) -> list[SamplingParams]:
        if params is None:
            params = SamplingParams()
        each = list(params) if isinstance(params, (list, tuple)) else [params] * count
        if len(each) != count:
            raise InvalidArgument(f"params: expected one for each of the {count} prompts, got {len(each)}")
        for item in each:
            if not isinstance(item, SamplingParams):
                raise TypeError(f"params: expected SamplingParams or a list of them, got {type(item).__name__}")
            if item.stop_strings and self._tokenizer is None:
                raise InvalidArgument(
                    f"SamplingParams.stop: expected none, because {self.name} came without a tokenizer"
                )
        return each

    # -- running --------------------------------------------------------------------------------------------------

    def _run(
        self, inputs: list[tuple[str | None, Any]], params: Any, use_cache: bool, progress: bool | None
    ) -> list[RequestOutput]:
        replies: list[Reply] = []
        try:
            self._submit(replies, inputs, self._params(params, len(inputs)), use_cache)
            with _progress_bar(len(replies), progress) as show:
                while not all(reply.finished for reply in replies):
                    self._advance(replies)
                    show(sum(reply.finished for reply in replies))
            outputs = [reply.output() for reply in replies]
            self._drop(replies)
            return outputs
        except BaseException:
            # Not `finally`, and twice: Ctrl-C may interrupt the clean-up as well. Dropping can be repeated.
            try:
                self._drop(replies)
            except BaseException:
                self._drop(replies)
                raise
            raise

    def _stream(self, text: str | None, token_ids: Any, params: Any, use_cache: bool) -> Iterator[RequestOutput]:
        checked = self._params(params, 1)
        with self._here, self._lock:
            self._check_open()
            token_ids = self._engine.check_request(token_ids, checked[0])

        def items() -> Iterator[RequestOutput]:
            replies: list[Reply] = []
            try:
                self._submit(replies, [(text, token_ids)], checked, use_cache)
                reply = replies[0]
                finished = False
                while not finished:
                    if not reply.has_news:  # else another call has advanced it meanwhile
                        self._advance(replies)
                    with self._here, self._lock:
                        reply.raise_error()
                        item = reply.output(new=True) if reply.has_news else None
                    if item is not None:
                        finished = item.finished
                        yield item
                self._drop(replies)
            except BaseException:  # GeneratorExit, too
                try:
                    self._drop(replies)
                except BaseException:
                    self._drop(replies)
                    raise
                raise

        return items()

    def _submit(
        self,
        replies: list[Reply],
        inputs: list[tuple[str | None, Any]],
        params: list[SamplingParams],
        use_cache: bool,
    ) -> None:
        """Check all prompts, then give them to the engine. What must be dropped later is in ``replies``, always."""
        if not isinstance(use_cache, bool):
            raise TypeError(f"use_cache: expected True or False, got {use_cache!r}")
        with self._here, self._lock:
            self._check_open()
            checked = [self._engine.check_request(ids, p) for (_, ids), p in zip(inputs, params, strict=True)]
            for (text, _), token_ids, item in zip(inputs, checked, params, strict=True):
                reply = Reply(next(self._ids), text, item, self._tokenizer, self._stop)
                replies.append(reply)
                self._replies[reply.request_id] = reply
                reply.seq = self._engine.add_request(reply.request_id, token_ids, item, use_cache=use_cache)

    def _advance(self, replies: list[Reply]) -> None:
        """Step the engine for everybody, unless another thread has finished these requests meanwhile."""
        with self._here, self._lock:
            for reply in replies:  # a step of another call that raised has told nobody
                self._follow(reply)
            if not all(reply.finished for reply in replies):
                self._check_open()
                for output in self._engine.step():
                    self._follow(self._replies.get(output.request_id))
        for reply in replies:
            reply.raise_error()
        if self._here.others:
            time.sleep(1e-4)  # a lock is not fair: without a pause this thread would take it again at once

    def _follow(self, reply: Reply | None) -> None:
        if reply is None:
            return
        try:
            reply.advance()
        except Exception as error:  # concerns this request only; the call that owns it raises it
            reply.error, reply.finished = error, True
            self._engine.abort(reply.request_id)

    def _stop(self, request_id: str, stop: str | None) -> None:
        self._engine.finish(request_id, "stop", stop)

    def _drop(self, replies: list[Reply]) -> None:
        """Forget requests, and abort those that have not ended. Can be repeated."""
        with self._here, self._lock:
            for reply in replies:
                if not self._closed:
                    self._engine.abort(reply.request_id)
                self._replies.pop(reply.request_id, None)

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidState("LLM: expected an open one, got a call after close()")


class _Presence:
    """Which threads hold or wait for the lock.

    Only a hint, but one that cures itself: should an interrupt lose an exit, the thread's next one makes up for it.
    """

    def __init__(self) -> None:
        self._threads: dict[int, None] = {}

    def __enter__(self) -> None:
        self._threads[threading.get_ident()] = None

    def __exit__(self, *_: object) -> None:
        self._threads.pop(threading.get_ident(), None)

    @property
    def others(self) -> bool:
        """Whether any thread is here, asked by one that has left."""
        return bool(self._threads)


def _is_batch(prompts: Any) -> bool:
    """Whether this is a list of prompts, not one prompt. (A list of token ids is one prompt.)"""
    if isinstance(prompts, np.ndarray):
        return prompts.ndim > 1
    return isinstance(prompts, (list, tuple)) and not (len(prompts) > 0 and isinstance(prompts[0], Integral))


@contextmanager
def _progress_bar(total: int, wanted: bool | None) -> Iterator[Any]:
    """Yields ``show(number finished)``."""
    if wanted is None:
        wanted = total >= _PROGRESS_FROM and sys.stderr.isatty()
    if not wanted:
        yield lambda finished: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("prompts", total=total)
        yield lambda finished: bar.update(task, completed=finished)
