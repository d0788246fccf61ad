"""LLM: text in, text out.

    prompts --tokenizer--> token ids --engine, step by step--> tokens --detokenizer, stop strings--> text

All calls on an ``LLM`` share one engine, and whoever steps it takes the requests of all calls along. So an iterator of
``stream`` can be left and come back to, and several threads can call at once: their requests run in common batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvcore.dispatch import Dispatcher
from kvcore.engine.engine import Engine
from kvcore.engine.interfaces import FloatArray
from kvcore.engine.logits import Constraint
from kvcore.engine.sampling_params import BeamSearchParams, SamplingParams
from kvcore.errors import InvalidArgument
from kvcore.loading import Options, Parts, load_parts, make_chat_template, parts_from_config
from kvcore.lora import LoadedAdapters, LoRARequest
from kvcore.outputs import BeamSearchOutput, RequestOutput
from kvcore.progress import progress_bar
from kvcore.prompt_caching import find_mark, mark_tokens, take_marks
from kvcore.prompts import Asked, Prompt, Prompts, check_salt, is_batch
from kvcore.reply import Reply, Submission

if TYPE_CHECKING:
    from types import TracebackType

    from kvcore.checkpoint.config import GenerationConfig
    from kvcore.structured import Grammars
    from kvcore.text.chat import ChatTemplate
    from kvcore.text.tokenizer import Tokenizer


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
        prompt_cache_min_tokens: int = 1024,
        swap_space: int = 0,
        scheduling_policy: str = "fcfs",
        num_threads: int | None = None,
        seed: int | None = None,
        speculative_config: Mapping[str, Any] | None = None,
    ) -> None:
        """Load a model.

        Args:
            model: a folder in Hugging Face's layout, a .gguf file, a name that ``kvcore pull`` knows ("smollm2"), or
                a hub id ("org/name"). A folder without a tokenizer serves token ids; only text raises then.
            dtype: what weights are held in: auto (as they were saved; bfloat16 for quantised files), float32 (f32),
                bfloat16 (bf16) or float16 (f16).
            quantization: auto: as the file has it. A GGUF file's matrices of 4 bits stay in 4 bits, those of 5 to 8
                are held in 8 (Q4_0, Q4_1, Q5_0 and Q8_0 exactly, other kinds rounded once), and what is multiplied
                with them is rounded to 8 bits; beside dtype="float32", which asks for its arithmetic, they are
                expanded. none: expanded to ``dtype``. int8 or int4: layers' matrices in 8 or 4 bits with scales for
                each 32 inputs, whatever the file has, and the output matrix in 8: half or a third of bfloat16's memory
                (the embedding's rows stay), and as much faster to decode with.
            mla: models with latent attention (DeepSeek) keep one compressed row for each token (absorbed), or the keys
                and values of all heads (expanded): the same but for rounding, in many times the memory.
            kv_cache_dtype: what keys and values are stored in: auto (float32 beside float32 weights, else bfloat16),
                float32 (f32), bfloat16 (bf16), float16 (f16), fp8_e4m3 (fp8), fp8_e5m2, int8 or int4.
            kv_cache_scale_mode: static (fp8: one scale for each layer and head, 1 until ``calibrate``), per_token_head
                (fp8, int8, int4: a scale of its own for each token and head), or auto: static where it can be.
            kv_cache_memory: bytes for the cache, of which layers with a sliding window get no more than twice what the
                windows of ``max_num_seqs`` sequences take. None: enough for ``max_num_seqs`` sequences of the full
                length, but no more than 4 GiB (or one such sequence) and no more than half of the available memory.
            num_kv_blocks: blocks in the cache, instead of ``kv_cache_memory``; layers with a sliding window have as
                many as all others then.
            block_size: tokens in a block, a multiple of 16.
            max_model_len: the most tokens of prompt and answer together. None: the model's own limit.
            max_num_seqs: the most requests that run at once; others wait.
            max_num_batched_tokens: the most tokens of a step; longer prompts go in chunks.
            enable_prefix_caching: share the blocks of equal front parts, also those of ended requests.
            prefix_ttl: seconds that a prefix is kept after the last request that used it; a hit renews it. None: until
                its space is needed.
            prompt_cache_min_tokens: marks (``cache_control``) of prefixes with fewer tokens are ignored.
            swap_space: bytes of a temporary file for blocks that give way to others, those of preempted requests among
                them. They come back from there instead of being computed again. 0: none.
            scheduling_policy: fcfs (who came first goes first), or priority: by the ``priority`` of each call, smaller
                first. A step of priority is worth 256 requests, so that nobody waits for ever.
            num_threads: threads of the kernels. None: one per core that the process may use.
            seed: makes requests without a seed reproducible, given the order of submission.
            speculative_config: guesses next tokens from what a text repeats of itself, to compute several in a step:
                {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2}: the
                last 4 to 2 tokens are looked up, and up to 4 guessed. Answers are the same to the token; those that
                repeat much come faster, others no slower but for a few rows. None: off.

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
            prompt_cache_min_tokens=prompt_cache_min_tokens,
            swap_space=swap_space,
            scheduling_policy=scheduling_policy,
            num_threads=num_threads,
            seed=seed,
            speculative_config=speculative_config,
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
            As ``LLM``; OutOfMemory also for a tensor that does not fit.
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
        self.generation_config = parts.generation
        self._eos_token_ids = tuple(parts.generation.eos_token_ids) if parts.generation is not None else ()
        self._engine: Engine | None = Engine(
            parts.decoder,
            eos_token_ids=self._eos_token_ids,
            max_model_len=parts.max_model_len,
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens,
            scheduling_policy=options.scheduling_policy,
            enable_prefix_caching=options.enable_prefix_caching,
            seed=options.seed,
            speculation=options.speculative_config,
        )
        self._dispatcher = Dispatcher(self._engine, parts.tokenizer)
        self._prompts = Prompts(parts.tokenizer, parts.name, parts.reader)
        self._finds_prefixes = options.enable_prefix_caching and options.prefix_ttl != 0
        self._min_marked_tokens = options.prompt_cache_min_tokens
        self._grammars: Grammars | None = None
        self._adapters = LoadedAdapters(lambda lora: self._decoder.adapter(lora))

    # -- calls ----------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | list[Prompt],
        params: SamplingParams | list[SamplingParams] | None = None,
        *,
        use_cache: bool = True,
        progress: bool | None = None,
        priority: int | list[int] = 0,
        timeout: float | None = None,
        callback: Callable[[RequestOutput], Any] | None = None,
        lora_request: LoRARequest | list[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """Answer one or several prompts; several decode together in one batch.

        Args:
            prompts: a text, a list of token ids, a dict with "prompt" or "prompt_token_ids", or a list of these. Texts
                get the special tokens that the tokenizer's configuration says. A dict may have a "cache_salt": only
                prompts with equal salts share blocks.
            params: for all prompts, or a list with one for each. None: ``SamplingParams()``, whatever the model's
                generation_config.json says about temperature and the like.
            use_cache: False computes everything again for each token, as if there were no KV cache. The tokens are
                the same; ``num_computed_tokens`` tells the difference.
            progress: show a progress bar on stderr. None: on a terminal, from 8 prompts on.
            priority: smaller goes first, where the scheduling policy is "priority"; for all, or a list.
            timeout: seconds after which requests that have not ended are aborted, with what they have until then
                (``finish_reason`` "abort", ``stop_reason`` "timeout").
            callback: is called for each request with what is new of it after each step, as the items of ``stream``.
                If it raises, that request is aborted, its output's ``error`` says why, and all others go on.
            lora_request: an adapter for all prompts, or a list with one or None for each; others are not affected.

        Returns:
            One output per prompt, in order.

        Raises:
            InvalidArgument: an empty prompt, an id or a length that the model does not take, params that do not fit.
            OutOfBlocks: a prompt that could never fit into the cache.
            CheckpointError: an adapter that is missing, damaged, not supported, or of another model.
            TypeError: prompts or params of the wrong type.
            InvalidState: logits that are no numbers, or a closed LLM.
            All are checked for every prompt before any runs. Whatever is raised, Ctrl-C included, ends the whole call
            and returns its blocks.
        """
        asked = self._prompts.inputs(prompts)
        submissions = self._submissions(asked, params, use_cache, priority, timeout, callback, lora_request)
        replies = self._run(submissions, progress)
        return [reply.output() for reply in replies]

    def chat(
        self,
        messages: list[Any],
        params: SamplingParams | list[SamplingParams] | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        use_cache: bool = True,
        progress: bool | None = None,
        priority: int | list[int] = 0,
        timeout: float | None = None,
        callback: Callable[[RequestOutput], Any] | None = None,
        cache_salt: str | None = None,
        lora_request: LoRARequest | list[LoRARequest | None] | None = None,
        **template_values: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or several.

        Args:
            messages: a conversation, a list of {"role": ..., "content": ...}; or a list of conversations. A content is
                a text or a list of blocks {"type": "text", "text": ...}. A message or block may have a
                "cache_control", see ``kvcore.prompt_caching``.
            params, use_cache, progress, priority, timeout, callback, lora_request: as ``generate``.
            chat_template: a Jinja template in place of the model's own.
            add_generation_prompt: end the prompt with the start of the assistant's turn.
            cache_salt: whose conversations these are: only prompts with equal salts share blocks.
            template_values: further variables of the template, such as ``tools``.

        Returns:
            One output per conversation.

        Raises:
            As ``generate``; InvalidArgument for messages of another kind, if there is no template, if it refuses the
            conversation, or for marks that are not as they should be.
        """
        if not isinstance(messages, (list, tuple)):
            raise InvalidArgument(f"messages: expected a list of messages, got {type(messages).__name__}")
        if not messages:
            raise InvalidArgument("messages: expected at least one message, got none")
        conversations = [messages] if isinstance(messages[0], Mapping) else messages
        values = {"chat_template": chat_template, "add_generation_prompt": add_generation_prompt, **template_values}
        asked = [self._conversation(conversation, values, cache_salt) for conversation in conversations]
        submissions = self._submissions(asked, params, use_cache, priority, timeout, callback, lora_request)
        replies = self._run(submissions, progress)
        return [reply.output() for reply in replies]

    def beam_search(
        self,
        prompts: Prompt | list[Prompt],
        params: BeamSearchParams,
        *,
        progress: bool | None = None,
        lora_request: LoRARequest | None = None,
    ) -> list[BeamSearchOutput]:
        """The most probable answers to each prompt, by beam search; beams share their blocks.

        Args:
            prompts, progress, lora_request: as ``generate``.
            params: width, length and penalty.

        Returns:
            One output per prompt, in order; its ``sequences`` are the answers, the best first.

        Raises:
            As ``generate``; OutOfBlocks also for a prompt whose beams could never fit.
        """
        if not isinstance(params, BeamSearchParams):
            raise TypeError(f"params: expected BeamSearchParams, got {type(params).__name__}")
        asked = self._prompts.inputs(prompts)
        adapter = self._adapters.get(lora_request)
        replies = self._run([Submission(asked=each, params=params, adapter=adapter) for each in asked], progress)
        return [reply.beams() for reply in replies]

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        use_cache: bool = True,
        priority: int = 0,
        timeout: float | None = None,
        lora_request: LoRARequest | None = None,
    ) -> Iterator[RequestOutput]:
        """Answer one prompt token by token.

        The prompt is checked here; work begins when the first item is asked for. Leaving the loop, or closing the
        iterator, aborts the request and returns its blocks. A loop that is slow misses nothing: what other calls
        have computed of this request meanwhile comes with its next item.

        Args:
            prompt, params, use_cache, priority, timeout, lora_request: as ``generate``, one prompt.

        Yields:
            An output after each step, whose ``outputs[i].text`` and ``.token_ids`` are what is new. (Other calls
            may have advanced the request meanwhile: then it is more than one token.) The pieces of text never split a
            character, and joined they are the whole text. The last item has ``finished`` set. With ``best_of`` above
            ``n`` there is one item, at the end.

        Raises:
            As ``generate``.
        """
        inputs = self._prompts.inputs(prompt)
        if len(inputs) != 1 or is_batch(prompt):
            raise InvalidArgument(f"prompt: expected one prompt, got a list of {len(inputs)}")
        return self._stream(self._submissions(inputs, params, use_cache, priority, timeout, None, lora_request)[0])

    def stream_chat(
        self,
        messages: list[Any],
        params: SamplingParams | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        use_cache: bool = True,
        priority: int = 0,
        timeout: float | None = None,
        cache_salt: str | None = None,
        lora_request: LoRARequest | None = None,
        **template_values: Any,
    ) -> Iterator[RequestOutput]:
        """Answer one conversation token by token: ``chat`` and ``stream`` in one."""
        values = {"chat_template": chat_template, "add_generation_prompt": add_generation_prompt, **template_values}
        asked = [self._conversation(messages, values, cache_salt)]
        return self._stream(self._submissions(asked, params, use_cache, priority, timeout, None, lora_request)[0])

    def abort(self, request_id: str) -> None:
        """End a request of any thread's call, with what it has until then (``finish_reason`` "abort").

        Requests that have ended, and names that no request has, are left alone.
        """
        reply = self._dispatcher.replies.get(request_id)
        if reply is not None:
            self._dispatcher.abort(reply)

    def logits(
        self, token_ids: Any, *, encoder: Mapping[str, Any] | None = None, lora_request: LoRARequest | None = None
    ) -> FloatArray:
        """The logits after every position, float32 [len(token_ids), vocab].

        Computed in chunks; nothing is read from the prefix cache or left in it, and no other call runs meanwhile.

        Args:
            token_ids: of an encoder-decoder the decoder's.
            encoder: what its encoder is given: {"encoder_token_ids": ids} or {"input_features": features}.
            lora_request: as ``generate``.

        Raises:
            InvalidArgument, TypeError: no list of ids that the model takes, or a list that is too long for it.
            OutOfBlocks: the cache lacks the space, or running requests leave too little of it.
        """
        dispatcher = self._dispatcher
        adapter, source = self._adapters.get(lora_request), self._prompts.encoder_input(encoder)
        with dispatcher.here, dispatcher.lock:
            return dispatcher.engine.logits(token_ids, adapter, source)

    def attention_map(self, token_ids: Any, encoder: Mapping[str, Any]) -> FloatArray:
        """What the decoder of an encoder-decoder looks at: the softmax weights of its cross-attention.

        Args:
            token_ids: the decoder's tokens, its start token among them, such as an answer to ``encoder``.
            encoder: what its encoder is given, as for ``logits``.

        Returns:
            float32 [layers, heads, len(token_ids), encoder rows]; each row sums to 1. Row i is that of the step that
            reads token i, and so chooses token i + 1. ``kvcore.viz.attention_map`` draws one.

        Raises:
            As ``logits``; InvalidArgument also for a model without an encoder.
        """
        dispatcher, source = self._dispatcher, self._prompts.encoder_input(encoder)
        if source is None:
            raise InvalidArgument(f"attention_map: expected an encoder-decoder, got {self.name}, a decoder alone")
        chunks: list[dict[int, FloatArray]] = []
        with dispatcher.here, dispatcher.lock:
            dispatcher.engine.logits(token_ids, None, source, chunks)
        layers = [np.concatenate([chunk[layer] for chunk in chunks]) for layer in chunks[0]]
        weights: FloatArray = np.stack(layers).swapaxes(1, 2)
        return weights

    def calibrate(self, prompts: Prompt | list[Prompt]) -> None:
        """Find static scales of an fp8 cache from what the model writes for some sample text.

        Afterwards the largest K and V of each layer and head in that text are the format's largest values. Give text
        like that which is to come, some thousand tokens. The cache must be empty: call it before anything else.

        Args:
            prompts: as for ``generate``; nothing is answered.

        Raises:
            InvalidState: the cache holds something, or it is not fp8 with static scales.
        """
        dispatcher = self._dispatcher
        with dispatcher.here, dispatcher.lock:
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
        dispatcher = self._dispatcher
        with dispatcher.here, dispatcher.lock:
            return dispatcher.engine.stats()

    def close(self) -> None:
        """Abort all requests and give weights and cache back. Later calls raise InvalidState; closing again is fine."""
        self._dispatcher.close()
        self._decoder = None
        self._engine = None

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<LLM {self.name}{' (closed)' if self._dispatcher.closed else ''}>"

    # -- what calls ask for ---------------------------------------------------------------------------------------

    def _conversation(self, messages: Any, template_values: Mapping[str, Any], cache_salt: str | None = None) -> Asked:
        """The prompt of a conversation, and the marks in it."""
        salt = check_salt(cache_salt, "cache_salt")
        plain, marks = take_marks(messages)
        text = self.render_chat(plain, **template_values)
        token_ids = self._prompts.encode(text, add_special_tokens=False)
        if not marks:
            return Asked(text, token_ids, cache_salt=salt)
        places = [find_mark(mark, plain, text, lambda m: self.render_chat(m, **template_values)) for mark in marks]
        prefixes = [self._prompts.encode(text[:place], add_special_tokens=False) for place in places]
        return Asked(text, token_ids, mark_tokens(marks, prefixes, token_ids, self._min_marked_tokens), salt)

    def _submissions(
        self,
        asked: list[Asked],
        params: Any,
        use_cache: bool = True,
        priority: int | list[int] = 0,
        timeout: float | None = None,
        callback: Callable[[RequestOutput], Any] | None = None,
        lora_request: Any = None,
    ) -> list[Submission]:
        if not isinstance(use_cache, bool):
            raise TypeError(f"use_cache: expected True or False, got {use_cache!r}")
        if timeout is not None and (isinstance(timeout, bool) or not isinstance(timeout, (int, float))):
            raise TypeError(f"timeout: expected None or seconds, got {timeout!r}")
        if timeout is not None and not timeout >= 0:
            raise InvalidArgument(f"timeout: expected None or seconds of at least 0, got {timeout}")
        if callback is not None and not callable(callback):
            raise TypeError(f"callback: expected a function, got {callback!r}")
        priorities = list(priority) if isinstance(priority, (list, tuple)) else [priority] * len(asked)
        if len(priorities) != len(asked):
            raise InvalidArgument(f"priority: expected one for each of the {len(asked)} prompts, got {len(priorities)}")
        for value in priorities:
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"priority: expected an integer or a list of them, got {value!r}")
        wanted = list(lora_request) if isinstance(lora_request, (list, tuple)) else [lora_request] * len(asked)
        if len(wanted) != len(asked):
            raise InvalidArgument(f"lora_request: expected one for each of the {len(asked)} prompts, got {len(wanted)}")
        adapters = [self._adapters.get(each) for each in wanted]
        return [
            Submission(
                asked=prompt,
                params=each,
                use_cache=use_cache,
                priority=rank,
                timeout=timeout,
                make_constraint=self._constraint(each),
                callback=callback,
                adapter=adapter,
            )
            for prompt, each, rank, adapter in zip(
                asked, self._prompts.params(params, len(asked)), priorities, adapters, strict=True
            )
        ]

    def _constraint(self, params: SamplingParams) -> Callable[[], Constraint] | None:
        if params.structured_outputs is None:
            return None
        if self._grammars is None:
            from kvcore.structured import Grammars

            assert self._tokenizer is not None  # params are checked
            self._grammars = Grammars(self._tokenizer, self._decoder.spec.vocab_size, self._eos_token_ids)
        return self._grammars.compile(params.structured_outputs)

    def _check_open(self) -> None:
        self._dispatcher.engine  # noqa: B018 - raises

    # -- running --------------------------------------------------------------------------------------------------

    def _run(self, submissions: list[Submission], progress: bool | None) -> list[Reply]:
        """Run requests to their ends. Whatever is raised, they are gone from the engine then."""
        dispatcher, replies = self._dispatcher, list[Reply]()
        try:
            dispatcher.submit(replies, submissions)
            with progress_bar(len(replies), progress) as show:
                while not all(reply.finished for reply in replies):
                    dispatcher.advance(replies)
                    show(sum(reply.finished for reply in replies))
                # Another call's step may have ended them: what it left for us, an error or news, is still to be told.
                dispatcher.advance(replies)
            dispatcher.drop(replies)
            return replies
        except BaseException:
            # Not `finally`, and twice: Ctrl-C may interrupt the clean-up as well. Dropping can be repeated.
            try:
                dispatcher.drop(replies)
            except BaseException:
                dispatcher.drop(replies)
                raise
            raise

    def _stream(self, submission: Submission) -> Iterator[RequestOutput]:
        dispatcher = self._dispatcher
        submission = dispatcher.check(submission)

        def items() -> Iterator[RequestOutput]:
            replies: list[Reply] = []
            try:
                dispatcher.submit(replies, [submission])
                finished = False
                while not finished:
                    if not replies[0].has_news:  # else another call has advanced it meanwhile
                        dispatcher.advance(replies)
                    item = dispatcher.news(replies[0])
                    if item is not None:
                        finished = item.finished
                        yield item
                dispatcher.drop(replies)
            except BaseException:  # GeneratorExit, too
                try:
                    dispatcher.drop(replies)
                except BaseException:
                    dispatcher.drop(replies)
                    raise
                raise

        return items()
