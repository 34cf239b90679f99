"""Files as users have them: odd bytes, line ends of Windows, molecules, lists of integers, labels, stored settings."""

import json
import random
from pathlib import Path

import pyarrow
import pyarrow.parquet
from runs import Sedd, ok

from sedd import models

STEP = ["--steps", "1", *("--set", "model.width=32", "--set", "model.depth=1", "--set", "train.eval_sequences=8")]
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


def prose(size: int) -> bytes:
    draw = random.Random(0)
    words = ["".join(draw.choices(LETTERS, k=draw.randint(2, 8))) for _ in range(300)]
    return " ".join(draw.choices(words, k=size // 6)).encode()


def test_odd_bytes_and_line_ends_are_reported(sedd: Sedd, tmp_path: Path) -> None:
    """In training, where they do not choose another tokenizer, and in evaluation."""
    file, content = tmp_path / "book.txt", prose(300_000).replace(b" ", b"\r\n", 3)
    file.write_bytes(content[:1000] + b"\xe9" + content[1000:] + b"\xe9")
    done = sedd("train", file, *STEP, "--out", tmp_path / "run")
    ok(done)
    assert "tokenizer bpe:" in done.stderr
    (tmp_path / "part.txt").write_bytes(file.read_bytes()[:5000])
    seen = sedd("eval", tmp_path / "run", tmp_path / "part.txt", "--protocol", "strict", "--json", "--draws", "2")
    ok(seen)
    for shown, words in ((done.stderr, f"2 of {len(content) + 2:,} bytes"), (seen.stderr, "1 of 5,000")):
        assert words in shown
        assert "offset 1,000, in line 4 of" in shown
        assert "--encoding latin-1" in shown
        assert "3 line ends are CRLF" in shown
    assert json.loads(seen.stdout)["bits_per_char"] > 0


def test_molecules_get_characters_and_long_ones_can_be_left_out(sedd: Sedd, tmp_path: Path) -> None:
    """The line about the lengths names one that leaves out few records; with it, their number is stated."""
    draw, atoms = random.Random(0), "CNOFSPIBHclnosr[]()+-=#/\\@123456789%"
    rows = ["".join(draw.choices(atoms, k=draw.randint(9, 20))) for _ in range(198)] + ["C" * 90] * 2
    (tmp_path / "zinc.smiles").write_text("\n".join(rows))
    words = ["train", tmp_path / "zinc.smiles", "--packing", "lines", *STEP]
    done = sedd(*words, "--out", tmp_path / "long")
    ok(done)
    assert "tokenizer chars" in done.stderr
    shown = next(line for line in done.stderr.splitlines() if "200 records" in line)
    assert "sequences have 90 tokens" in shown
    assert "--seq-len 20 leaves out 2 " in shown
    done = sedd(*words, "--seq-len", 20, "--out", tmp_path / "short")
    ok(done)
    assert "2 of 200 records have more than 20 tokens" in done.stderr
    done = sedd(
        "data", "prepare", tmp_path / "zinc.smiles", "--packing", "lines", "--length", 20, "--out", tmp_path / "p"
    )
    ok(done)
    assert "198" in next(line for line in done.stdout.splitlines() if line.startswith("records"))
    assert "2 of 200 records" in done.stderr


def test_a_label_implies_records(sedd: Sedd, tmp_path: Path) -> None:
    rows = [{"text": word * 3, "mood": "calm" if word < "c" else "loud"} for word in "abcdef"] * 9
    (tmp_path / "moods.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    ok(sedd("train", tmp_path / "moods.jsonl", "--label", "mood", *STEP, "--out", tmp_path / "run"))
    stored = json.loads((tmp_path / "run" / "config.json").read_text())["data"]
    assert (stored["packing"], stored["label"]) == ("lines", "mood")
    done = sedd("data", "prepare", tmp_path / "moods.jsonl", "--label", "mood", "--out", tmp_path / "out", "--json")
    ok(done)
    assert json.loads(done.stdout)["labels"] == ["calm", "loud"]


def test_the_configuration_of_a_model_trains_another(sedd: Sedd, tmp_path: Path) -> None:
    """Of a model in the box, and of a run with labels; what follows from the data is taken from the new data."""
    (tmp_path / "lines.txt").write_text("".join(f"the cat sat on {i} mats\n" for i in range(60)))
    stored = Path(models.built_in_model("stories") or "") / "config.json"
    words = ["--tokenizer", "chars", "--batch-size", 4, "--set", "model.heads=2", *STEP]
    ok(sedd("train", tmp_path / "lines.txt", "--config", stored, *words, "--out", tmp_path / "run"))
    old, new = (json.loads(path.read_text()) for path in (stored, tmp_path / "run" / "config.json"))
    assert (new["objective"], new["model"]["seq_len"]) == (old["objective"], old["model"]["seq_len"])
    assert "vocab_size" not in new


def test_integers_come_in_lists(sedd: Sedd, tmp_path: Path) -> None:
    """As JSON, JSON lines, a column or text, with rests and with 67.0: the same tokens, and samples like them."""
    rows = [[60, 62, 67, -1]] * 20
    (tmp_path / "jsb.json").write_text(json.dumps([[60, 62, 67.0, -1], *rows[1:]]))
    (tmp_path / "jsb.jsonl").write_text("".join(f"{row}\n" for row in rows))
    (tmp_path / "songs.jsonl").write_text("".join(json.dumps({"n": 4, "notes": row}) + "\n" for row in rows))
    (tmp_path / "jsb.txt").write_text("60 62 67.0 -1\n" * 20)
    pyarrow.parquet.write_table(pyarrow.table({"n": [4] * 20, "notes": rows}), tmp_path / "jsb.parquet")
    shards = set()
    for name in ("jsb.json", "jsb.jsonl", "songs.jsonl", "jsb.txt", "jsb.parquet"):
        words = ["--packing", "lines", "--tokenizer", "ints", "--out", tmp_path / f"prepared {name}", "--json"]
        done = sedd("data", "prepare", tmp_path / name, *words)
        ok(done)
        shards.add((tmp_path / f"prepared {name}" / "tokens-00000.bin").read_bytes())
        assert json.loads(done.stdout)["vocab_size"] == 69  # -1 … 67
    assert len(shards) == 1
    run = tmp_path / "run"
    done = sedd("train", tmp_path / "jsb.json", "--packing", "lines", *STEP, "--out", run)
    ok(done)
    assert "tokenizer ints" in done.stderr
    shown = sedd("infill", run, "60 62 {1} -1", "--json")
    ok(shown)
    first, *_, last = json.loads(shown.stdout)["text"].split()
    assert (first, last) == ("60", "-1")


def test_what_is_no_list_of_integers_is_one_sentence(sedd: Sedd, tmp_path: Path) -> None:
    contents = {
        "a.json": ("[[60, 1.5]]", "1.5"),
        "b.json": ("[[[60], [62]]]", "record 1"),
        "c.jsonl": ('[60]\n"text"\n', "record 2"),
        "d.json": ('{"train": [[60]]}', "an array"),
        "e.jsonl": ('{"notes": [60]}\n{"notes": ["C"]}\n', "record 2"),
        "f.json": ("[60, 62]", "record 1"),
        "g.json": ('[[60], {"notes": [60]}]', "record 2"),
    }
    for name, (content, words) in contents.items():
        (tmp_path / name).write_text(content)
        done = sedd("train", tmp_path / name, "--packing", "lines", *STEP, "--out", tmp_path / "run")
        assert done.returncode == 2
        assert words in done.stderr
        assert "[60, 62, -1]" in done.stderr
