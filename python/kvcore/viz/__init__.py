"""Pictures of a cache: which block holds whose tokens.

::

    from kvcore.viz import block_map

    block_map(cache).save("blocks.svg")      # or the last line of a notebook's cell

Pure Python over ``KVCache.snapshot()``. ``import kvcore`` does not load it.
"""

from kvcore.viz.block_map import BlockMap, block_map

__all__ = ["BlockMap", "block_map"]
