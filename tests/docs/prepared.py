"""The folder in which the commands of the documentation run: texts, tables, tiny runs, and a Hub on this machine."""

import gzip
import json
import random
import shutil
import string
import struct
from pathlib import Path

import local_hub
import numpy as np
import publications
import tiny_judges
from commands import Commands
from shell_blocks import ROOT
from shortened import TINY

from sedd.tokenizer import BPE

NONSENSE = "the cat sat on a mat and saw two small birds fly over old red houses near water"
ALPHABET = string.ascii_letters + string.digits + " .,;:!?'\"()-\n"
SMILES = ["CCO", "c1ccccc1", "CC(=O)O", "CCN", "CC(C)O", "c1ccncc1", "CCOC", "C1CCCCC1", "CC#N", "OCCO"]

RUNS: dict[str, list[str]] = {  # trained with `TINY`; a page that trains one of that name replaces it
    "run": ["book.txt", "--objective", "lambda-dce"],
    "other": ["book.txt", "--process", "uniform"],
    "judge-run": ["book.txt", "--seq-len", "256", "--objective", "autoregressive"],
    "long": [
        "corpus",
        "--seq-len",
        "1024",
        "--objective",
        "lambda-dce",
    ],  # of several documents, so with an end of text
}
RUNS_OF_PAGES: dict[str, dict[str, list[str]]] = {  # pages that need another run of that name
    "docs/guides/published.md": {"run": ["book.txt", "--set", "model.architecture=reference"]},
}


def sentences(count: int, seed: int = 0) -> str:
    draw, words = random.Random(seed), NONSENSE.split()
    return "".join(" ".join(draw.choices(words, k=8)).capitalize() + ".\n" for _ in range(count))


def write_texts(folder: Path) -> None:
    """Write the files that pages name: English, records, tables, molecules, a loss, keys."""
    draw = random.Random(1)
    book = ALPHABET + sentences(600)
    score_entropy = (ROOT / "examples/audited_losses.py").read_text().split("def softmax_formula")[0]
    lines = {
        "book.txt": book,
        "plays.txt": book,
        "test.txt": sentences(40, seed=2),
        "human.txt": sentences(60, seed=3).lower().replace(".", ""),
        "sentences.txt": "the cat sat\nbirds fly over water\n",
        "templates.txt": "The {8} sat.\n{4} cat\n",
        "molecules.smi": "".join("".join(draw.choices(SMILES, k=5)) + "\n" for _ in range(200)),
        "dna.txt": "".join("".join(draw.choices("ACGT", k=200)) + "\n" for _ in range(200)),
        "keys": "secret\n",
        "my_loss.py": score_entropy.replace("def score_entropy", "def name"),
    }
    lines["train.smi"] = lines["molecules.smi"]
    for file, text in lines.items():
        (folder / file).write_text(text)
    labels = ["fruit", "animal"]
    rows = [(sentence, labels[i % 2]) for i, sentence in enumerate(sentences(200, seed=4).splitlines())]
    reviews = "".join(json.dumps({"text": text, "mood": label}) + "\n" for text, label in rows)
    (folder / "reviews.jsonl").write_text(reviews)
    (folder / "labelled.csv").write_text("text,label\n" + "".join(f"{text},{label}\n" for text, label in rows))
    (folder / "corpus").mkdir()
    for i in range(2):
        (folder / "corpus" / f"part-{i}.txt").write_text(sentences(150, seed=5 + i))
    (folder / "corpora").mkdir()
    for file in ("lambada-test", "wikitext2-train", "ptb.test", "wikitext103-test", "lm1b-test"):
        text = sentences(800, seed=7)
        (folder / "corpora" / file).with_suffix(".txt" if "." not in file else ".test.txt").write_text(text)


def write_token_files(folder: Path) -> None:
    """Write token files of Megatron, datatrove and dolma, and the tokenizer of their ids."""
    tokenizer = BPE.train([sentences(100)], 300)
    (folder / "tokenizer.json").write_text(tokenizer.definition)
    documents = [tokenizer.encode(line) for line in sentences(200).splitlines()]
    lengths = [len(document) for document in documents]
    ids = np.concatenate([np.asarray(document) for document in documents]).astype("<u2")
    ends = np.cumsum(lengths)
    (folder / "nanoset").mkdir()
    for file in ("corpus.bin", "part-00.npy", "nanoset/corpus.ds"):
        (folder / file).write_bytes(ids.tobytes())
    index = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, len(lengths), len(lengths) + 1)
    index += np.asarray(lengths, "<i4").tobytes() + ((ends - lengths) * 2).astype("<i8").tobytes()
    (folder / "corpus.idx").write_bytes(index + np.arange(len(lengths) + 1, dtype="<i8").tobytes())
    (folder / "nanoset/corpus.ds.index").write_bytes(ends.astype("<u8").tobytes())
    (folder / "nanoset/corpus.ds.metadata").write_text(f"openai-community/gpt2|2\n{len(ids)}\n{len(ids)} T")
    rows = "".join(f"{end - size},{end},id,a/b.json.gz,{i}\r\n" for i, (end, size) in enumerate(zip(ends, lengths)))  # noqa: B905
    (folder / "part-00.csv.gz").write_bytes(gzip.compress(rows.encode()))


def train(sedd: Commands, folder: Path, name: str, words: list[str]) -> None:
    source, *options = words
    done = sedd("train", folder / source, "--out", folder / name, "--seq-len", 64, *TINY, *options)
    assert done.returncode == 0, done.stderr
    (folder / name / "PREPARED").touch()


def write(folder: Path, sedd: Commands) -> Path:
    """Write everything that pages share into ``folder``."""
    folder.mkdir(parents=True)
    write_texts(folder)
    write_token_files(folder)
    for name, words in RUNS.items():
        train(sedd, folder, name, words)
    (folder / "demo").mkdir()
    shutil.copytree(folder / "run", folder / "demo" / "run")
    judge = tiny_judges.save(folder / "judge", context=256)
    tiny_judges.save_gguf(folder / "model.gguf", judge)
    for file in ("texts.jsonl", "samples.jsonl"):
        done = sedd("sample", folder / "run", "-n", 4, "--steps", 4, "--out", folder / file)
        assert done.returncode == 0, done.stderr
    for file in ("a.jsonl", "b.jsonl"):
        done = sedd("quality", folder / "texts.jsonl", "--judge", folder / "judge-run", "--out", folder / file)
        assert done.returncode == 0, done.stderr
    return folder


def fill_hub(hub: local_hub.Hub, folder: Path) -> None:
    """Put tiny models under the names that pages download."""
    publications.folder(folder / "published", publications.KINDS[0])
    contents = {
        "louaaron/sedd-small": folder / "published",
        **dict.fromkeys(("gpt2-large", "gpt2-large/revision", "gpt2-large/tree"), folder / "judge"),
    }  # of a name without an owner, the path of a request has the next word in the owner's place
    for name, source in contents.items():
        hub.files[name] = {path.name: path.read_bytes() for path in source.iterdir() if path.is_file()}


def arrange(shared: Path, folder: Path, page: str, sedd: Commands) -> None:
    """Copy what was prepared into the folder of one page, with the runs that this page needs."""
    shutil.copytree(shared, folder)
    for name in ("examples", "benchmarks", "experiments", "notebooks"):
        (folder / name).symlink_to(ROOT / name)
    for name, words in RUNS_OF_PAGES.get(page, {}).items():
        shutil.rmtree(folder / name)
        train(sedd, folder, name, words)
