"""Conversion of published checkpoints: SEDD, RADD and MDLM, in both directions.

The layout is recognised by the names of the weights. Every name, shape, dtype and value is checked before anything is
written; pickles are read with torch's restricted loader only, and what it refuses is refused.
"""

from sedd.hub.convert.convert import (
    ImportedCheckpoint,
    export_model,
    read_published,
    save_model_folder,
)
from sedd.hub.convert.layout import LAYOUTS

__all__ = ["LAYOUTS", "ImportedCheckpoint", "export_model", "read_published", "save_model_folder"]
