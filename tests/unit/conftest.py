import lzma
import os
from pathlib import Path

import pytest

CORPORA = Path(os.environ.get("SEDD_TEST_DATA") or Path(__file__).parents[3] / "shared" / "data")


@pytest.fixture(scope="session")
def corpora() -> Path:
    """A folder of real corpora, which is no part of the package."""
    if not (CORPORA / "domains").is_dir():
        pytest.skip(f"no corpora at {CORPORA}; name their folder in SEDD_TEST_DATA")
    return CORPORA


@pytest.fixture(scope="session")
def gpt2(corpora: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """GPT-2's tokenizer files, unpacked."""
    folder = tmp_path_factory.mktemp("gpt2")
    for name in ("encoder.json", "vocab.bpe", "tokenizer.json"):
        (folder / name).write_bytes(lzma.decompress((corpora / "gpt2" / f"{name}.xz").read_bytes()))
    return folder
