"""Validity, uniqueness and novelty of molecules."""

import sys
from collections.abc import Callable

import pytest

from sedd.evaluation import molecules
from sedd.extras import install_hint

Refuses = Callable[..., None]


def test_spellings_of_one_molecule_have_one_canonical_form() -> None:
    assert molecules.canonical_smiles("OCC") == molecules.canonical_smiles("C(O)C") == "CCO"
    assert [molecules.canonical_smiles(text) for text in ("C(", "c1cc", "C(C)(C)(C)(C)C", "", "water")] == [None] * 5


def test_valid_unique_and_novel_molecules_are_counted() -> None:
    """Ethanol (twice) and acetic acid are valid; ethanol is known in another spelling."""
    found = molecules.measure_molecules(["OCC", "CCO", "CC(=O)O", "C((", ""], known=["C(C)O", "C"])
    assert found == (5, 3, 2, 1)
    assert molecules.measure_molecules([]) == (0, 0, 0, 0)


def test_parse_errors_are_not_printed(capfd: pytest.CaptureFixture[str]) -> None:
    molecules.canonical_smiles("c1cc(")
    assert capfd.readouterr() == ("", "")


def test_missing_rdkit_is_reported_in_a_sentence(monkeypatch: pytest.MonkeyPatch, refuses: Refuses) -> None:
    monkeypatch.setitem(sys.modules, "rdkit", None)
    refuses(lambda: molecules.canonical_smiles("C"), install_hint("molecules"))
