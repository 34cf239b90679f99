"""Text files that are almost UTF-8, or have line ends of two characters: what is read, and what the user is shown."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers.pre_tokenizers import ByteLevel

from sedd.data import TokenBlocks, prepare, prepare_cached, read_documents, readers
from sedd.data.text_file import TextEncoding
from sedd.tokenizer import BPE, Bytes, Ids, Tokenizer, bpe
from sedd.training import sizing
from sedd.training.config import DataConfig, RunConfig

WORDS = "once upon a time a naïve cat sat in 漢字 and ate\n"
MADE = BPE.train(iter([WORDS * 9]), 300)


def raw(tokenizer: Tokenizer, ids: Ids) -> bytes:
    """Return the bytes that the tokens stand for, one by one."""
    if isinstance(tokenizer, Bytes):
        return bytes(ids.tolist())
    alphabet = sorted(ByteLevel.alphabet())
    others = iter(letter for letter in alphabet if ord(letter) > 255)
    values = {chr(byte) if chr(byte) in alphabet else next(others): byte for byte in range(256)}
    assert isinstance(tokenizer, BPE)
    return bytes(values[letter] for id in ids.tolist() for letter in tokenizer._model.id_to_token(id))


@given(st.lists(st.one_of(st.binary(max_size=4), st.just(WORDS.encode())), max_size=12).map(b"".join))
def test_bpe_encodes_any_bytes(content: bytes) -> None:
    """The same ones in parts as at once; a text of Unicode alone has the tokens that the library gives it."""
    text = content.decode(errors="surrogateescape")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bpe, "PART", 20)
        cut = MADE.encode(text)
    assert raw(MADE, cut) == MADE.decode_bytes(cut) == content
    assert Bytes().decode_bytes(Bytes().encode(text)) == content
    assert MADE.encode(text).tolist() == cut.tolist()
    if not any("\udc80" <= letter <= "\udcff" for letter in text):
        assert cut.tolist() == MADE._model.encode(text).ids


def test_the_vocabulary_is_fitted_to_what_is_unicode() -> None:
    marked = [f"{line}\udce9" for line in [WORDS] * 9]
    assert BPE.train(iter(marked), 300) == BPE.train(iter([WORDS] * 9), 300)


def odd(every: int, size: int = 20_000) -> bytes:
    """Return a text of ``size`` bytes or a little more, in which one of ``every`` bytes is not UTF-8."""
    block = (WORDS.encode() * (every // len(WORDS.encode()) + 1))[: every - 1].decode(errors="ignore").encode()
    return (block.ljust(every - 1, b".") + b"\xe9") * (size // every + 1)


@pytest.mark.parametrize("made", [MADE, Bytes()])
@pytest.mark.parametrize("workers", [1, 3])
def test_nearly_clean_text_keeps_its_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], made: Tokenizer, workers: int
) -> None:
    """Across pieces, in parallel; the count, the first place and the option are shown, now and from the cache."""
    monkeypatch.setattr(readers, "PIECE", 997)
    content = odd(1999)
    file = tmp_path / "a.txt"
    file.write_bytes(content)
    line = content[:1998].count(b"\n") + 1
    for _ in range(2):
        folder = prepare_cached([file], "x", lambda: made, cache=tmp_path / "cache", workers=workers)
        shown = capsys.readouterr().err.splitlines()
        assert len(shown) == 1
        for words in ("11 of", "0xe9", "offset 1,998,", f"line {line} ", "a.txt", "--encoding latin-1"):
            assert words in shown[0]
    blocks = TokenBlocks.open(folder, 1, "all")
    assert raw(made, blocks.read(np.arange(len(blocks)))[0].ravel()) == content
    assert blocks.index.bytes == len(content)


def test_text_that_is_mostly_not_utf8_needs_bytes(
    tmp_path: Path, refuses: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes(odd(499))
    refuses(lambda: prepare([file], tmp_path / "out", MADE), "1 in 1,000", "offset 498,", "--encoding latin-1")
    prepare([file], tmp_path / "out", Bytes())
    assert "tokenizer of bytes" in capsys.readouterr().err
    lower = BPE(definition=MADE.definition.replace('"normalizer":null', '"normalizer":{"type":"Lowercase"}'))
    file.write_bytes(odd(1999))
    refuses(lambda: prepare([file], tmp_path / "lower", lower), "0xe9 at offset 1,998", "--encoding latin-1")


def test_the_share_of_odd_bytes_is_that_of_all_of_the_file(tmp_path: Path) -> None:
    """Many on the first pages of a book, none on the others."""
    file = tmp_path / "a.txt"
    file.write_bytes(odd(499, 300_000) + odd(10**6, 400_000))
    assert prepare([file], tmp_path / "out", MADE).bytes == file.stat().st_size
    chosen = sizing.choose_tokenizer(RunConfig(DataConfig([str(file)])), {}, "cpu")
    assert chosen["data"]["tokenizer"].startswith("bpe:")


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_line_ends_crlf_are_read_as_lf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """All of them, also next to other line ends; carriage returns that end no line stay."""
    monkeypatch.setattr(readers, "PIECE", size)
    (tmp_path / "a.txt").write_bytes(b"one\r\ntwo\nthree\rfour\r\r\n\r\nfive\r")
    for kind in ("bytes", "chars"):
        encoding = TextEncoding.for_tokenizer(kind)
        found = "".join(read_documents([tmp_path / "a.txt"], encoding=encoding))
        assert found == "one\ntwo\nthree\rfour\r\n\nfive\r"
