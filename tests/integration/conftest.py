import random
from pathlib import Path

import pytest
from runs import SMALL, Sedd, ok

NONSENSE = "the cat sat on a mat and saw two small birds fly over old red houses near water"


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of about 30,000 characters of random words."""
    draw, words = random.Random(0), NONSENSE.split()
    path = tmp_path_factory.mktemp("corpus") / "words.txt"
    path.write_text("\n".join(" ".join(draw.choices(words, k=8)) for _ in range(900)) + "\n")
    return path


@pytest.fixture(scope="session")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shelf")


@pytest.fixture
def words_run(sedd: Sedd, shelf: Path, corpus: Path) -> Path:
    """A run of one step."""
    if not (shelf / "words").exists():
        ok(sedd("train", corpus, *SMALL, "--steps", "1", "--tokenizer", "chars", "--out", shelf / "words"))
    return shelf / "words"
