"""From a file of SMILES to a model and the share of valid, unique and novel samples, by the commands alone."""

import gzip
import json
import random
from pathlib import Path

from runs import Sedd, ok

from sedd.evaluation import molecules
from sedd.loading import load_model

SMALL = [
    *("--set", "model.width=32", "--set", "model.depth=1", "--set", "model.heads=2", "--batch-size", "16"),
    *("--set", "train.eval_sequences=8", "--set", "optim.warmup_steps=2"),
]


def test_molecules_of_any_length(sedd: Sedd, tmp_path: Path) -> None:
    """The length is that of the longest molecule; padding is announced; `sedd quality` needs no judge."""
    draw, file = random.Random(0), tmp_path / "mols.smi.gz"
    known = ["C" * draw.randint(1, 70) + draw.choice(["O", "N", "F"]) for _ in range(300)] + ["C" * 90]
    file.write_bytes(gzip.compress("".join(f"{text}\tname {i}\n" for i, text in enumerate(known)).encode()))
    done = sedd("train", file, "--recipe", "molecules", *SMALL, "--steps", 12, "--lr", 0.01, "--out", tmp_path / "run")
    ok(done)
    assert "301 records of 2 to 90 tokens: sequences have 90 tokens" in done.stderr
    assert "records shorter than 90 tokens are padded, with a token that the model learns" in " ".join(
        done.stderr.split()
    )
    words = ["quality", tmp_path / "run", "-n", 8, "--steps", 8]
    done = sedd(*words, "--json", "--save", tmp_path / "drawn.jsonl")
    ok(done)
    record = json.loads(done.stdout)
    texts = [json.loads(line)["text"] for line in (tmp_path / "drawn.jsonl").read_text().splitlines()]
    expected = molecules.measure_molecules(texts, known[:286]).as_record()  # without the validation split
    assert record | expected == record
    assert (record["known_molecules"], record["validity_by"], record["samples"]) == (286, "RDKit", 8)
    (tmp_path / "texts.txt").write_text("CCO\nOCC\nC((\n\nCCN\n")
    done = sedd("quality", tmp_path / "texts.txt", "--molecules", "--known", file, "--json")
    ok(done)
    found = json.loads(done.stdout)
    assert (found["validity"], found["uniqueness"], found["novelty"]) == (0.6, round(2 / 3, 6), 0.0)
    saved = tmp_path / "found.json"
    saved.write_text(done.stdout)
    table = sedd("quality", saved, tmp_path / "texts.txt", "--molecules")
    ok(table)
    rows = [[cell.strip() for cell in line.split("|")] for line in table.stdout.splitlines()]
    assert any(row[i : i + 3] == ["0.6 ± 0.22", "0.6667", "0"] for row in rows for i in range(len(row)))
    assert "novelty is not known, name the training data with --known" in table.stderr
    hidden = sedd("quality", tmp_path / "texts.txt", "--molecules", before="sys.modules['rdkit'] = None")
    ok(hidden)
    assert "molecules by the syntax of SMILES alone" in hidden.stdout


def test_bad_options_for_molecules(sedd: Sedd, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("CCO\n")
    for words, sentence in (
        ([], "for molecules, add --molecules"),
        (["--known", tmp_path / "a.txt"], "add --molecules"),
        (["--molecules", "--out", tmp_path / "a.png"], "needs --judge"),
    ):
        done = sedd("quality", tmp_path / "a.txt", *words)
        assert (done.returncode, done.stdout) == (2, "")
        assert sentence in done.stderr


def test_samples_of_equal_length_records_hold_no_padding(sedd: Sedd, tmp_path: Path) -> None:
    """There is no such token, from the files and from prepared data; a longer length brings it back, announced."""
    draw = random.Random(0)
    (tmp_path / "dna.txt").write_text("".join("".join(draw.choices("ACGT", k=12)) + "\n" for _ in range(60)))
    words = [*SMALL, "--steps", 2, "--tokenizer", "chars", "--packing", "lines", "--set", "optim.name=adamw"]
    done = sedd("train", tmp_path / "dna.txt", *words, "--out", tmp_path / "run")
    ok(done)
    assert "60 records of 12 tokens each: sequences have 12 tokens" in done.stderr
    assert "padded" not in done.stderr
    loaded = load_model(tmp_path / "run")
    assert (loaded.tokenizer.pad, loaded.process.vocab_size) == (None, 4)
    done = sedd("sample", tmp_path / "run", "-n", 20, "--steps", 2, "--json")
    ok(done)
    assert {len(json.loads(line)["text"]) for line in done.stdout.splitlines()} == {12}
    done = sedd("train", tmp_path / "dna.txt", *words, "--seq-len", 16, "--out", tmp_path / "longer")
    ok(done)
    assert "records shorter than 16 tokens are padded" in done.stderr
    assert load_model(tmp_path / "longer").tokenizer.pad == 4
