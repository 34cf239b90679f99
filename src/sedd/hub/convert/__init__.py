"""Published checkpoints: SEDD, RADD and MDLM, read with care and written back.

The layout is recognised by the names of the weights. Every name, shape, dtype and value is looked at before anything
is written; pickles are read by torch's restricted loader alone, and what it refuses is refused.
"""

from sedd.hub.convert.convert import Published, free, read, save, write
from sedd.hub.convert.layout import LAYOUTS

__all__ = ["LAYOUTS", "Published", "free", "read", "save", "write"]
