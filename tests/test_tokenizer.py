from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from kvcore.checkpoint.config import Config
from kvcore.errors import CheckpointError, InvalidArgument
from kvcore.text.pre_tokenizers import PRE_TOKENIZERS
from kvcore.text.tokenizer import Tokenizer

DATA = Path(__file__).parent / "data"
EXPECTED = json.loads((DATA / "smollm2" / "expected.json").read_text(encoding="utf-8"))
SENTENCEPIECE = json.loads((DATA / "sentencepiece_bpe.json").read_text(encoding="utf-8"))
BYTE_CHARS = sorted(pre_tokenizers.ByteLevel.alphabet())


def gguf_bpe(pre: str | None, merges: tuple[str, ...] = (), **extra: Any) -> dict[str, Any]:
    """Metadata of a byte-level BPE with two control tokens, one user-defined token, all bytes and the merges."""
    tokens = ["<s>", "</s>", "<tool>", *BYTE_CHARS, *(merge.replace(" ", "") for merge in merges)]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, 4, *[1] * (len(tokens) - 3)],
        "tokenizer.ggml.merges": list(merges),
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        **{f"tokenizer.ggml.{key}": value for key, value in extra.items()},
    }
    if pre is not None:
        metadata["tokenizer.ggml.pre"] = pre
    return metadata


def cuts(pre: str, text: str) -> list[str]:
    """The pieces that a pre-tokenizer makes, as text."""
    backend = Tokenizer.from_gguf(gguf_bpe(pre))._backend
    assert isinstance(backend, tokenizers.Tokenizer)
    pieces = backend.pre_tokenizer.pre_tokenize_str(text)
    return [text[start:end] for _, (start, end) in pieces]


# -- the real model --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> Tokenizer:
    from kvcore.checkpoint.gguf import GGUFFile

    return Tokenizer.from_gguf(GGUFFile(smollm2_path).metadata)


@pytest.mark.model
def test_smollm2_golden(smollm2: Tokenizer) -> None:
    golden = EXPECTED["tokenizer"]
    for case in golden["cases"]:
        assert smollm2.encode(case["text"]) == case["ids"], case["text"]
        assert smollm2.decode(case["ids"], skip_special_tokens=False) == case["text"]
    for prompt in EXPECTED["prompts"]:
        assert smollm2.encode(prompt["prompt"], add_special_tokens=False) == prompt["input_ids"], prompt["name"]
    assert (smollm2.bos_token, smollm2.eos_token) == (golden["bos"], golden["eos"])
    assert (smollm2.bos_id, smollm2.eos_id, smollm2.vocab_size) == (1, 2, 49152)
    assert smollm2.chat_template == golden["chat_template"]


# -- GGUF, byte-level BPE --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("smollm", "a  2 10x", ["a", "  ", "2", " ", "1", "0", "x"]),
        ("smollm", "½ Ⅻ don't  I'LL", ["½", " ", "Ⅻ", " don", "'t", " ", " I", "'", "LL"]),
        ("gpt-2", "a  2 10x\n\n b", ["a", " ", " 2", " 10", "x", "\n\n", " b"]),
        ("default", "a+b 1234", ["a", "+", "b", " ", "123", "4"]),
        ("llama-bpe", "It'S 12345\n\n x(y)", ["It", "'S", " ", "123", "45", "\n\n", " x", "(y", ")"]),
        ("qwen2", "I'LL 123 a!!\r\n b", ["I", "'LL", " ", "1", "2", "3", " a", "!!\r\n", " b"]),
        ("command-r", "a 12 don't", ["a", " ", "1", "2", " don", "'t"]),
        ("glm4", "I'M 12345", ["I", "'M", " ", "123", "45"]),
        ("falcon", "a`b 12345", ["a", "`", "b", " ", "123", "45"]),
        ("tekken", "HelloWORLD camelCase 12 a/b", ["Hello", "WORLD", " camel", "Case", " ", "1", "2", " a", "/b"]),
        ("tekken", "don't", ["don", "'t"]),
        ("gpt-4o", "don't I'LL 1234 HTTPServer", ["don't", " I'LL", " ", "123", "4", " HTTPServer"]),
        ("gpt-4o", "x+=1;\n\n y", ["x", "+=", "1", ";\n\n", " y"]),
        ("deepseek-v3", "a.bc 1234 漢字かな x", ["a", ".bc", " ", "123", "4", " ", "漢字かな", " x"]),
        ("deepseek-llm", "ab cd, 123\n x", ["ab", " cd", ",", " ", "123", "\n", " x"]),
        ("deepseek-coder", "ab12 (c)", ["ab", "1", "2", " (", "c", ")"]),
        ("viking", "kaksi 12, kolme", ["kaksi", " ", "1", "2", ",", " kolme"]),
    ],
)
def test_pre_tokenizers(pre: str, text: str, expected: list[str]) -> None:
    assert cuts(pre, text) == expected


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
@given(text=st.text())
def test_bpe_round_trip(pre: str, text: str) -> None:
    tokenizer = TOKENIZERS[pre]
    expected = text
    if PRE_TOKENIZERS[pre].nfc:
        import unicodedata

        expected = unicodedata.normalize("NFC", text)
        # The package's tables may know other Unicode versions than Python's: then nothing can be said.
        if tokenizer.decode(tokenizer.encode(text, False), False) != expected and not text.isascii():
            return
    assert tokenizer.decode(tokenizer.encode(text, False), skip_special_tokens=False) == expected


TOKENIZERS = {pre: Tokenizer.from_gguf(gguf_bpe(pre, ("Ġ t", "h e", "Ġt he"))) for pre in PRE_TOKENIZERS}


def test_merges_and_special_tokens() -> None:
    tokenizer = Tokenizer.from_gguf(gguf_bpe("gpt-2", ("h e", "Ġ t", "Ġt he")))
    he, t, the = 3 + 256, 3 + 257, 3 + 258
    assert tokenizer.encode("he the the") == [he, the, the]
    assert tokenizer.encode("he<tool> the</s>") == [he, 2, the, 1]
    assert tokenizer.decode([he, 1, 2, the]) == "he<tool> the"
    assert tokenizer.decode([he, 1, 2, the], skip_special_tokens=False) == "he</s><tool> the"
    assert [tokenizer.is_special(i) for i in (0, 1, 2, he)] == [True, True, False, False]
    assert tokenizer.token_bytes(t) == b" t"
    assert tokenizer.token_bytes(2) == b"<tool>"
    assert tokenizer.token_to_id("Ġthe") == the
    assert tokenizer.id_to_token(the) == "Ġthe"
    assert all(tokenizer.token_bytes(tokenizer.encode("\n")[0]) == b"\n" for _ in range(2))


def test_every_byte_has_a_token() -> None:
    tokenizer = Tokenizer.from_gguf(gguf_bpe("gpt-2"))
    assert {tokenizer.token_bytes(3 + i) for i in range(256)} == {bytes((b,)) for b in range(256)}


def test_llama_bpe_keeps_whole_tokens() -> None:
    # The merges alone make "ab" + "c": a word that is a token stays whole with this pre-tokenizer only.
    metadata = gguf_bpe("llama-bpe", ("a b", "b c"))
    metadata["tokenizer.ggml.tokens"].append("abc")
    metadata["tokenizer.ggml.token_type"].append(1)
    whole = len(metadata["tokenizer.ggml.tokens"]) - 1
    assert Tokenizer.from_gguf(metadata).encode("abc", False) == [whole]
    assert len(Tokenizer.from_gguf({**metadata, "tokenizer.ggml.pre": "gpt-2"}).encode("abc", False)) == 2


@pytest.mark.parametrize(
    ("pre", "extra", "affixes"),
    [
        ("smollm", {}, ([], [])),
        ("smollm", {"add_bos_token": True}, ([0], [])),
        ("smollm", {"add_bos_token": True, "add_eos_token": True}, ([0], [1])),
        ("llama-bpe", {}, ([0], [])),
        ("llama-bpe", {"add_bos_token": False}, ([], [])),
    ],
)
def test_added_special_tokens(pre: str, extra: dict[str, Any], affixes: tuple[list[int], list[int]]) -> None:
    tokenizer = Tokenizer.from_gguf(gguf_bpe(pre, **extra))
    plain = tokenizer.encode("hi", add_special_tokens=False)
    assert len(plain) == 2
    assert tokenizer.encode("hi") == tokenizer.encode("hi", add_special_tokens=True)
    assert tokenizer.encode("hi", True) == [*affixes[0], *plain, *affixes[1]]
    assert tokenizer.encode("") == [*affixes[0], *affixes[1]]


def test_qwen2_normalises() -> None:
    tokenizer = Tokenizer.from_gguf(gguf_bpe("qwen2"))
    assert tokenizer.encode("e\u0301") == tokenizer.encode("\u00e9")


def test_arrays_may_be_numpy() -> None:
    metadata = gguf_bpe("gpt-2")
    metadata["tokenizer.ggml.token_type"] = np.asarray(metadata["tokenizer.ggml.token_type"], np.int32)
    metadata["tokenizer.ggml.bos_token_id"] = np.uint32(0)
    metadata["tokenizer.ggml.tokens"] = tuple(metadata["tokenizer.ggml.tokens"])
    tokenizer = Tokenizer.from_gguf(metadata)
    assert tokenizer.decode(np.asarray(tokenizer.encode("hi"), np.int64)) == "hi"
    assert tokenizer.bos_id == 0
    assert tokenizer.is_special(np.int64(0))


def test_chat_templates_of_gguf() -> None:
    metadata = gguf_bpe("gpt-2")
    assert Tokenizer.from_gguf(metadata).chat_template is None
    metadata["tokenizer.chat_template"] = "a"
    assert Tokenizer.from_gguf(metadata).chat_template == "a"
    metadata["tokenizer.chat_templates"] = ["tool_use"]
    metadata["tokenizer.chat_template.tool_use"] = "b"
    assert Tokenizer.from_gguf(metadata).chat_template == {"default": "a", "tool_use": "b"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pre": "warp"}, r"'warp'.*supported are bloom, .*, viking"),
        ({"model": "rwkv"}, r"'rwkv'.*'gpt2'.*'llama'.*'t5'"),
        ({"model": None}, r"None"),
        ({"tokens": None}, r"no tokenizer.ggml.tokens"),
        ({"tokens": [1, 2]}, r"strings"),
        ({"merges": None}, r"no tokenizer.ggml.merges"),
        ({"merges": ["ab"]}, r"merges\[0\].*'ab'"),
        ({"merges": ["x yzzy"]}, r"merges do not fit"),
        ({"token_type": [1]}, r"token_type has 1 entries for 259"),
        ({"eos_token_id": 5000}, r"eos_token_id is 5000, but there are only 259"),
        ({"eos_token_id": "1"}, r"eos_token_id: expected int, got '1'"),
        ({"add_bos_token": "yes"}, r"add_bos_token: expected bool, got 'yes'"),
        ({"tokens": "abc"}, r"tokens must hold strings only"),
        ({"token_type": ["1"] * 259}, r"token_type must hold values of type int only"),
        ({"pre": 3}, r"pre: expected str, got 3"),
        ({"tokens": ["a", "b", "a"], "token_type": [1, 1, 1]}, r"twice.*'a'"),
    ],
)
def test_damaged_gguf(changes: dict[str, Any], message: str) -> None:
    metadata = gguf_bpe("gpt-2")
    for key, value in changes.items():
        metadata[f"tokenizer.ggml.{key}"] = value
    metadata = {key: value for key, value in metadata.items() if value is not None}
    with pytest.raises(CheckpointError, match=f"(?s){message}"):
        Tokenizer.from_gguf(metadata)


UNIGRAM = {
    "tokenizer.ggml.model": "t5",
    "tokenizer.ggml.tokens": ["<pad>", "</s>", "<unk>", "▁", "a", "▁a", "b", "ab", "▁ab", "<extra_id_0>"],
    "tokenizer.ggml.scores": [0.0, 0.0, 0.0, -2.0, -4.0, -3.0, -3.5, -6.0, -5.0, 0.0],
    "tokenizer.ggml.token_type": [3, 3, 2, 1, 1, 1, 1, 1, 1, 4],
    "tokenizer.ggml.eos_token_id": 1,
    "tokenizer.ggml.unknown_token_id": 2,
    "tokenizer.ggml.precompiled_charsmap": [],
}


def test_unigram() -> None:
    """The cut with the best sum of scores, spaces collapsed, and the end-of-sequence token behind."""
    tokenizer = Tokenizer.from_gguf(UNIGRAM)
    assert tokenizer.encode("ab") == [8, 1]  # -5 is more than -3 - 3.5
    assert tokenizer.encode("  a   a ", False) == [5, 5]
    assert tokenizer.encode("ba", False) == [3, 6, 4]
    assert tokenizer.encode("a<extra_id_0>", False) == [5, 9]
    assert tokenizer.encode("ax", False) == [5, 2]
    assert tokenizer.decode([5, 8, 1]) == "a ab"
    assert tokenizer.is_special(1)
    assert not tokenizer.byte_exact
    with pytest.raises(CheckpointError, match="scores has no entries for 10 tokens"):
        Tokenizer.from_gguf({**UNIGRAM, "tokenizer.ggml.scores": None})


ODD: tuple[Any, ...] = (
    None, 0, -1, 10**6, 2**64, 1.5, float("nan"), True, "", "x", b"x", [], [0], ["a"], [None], ["a b"] * 3, [[1]],
    np.array([1, 2]), np.array([1.0] * 259), np.array([7] * 259), np.array([], bool), np.array(1), {"a": 1},
)  # fmt: skip


@given(st.data())
@pytest.mark.parametrize("metadata", [gguf_bpe("gpt-2", ("h e",)), SENTENCEPIECE["metadata"], UNIGRAM], ids=str)
@pytest.mark.filterwarnings("ignore:the file has no tokenizer.ggml.pre")
def test_any_value_under_any_key(metadata: dict[str, Any], data: st.DataObject) -> None:
    """A tokenizer, or an error that says what is wrong: nothing else comes of a stranger's file."""
    metadata = Config(metadata, "x.gguf")
    keys = [*metadata, "tokenizer.ggml.add_space_prefix", "tokenizer.ggml.unknown_token_id", "tokenizer.chat_template"]
    for key in data.draw(st.lists(st.sampled_from(keys), min_size=1, max_size=2)):
        metadata[key] = data.draw(st.sampled_from(ODD))
    try:
        tokenizer = Tokenizer.from_gguf(metadata)
    except CheckpointError as error:
        assert str(error).startswith("x.gguf: ")  # noqa: PT017
    else:
        tokenizer.decode(tokenizer.encode("he said"))


def test_missing_pre_warns() -> None:
    with pytest.warns(UserWarning, match="no tokenizer.ggml.pre"):
        tokenizer = Tokenizer.from_gguf(gguf_bpe(None))
    assert tokenizer.encode("1234") == TOKENIZERS["default"].encode("1234")


# -- GGUF, SentencePiece ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sentencepiece() -> Tokenizer:
    return Tokenizer.from_gguf(SENTENCEPIECE["metadata"])


def test_sentencepiece_golden(sentencepiece: Tokenizer) -> None:
    for case in SENTENCEPIECE["cases"]:
        assert sentencepiece.encode(case["text"], add_special_tokens=False) == case["ids"], case["text"]
        assert sentencepiece.decode(case["ids"]) == case["text"]
    assert sentencepiece.encode("a")[0] == sentencepiece.bos_id == 1
    assert sentencepiece.strips_leading_space


@given(text=st.text())
def test_sentencepiece_round_trip(text: str) -> None:
    tokenizer = Tokenizer.from_gguf(SENTENCEPIECE["metadata"])
    # "▁" is how the vocabulary writes a space, so the two cannot be told apart; and text may name a control token.
    assert tokenizer.decode(tokenizer.encode(text, False), skip_special_tokens=False) == text.replace("▁", " ")


@given(text=st.text("▁ab", max_size=12))
def test_sentencepiece_words_or_whole(text: str) -> None:
    """Cutting into words changes nothing; and the result is what joining the best pair again and again gives."""
    tokens = ["<unk>", "▁", "a", "b", "aa", "ab", "ba", "aaa", "aba", "▁a", "▁▁", "▁▁▁", "▁ab"]
    scores = [0.0, *(-float(i % 5) for i in range(1, len(tokens)))]  # equal scores on purpose
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": [2, *[1] * (len(tokens) - 1)],
        "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.ggml.add_bos_token": False,
    }
    symbols = [*text]
    while True:
        pairs = [
            (-scores[tokens.index(p)], i)
            for i in range(len(symbols) - 1)
            if (p := "".join(symbols[i : i + 2])) in tokens
        ]
        if not pairs:
            break
        _, at = min(pairs)
        symbols[at : at + 2] = ["".join(symbols[at : at + 2])]
    expected = [tokens.index(s) for s in symbols]
    assert Tokenizer.from_gguf(metadata).encode(text) == expected
    # A piece across a word's start switches the cutting into words off.
    tokens, scores = [*tokens, "bbb▁zz"], [*scores, 0.0]
    metadata |= {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.scores": scores}
    metadata["tokenizer.ggml.token_type"] = [2, *[1] * (len(tokens) - 1)]
    assert Tokenizer.from_gguf(metadata).encode(text) == expected


def test_sentencepiece_special_tokens(sentencepiece: Tokenizer) -> None:
    the = sentencepiece.encode("the", False)
    assert sentencepiece.encode("<s>the</s>the", False) == [1, *the, 2, *the]
    assert sentencepiece.decode([1, *the]) == "the"
    assert sentencepiece.decode([1, *the], skip_special_tokens=False) == "<s> the"
    # Text that looks like a byte token is text.
    ids = sentencepiece.encode("<0x41>", False)
    assert len(ids) > 1
    assert sentencepiece.decode(ids) == "<0x41>"


def test_sentencepiece_without_byte_fallback() -> None:
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", "▁", "a"],
        "tokenizer.ggml.scores": [0.0, -1.0, -2.0],
        "tokenizer.ggml.token_type": [2, 1, 1],
        "tokenizer.ggml.add_bos_token": False,
    }
    assert Tokenizer.from_gguf(metadata).encode("a김치a") == [1, 2, 0, 2]
    with pytest.raises(CheckpointError, match="scores has 1 entries for 3"):
        Tokenizer.from_gguf({**metadata, "tokenizer.ggml.scores": [0.0]})
    with pytest.raises(CheckpointError, match="token 2 is of type byte"):
        Tokenizer.from_gguf({**metadata, "tokenizer.ggml.token_type": [2, 1, 6]})


# -- tokenizer.json --------------------------------------------------------------------------------------------------


def write_byte_level(folder: Path) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(BYTE_CHARS)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    backend.enable_truncation(3)
    backend.enable_padding()
    backend.save(str(folder / "tokenizer.json"))
    return backend


def test_from_file(tmp_path: Path) -> None:
    write_byte_level(tmp_path)
    config = {
        "bos_token": {"content": "<s>", "special": True},
        "eos_token": "</s>",
        "pad_token": None,
        "chat_template": "from the config",
        "added_tokens_decoder": {
            "257": {"content": "</s>", "special": True},
            "258": {"content": "<turn>", "special": True, "normalized": False},
            "259": {"content": "<word>", "special": False},
            "65": {"content": BYTE_CHARS[65], "special": True},
        },
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"unk_token": "<s>", "bos_token": "wrong"}))
    for path in (tmp_path, tmp_path / "tokenizer.json", str(tmp_path / "tokenizer.json")):
        tokenizer = Tokenizer.from_file(path)
        ids = tokenizer.encode("héllo<turn>", add_special_tokens=False)
        assert tokenizer.encode("héllo<turn>") == [256, *ids]
        assert ids[-1] == 258
        assert len(ids) == 7  # neither truncated nor padded
        assert tokenizer.decode(ids) == "héllo"
        assert tokenizer.special_tokens == {"unk_token": "<s>", "bos_token": "<s>", "eos_token": "</s>"}
        assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.vocab_size) == (256, 257, 260)
        assert [tokenizer.is_special(i) for i in (65, 66, 256, 258, 259)] == [True, False, True, True, False]
        assert tokenizer.chat_template == "from the config"
        assert tokenizer.byte_exact
        assert not tokenizer.strips_leading_space


def test_chat_template_files(tmp_path: Path) -> None:
    write_byte_level(tmp_path)
    config = tmp_path / "tokenizer_config.json"
    config.write_text(
        json.dumps({"chat_template": [{"name": "default", "template": "a"}, {"name": "rag", "template": "b"}]})
    )
    assert Tokenizer.from_file(tmp_path).chat_template == {"default": "a", "rag": "b"}
    (tmp_path / "chat_template.jinja").write_text("c")
    assert Tokenizer.from_file(tmp_path).chat_template == {"default": "c", "rag": "b"}
    config.unlink()
    assert Tokenizer.from_file(tmp_path).chat_template == "c"
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("d")
    assert Tokenizer.from_file(tmp_path).chat_template == {"default": "c", "tool_use": "d"}


def test_from_file_with_spaces(tmp_path: Path) -> None:
    """A Llama 2 tokenizer: "▁" for spaces, bytes as tokens, one space dropped at the start."""
    vocab = {"<unk>": 0, "<s>": 1} | {f"<0x{b:02X}>": 2 + b for b in range(256)}
    for piece in ("▁", "h", "i", "hi", "▁hi"):
        vocab[piece] = len(vocab)
    backend = tokenizers.Tokenizer(
        models.BPE(vocab, [("h", "i"), ("▁", "hi")], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens(["<unk>", "<s>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_file(tmp_path)
    assert tokenizer.byte_exact
    assert tokenizer.strips_leading_space
    for text in ("hi hi", "  hi", "김치 hi", "<s>hi", "", " "):
        ids = tokenizer.encode(text)
        assert ids == backend.encode(text).ids
        for skip in (True, False):
            assert tokenizer.decode(ids, skip) == backend.decode(ids, skip_special_tokens=skip)
    assert tokenizer.token_bytes(2 + 0xED) == b"\xed"
    assert tokenizer.token_bytes(vocab["▁hi"]) == b" hi"
    backend.decoder = decoders.Sequence(steps[:3])
    backend.save(str(tmp_path / "tokenizer.json"))
    assert not Tokenizer.from_file(tmp_path).strips_leading_space


@pytest.mark.parametrize("decoder", [decoders.WordPiece(), decoders.Metaspace(), None])
def test_other_decoders_decode_as_they_do(tmp_path: Path, decoder: decoders.Decoder | None) -> None:
    vocab = {"[UNK]": 0, "play": 1, "##ing": 2, ".": 3, "▁a": 4}
    backend = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    backend.add_special_tokens(["[UNK]"])
    if decoder is not None:
        backend.decoder = decoder
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_file(tmp_path)
    assert not tokenizer.byte_exact
    assert tokenizer.decode([1, 2, 0, 3, 4, 99]) == backend.decode([1, 2, 3, 4])
    assert tokenizer.token_bytes(1) == b"play"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", None, "no such file"),
        ("tokenizer.json", b"{}", "not a tokenizer.json"),
        ("tokenizer.json", b"\xff\xfe", "cannot be read"),
        ("tokenizer.json", b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n", "Git LFS pointer"),
        ("tokenizer_config.json", b"{", "not JSON"),
        ("tokenizer_config.json", b"[]", "expected a JSON object"),
        ("tokenizer_config.json", b'{"added_tokens_decoder": {"999": {"content": "<x>"}}}', "should have id 999"),
        ("tokenizer_config.json", b'{"added_tokens_decoder": {"999": {}}}', "no content"),
    ],
)
def test_damaged_files(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    write_byte_level(tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=f"(?s){name}.*{message}"):
        Tokenizer.from_file(tmp_path)


# -- bad arguments ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [lambda: TOKENIZERS["gpt-2"], lambda: Tokenizer.from_gguf(SENTENCEPIECE["metadata"])])
def test_bad_arguments(make: Any) -> None:
    tokenizer = make()
    with pytest.raises(TypeError, match="text must be a str, got bytes"):
        tokenizer.encode(b"a")
    with pytest.raises(InvalidArgument, match="lone surrogate at index 1"):
        tokenizer.encode("a\ud800")
    with pytest.raises(InvalidArgument, match="0 or more, got -1"):
        tokenizer.decode([-1])
    with pytest.raises(TypeError):
        tokenizer.decode([1.5])
    with pytest.raises(TypeError):
        tokenizer.token_bytes("a")
    # Beyond the vocabulary: logits may be padded.
    assert tokenizer.decode([10**6, 2**40]) == ""
    assert tokenizer.token_bytes(10**6) == b""
    assert tokenizer.id_to_token(2**40) is None
    assert tokenizer.token_to_id("no such token") is None


@pytest.mark.parametrize("key", ["content", "-1", "1_0", "9" * 5000])
def test_added_tokens_have_ids(tmp_path: Path, key: str) -> None:
    write_byte_level(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": {key: 1}}))
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: added_tokens_decoder: .*got '"):
        Tokenizer.from_file(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
@pytest.mark.parametrize("kind", ["device", "pipe"])
def test_devices_and_pipes_are_refused(tmp_path: Path, name: str, kind: str) -> None:
    write_byte_level(tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    if kind == "device":
        (tmp_path / name).symlink_to("/dev/zero")
    else:
        os.mkfifo(tmp_path / name)
    with pytest.raises(CheckpointError, match=rf"{name}: .*expected a regular file"):
        Tokenizer.from_file(tmp_path)
