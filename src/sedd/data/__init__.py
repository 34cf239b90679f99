"""Datasets: files are tokenized into shards on disk, and shards are read as fixed-length blocks in a seeded order.

`prepare` tokenizes a corpus of any size in chunks and writes it once; `prepare_cached` reuses earlier work.
`TokenBlocks` reads the result through memory maps. `block_order` shuffles the blocks of each epoch. No torch here.
"""

from sedd.data.fitting import fit_tokenizer
from sedd.data.index import Index, Shard, is_prepared
from sedd.data.packing import TokenBlocks, block_order
from sedd.data.readers import expand_sources, read_documents
from sedd.data.record_lengths import RecordLengths, scan_record_lengths
from sedd.data.shards import prepare, prepare_cached, repeat_notes
from sedd.data.text_file import TextEncoding

__all__ = [
    "Index",
    "RecordLengths",
    "Shard",
    "TextEncoding",
    "TokenBlocks",
    "block_order",
    "expand_sources",
    "fit_tokenizer",
    "is_prepared",
    "prepare",
    "prepare_cached",
    "read_documents",
    "repeat_notes",
    "scan_record_lengths",
]
