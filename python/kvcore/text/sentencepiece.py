"""SentencePiece BPE, as GGUF files of the kind "llama" need it.

    symbols = the characters of the text, spaces written as "▁"
    loop: of all neighbours whose joined text is a token, join the pair whose token has the highest score,
          the leftmost of equals
    a symbol that is no token becomes the bytes of its UTF-8

The rule is that of SentencePiece's bpe_model.cc (and of llama.cpp). A list of merges, which is what the `tokenizers`
package takes, cannot express it: there a token's several ways to be joined get different ranks, while here they are
equal and the leftmost wins.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterator, Mapping, Sequence

SPACE = "▁"
_CACHED_WORDS = 1 << 16
_WORD = re.compile(f"{SPACE}*[^{SPACE}]+|{SPACE}+")


class SentencePieceBpe:
    """Text to ids, with the pieces and scores of a SentencePiece model of type BPE."""

    def __init__(
        self,
        tokens: Sequence[str],
        scores: Sequence[float],
        *,
        mergeable: Sequence[bool],
        verbatim: Sequence[bool],
        byte_ids: Mapping[int, int],
        unknown_id: int,
        add_space_prefix: bool = True,
    ) -> None:
        """Prepare the tables.

        Args:
            tokens: the text of every token, by id.
            scores: their scores; a higher one is joined first.
            mergeable: which tokens joining may make (not control and byte tokens).
            verbatim: which tokens are recognised as they stand in the text, before everything else.
            byte_ids: byte -> id of its token; empty if the model has no byte fallback.
            unknown_id: the token for what nothing else stands for.
            add_space_prefix: put a space before the text, and after each verbatim token.
        """
        self.vocab_size = len(tokens)
        self.add_space_prefix = add_space_prefix
        self.verbatim_ids = frozenset(i for i, flag in enumerate(verbatim) if flag)
        self._tokens = list(tokens)
        self._ids = {token: i for i, token in reversed([*enumerate(tokens)])}
        self._pieces = {t: i for i, (t, flag) in reversed([*enumerate(zip(tokens, mergeable, strict=True))]) if flag}
        self._scores = list(scores)
        self._byte_ids = dict(byte_ids)
        self._unknown_id = unknown_id
        # Longest first, so that at one place the longest token wins.
        texts = sorted({tokens[i] for i in self.verbatim_ids if tokens[i]}, key=len, reverse=True)
        self._verbatim = re.compile("|".join(map(re.escape, texts))) if texts else None
        # If no piece has a space after another character, words cannot influence each other, and their ids can be kept.
        self._by_word = not any(SPACE in piece.lstrip(SPACE) for piece in self._pieces)
        self._words: dict[str, list[int]] = {}

    def token_to_id(self, token: str) -> int | None:
        """The id of a token given as the vocabulary writes it, or None."""
        return self._ids.get(token)

    def id_to_token(self, token_id: int) -> str | None:
        """A token as the vocabulary writes it, or None beyond the vocabulary."""
        return self._tokens[token_id] if token_id < len(self._tokens) else None

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without bos and eos."""
        ids: list[int] = []
        start = 0
        for match in self._verbatim.finditer(text) if self._verbatim else ():
            ids += self._encode_run(text[start : match.start()])
            ids.append(self._ids[match[0]])
            start = match.end()
        ids += self._encode_run(text[start:])
        return ids

    def _encode_run(self, text: str) -> list[int]:
        if not text:
            return []
        text = (" " + text if self.add_space_prefix else text).replace(" ", SPACE)
        ids: list[int] = []
        for word in _WORD.findall(text) if self._by_word else [text]:
            known = self._words.get(word)
            if known is None:
                known = [*self._merge(word)]
                if len(self._words) < _CACHED_WORDS and len(word) <= 64:
                    self._words[word] = known
            for token_id in known:
                # A run of unknown characters is one unknown token.
                if not (token_id == self._unknown_id and ids and ids[-1] == token_id):
                    ids.append(token_id)
        return ids

    def _merge(self, text: str) -> Iterator[int]:
        symbols = [*text]  # "" once joined to its left neighbour
        after = [*range(1, len(text) + 1)]
        before = [*range(-1, len(text) - 1)]
        heap: list[tuple[float, int, int, str]] = []

        def offer(left: int, right: int) -> None:
            if left >= 0 and right < len(symbols):
                joined = symbols[left] + symbols[right]
                piece = self._pieces.get(joined)
                if piece is not None:
                    heapq.heappush(heap, (-self._scores[piece], left, right, joined))

        for i in range(len(symbols) - 1):
            offer(i, i + 1)
        while heap:
            _, left, right, joined = heapq.heappop(heap)
            # Skip what was overtaken: one of the two has since been joined to something else.
            if not symbols[left] or not symbols[right] or symbols[left] + symbols[right] != joined:
                continue
            symbols[left], symbols[right] = joined, ""
            after[left] = after[right]
            if after[right] < len(symbols):
                before[after[right]] = left
            offer(before[left], left)
            offer(left, after[left])

        for symbol in filter(None, symbols):
            piece = self._pieces.get(symbol)
            if piece is not None:
                yield piece
                continue
            fallback = [self._byte_ids.get(byte) for byte in symbol.encode()]
            yield from [self._unknown_id] if None in fallback else [i for i in fallback if i is not None]
