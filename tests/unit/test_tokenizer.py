"""Tokenizers: encoding is lossless, ids lie in the vocabulary, saved tokenizers load."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sedd import tokenizer
from sedd.tokenizer import BPE, Bytes, Characters, Integers, Tokenizer, base, bpe, build_tokenizer, load_tokenizer

Refuses = Callable[..., None]
TEXTS = ["the cat sat on the mat\n", "the dog <|endoftext|> sat\t too", "naïve 漢字 🎉 the the the"]
ANY = st.text(st.characters(exclude_categories=["Cs"]))  # all of Unicode except halves of surrogate pairs

KINDS: list[Tokenizer] = [
    Bytes(),
    Characters.fit(TEXTS),
    BPE.train(iter(TEXTS), 280),
    Integers(size=12),
]
WORDS = BPE.train(iter(["ba an na ab nab ban  a\nb", "it's nan's"] * 9), 290)
"""Has tokens of several characters, spaces included."""
TEXT_OF = {"ints": "3 1 4 11 5"}


def name(made: Tokenizer) -> str:
    return made.kind


def text_of(made: Tokenizer) -> str:
    return TEXT_OF.get(made.kind, "".join(TEXTS))


@given(ANY)
def test_bytes_and_bpe_are_lossless_on_any_text(text: str) -> None:
    for made in (KINDS[0], KINDS[2], KINDS[2].with_specials(True, True)):
        ids = made.encode(text)
        assert made.decode(ids) == text
        assert ids.dtype == np.int64
        assert ((ids >= 0) & (ids < made.base_size)).all()


@given(st.text(st.sampled_from("".join(TEXTS))))
def test_characters_are_lossless_on_their_alphabet(text: str) -> None:
    made = KINDS[1]
    assert made.decode(made.encode(text)) == text
    assert len(made.encode(text)) == len(text)


@given(st.text(st.sampled_from("abn  \n'st1.é漢"), max_size=40), st.integers(1, 4))
def test_parts_of_a_text_have_the_tokens_of_the_whole(text: str, part: int) -> None:
    """Wherever it is cut; trained on words with their spaces, so that a cut elsewhere changes tokens."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bpe, "PART", part)
        assert "".join(bpe._cut(text)) == text
        whole = WORDS._model.encode(text, add_special_tokens=False).ids
        assert WORDS.encode(text).tolist() == whole
    made = Characters.fit(["abn  \n'st1.é漢"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base, "PART", part)
        assert made.encode(text).tolist() == [made.alphabet.index(character) for character in text]


def test_long_texts_are_cut(monkeypatch: pytest.MonkeyPatch, refuses: Refuses) -> None:
    monkeypatch.setattr(bpe, "PART", 3)
    monkeypatch.setattr(base, "PART", 3)
    assert bpe._cut("a b c, d  e f g") == ["a b", " c, d  e", " f g"]
    assert bpe._cut("") == [""]
    refuses(lambda: Characters.fit(["ab"]).encode("abababaz"), "character 'z' at position 7")


@pytest.mark.parametrize(
    "parts",
    [
        {"normalizer": {"type": "Replace", "pattern": {"String": "a b"}, "content": "ab"}},
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}},
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}},
        {"pre_tokenizer": {"type": "WhitespaceSplit"}},
        {"pre_tokenizer": None},
        {
            "added_tokens": [
                {"id": 300, "content": "a b", "special": False}
                | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            ]
        },
    ],
    ids=["normalizer", "prefix space", "no pattern", "other", "none", "added token"],
)
def test_texts_of_other_tokenizers_are_not_cut(monkeypatch: pytest.MonkeyPatch, parts: dict[str, object]) -> None:
    """Those for which parts of a text may have other tokens than the whole."""
    made, text = BPE(definition=edited(WORDS, **parts)), "ba b an a ba a b"
    assert WORDS._splits_words
    monkeypatch.setattr(bpe, "PART", 1)
    assert not made._splits_words
    assert made.encode(text).tolist() == made._model.encode(text, add_special_tokens=False).ids


@given(st.lists(st.integers(0, 11)))
def test_integers_are_their_own_ids(ids: list[int]) -> None:
    made = KINDS[3]
    assert made.encode(made.decode(ids)).tolist() == ids
    assert made.encode(" \n".join(map(str, ids))).tolist() == ids


@pytest.mark.parametrize("made", KINDS, ids=name)
def test_a_batch_encodes_like_single_texts(made: Tokenizer) -> None:
    text = text_of(made)
    for ids in made.encode_batch([text, "", text]):
        assert ids.dtype == np.int64
        assert ids.tolist() in ([], made.encode(text).tolist())


@pytest.mark.parametrize("made", KINDS, ids=name)
def test_special_ids_follow_the_vocabulary_and_have_no_text(made: Tokenizer) -> None:
    both = made.with_specials(eos=True, pad=True)
    assert (both.eos, both.pad, both.vocab_size) == (made.vocab_size, made.vocab_size + 1, made.vocab_size + 2)
    assert both.with_specials(eos=True, pad=True) == both
    assert made.with_specials(eos=False, pad=False) == made
    assert made.with_specials(eos=False, pad=True).pad == made.vocab_size
    ids = both.encode(text_of(made)).tolist()
    assert ids == made.encode(text_of(made)).tolist()
    assert both.decode([both.eos, *ids, both.pad, both.pad]) == text_of(made)
    assert both.tokens([both.eos, both.pad]) == ["<eos>", "<pad>"]


@pytest.mark.parametrize("made", KINDS, ids=name)
def test_tokens_are_printable_one_per_id(made: Tokenizer) -> None:
    ids = made.encode(text_of(made))
    pieces = made.tokens(ids)
    assert len(pieces) == len(ids)
    assert all(piece and piece.isprintable() for piece in pieces)
    assert all(made.tokens(range(made.vocab_size)))


@pytest.mark.parametrize("made", [*KINDS, *(kind.with_specials(True, True) for kind in KINDS)], ids=name)
def test_saved_tokenizers_load(made: Tokenizer, tmp_path: Path) -> None:
    made.save(tmp_path / "a")
    again = load_tokenizer(tmp_path / "a")
    assert again == made
    assert again.fingerprint() == made.fingerprint()
    again.save(tmp_path / "b")
    files = {file.name: file.read_bytes() for file in (tmp_path / "b").iterdir()}
    assert files == made.files() == {file.name: file.read_bytes() for file in (tmp_path / "a").iterdir()}


def test_different_tokenizers_have_different_fingerprints() -> None:
    every = [*KINDS, *(kind.with_specials(True, False) for kind in KINDS), Integers(size=13), Characters(alphabet="ab")]
    assert len({made.fingerprint() for made in every}) == len(every)


def test_training_is_the_same_in_every_process() -> None:
    code = f"from sedd.tokenizer import BPE; print(BPE.train(iter({TEXTS!r}), 280).fingerprint())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == KINDS[2].fingerprint()


def test_negative_integers_come_back(tmp_path: Path) -> None:
    """The least one has id 0, also after loading; without one, ids and the saved form are as ever."""
    made = Integers.fit(["60 -2", "67.0 0"]).with_specials(eos=True, pad=True)
    assert (made.low, made.size) == (-2, 70)
    assert made.encode("-2 0 67").tolist() == made.encode_integers([-2, 0, 67]).tolist() == [0, 2, 69]
    made.save(tmp_path)
    assert load_tokenizer(tmp_path).decode([0, 69, 71, 2]) == "-2 67 0"
    assert load_tokenizer(tmp_path).tokens([0, 70]) == ["-2", "<eos>"]
    assert b'"low"' not in Integers.fit(["3 1"]).files()[tokenizer.CONFIG]


def test_torch_is_not_imported() -> None:
    code = "import sys, sedd.tokenizer, sedd.data; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_invalid_utf8_is_replaced() -> None:
    assert Bytes().decode([0xE6, 65]) == "�A"
    assert Bytes().tokens([0xE6, 65, 10]) == ["\\xe6", "A", "\\n"]


def test_refusals(refuses: Refuses, tmp_path: Path) -> None:
    made = Characters.fit(["abc"])
    refuses(lambda: made.encode("abxc"), "'x'", "position 2", "bytes")
    refuses(lambda: made.encode("a🎉"), "'🎉'", "position 1")
    refuses(lambda: made.decode([3]), "id 3", "mask", "0..2")
    refuses(lambda: made.decode([-1]), "id -1")
    refuses(lambda: made.decode([0.5]), "float64", "integers")
    refuses(lambda: Characters.fit([]), "no character")
    refuses(lambda: Characters(alphabet="ba"), "'ba'", "in order")
    refuses(lambda: Bytes(eos=300), "eos is 300")
    for kind in (Bytes(), KINDS[2]):
        refuses(lambda kind=kind: kind.encode("ab\ud800"), "position 2", "surrogate")
    refuses(lambda: BPE.train(iter(TEXTS), 100), "vocab_size of bpe is 100", "256")
    refuses(lambda: BPE(definition="{}"), "damaged")
    refuses(lambda: BPE.read(tmp_path / "none.json"), "none.json", "could not be read")
    refuses(lambda: BPE.gpt2(tmp_path / "encoder.json", tmp_path / "vocab.bpe"), "encoder.json")
    refuses(lambda: Integers(size=0), "size is 0")
    refuses(lambda: Integers.fit(["  "]), "no integer")
    refuses(lambda: Integers(size=3).encode("1 2 3"), "integer 3", "0..2")
    refuses(lambda: Integers(size=3).encode("1 -2"), "integer -2", "0..2")
    for text in ("1.5", "--1", "1e3", "٣"):
        refuses(lambda text=text: Integers(size=3).encode(text), f"{text!r}", "67 and -1")
    refuses(lambda: Integers(size=3, low=1), "low is 1")
    refuses(lambda: Integers(size=3).encode("9" * 30), "2⁶³")


def test_damaged_files_are_refused(refuses: Refuses, tmp_path: Path) -> None:
    refuses(lambda: load_tokenizer(tmp_path), tokenizer.CONFIG, "No such file")
    config = tmp_path / tokenizer.CONFIG
    for content, word in [
        ("{", "cannot be loaded"),
        ("[]", "list"),
        ('{"format": 1, "kind": "words"}', "'words'"),
        ('{"format": 2, "kind": "bytes"}', "format 2"),
        ('{"format": 1, "kind": "chars", "eos": null, "pad": null}', "cannot be loaded"),
        ('{"format": 1, "kind": "chars", "alphabet": "aa", "eos": null, "pad": null}', "cannot be loaded"),
        ('{"format": 1, "kind": "bytes", "eos": "x", "pad": null}', "cannot be loaded"),
        ('{"format": 1, "kind": "ints", "size": "x", "eos": null, "pad": null}', "cannot be loaded"),
        ('{"format": 1, "kind": "bpe", "eos": null, "pad": null}', tokenizer.DEFINITION),
    ]:
        config.write_text(content)
        refuses(lambda: load_tokenizer(tmp_path), word, tokenizer.CONFIG)
    KINDS[2].save(tmp_path)
    (tmp_path / tokenizer.DEFINITION).write_text("{}")
    refuses(lambda: load_tokenizer(tmp_path), "damaged")


def test_definitions_on_which_the_library_panics_or_aborts_are_refused(refuses: Refuses) -> None:
    """Found by fuzzing: a merge shorter than the prefix of later pieces, and ids so large that lists fill memory."""

    def define(**model: object) -> Callable[[], BPE]:
        parts = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]], **model}
        made = BPE.train(iter(["a"]), 256)
        return lambda: BPE(definition=edited(made, model=parts))

    assert define()().base_size == 3
    refuses(define(continuing_subword_prefix="##"), "definition of the tokenizer is damaged")
    refuses(define(vocab={"a": 0, "b": 1, "ab": 2**31}), "the vocabulary of the tokenizer is 2147483649", "1,048,576")


def test_tokenizers_are_built_from_specs(tmp_path: Path) -> None:
    texts = lambda: iter(TEXTS)  # noqa: E731
    KINDS[2].save(tmp_path)
    assert build_tokenizer("bytes", texts) == Bytes()
    assert build_tokenizer("chars", texts) == KINDS[1]
    assert build_tokenizer("bpe:280", texts) == KINDS[2]
    assert build_tokenizer("ints", lambda: iter(["3 11", "5"])) == KINDS[3]
    assert build_tokenizer("ints:12", texts) == KINDS[3]
    assert build_tokenizer(str(tmp_path), texts) == KINDS[2]
    assert build_tokenizer(str(tmp_path / "tokenizer.json"), texts) == KINDS[2]


def test_unknown_specs_are_refused(refuses: Refuses, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for spec in ("words", "bpe", "bpe:many", "chars:3", str(tmp_path / "nowhere")):
        refuses(lambda spec=spec: build_tokenizer(spec, lambda: iter(())), repr(spec), "bytes, chars, bpe:SIZE")
    monkeypatch.setenv("SEDD_GPT2", str(tmp_path))
    refuses(
        lambda: build_tokenizer("gpt2", lambda: iter(())),
        str(tmp_path / "tokenizer.json"),
        "download",
        "SEDD_GPT2",
    )


def edited(made: BPE, **parts: object) -> str:
    return json.dumps({**json.loads(made.definition), **parts})


def test_a_foreign_tokenizer_file(tmp_path: Path) -> None:
    """Its end-of-text token is used, normalization makes it lossy, its truncation and padding are dropped."""
    made = KINDS[2]
    assert isinstance(made, BPE)
    end = {"id": 280, "content": "<|endoftext|>", "special": True}
    end |= dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    cut = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    path = tmp_path / "tokenizer.json"
    path.write_text(edited(made, added_tokens=[end], truncation=cut))
    own = BPE.read(path)
    assert (own.eos, own.vocab_size, own.is_lossless) == (280, 281, True)
    assert own.with_specials(eos=True, pad=False) == own
    assert own.encode(TEXTS[1]).tolist() == made.encode(TEXTS[1]).tolist()  # <|endoftext|> inside a text is text
    lower = BPE(definition=edited(made, normalizer={"type": "Lowercase"}))
    assert not lower.is_lossless
    assert lower.decode(lower.encode("THE")) == "the"
    assert made.is_lossless


def test_gpt2_from_either_form(gpt2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEDD_GPT2", str(gpt2))
    made = build_tokenizer("gpt2", lambda: iter(()))
    other = BPE.gpt2(gpt2 / "encoder.json", gpt2 / "vocab.bpe")
    assert made.encode("Hello world").tolist() == [15496, 995]
    for one in (made, other):
        assert (one.vocab_size, one.eos, one.pad, one.is_lossless) == (50257, 50256, None, True)
        for text in TEXTS:
            assert one.encode(text).tolist() == made.encode(text).tolist()
            assert one.decode(one.encode(text)) == text
