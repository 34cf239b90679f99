"""Datasets: files are tokenized into shards on disk, and shards are read as fixed-length blocks in a seeded order.

`prepare` tokenizes a corpus of any size in chunks and writes it once; `prepare_cached` reuses earlier work.
`TokenBlocks` reads the result through memory maps. `block_order` shuffles the blocks of each epoch. No torch here.
"""

from sedd.data.packing import Index as Index
from sedd.data.packing import TokenBlocks as TokenBlocks
from sedd.data.packing import block_order as block_order
from sedd.data.packing import is_prepared as is_prepared
from sedd.data.readers import expand_sources as expand_sources
from sedd.data.readers import read_documents as read_documents
from sedd.data.shards import fit_tokenizer as fit_tokenizer
from sedd.data.shards import prepare as prepare
from sedd.data.shards import prepare_cached as prepare_cached
from sedd.data.shards import repeat_notes as repeat_notes
from sedd.data.shards import scan_record_lengths as scan_record_lengths
from sedd.data.text_file import TextEncoding as TextEncoding
