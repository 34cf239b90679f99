"""The names that stay: what they are, what they take, and that they give what the rooms below give."""

import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import sedd
from sedd import api, evaluation, factory
from sedd.runtime.distributed import Ranks

TINY = {"width": 32, "depth": 1, "heads": 2, "seq_len": 32}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[sedd.Model]:
    """Six letters, learned for a moment."""
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


def described() -> str:
    """Every public name with its signature; of classes, what belongs to them."""
    lines = []
    for name in sedd.__all__:
        found = getattr(sedd, name)
        if not callable(found):
            lines.append(name)
            continue
        several = inspect.isclass(found) and issubclass(found, tuple)
        lines.append(name if several else f"{name}{inspect.signature(found)}")
        if inspect.isclass(found):
            own = {**getattr(found, "__annotations__", {}), **vars(found)}
            for member in sorted(word for word in own if not word.startswith("_")):
                value = vars(found).get(member)
                shown = inspect.signature(value) if inspect.isfunction(value) else ""
                lines.append(f"    {member}{shown}")
    return "\n".join(lines).replace("'Model'", "Model") + "\n"


def test_names_and_signatures_are_those_that_were_promised() -> None:
    """What changes here changes for users: change `names.txt` with it, and say so in the changelog."""
    assert described() == Path(__file__).with_name("names.txt").read_text()


def test_importing_costs_nothing() -> None:
    """Neither torch nor numpy; and asking for what is not there is an error that says what is."""
    code = (
        "import sys, sedd\n"
        "assert not {'torch', 'numpy', 'typer', 'rich'} & set(sys.modules)\n"
        "assert 'load' in dir(sedd) and 'torch' not in sys.modules\n"
        "assert callable(sedd.load) and 'torch' in sys.modules\n"
        "import sedd.training\n"
        "assert callable(sedd.train)\n"
        "try:\n    sedd.lod\nexcept AttributeError as error:\n    assert 'load' in str(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_types_see_what_runs_see() -> None:
    """`__all__` is the one list: the imports for type checkers name the same, and so does the module itself."""
    source = Path(sedd.__file__).read_text()
    (line,) = [line for line in source.splitlines() if line.strip().startswith("from sedd.api import")]
    assert sorted([*line.split("import ")[1].split(", "), "__version__"]) == sorted(sedd.__all__)
    own = [
        name for name, value in vars(api).items() if getattr(value, "__module__", "") == "sedd.api" and name[0] != "_"
    ]
    assert sorted([*own, "__version__"]) == sorted(sedd.__all__)


def test_a_run_says_what_it_is(model: sedd.Model) -> None:
    assert repr(model).endswith(f"{model.parameters:,} parameters, lambda-dce, absorbing noise, chars, length 32)")
    assert model.tokenizer.decode(model.tokenizer.encode("abc def")) == "abc def"
    again = sedd.load(model.loaded.folder)
    assert str(again.sample(2, steps=4)) == str(model.sample(2, steps=4))


def test_samples_are_those_of_the_command(model: sedd.Model) -> None:
    texts = model.sample(3, length=8, steps=4, seed=5, batch=2)
    assert len(texts) == texts.stats.samples == 3
    assert all(len(text.ids) == len(text.tokens) == len(text.steps) == len(str(text)) == 8 for text in texts)
    assert str(texts).splitlines() == [text.text for text in texts]
    assert texts == model.sample(3, length=8, steps=4, seed=5)  # the batch changes nothing
    assert texts != model.sample(3, length=8, steps=4, seed=6)
    assert model.tokenizer.decode(list(texts[0].ids)) == texts[0].text
    bold = model.sample(2, length=8, steps=None, sampler="ordered", top_k=1, direction="forward")
    assert str(bold[0]) == str(bold[1])


def test_gaps_are_filled_and_the_rest_comes_back(model: sedd.Model) -> None:
    (first, second) = model.infill(["abc{3}abc", "{2}f"], steps=4)
    assert (first.text[:3], first.text[6:], first.template) == ("abc", "abc", "abc{3}abc")
    assert [step > 0 for step in first.steps] == [False] * 3 + [True] * 3 + [False] * 3
    assert second.text[2] == "f"
    assert len(model.infill("a{3}", 4, steps=4)) == 4
    shown = model.infill("a{3}", steps=4)._repr_html_()
    assert shown.count("<span") == 4
    assert shown.count("given") > 0


def test_bounds_are_those_of_sedd_score(model: sedd.Model) -> None:
    texts = ["abcabc", "def abc abc"]
    bounds = model.bound(texts, draws=16, seed=3)
    here = Ranks(0, 1, model.loaded.device)
    for bound, corpus in zip(bounds, evaluation.text_corpora(texts, model.loaded), strict=True):
        record = evaluation.evaluate(model.loaded, corpus, evaluation.SINGLE_TEXT, here, draws=16, seed=3)
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


def test_what_is_given_is_not_scored(model: sedd.Model) -> None:
    """A continuation, as `evaluate.after` has it: read behind the context, and counted by itself."""
    (rest,) = model.bound("def", given="abc", draws=16, seed=1)
    found = evaluation.score_continuation(
        *evaluation.encode_continuation("abc", "def", model.loaded), model.loaded, draws=16, seed=1
    )
    assert (rest.tokens, rest.nats, rest.stderr) == (3, 3 * found.nats, 3 * found.stderr)
    assert rest.nats != model.bound("def", draws=16, seed=1)[0].nats


@pytest.mark.parametrize(
    ("ask", "sentence"),
    [
        (lambda m: sedd.load("nowhere"), "nowhere is neither a folder"),
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
        (lambda m: sedd.train(out=m.loaded.folder.parents[1], steps=1), "no data was given"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_done_is_a_sentence(
    model: sedd.Model, ask: object, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=sentence):
        ask(model)


def test_a_run_goes_on(model: sedd.Model, tmp_path: Path) -> None:
    """From Python as from the command line, and what happens is told to who asks."""
    (tmp_path / "abc.txt").write_text("abcabcdefdef " * 300)
    small = {"model": TINY, "train": {"batch_size": 4, "eval_sequences": 4, "log_every": 1}, "tokenizer": "chars"}
    told: list[str] = []
    sedd.train(
        [tmp_path / "abc.txt"], out=tmp_path / "run", steps=1, **small, on_event=lambda kind, record: told.append(kind)
    )
    assert told
    longer = sedd.train(out=tmp_path / "run", resume=True, steps=3)
    assert longer.loaded.folder.name == "step-00000003"
    assert longer.loaded.config.train.batch_size == 4
    np.testing.assert_array_equal(longer.tokenizer.encode("abc"), model.tokenizer.encode("abc"))
    assert factory.load_model(tmp_path / "run").config.budget.steps == 3
