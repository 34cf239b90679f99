"""Validity, uniqueness and novelty of generated molecules, written as SMILES.

RDKit, an optional extra, decides what a molecule is and which spellings are the same one. Where it is not installed,
validity is that of the SMILES syntax alone, and spellings are compared as text; results state which.

References: Weininger 1988, "SMILES, a chemical language and information system", doi:10.1021/ci00057a005; Polykovskiy
et al. 2018, "Molecular Sets (MOSES): A Benchmarking Platform for Molecular Generation Models", arXiv 1811.12823 (the
three numbers).
"""

import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from types import ModuleType
from typing import Any, NamedTuple

from sedd.extras import install_hint

BRACKET_ATOM = (
    r"\[\d*(?:\*|[A-Z][a-z]?|se|as|te|[bcnops])(?:@@?(?:(?:TH|AL|SP|TB|OH)\d*)?)?"  # isotope, element, chirality
    r"(?:H\d?)?(?:[+-]\d+|\++|-+)?(?::\d+)?\]"  # hydrogens, charge, number
)
SYMBOL = re.compile(
    rf"(?P<atom>{BRACKET_ATOM}|Br|Cl|[BCNOPSFIbcnops*])|(?P<bond>[-=#$:/\\])|(?P<ring>\d|%\d\d)"
    r"|(?P<open>\()|(?P<close>\))|(?P<dot>\.)"
)
ORDER = re.compile(r"a([bd]?a|b?r|o[bd]?a|c)*")
"""The order in which symbols may follow each other, by their initials."""
HEAVY_ATOM = re.compile(r"\[\d*([A-Z][a-z]?|[a-z]+|\*)[^\]]*\]|(Br|Cl|[BCNOPSFIbcnops*])")


class MoleculeMetrics(NamedTuple):
    """Counts over generated texts."""

    texts: int
    valid: int  # texts that are molecules
    unique: int  # different molecules among them
    novel: int | None  # different molecules that are not among the known ones; None if none are known
    rdkit_version: str | None  # None: RDKit is not installed, and the syntax decided

    def as_record(self) -> dict[str, Any]:
        """Return the fields of a result: valid/texts with its standard error, unique/valid and novel/unique."""
        validity = self.valid / self.texts
        return {
            "validity": round(validity, 6),
            "stderr_validity": round((validity * (1 - validity) / self.texts) ** 0.5, 6),
            "uniqueness": round(self.unique / self.valid, 6) if self.valid else None,
            "novelty": None if self.novel is None or not self.unique else round(self.novel / self.unique, 6),
            "validity_by": "syntax" if self.rdkit_version is None else "RDKit",
            "rdkit_version": self.rdkit_version,
        }


def canonical_smiles(smiles: str) -> str | None:
    """Return RDKit's canonical SMILES, or None if the text is not a molecule or holds no atom."""
    chem, base = _rdkit()
    with base.BlockLogs():  # RDKit explains each parse error on stderr
        molecule = chem.MolFromSmiles(smiles)
        return None if molecule is None or not molecule.GetNumAtoms() else str(chem.MolToSmiles(molecule))


def is_smiles(text: str) -> bool:
    """Return whether a text follows the syntax of SMILES; valences and aromaticity are not checked.

    Atoms are of the organic subset or in brackets, every bond and branch follows an atom, branches are not empty and
    are closed, and ring bonds come in pairs between two atoms.
    """
    symbols = [(str(found.lastgroup), found[0]) for found in SYMBOL.finditer(text)]
    if "".join(word for _, word in symbols) != text or not ORDER.fullmatch("".join(kind[0] for kind, _ in symbols)):
        return False
    branches = [0]  # the atom that the current branch has reached, below it those at which its parents left off
    rings: dict[str, int] = {}  # the atom at which each open ring bond begins
    for number, (kind, word) in enumerate(symbols):
        if kind == "atom":
            branches[-1] = number
        elif kind == "open":
            branches.append(branches[-1])
        elif kind == "close":
            branches.pop()
        elif kind == "ring":
            name = word.removeprefix("%").zfill(2)
            if name not in rings:
                rings[name] = branches[-1]
            elif rings.pop(name) == branches[-1]:
                return False
        if not branches:
            return False
    return len(branches) == 1 and not rings


def measure_molecules(
    texts: Sequence[str],
    known: Iterable[str] | None = (),
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> MoleculeMetrics:
    """Count valid, unique and novel molecules; by RDKit, different spellings of one molecule count once.

    ``known`` are those of the training data, and None leaves novelty out; ``on_progress`` gets how many are compared.
    """
    version = None
    with suppress(ValueError):
        version = str(_rdkit()[1].rdkitVersion)
    canonical = canonical_smiles if version else lambda text: text if is_smiles(text) else None
    valid = [form for text in texts if (form := canonical(text)) is not None]
    unique, novel = set(valid), None
    if known is not None:
        known, forms = list(known), set[str | None]()
        compositions = {_heavy_atoms(text) for text in unique}
        for number, text in enumerate(known, 1):
            if _heavy_atoms(text) in compositions:  # only these can be equal, and parsing takes twenty times as long
                forms.add(canonical(text))
            on_progress(number, len(known))
        novel = len(unique - forms)
    return MoleculeMetrics(len(texts), len(valid), len(unique), novel, version)


def _heavy_atoms(smiles: str) -> str:
    """Return the sorted element symbols of a SMILES but hydrogen; all spellings of a molecule have the same."""
    symbols = (bracket or plain for bracket, plain in HEAVY_ATOM.findall(smiles))
    return " ".join(sorted(symbol.capitalize() for symbol in symbols if symbol != "H"))


def _rdkit() -> tuple[ModuleType, ModuleType]:
    try:
        from rdkit import Chem, rdBase
    except ImportError:
        raise ValueError(f"RDKit is not installed; install it: {install_hint('molecules')}") from None
    return Chem, rdBase
