"""Pictures: which block of a cache holds whose tokens, and what a model looks at.

::

    from kvcore.viz import attention_map, block_map

    block_map(cache).save("blocks.svg")      # or the last line of a notebook's cell
    attention_map(llm.attention_map(ids, encoder=source)[-1].mean(axis=0), rows=outputs, columns=inputs)

Pure Python over ``KVCache.snapshot()`` and arrays. ``import kvcore`` does not load it.
"""

from kvcore.viz.attention_map import AttentionMap, attention_map
from kvcore.viz.block_map import BlockMap, block_map

__all__ = ["AttentionMap", "BlockMap", "attention_map", "block_map"]
