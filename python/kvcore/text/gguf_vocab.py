"""The tokenizer that a GGUF file describes, from its ``tokenizer.ggml.*`` entries.

    gpt2     byte-level BPE, rebuilt with the ``tokenizers`` package; ``tokenizer.ggml.pre`` says how text is cut first
    llama    SentencePiece BPE, which runs in ``sentencepiece.py``
    t5       SentencePiece unigram, rebuilt with the ``tokenizers`` package

Files come from strangers: every entry is checked for its type before it is used.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from kvcore.errors import CheckpointError
from kvcore.text.pre_tokenizers import PRE_TOKENIZERS
from kvcore.text.sentencepiece import SPACE, SentencePieceBpe

BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""How a vocabulary of pieces writes the token of a byte."""

# token types (`tokenizer.ggml.token_type`)
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6

_NAMED: Final = {
    "bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding", "mask_token": "mask",
    "sep_token": "seperator",  # so spelt by llama.cpp
}  # fmt: skip


@dataclass(frozen=True)
class Vocabulary:
    """What a ``Tokenizer`` is made of.

    Attributes:
        backend: turns text into ids.
        special_ids: ids of control tokens.
        special_tokens: "bos_token" and the like, and their text.
        chat_template: None, one template, or several by name.
        affixes: ids before and after a text.
    """

    backend: tokenizers.Tokenizer | SentencePieceBpe
    special_ids: frozenset[int]
    special_tokens: Mapping[str, str]
    chat_template: str | Mapping[str, str] | None
    affixes: tuple[Sequence[int], Sequence[int]]


def vocabulary_from_gguf(metadata: Mapping[str, Any]) -> Vocabulary:
    """Read the tokenizer of a GGUF file.

    Args:
        metadata: the file's entries; arrays as sequences or numpy arrays. Its ``source``, if it has one, names the file
            in errors.

    Raises:
        CheckpointError: an entry is missing, of another type than it should be, or contradicts another, or the kind of
            tokenizer is not supported.
    """
    read = _Entries(metadata)
    tokens = read.strings("tokens")
    types = read.numbers("token_type", int, len(tokens)) or [_NORMAL] * len(tokens)
    kind = read.one("model", str)
    backend: tokenizers.Tokenizer | SentencePieceBpe
    add_eos = False
    if kind == "gpt2":
        backend, add_bos = _bpe(read, tokens, types)
    elif kind == "llama":
        backend, add_bos = _sentencepiece(read, tokens, types), True
    elif kind == "t5":
        backend, add_bos, add_eos = _unigram(read, tokens, types), False, True
    else:
        raise read.error(
            f"tokenizer.ggml.model is {kind!r}; supported are 'gpt2' (byte-level BPE), 'llama' (SentencePiece BPE) and "
            f"'t5' (SentencePiece unigram)"
        )
    ids = {name: read.token_id(f"{key}_token_id", len(tokens)) for name, key in _NAMED.items()}
    affixes = []
    for name, default in (("bos", add_bos), ("eos", add_eos)):
        token_id = ids[f"{name}_token"]
        wanted = read.one(f"add_{name}_token", bool, default)
        affixes.append([token_id] if wanted and token_id is not None else [])
    return Vocabulary(
        backend,
        special_ids=frozenset(i for i, kind in enumerate(types) if kind in (_UNKNOWN, _CONTROL)),
        special_tokens={name: tokens[i] for name, i in ids.items() if i is not None},
        chat_template=_chat_templates(metadata),
        affixes=(affixes[0], affixes[1]),
    )


def _bpe(read: _Entries, tokens: list[str], types: list[int]) -> tuple[tokenizers.Tokenizer, bool]:
    name = read.one("pre", str)
    if name is None:
        warnings.warn(
            "the file has no tokenizer.ggml.pre: text is cut as llama.cpp's 'default' does, which may give other"
            " tokens than the model was trained with",
            stacklevel=5,
        )
        name = "default"
    pre = PRE_TOKENIZERS.get(name)
    if pre is None:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise read.error(f"tokenizer.ggml.pre is {name!r}, which is not supported; supported are {known}")

    # Merge parts never hold a plain space: in the byte alphabet it is written as another character.
    merges: list[tuple[str, str]] = []
    for i, merge in enumerate(read.strings("merges")):
        left, separator, right = merge.partition(" ")
        if not (left and separator and right):
            raise read.error(f"tokenizer.ggml.merges[{i}] is {merge!r}, not two parts with a space between")
        merges.append((left, right))
    vocab = {token: i for i, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise read.error(f"tokenizer.ggml.tokens names a token twice: {_first_duplicate(tokens)!r}")
    try:
        model = models.BPE(vocab=vocab, merges=merges, ignore_merges=pre.ignore_merges)
    except Exception as error:  # the package raises bare Exception
        raise read.error(f"tokenizer.ggml.merges do not fit tokenizer.ggml.tokens: {error}") from error

    backend = tokenizers.Tokenizer(model)
    if pre.nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated") for pattern in pre.patterns]
        + [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    _add_verbatim(backend, tokens, types)
    return backend, pre.add_bos


def _unigram(read: _Entries, tokens: list[str], types: list[int]) -> tokenizers.Tokenizer:
    scores = read.numbers("scores", float, len(tokens))
    if len(scores) != len(tokens):
        raise read.error(f"tokenizer.ggml.scores has no entries for {len(tokens)} tokens")
    unknown = read.token_id("unknown_token_id", len(tokens))
    unknown = unknown if unknown is not None else types.index(_UNKNOWN) if _UNKNOWN in types else None
    charsmap = bytes(byte & 255 for byte in read.numbers("precompiled_charsmap", int))
    try:
        backend = tokenizers.Tokenizer(models.Unigram([*zip(tokens, scores, strict=True)], unknown, False))
        steps: list[Any] = [normalizers.Precompiled(charsmap)] if charsmap else []
    except Exception as error:  # the package raises bare Exception
        raise read.error(f"tokenizer.ggml: expected a unigram model, got one that cannot be built: {error}") from error
    if read.one("remove_extra_whitespaces", bool, True):
        steps += [normalizers.Strip(left=True, right=True), normalizers.Replace(tokenizers.Regex(" {2,}"), " ")]
    backend.normalizer = normalizers.Sequence(steps)
    scheme = "always" if read.one("add_space_prefix", bool, True) else "never"
    backend.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, scheme)
    backend.decoder = decoders.Metaspace(SPACE, scheme)
    _add_verbatim(backend, tokens, types)
    return backend


def _add_verbatim(backend: tokenizers.Tokenizer, tokens: list[str], types: list[int]) -> None:
    """Tokens that are recognised as they stand in the text, before everything else."""
    backend.add_tokens(
        [
            tokenizers.AddedToken(token, special=kind != _USER_DEFINED, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED) and token
        ]
    )


def _sentencepiece(read: _Entries, tokens: list[str], types: list[int]) -> SentencePieceBpe:
    scores = read.numbers("scores", float, len(tokens))
    if len(scores) != len(tokens):
        raise read.error(f"tokenizer.ggml.scores has no entries for {len(tokens)} tokens")
    byte_ids = {}
    for i, (token, kind) in enumerate(zip(tokens, types, strict=True)):
        if kind == _BYTE:
            match = BYTE_TOKEN.fullmatch(token)
            if match is None:
                raise read.error(f"token {i} is of type byte, but its text is {token!r} and not like '<0x0A>'")
            byte_ids[int(match[1], 16)] = i
    return SentencePieceBpe(
        tokens,
        scores,
        mergeable=[kind in (_NORMAL, _USER_DEFINED, _UNUSED) for kind in types],
        verbatim=[kind in (_UNKNOWN, _CONTROL, _USER_DEFINED) for kind in types],
        byte_ids=byte_ids,
        unknown_id=read.token_id("unknown_token_id", len(tokens)) or 0,
        add_space_prefix=read.one("add_space_prefix", bool, True),
    )


class _Entries:
    """The entries ``tokenizer.ggml.*``, asked by type."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._metadata = metadata
        self._source = getattr(metadata, "source", None)

    def error(self, message: str) -> CheckpointError:
        return CheckpointError(message if self._source is None else f"{self._source}: {message}")

    def one(self, key: str, kind: type, default: Any = None) -> Any:
        """A single value, or the default if there is none."""
        value = self._metadata.get(f"tokenizer.ggml.{key}")
        if value is None:
            return default
        value = value.item() if isinstance(value, np.generic) else value
        if type(value) is not kind:
            raise self.error(f"tokenizer.ggml.{key}: expected {kind.__name__}, got {value!r:.80}")
        return value

    def token_id(self, key: str, size: int) -> int | None:
        """The id of one of ``size`` tokens, or None."""
        value: int | None = self.one(key, int)
        if value is not None and not 0 <= value < size:
            raise self.error(f"tokenizer.ggml.{key} is {value}, but there are only {size} tokens")
        return value

    def strings(self, key: str) -> list[str]:
        """An array of strings, which must be there."""
        value = self._metadata.get(f"tokenizer.ggml.{key}")
        if value is None:
            raise self.error(f"the file has no tokenizer.ggml.{key}")
        if not isinstance(value, Sequence) or isinstance(value, str) or not all(isinstance(s, str) for s in value):
            raise self.error(f"tokenizer.ggml.{key} must hold strings only")
        return list(value)

    def numbers(self, key: str, kind: type, count: int | None = None) -> list[Any]:
        """An array of ``count`` numbers, or [] if there is none."""
        value = self._metadata.get(f"tokenizer.ggml.{key}")
        if value is None:
            return []
        items = value.tolist() if isinstance(value, np.ndarray) else value
        if not isinstance(items, Sequence) or not all(type(item) is kind for item in items):
            raise self.error(f"tokenizer.ggml.{key} must hold values of type {kind.__name__} only")
        if count is not None and len(items) != count:
            raise self.error(f"tokenizer.ggml.{key} has {len(items)} entries for {count} tokens")
        return list(items)


def _first_duplicate(items: Iterable[str]) -> str | None:
    seen: set[str] = set()
    for item in items:
        if item in seen:
            return item
        seen.add(item)
    return None


def _chat_templates(metadata: Mapping[str, Any]) -> str | dict[str, str] | None:
    """`tokenizer.chat_template`, and with several, `tokenizer.chat_template.NAME` for each of the further ones."""
    prefix = "tokenizer.chat_template."
    found = {key[len(prefix) :]: str(value) for key, value in metadata.items() if key.startswith(prefix)}
    default = metadata.get("tokenizer.chat_template")
    if default is not None:
        found["default"] = str(default)
    return found["default"] if [*found] == ["default"] else found or None
