"""A text without an ending is continued as the model continues records: their beginning is shown, up to a limit.

Records are padded, and the exact models know their distribution.
"""

from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import scipy.stats
import torch
from serving import Collector, running, site

from sedd import exact, models
from sedd.loading import LoadedModel, load_model
from sedd.parameterization import CausalModel, MeanModel
from sedd.process import Absorbing, Process, Uniform
from sedd.samplers import SamplingRun, SamplingSettings
from sedd.samplers.template import build_prompt, template_prompt
from sedd.schedule import LogLinear
from sedd.serve.app import build_app
from sedd.serve.jobs import Row
from sedd.tokenizer import Characters
from sedd.training.config import DataConfig, ModelConfig, RunConfig

FALSE_ALARM = 1e-6
LENGTH, PAD = 4, 2
LETTERS = Characters(alphabet="ab", pad=PAD)


def records() -> exact.Distribution:
    """Up to four of the letters a and b, then padding; seldom padding before a letter; random probabilities."""
    x = exact.all_sequences(3, LENGTH)
    ends = ((x[:, :-1] != PAD) | (x[:, 1:] == PAD)).all(-1)
    weights = torch.rand(len(x), generator=torch.Generator().manual_seed(0), dtype=torch.float64) * (0.1 + ends)
    return exact.Distribution((weights / weights.sum()).view([3] * LENGTH))


RECORDS = records()


class Next(torch.nn.Module):
    """The true distribution of the next token, for `CausalModel`: its input is shifted one position to the right."""

    def forward(self, x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        length = x.shape[-1]
        before = torch.nn.functional.pad(x[..., 1:], (0, LENGTH + 1 - length))
        log_next = exact.Score(RECORDS, Absorbing(3)).log_next(before)[..., :length, :]
        return log_next.nan_to_num(-1e3).clamp_min(-1e3)  # after what never occurs


def denoiser() -> MeanModel:
    """The true posterior of the clean token as a network that does not depend on σ."""
    table, x = exact.Table(4, LENGTH), exact.all_sequences(4, LENGTH)
    log_mean = exact.Score(RECORDS, Absorbing(3)).log_mean(x, torch.ones(len(x)))
    with torch.no_grad():
        table.weight[..., :3] = log_mean.nan_to_num(-1e3).clamp_min(-1e3)
    return MeanModel(table.requires_grad_(False), Absorbing(3), time_conditioning="none")


def loaded(kind: str) -> LoadedModel:
    process: Process = Uniform(3) if kind == "uniform" else Absorbing(3)
    models: dict[str, Any] = {
        "denoiser": denoiser,
        "score": lambda: exact.Score(RECORDS, process),
        "uniform": lambda: exact.Score(RECORDS, process),
        "autoregressive": lambda: CausalModel(Next(), process),
    }
    config = RunConfig(model=ModelConfig(seq_len=LENGTH), data=DataConfig(packing="lines")).resolved()
    network, objective = exact.Table(2, 1), None
    return LoadedModel(models[kind](), network, process, LogLinear(), objective, LETTERS, config, Path())


def beginnings(given: str, limit: int) -> dict[str, float]:
    """The probability of each continuation of ``given``, cut after ``limit`` tokens, by enumeration."""
    start, found = LETTERS.encode(given).tolist(), defaultdict[str, float](float)
    for ids, p in zip(exact.all_sequences(3, LENGTH).tolist(), RECORDS.probabilities.flatten().tolist(), strict=True):
        if ids[: len(start)] == start:
            found[LETTERS.decode(ids[: len(start) + limit])] += p
    return {text: p / sum(found.values()) for text, p in found.items()}


@pytest.mark.parametrize(
    ("kind", "given", "limit", "count"),
    [
        ("denoiser", "a", 2, 4000),
        ("denoiser", "b", 1, 4000),
        ("denoiser", "", 2, 4000),
        ("autoregressive", "a", 2, 4000),
        ("score", "a", 2, 500),
    ],
)
def test_what_is_shown_is_the_beginning_of_the_models_continuation(
    kind: str, given: str, limit: int, count: int
) -> None:
    """Counts against p(continuation | given) of whole records, cut at the limit."""
    model = loaded(kind)
    run = SamplingRun.of(model, SamplingSettings(steps=None, sampler=None if kind != "score" else "first-hitting"))
    sequences = run.sample(template_prompt([f"{given}{{{limit}}}"] * count, model), batch=count)
    assert {len(sequence.ids) for sequence in sequences} == {len(given) + limit}
    counts, expected = Counter(LETTERS.decode(sequence.ids) for sequence in sequences), beginnings(given, limit)
    assert counts.keys() <= expected.keys()
    names = sorted(expected)
    test = scipy.stats.chisquare([counts[name] for name in names], [count * expected[name] for name in names])
    assert test.pvalue > FALSE_ALARM


def test_positions_after_the_limit_cost_a_time_free_denoiser_nothing() -> None:
    """Their masks stay; other models draw them, too, and drop them."""
    calls = {}
    for kind in ("denoiser", "score", "uniform", "autoregressive"):
        model = loaded(kind)
        prompt = template_prompt(["a{2}"], model)
        calls[kind] = int(prompt.blank.sum())
        assert prompt.text_lengths.tolist() == [3]
    assert calls == {"denoiser": 2, "score": 3, "uniform": 3, "autoregressive": 2}


def test_under_uniform_noise_the_whole_record_is_drawn_and_cut() -> None:
    model = loaded("uniform")
    run = SamplingRun.of(model, SamplingSettings(steps=8))
    shown = run.sample(template_prompt(["{2}"] * 50, model))
    whole = run.sample(template_prompt(["{4}"] * 50, model))
    assert [sequence.ids for sequence in shown] == [sequence.ids[:2] for sequence in whole]


def test_a_text_with_an_ending_is_a_whole_record() -> None:
    model = loaded("denoiser")
    prompt = build_prompt([[0, -1, 1], [0, -1]], model)
    assert prompt.given.tolist() == [[0, -1, 1, PAD], [0, -1, 3, 3]]
    assert prompt.text_lengths.tolist() == [4, 2]
    packed = replace(model, config=replace(model.config, data=DataConfig(packing="packed")))
    assert build_prompt([[0, -1]], packed).given.tolist() == [[0, -1]]


@pytest.mark.parametrize("kind", ["denoiser", "score", "uniform", "autoregressive"])
def test_served_continuations_are_those_of_infill(kind: str) -> None:
    """In batches of rows with and without an ending, with every kind of sampler; edits are those of the text alone."""
    model = loaded(kind)
    templates = ["a{2}", "{3}"] if kind == "autoregressive" else ["a{2}", "{1}b", "{3}"]
    for seed, steps in enumerate((None, 5) if kind in ("denoiser", "autoregressive") else (5,)):
        run, prompt = SamplingRun.of(model, SamplingSettings(steps=steps, seed=seed)), template_prompt(templates, model)
        expected = [sequence.ids for sequence in run.sample(prompt)]
        kept, lengths = prompt.text_lengths.tolist(), prompt.lengths.tolist()
        rows = [Row(run, prompt.given[i, :length].tolist(), i, kept[i]) for i, length in enumerate(lengths)]
        with running(model) as engine:
            collector = Collector(rows, streams=True)
            engine.submit(collector.job)
            served = collector.wait()
        assert served.ids == expected
        edits = [[edit.position for step in steps for edit in step.edits] for steps in served.steps]
        assert all(max(positions) < length for positions, length in zip(edits, kept, strict=True))


def test_the_end_of_a_completion_is_the_models_or_the_limit() -> None:
    """`stop` where padding was drawn, `length` at the limit; usage counts text; streams send the same."""
    model = loaded("denoiser")
    with site(build_app(model, "records")) as server:
        body = {"prompt": "a", "max_tokens": 2, "n": 20, "steps": "inf", "seed": 1}
        reply = server.send("/v1/completions", body).json
        texts = {choice["index"]: (choice["text"], choice["finish_reason"]) for choice in reply["choices"]}
        assert {reason for _, reason in texts.values()} == {"stop", "length"}
        assert all(len(text) < 2 or reason == "length" for text, reason in texts.values())
        assert reply["usage"]["completion_tokens"] == sum(len(text) for text, _ in texts.values())
        assert reply["usage"]["prompt_tokens"] == 1
        streamed: Counter[int] = Counter()
        parts, ends = dict.fromkeys(texts, ""), {}
        for _, event in server.send("/v1/completions", {**body, "stream": True}).events[:-1]:
            [choice] = event["choices"]
            parts[choice["index"]] += choice["text"]
            streamed[choice["index"]] += 1
            ends[choice["index"]] = choice["finish_reason"]
        assert {index: (text, ends[index]) for index, text in parts.items()} == texts
        echoed = server.send("/v1/completions", {**body, "echo": True, "logprobs": 0}).json["choices"]
        assert ["a" + texts[choice["index"]][0] for choice in echoed] == [choice["text"] for choice in echoed]
        assert all("".join(choice["logprobs"]["tokens"]).replace("<pad>", "") == choice["text"] for choice in echoed)
        body = {"template": "a{2}", "steps": "inf", "seed": 1, "diffusing": True}
        (_, start), *_, (_, end) = server.send("/v1/infill", body).events
        assert (len(start["tokens"]), start["length"]) == (3, 3)
        assert end["text"] == end["infilled"] == f"a{texts[0][0]}"
        assert end["usage"]["completion_tokens"] == len(texts[0][0])
        closed = server.send("/v1/infill", {"template": "{2}b", "diffusing": True}).events[-1][1]
        assert closed["usage"]["prompt_tokens"] == 1


def test_stories_continue_their_beginning() -> None:
    """The model in the box: text for every seed, as the prompt has no ending."""
    stories = load_model(Path(models.__file__).parent / "stories")
    prompt = template_prompt(["Once upon a time {12}"], stories)
    for seed in range(10):
        [sequence] = SamplingRun.of(stories, SamplingSettings(steps=1, seed=seed)).sample(prompt)
        text = stories.tokenizer.decode(sequence.ids)
        assert text.startswith("Once upon a time")
        assert len(text) > len("Once upon a time") + 12


@pytest.mark.parametrize("limit", [12, 60])
def test_served_stories_continue_their_beginning(limit: int) -> None:
    stories = load_model(Path(models.__file__).parent / "stories")
    with site(build_app(stories, "stories")) as server:
        for seed in range(2, 6):
            body = {"prompt": "Once upon a time", "max_tokens": limit, "temperature": 0.6, "seed": seed, "steps": 4}
            reply = server.send("/v1/completions", {**body, "user": "someone"}).json
            [choice] = reply["choices"]
            assert len(choice["text"]) > limit
            shown = len(stories.tokenizer.encode(choice["text"]))
            assert reply["usage"]["completion_tokens"] <= limit
            assert (choice["finish_reason"] == "length") or shown < limit
