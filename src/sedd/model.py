"""The Python interface: `train` or `load` a model, then `Model.sample`, `Model.infill`, `Model.bound`.

These are the public names of ``sedd`` (``import sedd; sedd.load("run")``). They only call the packages below them;
``model.loaded`` is the object that they take.
"""

import html
import math
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, final

import numpy as np
from torch import nn

from sedd import evaluation, hub, samplers, trace
from sedd.diffusion import Diffusion
from sedd.draws import derive_seed
from sedd.likelihood.estimate import OnProgress
from sedd.likelihood.orders import Orders
from sedd.loading import LoadedModel, convert_precision
from sedd.runtime.device import resolve_device
from sedd.runtime.distributed import Ranks
from sedd.samplers import Prompt, SamplingRun, SamplingStats, template
from sedd.sampling_settings import SamplingSettings, shows_settings
from sedd.schema import MAX_SAMPLES, check_count
from sedd.training import checkpoint
from sedd.training.datasets import check_data, prepare_data


def load(
    source: str | Path, *, device: str | None = None, weights: str = "ema", network: type[nn.Module] | str | None = None
) -> "Model":
    """Load a model.

    Args:
        source: The folder of a run, a checkpoint or a model; or the name of a bundled model (``stories``) or of one on
            the Hugging Face Hub. Published SEDD, RADD and MDLM models must be safetensors; see ``sedd import``.
        device: cpu, cuda, cuda:N or mps; by default the GPU of CUDA if there is one.
        weights: ``ema``, the exponential moving average, or ``model``, the weights of the last step.
        network: The class or import path of a network of your own, if you did not train the model here.
    """
    return Model(hub.from_pretrained(source, weights=weights, device=str(resolve_device(device)), network=network))


def train(
    sources: str | Path | Sequence[str | Path] = (),
    *,
    out: str | Path,
    recipe: str | None = None,
    resume: bool = False,
    on_event: Callable[[str, dict[str, Any]], None] | None = None,
    track: str | None = None,
    device: str | None = None,
    **options: Any,
) -> "Model":
    """Train a model and return it, as `load` does. An interrupt (Ctrl-C) ends training early, with a checkpoint.

    Args:
        sources: Files or folders to train on; not needed with ``resume``.
        out: The folder of the run.
        recipe: A named configuration to start from: tiny, text8, text8-uniform, english, dna, molecules, small, medium.
        resume: Continue from the newest checkpoint in ``out``.
        on_event: Called with each event and its record, in every process, instead of a progress bar.
        track: Send the log to a tracker too: wandb or trackio.
        device: cpu, cuda or cuda:N; by default the GPU if there is one.
        **options: Options of ``sedd train`` (steps, minutes, tokenizer …), or sections of `config.RunConfig` as
            mappings: ``model={"width": 64}``. ``network`` is a network of your own: the class, its import path, or a
            mapping of ``class`` and the options of its constructor.
    """
    from sedd.training import loop  # a loaded model needs none of these
    from sedd.training.overrides import decide_resume, merge_config
    from sedd.training.progress import progress_bar, track_run

    folder, paths = Path(out), [sources] if isinstance(sources, str | Path) else list(sources)
    flags = {**options, **({"sources": [str(path) for path in paths]} if paths else {})}
    checkpoint.check_writable(folder)
    resume = decide_resume(folder, resume)
    with progress_bar() as (show_event, show_preparation):
        report = on_event or show_event
        config = merge_config(
            flags,
            resume=folder if resume else None,
            recipe=recipe,
            on_sizing=lambda text: report("note", {"text": text}),
            device=device,
        )
        check_data(config.data)
        prepare = partial(prepare_data, config, show_preparation)
        with track_run(track, config, folder, report) as tracked:
            result = loop.run(config, prepare, folder, resume, tracked, device)
    if result.signal == signal.SIGTERM:
        raise SystemExit(128 + signal.SIGTERM)
    return load(folder, device=device)


@final
@dataclass(frozen=True)
class Text:
    """A generated text."""

    text: str
    ids: tuple[int, ...]
    tokens: tuple[str, ...]  # the text of each token, in printable form
    steps: tuple[int, ...]  # the step at which each token was revealed; 0 for a given token
    template: str | None = None

    def __str__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        return trace.trace_fragment([trace.trace_tokens(self.tokens, self.steps)])


@final
class Texts(tuple[Text, ...]):
    """A tuple of generated texts; ``print(texts)`` shows one per line, a notebook colours tokens by their step."""

    stats: SamplingStats

    def __str__(self) -> str:
        return "\n".join(map(str, self))

    def _repr_html_(self) -> str:
        return "".join(text._repr_html_() for text in self)


@final
@dataclass(frozen=True)
class Bound:
    """−log p(text) where ``is_exact``, else an upper bound on it (the negative ELBO)."""

    text: str
    nats: float
    stderr: float  # standard error of ``nats``; 0 where it is exact
    tokens: int
    is_exact: bool

    @property
    def nats_per_token(self) -> float:
        return self.nats / self.tokens

    @property
    def bits_per_char(self) -> float:
        return self.nats / math.log(2) / len(self.text)

    def __str__(self) -> str:
        value = f"exactly {self.nats:.3f}" if self.is_exact else f"at most {self.nats:.3f} ± {self.stderr:.3f}"
        return f"{value} nats, {self.nats_per_token:.3f} per token: {self.text!r}"


@final
class Bounds(tuple[Bound, ...]):
    """A tuple with a bound for each text; ``print(bounds)`` shows one per line."""

    def __str__(self) -> str:
        return "\n".join(map(str, self))

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


@final
class Model:
    """A trained model, as `load` and `train` return it. The same seed gives the same texts and numbers.

    ``length`` is the most tokens that the model reads or generates, ``labels`` the names that texts can be conditioned
    on, and ``loaded`` the object that the packages below take.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        self.loaded, self.tokenizer, self.labels = loaded, loaded.tokenizer, loaded.labels
        self.length = loaded.config.model.seq_len

    @property
    def diffusion(self) -> Diffusion:
        """The same model of token ids: it samples, infills and bounds tensors."""
        return Diffusion.of(self.loaded.model, self.loaded.objective, self.length)

    @property
    def parameters(self) -> int:
        return sum(p.numel() for p in self.loaded.network.parameters())

    def __repr__(self) -> str:
        run = self.loaded.config
        kind = f"{run.objective}, {run.noise.process} noise, {self.tokenizer.kind}, length {self.length}"
        return f"Model({str(self.loaded.folder)!r}: {self.parameters:,} parameters, {kind})"

    @shows_settings
    def sample(self, count: int = 1, *, length: int | None = None, batch: int = 16, **settings: Any) -> Texts:
        """Generate texts.

        Args:
            length: Tokens per text; by default the model's sequence length.
            batch: Texts generated at a time; it changes no text.
            **settings: Fields of `SamplingSettings` (``steps=None``: one token at a time) and options of the sampler.
        """
        check_count("count", count, most=MAX_SAMPLES)
        prompt = samplers.blank_prompt(self.loaded, count, length)
        return self._generate(prompt, [None] * count, SamplingSettings.of(**settings), batch)

    @shows_settings
    def infill(self, templates: str | Sequence[str], count: int = 1, *, batch: int = 16, **settings: Any) -> Texts:
        """Fill the gaps of templates; given text is returned unchanged. Under uniform noise this is approximate.

        Args:
            templates: Texts with gaps: ``The {8} sat.`` has a gap of eight tokens.
            count: Number of texts per template; ``batch`` and the settings are as for `sample`.
        """
        check_count("count", count, most=MAX_SAMPLES)
        repeated = [text for text in _as_list(templates, "template") for _ in range(count)]
        prompt = template.template_prompt(repeated, self.loaded)
        return self._generate(prompt, repeated, SamplingSettings.of(**settings), batch)

    def bound(
        self,
        texts: str | Sequence[str],
        *,
        given: str = "",
        draws: int | None = None,
        seed: int = 0,
        estimator: str | None = None,
        orders: Orders | None = None,
        label: str | None = None,
        shared_noise: bool = False,
        batch: int = 16,
        on_progress: OnProgress | None = None,
    ) -> Bounds:
        """Bound −log p of each text: exact for autoregressive models, an upper bound for the others.

        Args:
            given: Text before each of them, on which the probability is conditioned.
            draws: Monte Carlo draws per text; more make the standard error smaller. By default 128, with ``orders`` 8.
            seed: Decides the draws, together with the text, so that the errors of texts are independent.
            estimator: As for ``sedd eval``; by default the variational bound.
            orders: For a time-free denoiser under absorbing noise: the number of orders of the importance-weighted
                bound, or ``"all"`` for the exact likelihood of at most 16 tokens.
            shared_noise: Use the same noise for all texts, for comparing texts of one length: differences have smaller
                errors, and sums larger ones than their standard errors say.
            batch: Draws evaluated at a time; it changes no result.
            on_progress: Called after each batch with the number of draws that are done and of all, for each text.
        """
        text_list = _as_list(texts, "text")
        draws = evaluation.default_draws(evaluation.SINGLE_TEXT, orders) if draws is None else draws
        conditional = self.loaded if label is None else self.loaded.with_label(label)
        bounds = []
        if given:
            encoded = [evaluation.encode_continuation(given, text, self.loaded) for text in text_list]
        else:
            encoded = [(np.zeros(0, np.int64), ids) for ids in evaluation.encode_texts(text_list, self.loaded)]
        for text, (context, ids) in zip(text_list, encoded, strict=True):
            found = evaluation.score_continuation(
                *(context, ids, conditional),
                estimator=estimator,
                orders=orders,
                draws=draws,
                seed=seed,
                noise_seed=seed if shared_noise else derive_seed(seed, given + text),
                batch=batch,
                on_progress=on_progress,
            )
            bounds.append(Bound(text, found.nats * len(ids), found.stderr * len(ids), len(ids), found.is_exact))
        return Bounds(bounds)

    def evaluate(
        self,
        data: str | Path | None = None,
        *,
        protocol: str | None = None,
        estimator: str | None = None,
        orders: Orders | None = None,
        draws: int | None = None,
        seed: int = 0,
        label: str | None = None,
        column: str | None = None,
        encoding: str = "utf-8",
        batch: int | None = None,
    ) -> dict[str, Any]:
        """Bound −log p of a file or of the validation split, as ``sedd eval`` does, and return its record.

        Args:
            data: A file, a folder or prepared data, of the run with protocol ``held-out``; None: its validation split.
            protocol: How text is cut, and which terms count; by default ``strict``, without ``data`` ``held-out``.
            estimator: As for `bound`, like ``orders``, ``seed`` and ``label``.
            draws: Monte Carlo draws per sequence; by default the protocol's.
            column: The column of a table that holds the text.
            batch: Draws evaluated at a time; by default as many as suit the device.
        """
        chosen = evaluation.get_protocol(protocol or ("held-out" if data is None else "strict"))
        conditional, source = self.loaded.with_label(label), None if data is None else str(data)
        advice = "model.evaluate(DATA, protocol='held-out')"
        [corpus] = evaluation.load_corpora(conditional, source, chosen, column=column, encoding=encoding, advice=advice)
        ranks = Ranks(0, 1, self.loaded.device)
        return evaluation.evaluate(
            conditional, corpus, chosen, ranks, estimator=estimator, orders=orders, draws=draws, batch=batch, seed=seed
        )

    def evaluate_samples(
        self, samples: int, *, orders: int = 16, seed: int = 0, label: str | None = None, batch: int | None = None
    ) -> dict[str, Any]:
        """Bound −log p of the model's own samples, and so its entropy, from both sides.

        For time-free denoisers under absorbing noise; as ``sedd eval --samples`` does.

        Args:
            samples: Number of samples to generate, one token at a time.
            orders: Orders in each mean; more bring the two bounds closer together.
            batch: Samples at a time; by default as many as suit the device.

        Returns:
            The record of `evaluate`: ``nats_per_token`` is the upper bound, ``lower_nats_per_token`` the lower.
        """
        conditional, ranks = self.loaded.with_label(label), Ranks(0, 1, self.loaded.device)
        return evaluation.evaluate_own_samples(
            conditional, ranks, samples=samples, orders=orders, seed=seed, batch=batch
        )

    def to(self, device: str) -> "Model":
        """Return this model on another device: cpu, cuda, cuda:N or mps."""
        return Model(convert_precision(self.loaded, "float32", str(resolve_device(device))))

    def save(
        self,
        folder: str | Path,
        *,
        name: str | None = None,
        results: Sequence[Mapping[str, Any]] = (),
        dtype: str | None = None,
    ) -> Path:
        """Write a model folder that `load` reads: EMA weights, configuration, tokenizer and a model card.

        Args:
            folder: The folder to write; it must be new or empty.
            name: The model's name in its card; by default that of the folder.
            results: Records of `evaluate` for the card.
            dtype: How the weights are stored: ``int8``, ``bfloat16`` or ``float32``; by default as they are.
        """
        network = self.loaded.config.network.get("class")
        return hub.save_pretrained(self.loaded.folder, Path(folder), name, results, dtype, network)

    def push(self, name: str, *, private: bool = False, results: Sequence[Mapping[str, Any]] = ()) -> str:
        """Upload the model, with its card, to the Hugging Face Hub as ``name`` (owner/name); return its address."""
        network = self.loaded.config.network.get("class")
        return hub.push_to_hub(self.loaded.folder, name, private=private, results=results, network=network)

    def _generate(
        self, prompt: Prompt, templates: Sequence[str | None], settings: SamplingSettings, batch: int
    ) -> Texts:
        run, texts = SamplingRun.of(self.loaded, settings), []
        for (ids, steps), name in zip(run.sample(prompt.to(self.loaded.device), batch), templates, strict=True):
            tokens = self.tokenizer.tokens(ids)
            texts.append(Text(self.tokenizer.decode(ids), tuple(ids), tuple(tokens), tuple(steps), name))
        generated = Texts(texts)
        generated.stats = run.stats
        return generated


def _as_list(given: str | Sequence[str], what: str) -> list[str]:
    texts = [given] if isinstance(given, str) else list(given)
    if not texts:
        raise ValueError(f"no {what} was given; give one, or a list of them")
    return texts
