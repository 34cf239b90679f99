"""Validity, uniqueness and novelty of molecules."""

import random
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
    assert found[:4] == (5, 3, 2, 1)
    assert molecules.measure_molecules([])[:4] == (0, 0, 0, 0)
    assert molecules.measure_molecules(["C"], known=None).novel is None
    record = found.as_record()
    assert (record["validity"], record["uniqueness"], record["novelty"]) == (0.6, round(2 / 3, 6), 0.5)
    assert (record["validity_by"], record["stderr_validity"]) == ("RDKit", round((0.6 * 0.4 / 5) ** 0.5, 6))


def test_parse_errors_are_not_printed(capfd: pytest.CaptureFixture[str]) -> None:
    molecules.canonical_smiles("c1cc(")
    assert capfd.readouterr() == ("", "")


def test_missing_rdkit_is_reported_in_a_sentence(monkeypatch: pytest.MonkeyPatch, refuses: Refuses) -> None:
    monkeypatch.setitem(sys.modules, "rdkit", None)
    refuses(lambda: molecules.canonical_smiles("C"), install_hint("molecules"))


MOLECULES = [
    *(
        "C",
        "CCO",
        "c1ccccc1",
        "CC(=O)Oc1ccccc1C(=O)O",
        "[Na+].[Cl-]",
        "C%10CC%10",
        "[nH]1cccc1",
        "F/C=C\\F",
        "C1CC1C1CC1",
    ),
    *("N[C@@H](C)C(=O)O", "[13CH4]", "C(C)(C)(C)O", "O=C1CCC(=O)N1", "Clc1ccc(Br)cc1", "[Fe+2]", "C1=CC=CC=C1"),
]
NO_SMILES = [
    "",
    "C(",
    "C)",
    "C()",
    "(C)",
    "C=",
    "=C",
    "C==C",
    "C1CC",
    "C11",
    "C11C1",
    "1CC1",
    "C..C",
    "C.",
    "[C",
    "C]",
    "water",
]


def test_the_syntax_is_that_of_smiles() -> None:
    """Everything that RDKit reads follows it; without a symbol that it needs, no molecule does."""
    assert all(molecules.is_smiles(text) and molecules.canonical_smiles(text) for text in MOLECULES)
    assert not any(molecules.is_smiles(text) for text in NO_SMILES)
    assert not any(molecules.canonical_smiles(text) for text in NO_SMILES)
    assert molecules.is_smiles("C(C)(C)(C)(C)C")  # five bonds: the syntax has no valences


def test_random_edits_that_rdkit_reads_follow_the_syntax() -> None:
    draw, read = random.Random(0), 0
    for _ in range(3000):
        symbols = list(draw.choice(MOLECULES))
        symbols[draw.randrange(len(symbols))] = draw.choice(["", *"CNOc1()=#[]."])
        text = "".join(symbols)
        if molecules.canonical_smiles(text) is not None:
            read += 1
            assert molecules.is_smiles(text), text
    assert read > 300


def test_novelty_is_that_of_comparing_all_canonical_forms() -> None:
    """Known molecules with other atoms are left out before they are parsed; that changes nothing."""
    known = [text[::-1] if text in ("CCO",) else text for text in MOLECULES[::2]]
    forms = {molecules.canonical_smiles(text) for text in known}
    novel = {molecules.canonical_smiles(text) for text in MOLECULES} - forms
    assert molecules.measure_molecules(MOLECULES, known).novel == len(novel) > 3


def test_without_rdkit_the_syntax_decides_and_the_record_states_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rdkit", None)
    found = molecules.measure_molecules(["OCC", "CCO", "CCO", "C((", ""], known=["OCC"])
    assert found == (5, 3, 2, 1, None)
    assert found.as_record()["validity_by"] == "syntax"
