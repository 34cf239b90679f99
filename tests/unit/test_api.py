"""The Python interface: its public names and signatures, and that it returns what the packages below it do."""

import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import sedd
import sedd.model
from sedd import evaluation, hub
from sedd.loading import load_model
from sedd.runtime.distributed import Ranks

TINY = {"width": 32, "depth": 1, "heads": 2, "seq_len": 32}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[sedd.Model]:
    """Return a small model, trained for two steps on six letters."""
    folder = tmp_path_factory.mktemp("api")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SEDD_CACHE", str(folder / "cache"))
        (folder / "abc.txt").write_text("abcabcdefdef " * 300)
        yield sedd.train(
            folder / "abc.txt",
            out=folder / "run",
            recipe="tiny",
            tokenizer="chars",
            objective="lambda-dce",
            steps=2,
            model=TINY,
            **{"train.batch_size": 4, "train.eval_sequences": 4},
        )


def public_interface() -> str:
    """Return every public name with its signature, and the members of `Diffusion` and of the classes of texts."""
    lines = []
    for name in sedd.__all__:
        value = getattr(sedd, name)
        if not callable(value):
            lines.append(name)
            continue
        is_tuple = inspect.isclass(value) and issubclass(value, tuple)
        lines.append(name if is_tuple else f"{name}{inspect.signature(value)}")
        if inspect.isclass(value) and value.__module__ in ("sedd.model", "sedd.diffusion"):
            members = {**getattr(value, "__annotations__", {}), **vars(value)}
            for member in sorted(member for member in members if not member.startswith("_")):
                attribute = vars(value).get(member)
                signature = inspect.signature(attribute) if inspect.isfunction(attribute) else ""
                lines.append(f"    {member}{signature}")
    return "\n".join(lines).replace("'Model'", "Model") + "\n"


def test_public_names_and_signatures() -> None:
    """A change here is one for users: update `names.txt`, and mention it in the changelog."""
    assert public_interface() == Path(__file__).with_name("names.txt").read_text()


def test_import_is_lazy() -> None:
    """Importing sedd imports neither torch nor numpy; the error for an unknown name lists the known ones."""
    code = (
        "import sys, sedd\n"
        "assert not {'torch', 'numpy', 'typer', 'rich'} & set(sys.modules)\n"
        "assert 'load' in dir(sedd) and 'torch' not in sys.modules\n"
        "assert callable(sedd.load) and 'torch' in sys.modules\n"
        "import sedd.training\n"
        "assert callable(sedd.train)\n"
        "try:\n    sedd.lod\nexcept AttributeError as error:\n    assert 'load' in str(error)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_all_public_names_of_texts_are_exported() -> None:
    for name, value in vars(sedd.model).items():
        assert getattr(value, "__module__", "") != "sedd.model" or name[0] == "_" or name in sedd.__all__


def test_model_description_and_tokenizer(model: sedd.Model) -> None:
    assert repr(model).endswith(f"{model.parameters:,} parameters, lambda-dce, absorbing noise, chars, length 32)")
    assert model.tokenizer.decode(model.tokenizer.encode("abc def")) == "abc def"
    loaded_again = sedd.load(model.loaded.folder)
    assert str(loaded_again.sample(2, steps=4)) == str(model.sample(2, steps=4))


def test_samples(model: sedd.Model) -> None:
    texts = model.sample(3, length=8, steps=4, seed=5, batch=2)
    assert len(texts) == texts.stats.samples == 3
    assert all(len(text.ids) == len(text.tokens) == len(text.steps) == len(str(text)) == 8 for text in texts)
    assert str(texts).splitlines() == [text.text for text in texts]
    assert texts == model.sample(3, length=8, steps=4, seed=5)  # the batch changes nothing
    assert texts != model.sample(3, length=8, steps=4, seed=6)
    assert model.tokenizer.decode(list(texts[0].ids)) == texts[0].text
    greedy = model.sample(2, length=8, steps=None, sampler="ordered", top_k=1, direction="forward")
    assert str(greedy[0]) == str(greedy[1])


def test_infilling_returns_given_text_unchanged(model: sedd.Model) -> None:
    (first, second) = model.infill(["abc{3}abc", "{2}f"], steps=4)
    assert (first.text[:3], first.text[6:], first.template) == ("abc", "abc", "abc{3}abc")
    assert [step > 0 for step in first.steps] == [False] * 3 + [True] * 3 + [False] * 3
    assert second.text[2] == "f"
    assert len(model.infill("a{3}", 4, steps=4)) == 4
    html = model.infill("a{3}", steps=4)._repr_html_()
    assert html.count("<span") == 4
    assert html.count("given") > 0


def test_bounds_equal_those_of_sedd_score(model: sedd.Model) -> None:
    texts = ["abcabc", "def abc abc"]
    bounds = model.bound(texts, draws=16, seed=3, shared_noise=True)
    ranks = Ranks(0, 1, model.loaded.device)
    for bound, corpus in zip(bounds, evaluation.text_corpora(texts, model.loaded), strict=True):
        record = evaluation.evaluate(model.loaded, corpus, evaluation.SINGLE_TEXT, ranks, draws=16, seed=3)
        assert round(bound.nats_per_token, 5) == record["nats_per_token"]
        assert round(bound.stderr / bound.tokens, 6) == record["stderr_nats_per_token"]
        assert round(bound.bits_per_char, 5) == record["bits_per_char"]
        assert bound.tokens == record["tokens"]
    assert f"at most {bounds[0].nats:.3f} ± {bounds[0].stderr:.3f} nats" in str(bounds).splitlines()[0]
    assert bounds._repr_html_().startswith("<pre>")
    (exact,) = model.bound("abcabc", estimator="forward")
    assert exact.is_exact
    assert exact.stderr == 0
    assert str(exact).startswith("exactly ")


def test_the_bound_of_a_text_depends_on_no_other_text_and_on_no_batch(model: sedd.Model) -> None:
    together = model.bound(["abc", "defa", "abc"], draws=8)
    alone = [model.bound(text, draws=8, batch=batch)[0] for text, batch in (("abc", 1), ("defa", 3), ("abc", 5))]
    assert [round(bound.nats, 5) for bound in together] == [round(bound.nats, 5) for bound in alone]
    assert model.bound("abc", draws=8, seed=1)[0].nats != together[0].nats


def test_a_given_context_is_not_scored(model: sedd.Model) -> None:
    """The bound is that of the continuation given its context, per token of the continuation."""
    (continuation,) = model.bound("def", given="abc", draws=16, seed=1, shared_noise=True)
    expected = evaluation.score_continuation(
        *evaluation.encode_continuation("abc", "def", model.loaded), model.loaded, draws=16, seed=1
    )
    assert (continuation.tokens, continuation.nats) == (3, 3 * expected.nats)
    assert continuation.stderr == 3 * expected.stderr
    assert continuation.nats != model.bound("def", draws=16, seed=1, shared_noise=True)[0].nats


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda m: sedd.load("nowhere"), "nowhere holds no model"),
        (lambda m: m.sample(0), "count is 0"),
        (lambda m: m.sample(length=99), "length is 99"),
        (lambda m: m.sample(batch=0), "batch is 0"),
        (lambda m: m.sample(sampler="best"), "choose one of first-hitting"),
        (lambda m: m.sample(strategi="loop"), "has no option strategi"),
        (lambda m: m.infill([]), "no template was given"),
        (lambda m: m.infill("abc"), "no gap"),
        (lambda m: m.bound([]), "no text was given"),
        (lambda m: m.bound(""), "empty"),
        (lambda m: m.bound("a" * 33), "33 tokens"),
        (lambda m: m.bound("abc", draws=3), "draws is 3"),
        (lambda m: m.bound("xyz"), "'x'"),
        (lambda m: sedd.train(out="/proc/none"), "cannot be written"),
        (lambda m: sedd.train("x.txt", out="run", recipe="huge"), "recipe is 'huge'"),
        (lambda m: sedd.train("x.txt", out="run", widht=3), "widht"),
        (lambda m: sedd.train(out=m.loaded.folder.parents[1] / "new", steps=1), "no data was given"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_invalid_calls_are_refused(
    model: sedd.Model, call: object, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=sentence):
        call(model)


def test_resuming_a_run_and_its_events(model: sedd.Model, tmp_path: Path) -> None:
    """``on_event`` is called, and ``resume`` continues with the stored configuration."""
    (tmp_path / "abc.txt").write_text("abcabcdefdef " * 300)
    small = {"model": TINY, "train": {"batch_size": 4, "eval_sequences": 4, "log_every": 1}, "tokenizer": "chars"}
    events: list[str] = []
    sedd.train(
        [tmp_path / "abc.txt"],
        out=tmp_path / "run",
        steps=1,
        **small,
        on_event=lambda kind, record: events.append(kind),
    )
    assert events
    resumed = sedd.train(out=tmp_path / "run", resume=True, steps=3)
    last = tmp_path / "run" / "checkpoints" / "step-00000003"
    assert resumed.loaded.config.train.batch_size == 4
    np.testing.assert_array_equal(resumed.tokenizer.encode("abc"), model.tokenizer.encode("abc"))
    assert load_model(last).config.budget.steps == 3


def test_evaluate_equals_sedd_eval(model: sedd.Model, tmp_path: Path) -> None:
    """Of a file and of the validation split; a model moved to a device gives the same."""
    (tmp_path / "test.txt").write_text("abcdef " * 20)
    protocol, ranks = evaluation.get_protocol("strict"), Ranks(0, 1, model.loaded.device)
    corpus = evaluation.read_corpus(str(tmp_path / "test.txt"), protocol, model.loaded)
    expected = evaluation.evaluate(model.loaded, corpus, protocol, ranks, draws=4, seed=1)
    assert model.evaluate(tmp_path / "test.txt", draws=4, seed=1) == expected
    moved = model.to("cpu")
    assert moved.loaded.network is not model.loaded.network
    assert moved.evaluate(tmp_path / "test.txt", draws=4, seed=1) == expected
    assert str(moved.sample(2, steps=4)) == str(model.sample(2, steps=4))
    held_out = model.evaluate(draws=2)
    assert (held_out["protocol"], held_out["draws"]) == ("held-out", 2)
    for call, sentence in (
        (lambda: model.evaluate(protocol="strict"), "needs data"),
        (lambda: model.evaluate(tmp_path / "test.txt", protocol="held-out"), "is not what .* was trained on"),
        (lambda: model.to("tpu"), "choose one of cpu, cuda"),
    ):
        with pytest.raises(ValueError, match=sentence):
            call()


def test_a_saved_model_is_the_same_model(model: sedd.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what is pushed is what is saved, with the results in its card."""
    record = model.evaluate(draws=2)
    folder = model.save(tmp_path / "saved", name="owner/abc", results=[record])
    assert str(sedd.load(folder).sample(2, steps=4)) == str(model.sample(2, steps=4))
    card = (folder / "README.md").read_text()
    assert "owner/abc" in card
    assert str(record["nats_per_token"]) in card
    pushed: dict[str, bytes] = {}

    def upload(folder: Path, name: str, private: bool, message: str) -> str:
        pushed.update({path.name: path.read_bytes() for path in folder.iterdir()})
        return f"https://hub/{name}, private {private}"

    monkeypatch.setattr(hub.client, "upload", upload)
    assert model.push("owner/abc", private=True, results=[record]) == "https://hub/owner/abc, private True"
    assert pushed == {path.name: path.read_bytes() for path in folder.iterdir()}
