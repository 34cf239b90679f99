"""Evaluation protocols: detokenization, packing, and which results can be compared in one table."""

import dataclasses
import json
import lzma
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given as over
from hypothesis import strategies as st

from sedd import data, evaluation, tokenizer
from sedd.data import readers
from sedd.evaluation import detokenize, protocols
from sedd.evaluation.corpus import Corpus
from sedd.evaluation.protocols import DATASETS, DROP_REMAINDER, KEEP_REMAINDER, PROTOCOLS, Packing, Protocol
from sedd.loading import LoadedModel
from sedd.training.config import DataConfig, ModelConfig, RunConfig

# Golden strings: tokenized text, and the result of the published rules, written by hand ----------------------


@pytest.mark.parametrize(
    ("tokenized", "text"),
    [
        (" He had a guest @-@ starring role in 2000 . \n", " He had a guest-starring role in 2000.\n"),
        ("about 1 @,@ 000 @.@ 5 metres\n", "about 1,000.5 metres\n"),
        (
            ' a role as " Craig " in " Teddy \'s Story " ; he starred\n',
            ' a role as "Craig" in "Teddy\'s Story"; he starred\n',
        ),
        ("one ( two three ) four [ five ] { six }\n", "one (two three) four [five] {six}\n"),
        ("the actors ' guild , which : yes ! no ? then\n", "the actors' guild, which: yes! no? then\n"),
        (" = = Career = = \n", " == Career ==\n"),
        (" = = = = Deep = = = = \n", " ==== Deep ====\n"),
        ("at 20 ° C , yes\n", "at 20°C, yes\n"),
        ("in N of N cases\n", "in 1 of 1 cases\n"),
    ],
)
def test_wikitext(tokenized: str, text: str) -> None:
    assert detokenize.wikitext(tokenized) == text


@pytest.mark.parametrize(
    ("tokenized", "text"),
    [
        ("no it was n't black monday", "no it wasn't black monday"),
        ("the exchange 's traders ' floor", "the exchange's traders' floor"),
        ("plunged N points N N times", "plunged 1 points 1 1 times"),
        ("$ N million or # N and 1\\/2", "$1 million or #1 and 1/2"),
        ("the <unk> firms", "the ? firms"),
        ("fell N", "fell N"),  # the published rule wants a space behind
    ],
)
def test_ptb(tokenized: str, text: str) -> None:
    assert detokenize.ptb(tokenized) == text


@pytest.mark.parametrize(
    ("tokenized", "text"),
    [
        ('compared it to " house arrest , " saying', 'compared it to "house arrest," saying'),
        ("I 'm not sure , he said . Then left .", "I'm not sure, he said. Then left."),
        ("Why ? Because ! Really ?", "Why? Because! Really?"),
        ("see http : / / example or https : / / x", "see http://example or https://x"),
        ("SYEED ( AP ) - a and / or b : c ; d", "SYEED (AP) - a and/or b: c; d"),
        ("it cost $ 5 or £ 3 [ sic ]", "it cost $5 or £3 [sic]"),
    ],
)
def test_lm1b(tokenized: str, text: str) -> None:
    assert detokenize.lm1b(tokenized) == text


def test_lambada() -> None:
    assert detokenize.lambada(" “Figured,” he said.\n\nShe left ") == '\n"Figured," he said.\n\nShe left'


def test_rows_of_a_benchmark() -> None:
    """WikiText keeps line ends and empty lines; PTB trims lines and skips empty ones."""
    assert DATASETS["wikitext2"].split_rows(" = A = \n \n b @-@ c . \n") == [" = A =\n", "", " b-c.\n"]
    assert DATASETS["ptb"].split_rows(" it 's \n\n here \n") == ["it's", "here"]


# Packing ------------------------------------------------------------------------------------------------------

ROWS = st.lists(st.lists(st.integers(0, 9), max_size=7).map(np.array), max_size=30)


def joined(rows: list[np.ndarray]) -> list[int]:
    return [int(token) for row in rows for token in row]


@over(ROWS, st.integers(1, 6))
def test_keep_remainder_drops_nothing_and_drop_remainder_only_the_last_tokens(
    rows: list[np.ndarray], length: int
) -> None:
    rows = [row.astype(np.int64) for row in rows]
    whole, stream = KEEP_REMAINDER(rows, length), DROP_REMAINDER(rows, length)
    assert joined(whole) == joined(rows)
    assert all(len(block) == length for block in whole[:-1])
    assert joined(stream) == joined(rows)[: len(joined(rows)) // length * length]


@over(ROWS, st.integers(1, 6), st.integers(1, 4), st.integers(1, 5))
def test_sharded_batches_match_their_definition(rows: list[np.ndarray], length: int, shards: int, size: int) -> None:
    """Every batch of every shard is packed by itself. Rows are assigned to shards in order; the first shards get one
    row more if the number of rows is not a multiple."""
    rows = [row.astype(np.int64) for row in rows]
    expected, start = [], 0
    for shard in range(shards):
        count = len(rows) // shards + (shard < len(rows) % shards)
        part, start = rows[start : start + count], start + count
        for i in range(0, count, size):
            tokens = joined(part[i : i + size])
            expected += tokens[: len(tokens) // length * length]
    assert joined(Packing("", rows=size, shards=shards)(rows, length)) == expected


# Files --------------------------------------------------------------------------------------------------------


def loaded(made: tokenizer.Tokenizer, length: int, **options: str) -> LoadedModel:
    """A model without weights: a tokenizer, a sequence length and the data options."""
    config = RunConfig(data=DataConfig(**options), model=ModelConfig(seq_len=length)).resolved()
    found = object.__new__(LoadedModel)
    vars(found).update(tokenizer=made, config=config, folder=Path("none"))
    return found


def read(path: Path, protocol: Protocol | str, model: LoadedModel, dataset: str | None = None) -> Corpus:
    chosen = evaluation.get_protocol(protocol) if isinstance(protocol, str) else protocol
    return evaluation.read_corpus(str(path), chosen, model, dataset, None)


def test_strict_reads_all_text_and_counts_characters(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("héllo world")
    corpus = read(path, "strict", loaded(tokenizer.Bytes(), 5))
    assert [len(row) for row in corpus.sequences] == [5, 5, 2]
    assert bytes(joined(corpus.sequences)).decode() == "héllo world"
    assert corpus.characters_per_token == pytest.approx(11 / 12)
    assert corpus.bytes_per_token == 1


def test_strict_separates_documents_as_training_does(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("ab", "cde", "f")))
    made = tokenizer.Bytes().with_specials(eos=True, pad=False)
    corpus = read(path, "strict", loaded(made, 100))
    index = data.prepare([path], tmp_path / "shards", made)
    trained = data.TokenBlocks.open(tmp_path / "shards", index.tokens, "all").read(np.array([0]))[0]
    np.testing.assert_array_equal(corpus.sequences[0], trained[0])
    assert corpus.sequences[0].tolist().count(256) == 2


def test_packing_does_not_depend_on_chunk_size_or_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "text.txt"
    path.write_text("".join(f"line {i} of the text\n" for i in range(400)))
    made = tokenizer.BPE.train(readers.read_documents([path]), 300)
    model = loaded(made, 64)
    whole = read(path, "strict", model)
    for workers in (1, 3):
        folder = tmp_path / f"shards-{workers}"
        data.prepare([path], folder, made, workers=workers)
        again = read(folder, "strict", model)
        assert joined(again.sequences) == joined(whole.sequences)
        assert [*map(len, again.sequences)] == [*map(len, whole.sequences)]
    monkeypatch.setattr(readers, "PIECE", 777)
    assert joined(read(path, "strict", model).sequences) == joined(whole.sequences)


def test_sedd_adds_end_of_text_tokens_and_mdlm_does_not(tmp_path: Path) -> None:
    """Blocks of 1024. Protocol sedd: WikiText-2 on train, the others on test. Protocol mdlm: validation."""
    made = tokenizer.Bytes().with_specials(eos=True, pad=False)
    model = loaded(made, 1024)
    train = tmp_path / "wikitext2-train.txt"
    train.write_text(" = A = \n \n some words , and more . \n" * 400)
    corpus = read(train, "sedd", model)
    stream = " = A =\n\0\0 some words, and more.\n\0" * 400  # \0 marks end of text
    tokens = [256 if letter == "\0" else ord(letter) for letter in stream]
    shards = [part.tolist() for part in np.array_split(np.arange(1200), 8)]
    rows = _by_rows(tokens)
    expected = []
    for shard in shards:
        part = [token for number in shard for token in rows[number]]
        expected += part[: len(part) // 1024 * 1024]
    assert joined(corpus.sequences) == expected
    assert (corpus.split, corpus.dataset) == ("train", "wikitext2")
    valid = tmp_path / "wikitext103-valid.tokens"
    valid.write_text(" some words , and more . \n" * 60)
    corpus = read(valid, "mdlm", model)
    assert 256 not in joined(corpus.sequences)
    assert joined(corpus.sequences) == list((" some words, and more.\n" * 60).encode())[:1024]
    assert corpus.split == "validation"


def _by_rows(tokens: list[int]) -> list[list[int]]:
    ends = [i + 1 for i, token in enumerate(tokens) if token == 256]
    return [tokens[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def test_lambada_rows_are_read_from_json(tmp_path: Path) -> None:
    path = tmp_path / "lambada_test.jsonl"
    path.write_text(json.dumps({"text": "“One\n\ntwo” "}) + "\n")
    short = dataclasses.replace(PROTOCOLS["sedd"], length=4)
    corpus = read(path, short, loaded(tokenizer.Bytes().with_specials(eos=True, pad=False), 4))
    assert joined(corpus.sequences) == [*b'\n"One\n\ntwo"', 256]


def test_text8p_scores_a_range_of_characters_in_windows(tmp_path: Path, refuses: Callable[..., object]) -> None:
    path, letters = tmp_path / "text8", "the quick brown fox jumps over the lazy dog " * 3
    path.write_text(letters)
    model = loaded(tokenizer.Characters(alphabet=PROTOCOLS["text8p"].alphabet), 16)
    small = dataclasses.replace(PROTOCOLS["text8p"], char_range=(40, 100), length=16)
    corpus = read(path, small, model)
    assert [len(row) for row in corpus.sequences] == [16, 16, 16]
    assert model.tokenizer.decode(np.concatenate(corpus.sequences)) == letters[40:88]
    refuses(lambda: read(path, "text8p", loaded(model.tokenizer, 256)), "74,000,000", "text8p")
    path.write_text(letters.replace("fox", "FOX"))
    refuses(lambda: read(path, small, model), "'F'", "text8p")
    pairs = tokenizer.BPE.train(iter([letters] * 9), 300)
    path.write_text(letters)
    refuses(lambda: read(path, small, loaded(pairs, 16)), "counts characters", "chars")


def test_lines_are_scored_as_records(tmp_path: Path, refuses: Callable[..., object]) -> None:
    path = tmp_path / "records.txt"
    path.write_text("abc\nb\n\ncab\n")
    letters = tokenizer.Characters(alphabet="abc")
    ignoring = read(path, "strict", loaded(letters, 4, packing="lines", pad="ignore"))
    assert [row.tolist() for row in ignoring.sequences] == [[0, 1, 2], [1], [2, 0, 1]]
    filling = read(path, "strict", loaded(letters.with_specials(eos=False, pad=True), 4, packing="lines"))
    assert [row.tolist() for row in filling.sequences] == [[0, 1, 2, 3], [1, 3, 3, 3], [2, 0, 1, 3]]
    assert filling.characters_per_token == pytest.approx(7 / 12)
    refuses(lambda: read(path, "strict", loaded(letters, 2, packing="lines", pad="ignore")), "3 tokens", "trained on 2")
    refuses(lambda: read(path, "sedd", loaded(letters, 4, packing="lines"), "ptb"), "reads records", "strict")


def test_integer_data_has_no_characters(tmp_path: Path, refuses: Callable[..., object]) -> None:
    path = tmp_path / "counts.npy"
    np.save(path, np.arange(10) % 4)
    corpus = read(path, "strict", loaded(tokenizer.Integers(size=4), 4))
    assert corpus.characters_per_token is None
    assert [len(row) for row in corpus.sequences] == [4, 4, 2]
    refuses(lambda: read(path, "strict", loaded(tokenizer.Bytes(), 4)), "holds integers", "bytes")


def test_single_texts(refuses: Callable[..., object]) -> None:
    model = loaded(tokenizer.Bytes(), 5)
    one, two = evaluation.text_corpora(["ab", "cdefg"], model)
    assert (one.sequences[0].tolist(), len(two.sequences[0])) == ([97, 98], 5)
    refuses(lambda: evaluation.text_corpora(["abcdef"], model), "6 tokens", "trained on 5", "strict")
    refuses(lambda: evaluation.text_corpora(["a", ""], model), "empty")
    refuses(lambda: evaluation.text_corpora(["é"], loaded(tokenizer.Characters(alphabet="ab"), 5)), "'é'", "tokenizer")


def test_protocols_refuse_unsuitable_data(tmp_path: Path, refuses: Callable[..., object]) -> None:
    model = loaded(tokenizer.Bytes().with_specials(eos=True, pad=False), 1024)
    for name in ("wikitext2-test.txt", "ptb.test.txt", "notes.txt", "lm1b-test.txt"):
        (tmp_path / name).write_text("some words\n")
    refuses(lambda: evaluation.get_protocol("paper"), "'paper'", "strict", "sedd", "mdlm", "text8p")
    refuses(lambda: read(tmp_path / "wikitext2-test.txt", "sedd", model), "test split", "scores train", "strict")
    refuses(lambda: read(tmp_path / "notes.txt", "sedd", model), "notes.txt", "--dataset")
    refuses(lambda: read(tmp_path / "notes.txt", "sedd", model, "text8"), "'text8'", "lambada")
    refuses(lambda: read(tmp_path / "notes.txt", "strict", model, "ptb"), "'ptb'", "as it is")
    refuses(lambda: read(tmp_path / "ptb.test.txt", "sedd", model), "11 tokens", "drops", "1024", "strict")
    refuses(lambda: read(tmp_path / "ptb.test.txt", "sedd", loaded(tokenizer.Bytes(), 1024)), "end-of-text", "bytes")
    refuses(lambda: read(tmp_path / "ptb.test.txt", "sedd", loaded(model.tokenizer, 512)), "1024", "trained on 512")
    refuses(lambda: read(tmp_path / "none.txt", "strict", model), "none.txt does not exist")
    (tmp_path / "empty.txt").write_text("")
    refuses(lambda: read(tmp_path / "empty.txt", "strict", model), "empty.txt holds no text")
    sedd, strict = evaluation.get_protocol("sedd"), evaluation.get_protocol("strict")
    refuses(lambda: protocols.suite_datasets("few-shot", sedd), "'few-shot'", "zero-shot")
    refuses(lambda: protocols.suite_datasets("zero-shot", strict), "strict", "sedd, mdlm")
    refuses(
        lambda: protocols.suite_datasets("zero-shot", evaluation.get_protocol("mdlm"), ["wikitext2"]),
        "'wikitext2'",
        "lambada",
    )
    refuses(lambda: sedd.find_file(tmp_path, "lambada"), "LAMBADA (test)", "begins with lambada")


def test_prepared_data_of_another_tokenizer_is_refused(tmp_path: Path, refuses: Callable[..., object]) -> None:
    path = tmp_path / "text.txt"
    path.write_text("abab" * 20)
    data.prepare([path], tmp_path / "shards", tokenizer.Characters(alphabet="ab"))
    refuses(lambda: read(tmp_path / "shards", "strict", loaded(tokenizer.Bytes(), 8)), "another tokenizer", "bytes")
    model = loaded(tokenizer.Characters(alphabet="ab"), 8)
    refuses(lambda: read(tmp_path / "shards", "sedd", model), "prepared data", "starts from text")
    assert sum(map(len, read(tmp_path / "shards", "strict", model).sequences)) == 80


def test_results_of_different_protocols_cannot_share_a_table(refuses: Callable[..., object]) -> None:
    facts = {"terms_included": ["diffusion"], "is_exact": False, "nats_per_token": 1.0}
    sedd, mdlm = ({**facts, **evaluation.get_protocol(name).as_record()} for name in ("sedd", "mdlm"))
    assert evaluation.likelihood_table([sedd, sedd], ["nats_per_token"]) == [["1.0"], ["1.0"]]
    refuses(
        lambda: evaluation.likelihood_table([sedd, mdlm], ["nats_per_token"]), "mdlm and sedd", "cannot share a table"
    )
    half = {**sedd, "precision": "bfloat16", "bfloat16_difference": None}
    full = {**sedd, "precision": "float32"}
    refuses(lambda: evaluation.likelihood_table([full, half], ["nats_per_token"]), "precision bfloat16 and float32")
    chosen = {**half, "bfloat16_difference": {"nats_per_token": 1e-6}}
    assert len(evaluation.likelihood_table([full, chosen], ["nats_per_token"])) == 2
    whole = {**sedd, "terms_included": ["diffusion", "prior", "reconstruction"]}
    refuses(lambda: evaluation.likelihood_table([sedd, whole], ["nats_per_token"]), "terms_included")
    assert (
        len(evaluation.likelihood_table([sedd, {**whole, "is_exact": True}], ["nats_per_token"])) == 2
    )  # an exact likelihood


@pytest.mark.parametrize(
    ("name", "dataset", "blocks"),
    [
        ("ptb.test.txt", "ptb", 86),
        ("lambada_test.jsonl", "lambada", 414),
        ("wikitext-raw-test.txt", "wikitext103", 264),
        ("lm1b-sample.tokens", "lm1b", 334),
    ],
)
def test_real_benchmarks(corpora: Path, gpt2: Path, name: str, dataset: str, blocks: int) -> None:
    """The number of blocks of 1024 GPT-2 tokens under protocol sedd is unchanged, and the text is detokenized."""
    model = loaded(tokenizer.BPE.read(gpt2 / "tokenizer.json"), 1024)
    path = next((corpora / "eval").glob(f"{name}*"))
    corpus = read(path, "sedd", model)
    assert corpus.dataset == dataset
    assert len(corpus.sequences) == blocks
    assert all(len(row) == 1024 for row in corpus.sequences)
    text = model.tokenizer.decode(corpus.sequences[0])
    assert not any(pattern in text for pattern in (" @-@ ", " n't ", " , and", "<unk>"))


def test_every_line_of_wikitext_is_a_row(corpora: Path) -> None:
    """36,718 lines and 2,051,910 words: 2,088,628 tokens with line ends, the published size of the corpus."""
    text = lzma.decompress((corpora / "eval" / "wikitext2-train.txt.xz").read_bytes()).decode()
    rows = DATASETS["wikitext2"].split_rows(text)
    assert len(rows) == 36_718
    assert sum(len(line.split()) for line in text.split("\n")) + len(rows) == 2_088_628
