"""Two commands that write the same folder at once: one succeeds, and its result is whole; the other says why not."""

import json
from pathlib import Path

from runs import SMALL, Sedd, ok

from sedd import data
from sedd.training import checkpoint

PAIRS = """
import json
import traceback

def start(words, gate, err):
    os.read(gate, 1)  # ends when the parent closes the other end: both start at once
    for stream in (1, 2):
        os.dup2(os.open(err, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
    sys.argv = ["sedd", *words]
    try:
        main()
    except SystemExit as end:
        return end.code or 0
    except BaseException:
        traceback.print_exc()
        return 1
    return 0

def both(first, second):
    gate, opener = os.pipe()
    children = []
    for number, words in enumerate((first, second)):
        children.append(os.fork())
        if children[-1] == 0:
            os.close(opener)
            os._exit(start(words, gate, f"{err}-{number}"))
    os.close(opener)
    os.close(gate)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    return [(code, open(f"{err}-{number}").read()) for number, code in enumerate(codes)]

print(json.dumps([both(*pair) for pair in pairs]), flush=True)
os._exit(0)
"""
FILES = {*checkpoint.MODEL_FILES, checkpoint.MANIFEST, "card.json", "README.md"}
Ends = list[tuple[int, str]]


def run_pairs(sedd: Sedd, tmp_path: Path, pairs: list[list[list[object]]]) -> list[Ends]:
    """Start the two commands of each pair in processes of their own; return exit codes and output."""
    words = [[list(map(str, command)) for command in pair] for pair in pairs]
    done = sedd("--version", before=f"pairs, err = {words!r}, {str(tmp_path / 'pair')!r}\n{PAIRS}")
    ok(done)
    return [[(code, text) for code, text in pair] for pair in json.loads(done.stdout)]


def one_wins(ends: Ends) -> int:
    """Return which of two commands succeeded; the other ended with one sentence."""
    assert sorted(code for code, _ in ends) == [0, 2], ends
    winner = [code for code, _ in ends].index(0)
    sentences = [
        line for line in ends[1 - winner][1].splitlines() if " in use by " in line or "not an empty folder" in line
    ]
    assert len(sentences) == 1, ends
    assert "--out" in sentences[0]
    assert "Traceback" not in ends[1 - winner][1]
    return winner


def test_two_exports(sedd: Sedd, words_run: Path, tmp_path: Path) -> None:
    dtypes, place = ("int8", "float32"), tmp_path / "place"
    outs = [place / f"out-{number}" for number in range(6)]
    pairs = [[["export", words_run, "--out", out, "--dtype", dtype] for dtype in dtypes] for out in outs]
    for out, ends in zip(outs, run_pairs(sedd, tmp_path, pairs), strict=True):
        winner = one_wins(ends)
        assert checkpoint.read_header(out).dtype == dtypes[winner]
        assert checkpoint.corruption(out, checkpoint.MODEL_FILES) is None
        assert (out / "README.md").read_text().startswith("---")
        assert {path.name for path in out.iterdir()} == {
            *checkpoint.MODEL_FILES,
            "manifest.json",
            *("card.json", "README.md"),
        }
    assert sorted(place.iterdir()) == outs


def test_two_preparations(sedd: Sedd, corpus: Path, tmp_path: Path) -> None:
    tokenizers, place = ("bytes", "chars"), tmp_path / "place"
    pair = [["data", "prepare", corpus, "--out", place / "out", "--tokenizer", name] for name in tokenizers]
    (ends,) = run_pairs(sedd, tmp_path, [pair])
    winner = one_wins(ends)
    assert data.Index.read(place / "out").vocab_size == (256, 21)[winner]
    assert [path.name for path in place.iterdir()] == ["out"]


def test_two_runs_that_prepare_the_same_data(sedd: Sedd, corpus: Path, tmp_path: Path) -> None:
    """The cache is filled once; neither run fails."""
    text = tmp_path / "words.txt"
    text.write_text(corpus.read_text()[:9000])
    pair = [["train", text, *SMALL, "--steps", 1, "--out", tmp_path / name] for name in "ab"]
    (ends,) = run_pairs(sedd, tmp_path, [pair])
    assert [code for code, _ in ends] == [0, 0], ends
