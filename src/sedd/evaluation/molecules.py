"""Validity, uniqueness and novelty of generated molecules, written as SMILES. Needs RDKit, an optional extra."""

from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import NamedTuple

from sedd.extras import install_hint


class MoleculeMetrics(NamedTuple):
    """Counts over generated texts."""

    texts: int
    valid: int
    """Texts that are molecules."""
    unique: int
    """Different molecules among them."""
    novel: int
    """Different molecules that are not among the known ones."""


def canonical_smiles(smiles: str) -> str | None:
    """Return RDKit's canonical SMILES, or None if the text is not a molecule or holds no atom."""
    chem, base = _rdkit()
    with base.BlockLogs():  # RDKit explains each parse error on stderr
        molecule = chem.MolFromSmiles(smiles)
        return None if molecule is None or not molecule.GetNumAtoms() else str(chem.MolToSmiles(molecule))


def measure_molecules(texts: Sequence[str], known: Iterable[str] = ()) -> MoleculeMetrics:
    """Count valid, unique and novel molecules; different spellings of one molecule count once.

    Args:
        texts: Generated SMILES.
        known: SMILES of the training data.
    """
    valid = [molecule for text in texts if (molecule := canonical_smiles(text)) is not None]
    novel = set(valid) - {canonical_smiles(text) for text in known}
    return MoleculeMetrics(len(texts), len(valid), len(set(valid)), len(novel))


def _rdkit() -> tuple[ModuleType, ModuleType]:
    try:
        from rdkit import Chem, rdBase
    except ImportError:
        raise ValueError(f"RDKit is not installed; install it: {install_hint('molecules')}") from None
    return Chem, rdBase
