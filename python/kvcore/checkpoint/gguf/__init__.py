"""GGUF files as models: the file itself, and what it says in Hugging Face's words.

file.py            a mapped file: metadata and tensors as they are stored
keys.py            how values of config.json are read from the metadata
layouts.py         how tensors that the converter changed are turned back
architectures/     one table each: which keys, which tensors, which layouts
config.py          metadata -> config.json
weights.py         tensors -> Hugging Face's names and layouts
"""

from kvcore.checkpoint.gguf.config import to_config
from kvcore.checkpoint.gguf.file import GGUFFile, GGUFTensor, StringArray
from kvcore.checkpoint.gguf.keys import ROPE_TENSORS
from kvcore.checkpoint.gguf.weights import GGUFWeights

__all__ = ["ROPE_TENSORS", "GGUFFile", "GGUFTensor", "GGUFWeights", "StringArray", "to_config"]
