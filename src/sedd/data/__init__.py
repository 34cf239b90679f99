"""Data: files become shards of token ids on disk, shards become blocks, and blocks come in a known order.

`prepare` reads any corpus in pieces, so that its size does not matter, and writes it once; `cached` does so where
nobody has before. `Blocks` reads the result through memory maps. `order` says which block is the n-th to be seen.
No torch here.
"""

from sedd.data.index import Index, Shard, is_prepared
from sedd.data.packing import Blocks, order
from sedd.data.readers import documents
from sedd.data.shards import cached, prepare

__all__ = ["Blocks", "Index", "Shard", "cached", "documents", "is_prepared", "order", "prepare"]
