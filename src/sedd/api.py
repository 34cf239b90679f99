"""The package in a few words: `train` or `load` a model, then `Model.sample`, `Model.infill`, `Model.bound`.

These names are ``sedd``'s own (``import sedd; sedd.load("run")``), and they stay. They add nothing to the rooms below
but convenience; ``model.loaded`` is what those work on.
"""

import html
import math
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
import torch

from sedd import evaluation, factory, generate, hub, training
from sedd.factory import LoadedModel
from sedd.generate import GeneratedSequence, SamplingRun, SamplingSettings, SamplingStats, template, trace
from sedd.sampling import Prompt
from sedd.tokenizer import Ids, Tokenizer


def load(source: str | Path, *, device: str | None = None, weights: str = "ema") -> "Model":
    """The model of a run, of one of its checkpoints, of a model folder, or of a name on the Hub.

    A published SEDD, RADD or MDLM checkpoint will do where it is safetensors; pickles go through ``sedd import``.

    ``device`` is a GPU where there is one; ``weights`` are the averaged ones (``ema``) or the last (``model``).
    """
    place = device or ("cuda" if torch.cuda.is_available() else "cpu")
    return Model(hub.from_pretrained(source, weights=weights, device=place))


def train(
    sources: str | Path | Sequence[str | Path] = (),
    *,
    out: str | Path,
    recipe: str | None = None,
    resume: bool = False,
    on_event: training.OnEvent | None = None,
    **options: Any,
) -> "Model":
    """Train on files or folders, keep the run in ``out``, and give its model back.

    ``options`` are words of ``sedd train`` (steps, minutes, tokenizer, objective, process, seed …), or sections of
    `config.Run` as mappings: ``model={"width": 64}``. ``resume`` goes on from the newest checkpoint in ``out``. An
    interrupt ends training early, with everything saved. ``on_event`` receives each event; by default a bar shows it.
    """
    folder, names = Path(out), [sources] if isinstance(sources, str | Path) else list(sources)
    stored = training.stored_config(folder) if resume else None
    words = {**options, **({"sources": [str(name) for name in names]} if names else {})}
    config = training.merge_config(words, stored=stored, recipe=recipe)
    training.check_writable(folder)
    with training.progress_bar() as (show, preparing):
        end = training.run(config, lambda: training.prepare_data(config, preparing), folder, resume, on_event or show)
    if end.signal == signal.SIGTERM:
        raise SystemExit(128 + signal.SIGTERM)
    return load(folder)


@final
@dataclass(frozen=True)
class Text:
    """What a model wrote."""

    text: str
    ids: tuple[int, ...]
    """Token ids."""
    tokens: tuple[str, ...]
    """Their texts, made printable."""
    steps: tuple[int, ...]
    """When each token took its value; 0: it was given."""
    template: str | None = None

    def __str__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        return trace.trace_fragment([[trace.Token(*pair) for pair in zip(self.tokens, self.steps, strict=True)]])


@final
class Texts(tuple[Text, ...]):
    """Texts, and what they cost: ``print(texts)`` shows one a line, a notebook shows when each token came."""

    cost: SamplingStats

    def __str__(self) -> str:
        return "\n".join(map(str, self))

    def _repr_html_(self) -> str:
        return "".join(text._repr_html_() for text in self)


@final
@dataclass(frozen=True)
class Bound:
    """How unlikely a text is: −log p(text) where ``is_exact``, else an upper bound on it."""

    text: str
    nats: float
    stderr: float
    """Of ``nats``: 1.96 of it on either side hold the bound in 95 of 100 cases. 0 where it is exact."""
    tokens: int
    is_exact: bool

    @property
    def nats_per_token(self) -> float:
        """The same a token."""
        return self.nats / self.tokens

    @property
    def bits_per_char(self) -> float:
        """The same in bits, a character of the text."""
        return self.nats / math.log(2) / len(self.text)

    def __str__(self) -> str:
        value = f"exactly {self.nats:.3f}" if self.is_exact else f"at most {self.nats:.3f} ± {self.stderr:.3f}"
        return f"{value} nats, {self.nats_per_token:.3f} a token: {self.text!r}"


@final
class Bounds(tuple[Bound, ...]):
    """A bound for each text; ``print(bounds)`` shows one a line."""

    def __str__(self) -> str:
        return "\n".join(map(str, self))

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


@final
class Model:
    """A trained model; `load` or `train` gives one. The same seed gives the same texts and numbers, in any batch."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.loaded = loaded

    @property
    def tokenizer(self) -> Tokenizer:
        """Text to token ids and back."""
        return self.loaded.tokenizer

    @property
    def length(self) -> int:
        """Tokens that it reads and writes at most."""
        return self.loaded.config.model.seq_len

    @property
    def labels(self) -> tuple[str, ...]:
        """What its texts may be told to be, where it was trained on that."""
        return self.loaded.labels

    @property
    def parameters(self) -> int:
        """How many numbers it has learned."""
        return sum(p.numel() for p in self.loaded.network.parameters())

    def __repr__(self) -> str:
        run = self.loaded.config
        kind = f"{run.objective}, {run.noise.process} noise, {self.tokenizer.kind}, length {self.length}"
        return f"Model({str(self.loaded.folder)!r}: {self.parameters:,} parameters, {kind})"

    def sample(
        self,
        count: int = 1,
        *,
        length: int | None = None,
        steps: int | None = 128,
        seed: int = 0,
        sampler: str | None = None,
        grid: str = "uniform",
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int | None = None,
        label: str | None = None,
        guidance: float = 1.0,
        batch: int = 16,
        **options: Any,
    ) -> Texts:
        """Texts from nothing; ``options`` are the sampler's own, and no ``steps`` are one token after another.

        Of a model with labels, ``label`` is what they shall be, and ``guidance`` above 1 makes them more so.
        """
        _at_least_one(count)
        how = SamplingSettings(sampler, steps, grid, seed, temperature, top_p, top_k, options, label, guidance)
        return self._written(generate.blank(self.loaded, count, length), [None] * count, how, batch)

    def infill(
        self,
        templates: str | Sequence[str],
        count: int = 1,
        *,
        steps: int | None = 128,
        seed: int = 0,
        sampler: str | None = None,
        grid: str = "uniform",
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int | None = None,
        label: str | None = None,
        guidance: float = 1.0,
        batch: int = 16,
        **options: Any,
    ) -> Texts:
        """``count`` fillings of each template: ``The {8} sat.`` has a gap of eight tokens.

        What is given comes back as it is. Under uniform noise fillings are approximate.
        """
        _at_least_one(count)
        how = SamplingSettings(sampler, steps, grid, seed, temperature, top_p, top_k, options, label, guidance)
        named = [text for text in _listed(templates, "template") for _ in range(count)]
        return self._written(template.around(named, self.loaded), named, how, batch)

    def bound(
        self,
        texts: str | Sequence[str],
        *,
        given: str = "",
        draws: int | None = None,
        seed: int = 0,
        estimator: str | None = None,
        label: str | None = None,
        batch: int = 16,
    ) -> Bounds:
        """How unlikely each text is, by itself or behind what is ``given``; ``draws`` looks decide the error.

        Exact for autoregressive models, an upper bound for the others. ``estimator`` is as for ``sedd eval``. With
        ``label`` it is the text's given that label.
        """
        wanted, draws = _listed(texts, "text"), evaluation.SINGLE_TEXT.draws if draws is None else draws
        told = factory.labelled(self.loaded, label)
        is_exact = factory.build_estimator(estimator, told, evaluation.SINGLE_TEXT.terms).is_exact
        found = []
        for text, (context, row) in zip(wanted, self._rows(wanted, given), strict=True):
            nats, stderr, *_ = evaluation.score_continuation(
                context, row, told, estimator=estimator, draws=draws, seed=seed, batch=batch
            )
            found.append(Bound(text, nats * len(row), stderr * len(row), len(row), is_exact))
        return Bounds(found)

    def _rows(self, texts: Sequence[str], given: str) -> list[tuple[Ids, Ids]]:
        """What stands before each text, and the text."""
        if given:
            return [evaluation.encode_continuation(given, text, self.loaded) for text in texts]
        return [(np.zeros(0, np.int64), corpus.sequences[0]) for corpus in evaluation.text_corpora(texts, self.loaded)]

    def _written(self, prompt: Prompt, templates: Sequence[str | None], how: SamplingSettings, batch: int) -> Texts:
        job = SamplingRun.of(self.loaded, how)
        rows = generate.sample(job, prompt.to(self.loaded.device), batch)
        texts = Texts(self._text(row, name) for row, name in zip(rows, templates, strict=True))
        texts.cost = job.tally
        return texts

    def _text(self, row: GeneratedSequence, name: str | None) -> Text:
        tokens = tuple(self.tokenizer.tokens(row.ids))
        return Text(self.tokenizer.decode(row.ids), tuple(row.ids), tokens, tuple(row.when), name)


def _listed(given: str | Sequence[str], what: str) -> list[str]:
    found = [given] if isinstance(given, str) else list(given)
    if not found:
        raise ValueError(f"no {what} was given; give one, or a list of them")
    return found


def _at_least_one(count: int) -> None:
    if count < 1:
        raise ValueError(f"count is {count}; ask for at least 1 text")
