"""Text to token ids and back.

    encode:  text --split at special tokens--> runs --model's merges--> ids
    decode:  ids --token_bytes--> bytes --UTF-8, U+FFFD for what is invalid--> text

Two sources give the same class: a `tokenizer.json` (read by the `tokenizers` package) and the entries of a GGUF file
(read by `gguf_vocab.py`).
"""

from __future__ import annotations

import json
import operator
import stat
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, SupportsIndex

import tokenizers

from kvcore.errors import CheckpointError, InvalidArgument
from kvcore.text.gguf_vocab import BYTE_TOKEN, vocabulary_from_gguf
from kvcore.text.sentencepiece import SPACE, SentencePieceBpe

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

MAX_TEXT_CHARS = 256 << 20
"""No tokenizer comes near this size (the largest known have 40 MB); larger files are refused."""


def _byte_alphabet() -> dict[str, int]:
    """The 256 characters that stand for bytes in byte-level BPE (GPT-2): character -> byte.

    Printable Latin-1 characters stand for themselves, the other 68 bytes for U+0100 onwards in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


_BYTE_OF = _byte_alphabet()


class Tokenizer:
    """A model's tokenizer: `encode`, `decode`, and the bytes of every token.

    Build it with `from_file` or `from_gguf`.

    Attributes:
        vocab_size: number of token ids; a model's logits may have more columns (padding), never fewer.
        bos_token, eos_token: their text, or None.
        bos_id, eos_id: their ids, or None.
        special_tokens: the named special tokens ("bos_token", "pad_token", ...) and their text, for chat templates.
        chat_template: None, one Jinja template, or several by name.
        byte_exact: True if `decode` is the tokens' bytes joined, so that text can be streamed byte by byte.
        strips_leading_space: True if `decode` drops one space at the very start (SentencePiece's dummy prefix).
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer | SentencePieceBpe,
        *,
        special_ids: Iterable[int],
        special_tokens: Mapping[str, str],
        chat_template: str | Mapping[str, str] | None = None,
        affixes: tuple[Sequence[int], Sequence[int]] | None = None,
    ) -> None:
        """`affixes`: ids that `add_special_tokens` puts before and after; None leaves it to the backend."""
        self._backend = backend
        self._special_ids = frozenset(special_ids)
        self._affixes = affixes
        self._bytes: dict[int, bytes] = {}
        self.special_tokens: dict[str, str] = dict(special_tokens)
        self.chat_template = chat_template
        self.bos_token = self.special_tokens.get("bos_token")
        self.eos_token = self.special_tokens.get("eos_token")
        self.bos_id = None if self.bos_token is None else backend.token_to_id(self.bos_token)
        self.eos_id = None if self.eos_token is None else backend.token_to_id(self.eos_token)
        if isinstance(backend, SentencePieceBpe):
            self.vocab_size = backend.vocab_size
            self._kind, self.strips_leading_space = "spaces", backend.add_space_prefix
            self._added: frozenset[int] = backend.verbatim_ids
        else:
            self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
            self._kind, self.strips_leading_space = _decoder_kind(backend)
            self._added = frozenset(backend.get_added_tokens_decoder())
        self.byte_exact = self._kind != "other"

    # -- loading ------------------------------------------------------------------------------------------------

    @classmethod
    def from_file(cls, path: str | Path) -> Tokenizer:
        """Read a `tokenizer.json`, with the files beside it that belong to it where they are present.

        Those are `tokenizer_config.json` (named and added special tokens, chat template), `special_tokens_map.json`,
        `chat_template.jinja` and `additional_chat_templates/*.jinja`. What `add_special_tokens` adds is what the
        post-processor in `tokenizer.json` says, as with transformers 5.

        Args:
            path: the file, or the folder it is in.

        Raises:
            CheckpointError: a file is missing or damaged; the message names it.
        """
        path = Path(path)
        if path.is_dir():
            path = path / "tokenizer.json"
        text = _read_text(path)
        try:
            backend = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the package raises bare Exception
            raise CheckpointError(f"{path}: not a tokenizer.json that can be read: {error}") from error
        backend.no_truncation()
        backend.no_padding()

        config_path = path.with_name("tokenizer_config.json")
        config = _read_json(config_path)
        named = {**_named_tokens(_read_json(path.with_name("special_tokens_map.json"))), **_named_tokens(config)}
        _add_missing_tokens(backend, config, config_path)
        special_ids = {i for i, token in backend.get_added_tokens_decoder().items() if token.special}
        return cls(
            backend,
            special_ids=special_ids,
            special_tokens=named,
            chat_template=_chat_templates(path.parent, config),
        )

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """Build the tokenizer that a GGUF file describes.

        Args:
            metadata: the file's entries; arrays as sequences or numpy arrays. Its ``source``, if it has one, names the
                file in errors.

        Raises:
            CheckpointError: an entry is missing or contradicts another, or the kind of tokenizer is not supported.
        """
        read = vocabulary_from_gguf(metadata)
        return cls(
            read.backend,
            special_ids=read.special_ids,
            special_tokens=read.special_tokens,
            chat_template=read.chat_template,
            affixes=read.affixes,
        )

    # -- use ----------------------------------------------------------------------------------------------------

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. Special tokens written in the text are recognised.

        Args:
            text: any text; "" gives no ids (but for the special tokens asked for).
            add_special_tokens: put the bos and eos ids where the model wants them. Leave it False for text that a
                chat template rendered: it has them already.

        Raises:
            TypeError: `text` is not a str.
            InvalidArgument: `text` holds lone surrogates, so it is no text that UTF-8 can express.
        """
        if not isinstance(text, str):
            raise TypeError(f"text must be a str, got {type(text).__name__}")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidArgument(f"text has a lone surrogate at index {error.start}, which is no character") from error
        if isinstance(self._backend, SentencePieceBpe):
            ids = self._backend.encode(text)
        else:
            ids = self._backend.encode(text, add_special_tokens=add_special_tokens and self._affixes is None).ids
        if add_special_tokens and self._affixes is not None:
            return [*self._affixes[0], *ids, *self._affixes[1]]
        return ids

    def decode(self, ids: Iterable[SupportsIndex], skip_special_tokens: bool = True) -> str:
        """The text of token ids. Bytes that are no UTF-8 become U+FFFD, as with Python's errors="replace".

        Ids beyond the vocabulary (the padding of some models' logits) have no text.

        Raises:
            TypeError: an id is not an integer.
            InvalidArgument: an id is negative.
        """
        kept = [i for i in map(self._checked, ids) if not (skip_special_tokens and i in self._special_ids)]
        if not self.byte_exact:
            assert isinstance(self._backend, tokenizers.Tokenizer)
            return self._backend.decode([i for i in kept if i < self.vocab_size], skip_special_tokens=False)
        text = b"".join(map(self.token_bytes, kept)).decode("utf-8", errors="replace")
        return text[1:] if self.strips_leading_space and text.startswith(" ") else text

    def token_bytes(self, token_id: SupportsIndex) -> bytes:
        """The bytes that a token stands for; b"" for an id beyond the vocabulary.

        A special token stands for its own text. If not `byte_exact` these are only the token's own text in UTF-8,
        and `decode` may put other text between tokens.
        """
        token_id = self._checked(token_id)
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._make_bytes(token_id)
        return known

    def token_to_id(self, token: str) -> int | None:
        """The id of a token given as the vocabulary writes it, or None."""
        return self._backend.token_to_id(token)

    def id_to_token(self, token_id: SupportsIndex) -> str | None:
        """A token as the vocabulary writes it (spaces and bytes encoded), or None beyond the vocabulary."""
        token_id = self._checked(token_id)
        return self._backend.id_to_token(token_id) if token_id < 1 << 32 else None

    def is_special(self, token_id: SupportsIndex) -> bool:
        """True for control tokens such as bos, eos and turn markers."""
        return self._checked(token_id) in self._special_ids

    @staticmethod
    def _checked(token_id: SupportsIndex) -> int:
        index = operator.index(token_id)
        if index < 0:
            raise InvalidArgument(f"a token id must be 0 or more, got {index}")
        return index

    def _make_bytes(self, token_id: int) -> bytes:
        token = self.id_to_token(token_id)
        if token is None:
            return b""
        if token_id not in self._added:
            if self._kind == "bytes":
                # A character outside the alphabet can only come from a damaged vocabulary: take it as text.
                return b"".join(
                    bytes((_BYTE_OF[char],)) if char in _BYTE_OF else char.encode("utf-8", "replace") for char in token
                )
            if self._kind == "spaces":
                if match := BYTE_TOKEN.fullmatch(token):
                    return bytes.fromhex(match[1])
                return token.replace(SPACE, " ").encode("utf-8", "replace")
        return token.encode("utf-8", "replace")


# -- helpers of from_file --------------------------------------------------------------------------------------------


def _decoder_kind(backend: tokenizers.Tokenizer) -> tuple[str, bool]:
    """How a tokenizer.json turns tokens into text: ("bytes" | "spaces" | "other", drops one leading space)."""
    if backend.decoder is None:
        return "other", False
    decoder = json.loads(backend.decoder.__getstate__())
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return "bytes", False
    # Llama 2, Gemma, Mistral: "▁" is a space, <0xNN> a byte, and perhaps one space at the start is dropped.
    replace = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    if steps[:1] == [replace] and kinds[1:3] == ["ByteFallback", "Fuse"] and steps[3:] in ([], [strip]):
        return "spaces", len(steps) == 4
    return "other", False


def _add_missing_tokens(backend: tokenizers.Tokenizer, config: Mapping[str, Any], path: Path) -> None:
    """Add the tokens that only tokenizer_config.json (added_tokens_decoder) names."""
    listed = config.get("added_tokens_decoder")
    if not isinstance(listed, Mapping):
        return
    known = backend.get_added_tokens_decoder()
    for key in listed:
        if not (isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= 10):
            raise CheckpointError(f"{path}: added_tokens_decoder: expected token ids as keys, got {key!r:.80}")
    for key, entry in sorted(listed.items(), key=lambda item: int(item[0])):
        if not isinstance(entry, Mapping) or not isinstance(entry.get("content"), str):
            raise CheckpointError(f"{path}: added_tokens_decoder[{key!r}] has no content")
        content = entry["content"]
        if not content or int(key) in known:
            continue
        flags = {k: bool(entry[k]) for k in ("single_word", "lstrip", "rstrip", "normalized", "special") if k in entry}
        backend.add_tokens([tokenizers.AddedToken(content, **flags)])
        if backend.token_to_id(content) != int(key):
            raise CheckpointError(
                f"{path}: token {content!r} should have id {key}, but {backend.token_to_id(content)} is the next free"
            )


def _named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    named = {}
    for name in _NAMED_TOKENS:
        value = config.get(name)
        if isinstance(value, Mapping):
            value = value.get("content")
        if isinstance(value, str):
            named[name] = value
    return named


def _chat_templates(folder: Path, config: Mapping[str, Any]) -> str | dict[str, str] | None:
    """The folder's chat templates. A file of its own goes before the entry in tokenizer_config.json."""
    found: dict[str, str] = {}
    entry = config.get("chat_template")
    if isinstance(entry, str):
        found["default"] = entry
    elif isinstance(entry, list):
        found.update(
            {t["name"]: t["template"] for t in entry if isinstance(t, Mapping) and {"name", "template"} <= {*t}}
        )
    elif isinstance(entry, Mapping):
        found.update({str(name): str(template) for name, template in entry.items()})
    for file in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        found[file.stem] = _read_text(file)
    if (file := folder / "chat_template.jinja").exists():
        found["default"] = _read_text(file)
    return found["default"] if [*found] == ["default"] else found or None


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON object, {} if there is no such file."""
    if not path.exists():
        return {}
    try:
        value = json.loads(_read_text(path))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def _read_text(path: Path) -> str:
    try:
        # devices and pipes, which may have no end or never begin, are not even opened
        if not stat.S_ISREG(path.stat().st_mode):
            raise CheckpointError(f"{path}: cannot be read: expected a regular file, got a folder, device or pipe")
        with path.open(encoding="utf-8") as file:
            text = file.read(MAX_TEXT_CHARS + 1)
        if len(text) > MAX_TEXT_CHARS:
            raise CheckpointError(f"{path}: expected a file of at most {MAX_TEXT_CHARS} characters, got more")
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: no such file") from error
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    if text.startswith("version https://git-lfs"):
        raise CheckpointError(f"{path}: a Git LFS pointer, not the file itself; fetch it with `git lfs pull`")
    return text
