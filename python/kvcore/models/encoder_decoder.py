"""A decoder behind an encoder.

encode(seq, source):  encoded = encoder(source)
                      for each layer:  cross K and V of encoded --> cache, once for a request
forward(...)          is the decoder's: its layers attend to what the cache has for each row's sequence
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvcore.models.decoder import Decoder
from kvcore.models.encoder import Encoder
from kvcore.models.encoder_input import EncoderInput, encoder_input

if TYPE_CHECKING:
    from kvcore._kvcore import KVCache
    from kvcore.checkpoint.weights import Weights
    from kvcore.models.reader import Reader
    from kvcore.models.spec import DecoderSpec, EncoderSpec


class EncoderDecoder(Decoder):
    """An encoder and a decoder with packed weights; arguments and errors as ``Decoder``."""

    def __init__(self, spec: DecoderSpec, weights: Weights, cache: KVCache, **options: Any) -> None:
        """Read and pack both."""
        assert spec.encoder is not None
        self._source: EncoderSpec = spec.encoder
        super().__init__(spec, weights, cache, **options)

    def _read_more(self, weights: Weights, reader: type[Reader], **held_in: Any) -> int:
        embedding = self._source.stack.tensors.get("embed_tokens.weight")
        same = embedding == self.spec.tensors["embed_tokens.weight"]
        read = reader(self._source.stack, weights, self.cache.threads, **held_in)
        self.encoder = Encoder(self._source, read, held_in["dtype"], self._embedding.table if same else None)
        return self.encoder.nbytes

    def step_nbytes(self, num_tokens: int) -> int:
        """As ``Decoder.step_nbytes``: a step reads nothing of the encoder."""
        return super().step_nbytes(num_tokens) - self.encoder.nbytes

    @property
    def start_token_id(self) -> int:
        """The decoder's first token."""
        return self._source.start_token_id

    @property
    def mel_bins(self) -> int | None:
        """Rows of the sound's features that the encoder takes; None: it takes token ids."""
        return self._source.mel_bins

    def encoder_input(self, given: Mapping[str, Any], /) -> EncoderInput:
        """Check what a prompt has for the encoder. Raises as ``encoder_input.encoder_input``."""
        return encoder_input(self._source, given)

    def encode(self, seq: Any, source: EncoderInput, /) -> None:
        """Run the encoder and keep its K and V of every layer for a sequence of the cache.

        Raises:
            OutOfBlocks: there is no room for them.
        """
        encoded = self.encoder(source)
        for layer in self._layers:
            assert layer.cross is not None
            layer.cross.store(seq, encoded)
