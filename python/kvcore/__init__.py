"""kvcore: the KV cache of large language models as real software."""
