"""Molecules: which SMILES are molecules, and how many of them are new. The door to RDKit, an optional extra."""

from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import NamedTuple

from sedd.extras import install_hint


class Quality(NamedTuple):
    """How many of some texts are molecules, how many different ones, and how many of those were not known."""

    texts: int
    valid: int
    unique: int
    novel: int


def canonical(smiles: str) -> str | None:
    """The one way RDKit writes this molecule; None where it is none, or holds no atom."""
    chem, base = _rdkit()
    with base.BlockLogs():  # it explains each refusal on stderr
        molecule = chem.MolFromSmiles(smiles)
        return None if molecule is None or not molecule.GetNumAtoms() else str(chem.MolToSmiles(molecule))


def quality(texts: Sequence[str], known: Iterable[str] = ()) -> Quality:
    """Of SMILES, beside those that a model was trained on; two ways to write a molecule are one molecule."""
    valid = [found for text in texts if (found := canonical(text)) is not None]
    return Quality(len(texts), len(valid), len(set(valid)), len(set(valid) - {canonical(text) for text in known}))


def _rdkit() -> tuple[ModuleType, ModuleType]:
    try:
        from rdkit import Chem, rdBase
    except ImportError:
        raise ValueError(f"RDKit is not installed; install it: {install_hint('molecules')}") from None
    return Chem, rdBase
