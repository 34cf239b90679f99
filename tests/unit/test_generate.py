"""Templates, sampling runs and traces."""

import copy
import itertools
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import boxed
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sedd import process, samplers, tokenizer, trace
from sedd.loading import LoadedModel, load_model
from sedd.nn import transformer
from sedd.parameterization import MeanModel, ScoreModel
from sedd.samplers import template

Refuses = Callable[..., None]
BYTES = tokenizer.Bytes()


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("The {8} sat on the {12}.", ["The ", 8, " sat on the ", 12, "."]),
        ("{3}", [3]),
        ("{3}{4}", [3, 4]),
        ("a {{b}} {1}", ["a {b} ", 1]),
        ("{{{2}}}", ["{", 2, "}"]),
        ("{{8}} {{{{ {1}", ["{8} {{ ", 1]),
    ],
)
def test_parsing_templates(text: str, parts: list[str | int]) -> None:
    assert template.parse_template(text) == parts


@pytest.mark.parametrize("text", ["no gap", "", "{{8}}", "{", "a } b {1}", "{0}", "{-1}", "{x}", "{ 8 }", "{1.5}"])
def test_invalid_templates_are_refused(text: str, refuses: Refuses) -> None:
    refuses(lambda: template.parse_template(text), "{8}")


def test_the_gaps_of_a_template_together_fit_into_the_model(refuses: Refuses) -> None:
    """Before anything of their size is made; so do its texts with them."""
    assert template.parse_template("{5}a{3}", 8) == [5, "a", 3]
    refuses(lambda: template.parse_template("{5}a{4}", 8), "9 tokens", "takes 8")
    refuses(lambda: template.parse_template("{16777216}" * 30), str(30 * 2**24))
    assert template.template_ids("{5}abc", BYTES, 8) == [-1] * 5 + [97, 98, 99]
    refuses(lambda: template.template_ids("{5}a{1}bc", BYTES, 8), "9 tokens", "up to 8")
    refuses(lambda: template.parse_template("{" + "9" * 5000 + "}"), "{8}")


def test_prompts_of_different_lengths() -> None:
    rows = [template.template_ids(text, BYTES) for text in ("ab{2}", "{1}c")]
    prompt = template.prompt_from_ids(rows)
    assert prompt.given.tolist() == [[97, 98, -1, -1], [-1, 99, 0, 0]]
    assert prompt.valid.tolist() == [[True] * 4, [True, True, False, False]]
    assert prompt.lengths.tolist() == [4, 2]
    assert template.prompt_from_ids(rows[:1]).valid is None
    whole = template.prompt_from_ids(rows, 5, pad=256, unknown=257)  # padding after a text, masks after a gap
    assert whole.given.tolist() == [[97, 98, -1, -1, 257], [-1, 99, 256, 256, 256]]
    assert whole.text_lengths.tolist() == [4, 5]
    assert whole.valid is None


@pytest.mark.parametrize(
    ("text", "stops", "start", "whole", "streamed"),
    [
        ("one\ntwo", ["wo", "\n"], 0, "one", "one"),
        ("one\ntwo", ["x"], 0, "one\ntwo", "one\ntwo"),
        ("one", ["one"], 1, "one", "one"),
        ("on", ["one"], 0, "on", ""),
        ("abc", ["bc", "abcd"], 0, "a", ""),  # the longer one would begin earlier
        ("abc", ["cd"], 3, "abc", "abc"),
    ],
)
def test_a_text_ends_before_the_first_stop_string(
    text: str, stops: list[str], start: int, whole: str, streamed: str
) -> None:
    """Of a text that may go on, without what may become one."""
    assert template.without_stop(text, stops, start) == whole
    assert template.without_stop(text, stops, start, may_go_on=True) == streamed


def test_a_space_before_a_gap_is_left_to_it_where_words_include_their_space() -> None:
    bpe = tokenizer.BPE.train(iter(["The cat sat on the mat."] * 9), 280)
    assert bpe.words_include_space
    same = [template.template_ids(text, bpe) for text in ("The {3} sat on {2}", "The{3} sat on{2}")]
    assert same[0] == same[1] == [*bpe.encode("The"), -1, -1, -1, *bpe.encode(" sat on"), -1, -1]
    two = template.template_ids("The  {1} ", bpe)  # one of two is left, and none that no gap follows
    assert two == [*bpe.encode("The "), -1, *bpe.encode(" ")]
    assert not BYTES.words_include_space
    assert template.template_ids("a {1}", BYTES) == [97, 32, -1]


def small_model(parameterization: type, kind: type) -> tuple[object, process.Process]:
    """Build a model of a small network in which no weight is 0, and its process."""
    noise = kind(11)
    network = transformer.Modern(
        states=noise.num_states,
        width=16,
        depth=2,
        heads=2,
        generator=torch.Generator().manual_seed(0),
    )
    for i, p in enumerate(network.parameters()):
        p.data.normal_(0, 0.3, generator=torch.Generator().manual_seed(i))
    return parameterization(network.eval().requires_grad_(False), noise), noise


CASES = [
    (parameterization, kind, name)
    for parameterization in (ScoreModel, MeanModel)
    for kind in (process.Absorbing, process.Uniform)
    for name in (
        ["first-hitting", "tweedie", "euler", "theta", "remask", "ordered", "confidence", "entropy"]
        if kind is process.Absorbing
        else ["tweedie", "euler", "theta", "gibbs"]
    )
]


@pytest.mark.parametrize(("parameterization", "kind", "name"), CASES)
def test_a_sample_does_not_depend_on_its_batch(parameterization: type, kind: type, name: str) -> None:
    """A row is the same alone and, padded, in a batch with longer rows; hidden states and head are computed apart."""
    model, _ = small_model(parameterization, kind)
    rows = [[-1] * 9, [3, -1, -1, 5, -1, -1], [1, 2, -1]]
    settings = samplers.SamplingSettings(sampler=name, steps=4, seed=3)

    def sampling_run() -> samplers.SamplingRun:
        return samplers.SamplingRun(model, settings)

    together = sampling_run().sample(template.prompt_from_ids(rows))
    alone = []
    for i, row in enumerate(rows):
        prompt = template.prompt_from_ids([row])
        *_, last = sampling_run().states(prompt, first=i)
        alone += samplers.final_sequences(last, prompt)
    assert together == alone
    for row, generated in zip(rows, together, strict=True):
        assert len(generated.ids) == len(row)
        assert all(a == b for a, b in zip(row, generated.ids, strict=True) if a >= 0)
        assert all(0 <= id < 11 for id in generated.ids)
        assert all(step == 0 for a, step in zip(row, generated.reveal_step, strict=True) if a >= 0)


@pytest.mark.parametrize("parameterization", [ScoreModel, MeanModel])
@pytest.mark.parametrize("kind", [process.Absorbing, process.Uniform])
def test_log_scores_from_hidden_states(parameterization: type, kind: type) -> None:
    """`hidden` followed by `log_score_at` equals the whole model."""
    model, noise = small_model(parameterization, kind)
    x = torch.randint(noise.num_states, (4, 7), generator=torch.Generator().manual_seed(0))
    sigma = torch.tensor([0.1, 0.5, 1.0, 3.0], dtype=torch.float64)
    rows = model.log_score_at(model.hidden(x, sigma).flatten(0, 1), x.flatten(), sigma.repeat_interleave(7))
    torch.testing.assert_close(rows.view(4, 7, -1), model(x, sigma), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("parameterization", "kind", "name"), CASES)
def test_output_that_is_not_finite_is_refused(parameterization: type, kind: type, name: str, refuses: Refuses) -> None:
    """Whatever the sampler, also where noise would be left as it is."""
    noise = kind(11)
    network = transformer.Modern(states=noise.num_states, width=16, depth=1, heads=2)
    with torch.no_grad():
        network.vocab_embed.embedding[:, 0] = torch.nan
    model = parameterization(network.eval().requires_grad_(False), noise)
    settings = samplers.SamplingSettings(name, steps=2)
    sampling_run = samplers.SamplingRun(model, settings)
    refuses(lambda: sampling_run.sample(samplers.empty(2, 8)), "not finite", "another checkpoint")
    if name == "entropy":  # which goes on until there are no masks
        states = sampling_run.sampler.trajectory(model, 2, 8, steps=2)
        refuses(lambda: list(itertools.islice(states, 20)), "not finite")


@pytest.mark.parametrize(("kind", "name"), [(process.Absorbing, "tweedie"), (process.Uniform, "tweedie")])
def test_log_scores_that_overflow_are_refused(kind: type, name: str, refuses: Refuses) -> None:
    """e^800 is infinite."""
    noise = kind(11)
    network = transformer.Modern(states=noise.num_states, width=16, depth=1, heads=2)
    with torch.no_grad():
        network.output_layer.linear.weight.normal_(0, 1e4, generator=torch.Generator().manual_seed(0))
    model = ScoreModel(network.eval().requires_grad_(False), noise)
    sampling_run = samplers.SamplingRun(model, samplers.SamplingSettings(name, steps=4))
    refuses(lambda: sampling_run.sample(samplers.empty(2, 8)), "beyond the range of floating point")


class LargestTensor(TorchDispatchMode):
    """Dispatch mode that stores the number of entries of the largest tensor that an operation returns."""

    entries = 0

    def __torch_dispatch__(
        self, function: object, types: object, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        output = function(*args, **(kwargs or {}))
        for tensor in output if isinstance(output, (tuple, list)) else (output,):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().nbytes():
                self.entries = max(self.entries, tensor.untyped_storage().nbytes() // tensor.element_size())
        return output


@pytest.mark.parametrize(("parameterization", "kind", "name"), [c for c in CASES if c[0] is MeanModel])
def test_no_tensor_of_batch_times_length_times_vocabulary(parameterization: type, kind: type, name: str) -> None:
    vocabulary, batch, length = 20_000, 4, 128
    noise = kind(vocabulary)
    network = transformer.Modern(states=noise.num_states, width=16, depth=1, heads=2)
    model = parameterization(network.eval().requires_grad_(False), noise)
    options = {"bound": 1e9} if name == "entropy" else {}  # all at once, not one after another
    sampling_run = samplers.SamplingRun(model, samplers.SamplingSettings(name, steps=2, options=options))
    with LargestTensor() as largest:
        *_, last = sampling_run.states(samplers.empty(batch, length))
    assert (last.x < vocabulary).all()
    assert largest.entries <= 1.01 * 2**22 < batch * length * vocabulary / 2


def test_default_samplers() -> None:
    for parameterization, kind, expected in (
        (MeanModel, process.Absorbing, samplers.FirstHitting),
        (MeanModel, process.Uniform, samplers.Ancestral),
        (ScoreModel, process.Absorbing, samplers.Tweedie),
        (ScoreModel, process.Uniform, samplers.Tweedie),
    ):
        assert type(samplers.build_sampler(None, small_model(parameterization, kind)[0])) is expected


def test_grids_decrease_from_1_to_0(refuses: Refuses) -> None:
    for spec in ("uniform", "cosine", "1,0.5,0.25,0"):
        grid = samplers.Tweedie().times(samplers.build_grid(spec, 3))
        assert grid[0] == 1
        assert grid[-1] == 0
        assert len(grid) == 4
        assert (grid.diff() < 0).all()
    assert samplers.build_grid("uniform", None) is None
    refuses(lambda: samplers.build_grid("fast", 3), "'fast'", "cosine")
    refuses(lambda: samplers.build_grid("1,a,0", 3), "1,a,0")


# Traces ---------------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """Parser of the tokens of a page, its scripts, and the addresses it would fetch."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.steps: list[int] = []
        self.given, self.scripts, self.fetched, self.text = 0, 0, [], ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        self.scripts += tag == "script"
        self.steps += [int(attributes["data-step"])] if "data-step" in attributes else []
        self.given += attributes.get("class") == "given"
        self.fetched += [attributes[name] for name in ("src", "href") if name in attributes]

    def handle_data(self, data: str) -> None:
        self.text += data


def test_a_trace_page_is_self_contained_and_shows_every_token() -> None:
    text = '<script>alert("x")</script>&'
    row = trace.trace_tokens(BYTES.tokens(BYTES.encode(text)), [0] * 8 + list(range(1, len(text) - 7)))
    page = Page(trace.trace_page([row], "a <b>title</b>", "about"))
    assert page.steps == list(range(1, len(text) - 7))
    assert page.given == 8
    assert page.scripts == 1  # its own
    assert page.fetched == []
    assert text in page.text


def test_a_trace_ends_with_the_text() -> None:
    """Padding at the end is left out of pages and pictures; padding before a token is not."""
    padded = BYTES.with_specials(eos=False, pad=True)
    ids = [*padded.encode("a").tolist(), padded.pad, *padded.encode("b").tolist(), *[padded.pad] * 3]
    tokens = trace.trace_tokens(padded.tokens(ids), [0, 1, 2, 3, 4, 0])
    page = Page(trace.trace_page([tokens], "title", "about"))
    assert page.steps == [1, 2]
    assert (page.text.count("<pad>"), Page(trace.trace_fragment([tokens])).text.count("<pad>")) == (1, 1)


def test_a_trace_is_saved_as_png(tmp_path: Path) -> None:
    row = trace.trace_tokens(BYTES.tokens(BYTES.encode("a $line$\nand another " * 9)), range(189))
    trace.save_trace_png([row], "title", tmp_path / "trace.png")
    assert (tmp_path / "trace.png").read_bytes().startswith(b"\x89PNG")
    placed, lines = trace._lines([row])
    assert all(x + len(text) <= trace.WIDTH and y < lines for _, text, x, y in placed)
    assert "".join(text for _, text, _, _ in placed) == "".join(token.text for token in row)


def test_the_padding_of_a_model_reaches_samplers_by_confidence(tmp_path: Path) -> None:
    """That of records, unless another is given; packed text and records of one length have none."""
    loaded = load_model(boxed.write_model(tmp_path / "model"))
    padded = loaded.tokenizer.with_specials(eos=False, pad=True)
    lines = replace(loaded.config, data=replace(loaded.config.data, packing="lines"))
    model = copy.copy(loaded.model)
    model.process = process.Absorbing(padded.vocab_size)

    def pad(loaded: LoadedModel, sampler: str, **options: int) -> object:
        settings = samplers.SamplingSettings(sampler=sampler, options=options)
        return getattr(samplers.SamplingRun.of(loaded, settings).sampler, "pad", None)

    records = replace(loaded, tokenizer=padded, config=lines, model=model)
    assert records.learned_pad == padded.pad == 256
    assert [pad(records, name) for name in ("confidence", "entropy", "first-hitting")] == [256, 256, None]
    assert pad(records, "confidence", pad=-1) == -1
    assert pad(loaded, "confidence") == -1
    assert pad(replace(loaded, config=lines), "confidence") == -1
