"""Sample quality: metrics worked out by hand, judges against independent computations, and error messages."""

import json
import math
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_judges
import torch

from sedd import draws, samplers, sampling_settings
from sedd.evaluation import quality
from sedd.evaluation.quality import judges, metrics, results, samples
from sedd.evaluation.quality.judge import Judge, count_tokens, extract_features, score_samples
from sedd.evaluation.quality.samples import Sample, SampleSet
from sedd.extras import install_hint


def row(*ids: int) -> np.ndarray:
    return np.array(ids, dtype=np.int64)


def measured(*samples: tuple[np.ndarray, float]) -> dict[str, Any]:
    """The metrics of samples and their nats, all of whose tokens are counted."""
    rows = [ids for ids, _ in samples]
    return metrics.compute_metrics(rows, np.array([nats for _, nats in samples]), np.array([*map(len, rows)], float))


# Counting --------------------------------------------------------------------------------------------------


def test_entropy_is_in_nats() -> None:
    """Two equally frequent tokens have log 2 = 0.693… nats; the mutant would be 1 bit."""
    assert metrics.unigram_entropy(row(0, 1, 0, 1)) == pytest.approx(math.log(2), abs=1e-15)
    assert metrics.unigram_entropy(row(0, 1, 2, 2)) == pytest.approx(1.5 * math.log(2), abs=1e-15)
    assert metrics.unigram_entropy(row(7, 7, 7)) == 0
    bits = 1.0
    assert abs(metrics.unigram_entropy(row(0, 1, 0, 1)) - bits) > 0.3


def test_distinct_n_is_counted_over_all_samples() -> None:
    """'abab' and 'abc': 3 different of 7 letters; 3 of 5 bigrams (ab ba ab, ab bc); all 3-grams and 4-grams differ."""
    rows = [row(0, 1, 0, 1), row(0, 1, 2)]
    assert [metrics.distinct_ngrams(rows, n) for n in (1, 2, 3, 4)] == [3 / 7, 3 / 5, 1, 1]
    assert metrics.distinct_ngrams([row(0, 1)], 3) is None


def test_self_repetition_is_counted_inside_a_sample() -> None:
    """'abababab' has five 4-grams, abab three times and baba twice: 3 of 5 are repetitions. 'abcdefgh' has none."""
    again, never = (row(*[0, 1] * 4), 8.0), (row(*range(8)), 8.0)
    found = measured(again, never, again)
    assert found["self_repetition_4"] == pytest.approx((3 / 5 + 0 + 3 / 5) / 3)
    assert measured(never, never)["self_repetition_4"] == 0  # repetition between samples does not count
    assert measured((row(1, 2), 1.0))["self_repetition_4"] is None


def test_the_two_conventions_of_generative_perplexity() -> None:
    """They agree if all samples cost the same; else, for samples of one length, by token is less (Jensen)."""
    same = measured((row(1, 2), 3.0), (row(2, 1), 3.0))
    assert same["gen_ppl_by_token"] == pytest.approx(math.exp(1.5), rel=1e-15)
    assert same["gen_ppl_by_sample"] == pytest.approx(math.exp(1.5), rel=1e-15)
    random = np.random.default_rng(0)
    for nats in random.uniform(1, 9, size=(100, 5)):
        found = measured(*((row(1, 2), float(n)) for n in nats))
        assert found["gen_ppl_by_token"] < found["gen_ppl_by_sample"]
    unequal = measured((row(1, 2, 3, 4), 4 * math.log(8)), (row(1), math.log(2)))
    assert unequal["gen_ppl_by_token"] == pytest.approx(8 ** (4 / 5) * 2 ** (1 / 5))  # tokens have equal weights
    assert unequal["gen_ppl_by_sample"] == pytest.approx((8 + 2) / 2)  # samples have equal weights


def test_standard_errors_cover_what_is_estimated() -> None:
    """95 % intervals cover the truth in 95 % of 2,000 sets of 200 samples of random lengths.

    Nats per token are normal around 2, so the truth is e² by token and e^(2 + 0.3²/2) by sample. The tolerance of 3 %
    is 6.2 standard deviations of the coverage: false alarm below 1e-8. The mutant, a standard error that ignores the
    lengths, covers less often.
    """
    random, covered, sets = np.random.default_rng(1), np.zeros(3), 2000
    truth = np.array([math.exp(2), math.exp(2 + 0.3**2 / 2), math.exp(2)])
    for _ in range(sets):
        lengths, each = random.choice([4, 100], 200), random.normal(2, 0.3, 200)
        by_token, by_sample = metrics._exp_of_ratio(each * lengths, lengths), metrics._mean(np.exp(each))
        found = np.array([by_token, by_sample, (by_token[0], by_token[0] * each.std() / 200**0.5)])
        covered += np.abs(found[:, 0] - truth) < 1.96 * found[:, 1]
    assert (np.abs(covered[:2] / sets - 0.95) < 0.03).all(), covered / sets
    assert covered[2] / sets < 0.9


def test_no_generative_perplexity_without_entropy() -> None:
    """A function that returns a perplexity returns the entropy with it, and a table of perplexities has both."""
    found = measured((row(1, 2), 3.0))
    assert math.isfinite(found["gen_ppl_by_token"])
    assert found["entropy_nats"] == pytest.approx(math.log(2))
    with pytest.raises(ValueError, match="must contain entropy_nats"):
        results.quality_table([], ["source", "gen_ppl_by_token"])


def test_samples_of_probability_zero_are_refused() -> None:
    with pytest.raises(ValueError, match="assigns probability 0 to a sample"):
        measured((row(1, 2), math.inf), (row(1, 2), 1.0))


# Judges ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_judges.save(tmp_path_factory.mktemp("judge"))


@pytest.fixture(scope="module")
def judge(folder: Path) -> Judge:
    return judges.load_judge(str(folder))


TEXTS = ["a cat", "the cat sat on a mat", "abab", "two small birds fly over old red houses", "zz"]


def reference_nll(folder: Path, text: str, start: bool) -> list[float]:
    """−log p of each token from one forward pass per prefix, in NumPy and float64."""
    from transformers import GPT2LMHeadModel, PreTrainedTokenizerFast

    model, tokenizer = GPT2LMHeadModel.from_pretrained(folder).eval(), PreTrainedTokenizerFast.from_pretrained(folder)
    ids = [tokenizer.bos_token_id] * start + tokenizer.encode(text, add_special_tokens=False)
    costs = []
    for end in range(1, len(ids)):
        with torch.no_grad():
            logits = model(torch.tensor([ids[:end]])).logits[0, -1].double().numpy()
        costs.append(np.log(np.exp(logits).sum()) - logits[ids[end]])
    return costs


@pytest.mark.parametrize("first", ["skipped", "scored"])
def test_scores_match_an_independent_computation(folder: Path, first: str) -> None:
    judge = judges.load_judge(str(folder), first_token=first)
    rows = judge.encode(TEXTS)
    for text, tokens, nats in zip(TEXTS, count_tokens(judge, rows), score_samples(judge, rows), strict=True):
        costs = reference_nll(folder, text, start=first == "scored")
        assert tokens == len(costs)
        assert nats == pytest.approx(sum(costs), rel=1e-5)
    backwards = sum(reference_nll(folder, TEXTS[1][::-1], start=False))  # the mutant reads from right to left
    assert abs(score_samples(judge, judge.encode(TEXTS[1:2]))[0] - backwards) > 0.1


class LeftPadded(Judge):
    """The mutant: rows are padded on the left, where a causal model sees the padding."""

    def __init__(self, judge: Judge) -> None:
        self.judge, self.skips_first_token = judge, judge.skips_first_token

    encode = decode = features = None  # type: ignore[assignment]

    def token_nll(self, x: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
        shifts = (~valid).sum(-1).tolist()
        left = torch.stack([r.roll(s) for r, s in zip(x, shifts, strict=True)])
        costs = self.judge.token_nll(left, torch.ones_like(valid))
        return torch.stack([r.roll(-s) for r, s in zip(costs, shifts, strict=True)])


def test_scores_do_not_depend_on_other_rows_or_the_batch_size(judge: Judge) -> None:
    """Padding is neither seen nor counted, in any batch size and order."""
    rows = judge.encode(TEXTS)
    one = score_samples(judge, rows, batch=1)
    for size in (2, 3, 8):
        assert score_samples(judge, rows, batch=size) == pytest.approx(one, rel=1e-6)
    reversed_order = score_samples(judge, rows[::-1], batch=3)
    assert reversed_order[::-1] == pytest.approx(one, rel=1e-6)
    wrong = score_samples(LeftPadded(judge), rows, batch=8)
    assert wrong != pytest.approx(one, rel=1e-2)
    single = extract_features(judge, rows, batch=1)
    assert np.allclose(extract_features(judge, rows, batch=3), single, atol=1e-5)
    assert not np.allclose(single[0], single[1], atol=1e-2)


def test_a_gguf_file_is_the_same_judge(judge: Judge, folder: Path, tmp_path: Path) -> None:
    path = tiny_judges.save_gguf(tmp_path / "judge.gguf", folder)
    other = judges.load_judge(str(path))
    for ids, other_ids in zip(judge.encode(TEXTS), other.encode(TEXTS), strict=True):
        assert ids.tolist() == other_ids.tolist()
    costs = [score_samples(each, each.encode(TEXTS)) for each in (judge, other)]
    assert costs[0] == pytest.approx(costs[1], rel=1e-5)
    assert other.context_length == judge.context_length == 48


def test_a_judge_without_a_start_token_cannot_score_the_first_token(folder: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, bos_token=None, eos_token=None)
    with pytest.raises(ValueError, match="no token that starts a text"):
        judges.HuggingFaceJudge(tiny_judges.network(len(tokenizer)), tokenizer, "nameless", skips_first_token=False)


def test_the_hash_of_a_judge_depends_on_its_weights(judge: Judge, tmp_path: Path) -> None:
    other, same = tiny_judges.save(tmp_path / "other", seed=1), tiny_judges.save(tmp_path / "same")
    assert judges.load_judge(str(other)).sha256 != judge.sha256
    assert judges.load_judge(str(same)).sha256 == judge.sha256


# SampleSet ---------------------------------------------------------------------------------------------------


def read(path: Path, content: str) -> SampleSet:
    path.write_text(content)
    return samples.read_samples(path)


def test_files_of_samples(tmp_path: Path) -> None:
    wanted = [Sample("a b", None), Sample("c", None)]
    assert read(tmp_path / "a.txt", "a b\nc\n").samples == wanted
    assert read(tmp_path / "a.txt", "a\u2028b\x0cc\n").samples == [Sample("a\u2028b\x0cc", None)]
    assert read(tmp_path / "a.json", '["a b", "c"]').samples == wanted
    assert read(tmp_path / "b.json", '[{"text": "a b"}, {"text": "c"}]').samples == wanted
    assert read(tmp_path / "a.jsonl", '"a b"\n"c"\n').samples == wanted
    for name, text in (("0", "a b"), ("1", "c\nd")):
        (tmp_path / "texts").mkdir(exist_ok=True)
        (tmp_path / "texts" / f"{name}.txt").write_text(text)
    assert samples.read_samples(tmp_path / "texts").samples == [Sample("a b", None), Sample("c\nd", None)]


def test_the_cost_of_samples_is_read_from_their_file(tmp_path: Path) -> None:
    lines = [
        {"text": "a", "ids": [0], "calls": 3, "seconds": 0.5, "steps": 8, "draw_precision": "float32"},
        {"text": "b", "ids": [1], "calls": 5, "seconds": 1.5, "steps": 8, "draw_precision": "float32"},
    ]
    found = read(tmp_path / "a.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    assert (found.nfe, found.seconds) == (4, 1)
    assert (found.facts["steps"], found.facts["draw_precision"], found.facts["sampler"]) == (8, "float32", None)
    samples.write_samples(found, tmp_path / "b.jsonl")
    again = samples.read_samples(tmp_path / "b.jsonl")
    assert again == replace(found, source=again.source)


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("a.txt", "", "holds no sample"),
        ("a.txt", "one\n\ntwo\n", "sample 1 of .* is empty"),
        ("a.jsonl", "no json\n", "is not JSON"),
        ("a.json", '[{"words": "a"}]', "without text or ids"),
        ("a.json", '[{"ids": ["a"]}]', "without text or ids"),
        ("a.json", '[{"ids": []}]', "sample 0 of .* is empty"),
    ],
)
def test_files_without_samples_are_refused(
    tmp_path: Path, judge: Judge, name: str, content: str, sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        samples.encode_for_judge(read(tmp_path / name, content), judge)


def test_ids_are_used_if_they_decode_to_the_same_text(judge: Judge) -> None:
    """Encoding 'abc' merges 'ab' into one token; the sample's own ids are left unmerged."""
    drawn = SampleSet([Sample("abc", [0, 1, 2])], "drawn")
    assert samples.encode_for_judge(drawn, judge)[0][0].tolist() == judge.encode(["abc"])[0].tolist() != [0, 1, 2]
    assert samples.encode_for_judge(drawn, judge, by_ids=True)[0][0].tolist() == [0, 1, 2]
    assert samples.encode_for_judge(SampleSet([Sample(None, [0, 1, 2])], "ids"), judge)[0][0].tolist() == [0, 1, 2]
    for wrong, sentence in (
        (Sample("abd", [0, 1, 2]), "decode to another text"),
        (Sample(None, [0, 999]), "holds id 999"),
        (Sample("abc", None), "has no ids"),
    ):
        with pytest.raises(ValueError, match=sentence):
            samples.encode_for_judge(SampleSet([wrong], "wrong"), judge, by_ids=True)


def test_samples_longer_than_the_context_are_refused_or_truncated(judge: Judge) -> None:
    long = SampleSet([Sample("c" * 60, None), Sample("c" * 48, None)], "long")
    with pytest.raises(ValueError, match="sample 0 of long has 60 tokens of the judge, which reads 48"):
        samples.encode_for_judge(long, judge)
    rows, facts = samples.encode_for_judge(long, judge, truncate=True)
    assert ([len(ids) for ids in rows], facts["truncated"]) == ([48, 48], 1)
    with pytest.raises(ValueError, match="none of which is counted"):
        samples.encode_for_judge(SampleSet([Sample("c", None)], "short"), judge)


def test_samplers_draw_with_the_recorded_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every sampler draws with float64 uniforms, which float32 cannot represent."""
    from sedd import exact, process

    seen: set[torch.dtype] = set()
    used = set()
    for name in ("sample_inverse_cdf", "sample_next"):
        whole = getattr(draws, name)
        monkeypatch.setattr(draws, name, lambda *a, whole=whole: (seen.add(a[-1].dtype), whole(*a))[1])
    distribution = exact.Distribution(torch.tensor([[0.4, 0.1], [0.1, 0.4]]))
    for noise in (process.Absorbing(2), process.Uniform(2)):
        for kind in sampling_settings.SAMPLERS.built_in:
            try:
                sampling_run = samplers.SamplingRun(
                    exact.Score(distribution, noise), samplers.SamplingSettings(kind, 4)
                )
                sampling_run.sample(samplers.empty(8, 2))
                assert sampling_run.describe()["sampler"] == kind
                used.add(kind)
            except ValueError:
                continue  # a sampler for the other process
    assert used == set(sampling_settings.SAMPLERS.built_in)
    assert seen == {getattr(torch, draws.PRECISION)} == {torch.float64}
    u = draws.CounterRNG(0, torch.arange(64))(64).double()
    assert not torch.equal(u.float().double(), u)
    assert sampling_run.describe()["draw_precision"] == "float64"


# Tables ----------------------------------------------------------------------------------------------------


def result(**changed: object) -> dict[str, object]:
    found = SampleSet([Sample("a cat", None), Sample("abab", None)], "a.txt", 4.0, 0.1, {"draw_precision": "float64"})
    known = quality.evaluate_samples(found, LinearJudge())
    return {**known, **changed}


class LinearJudge(Judge):
    """A judge for which token i costs i/100 nats."""

    name, sha256, precision, vocab_size, context_length, skips_first_token = (
        "known",
        "0" * 64,
        "float64",
        128,
        None,
        False,
    )

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        return [np.array([ord(c) for c in text]) for text in texts]

    def decode(self, ids: object) -> str:
        return "".join(map(chr, np.asarray(ids)))

    def token_nll(self, x: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
        return x.double() / 100

    def features(self, x: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
        return x[:, :1].float()


def test_a_record_has_all_fields() -> None:
    found = result()
    costs = [np.array([ord(c) for c in text]) / 100 for text in ("a cat", "abab")]
    assert found["gen_ppl_by_token"] == pytest.approx(np.exp(np.concatenate(costs).mean()), rel=1e-5)
    assert found["gen_ppl_by_sample"] == pytest.approx(np.mean([np.exp(c.mean()) for c in costs]), rel=1e-5)
    assert set(results.REQUIRED_FIELDS) <= set(found)
    assert json.loads(json.dumps(found)) == found
    assert (found["samples"], found["tokens"], found["nfe"], found["seconds_per_sample"]) == (2, 9, 4.0, 0.1)


@pytest.mark.parametrize("key", results.JUDGE_FIELDS)
def test_results_of_different_judges_cannot_share_a_table(key: str) -> None:
    with pytest.raises(ValueError, match="cannot share a table"):
        results.quality_table([result(), result(**{key: "other"})], ["gen_ppl_by_token", "entropy_nats"])
    assert results.quality_table([result(), result()], ["samples", "mauve"]) == [[2, None], [2, None]]


def test_different_draw_precisions_cause_a_warning() -> None:
    assert results.comparison_warnings([result(), result()]) == []
    (words,) = results.comparison_warnings([result(), result(draw_precision="float32")])
    assert words.startswith("warning: these samples were drawn with float32 and float64 precision")
    (words,) = results.comparison_warnings([result(), result(draw_precision=None)])
    assert "float64 and unknown" in words
    assert "number of samples" in results.comparison_warnings([result(), result(samples=3, tokens=13)])[0]
    assert "length of samples" in results.comparison_warnings([result(), result(tokens=12)])[0]


def test_a_stored_result_without_entropy_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps(result()))
    assert results.read_results(path) == [result()]
    for broken in ({k: v for k, v in result().items() if k != "entropy_nats"}, result(entropy_nats=None)):
        path.write_text(json.dumps(broken))
        with pytest.raises(ValueError, match=r"without (an )?entropy"):
            results.read_results(path)
    path.write_text('[{"text": "a"}]')
    assert results.read_results(path) is None


def test_the_plot_joins_records_that_differ_in_the_first_swept_setting() -> None:
    from sedd.evaluation.quality.plots import plot_quality

    made = [
        result(steps=steps, temperature=warmth, nfe=steps * 0.9, gen_ppl_by_token=90.0 / steps, entropy_nats=warmth + 2)
        for steps in (4, 8)
        for warmth in (0.5, 1.0)
    ]
    cost, entropy = plot_quality(made, ["steps", "temperature"]).axes
    for axes, x in ((cost, "nfe"), (entropy, "entropy_nats")):
        lines = [bars.lines[0] for bars in axes.containers]
        for line, warmth in zip(lines, (0.5, 1.0), strict=True):
            points = [(r[x], r["gen_ppl_by_token"]) for r in made if r["temperature"] == warmth]
            assert np.array(line.get_data()).T.tolist() == [list(point) for point in points]
    assert [text.get_text() for text in entropy.texts] == ["4", "8", "4", "8"]
    assert [text.get_text() for text in entropy.get_legend().get_texts()] == [
        "a.txt, temperature 0.5",
        "a.txt, temperature 1.0",
    ]
    timeless, _ = plot_quality([result(nfe=None), result(nfe=None)]).axes  # texts of unknown cost
    assert timeless.get_xscale() == "linear"


# Sweeps and MAUVE ------------------------------------------------------------------------------------------


def test_sweeps() -> None:
    base = samplers.SamplingSettings(seed=3), None
    assert samples.sweep_points(base, {}) == [base]
    found = samples.sweep_points(base, samples.parse_sweeps(["steps=4,inf", "temperature=0.5,1"]))
    settings = [(one.steps, one.temperature, one.seed) for one, _ in found]
    assert settings == [(4, 0.5, 3), (4, 1.0, 3), (None, 0.5, 3), (None, 1.0, 3)]
    axes = samples.parse_sweeps(["sampler=remask", "eta=0.1", "top-k=2", "length=5"])
    ((chosen, length),) = samples.sweep_points(base, axes)
    assert (chosen.sampler, chosen.options, length) == ("remask", {"eta": 0.1}, 5)
    assert (chosen.top_k, [*axes]) == (2, ["sampler", "eta", "top_k", "length"])


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ("stps=4", "choose one of sampler, steps"),
        ("steps", "write it as name=value,value"),
        ("steps=4,,8", "write it as name=value,value"),
        ("steps=-4", "sweep of steps cannot take '-4'"),
        ("temperature=warm", "sweep of temperature cannot take 'warm'"),
        ("temperature=0", "temperature is 0"),
    ],
)
def test_bad_sweeps(spec: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        samples.sweep_points((samplers.SamplingSettings(), None), samples.parse_sweeps([spec]))


def test_mauve_is_near_one_for_equal_and_near_zero_for_different_distributions(judge: Judge) -> None:
    random = np.random.default_rng(0)

    def texts(letters: str) -> SampleSet:
        return SampleSet([Sample("".join(random.choice(list(letters), 12)), None) for _ in range(60)], letters)

    reference = metrics.MauveReference(texts("abcdef"), judge)
    same = quality.evaluate_samples(texts("abcdef"), judge, reference=reference)
    other = quality.evaluate_samples(texts("uvwxyz"), judge, reference=reference)
    assert same["mauve"] > 0.8 > 0.3 > other["mauve"]
    assert (same["mauve_reference"], same["mauve_texts"], same["mauve_buckets"]) == ("abcdef", 60, 6)


def test_missing_packages_are_named_with_the_command_that_installs_them(
    judge: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("mauve", "transformers"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ValueError, match=re.escape(install_hint("mauve"))):
        metrics.MauveReference(SampleSet([Sample("a", None)] * 2, "a"), judge)
    with pytest.raises(ValueError, match=re.escape(install_hint("judge"))):
        judges.load_judge("gpt2")
