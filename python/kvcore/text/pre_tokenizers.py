r"""How text is cut before merging, by the names of ``tokenizer.ggml.pre``.

    pieces = [text]
    for each pattern:  cut every piece into what the pattern matches and what is between

The cuts are those of llama.cpp (src/llama-vocab.cpp), written as in the models' own tokenizer.json where it had to
rephrase them for std::regex. Names that cut alike share an entry.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final


@dataclass(frozen=True)
class PreTokenizer:
    """What is done before merging.

    Attributes:
        patterns: in the syntax of Oniguruma, which the ``tokenizers`` package uses.
        nfc: Unicode normalisation form C first, as the models' own tokenizer.json has it.
        ignore_merges: a piece that is a token stays whole, whatever the merges say.
        add_bos: what holds if the file has no ``tokenizer.ggml.add_bos_token``.
    """

    patterns: tuple[str, ...]
    nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = _SHORT + r"|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s|"
_CASED_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _SPACES
_EAST_ASIAN = r"[\x{4E00}-\x{9FA5}\x{0800}-\x{4E00}\x{AC00}-\x{D7FF}]+"
# letters that have a case, but for the mathematical ones
_LETTERS = r"\s?[\p{Lu}\p{Ll}\p{Lt}&&[^\x{1D400}-\x{1D7FF}]]+"
_PUNCTUATION = r"\s?[!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3000}-\x{3002}]+"
_BEFORE_WORD = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
_BLOOM = r" ?[^(\s|.,!?\x{2026}\x{3002}\x{FF0C}\x{3001}\x{0964}\x{06D4}\x{060C})]+"

_LLAMA3 = PreTokenizer((_WORDS + r"\p{N}{1,3}" + _REST,))
_QWEN2 = PreTokenizer((_WORDS + r"\p{N}" + _REST,), nfc=True)
_DIGITS = PreTokenizer((r"\p{N}", _GPT2))
_PLAIN = PreTokenizer((_GPT2,))
_BPE3 = replace(_LLAMA3, ignore_merges=True, add_bos=True)
_GPT4O = PreTokenizer((_CASED % (f"{_SHORT}?", f"{_SHORT}?") + r"\p{N}{1,3}" + _CASED_REST,))
_DEEPSEEK3 = PreTokenizer(
    (
        r"\p{N}{1,3}",
        r"[\x{4E00}-\x{9FA5}\x{3040}-\x{309F}\x{30A0}-\x{30FF}]+",
        _BEFORE_WORD + r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|" + _SPACES,
    )
)

PRE_TOKENIZERS: Final[Mapping[str, PreTokenizer]] = {
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "jais", "exaone4", "trillion", "granite-docling"), _PLAIN),
    "olmo": replace(_PLAIN, nfc=True),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell", "exaone", "minerva-7b"), _DIGITS),
    "command-r": replace(_DIGITS, nfc=True),
    "falcon": PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "lfm2"), _BPE3),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _QWEN2),
    **dict.fromkeys(("stablelm2", "hunyuan"), replace(_QWEN2, nfc=False)),
    "tekken": PreTokenizer((_CASED % ("", "") + r"\p{N}" + _CASED_REST,), ignore_merges=True, add_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4"), _GPT4O),
    "deepseek-llm": PreTokenizer((r"[\r\n]", _LETTERS, _PUNCTUATION, r"\s+$", _EAST_ASIAN, r"\p{N}+")),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EAST_ASIAN, r"\p{N}")),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), _DEEPSEEK3),
    **dict.fromkeys(("bloom", "poro-chat", "gpt3-finnish"), PreTokenizer((_BLOOM,))),
    "viking": PreTokenizer((_BLOOM, r"\p{N}")),
}
"""By ``tokenizer.ggml.pre``."""
