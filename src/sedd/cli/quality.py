"""``sedd quality``: generative perplexity and other metrics of samples."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from sedd.cli import root
from sedd.cli.sample import sampling_options, sampling_settings
from sedd.extras import install_hint
from sedd.models import built_in_names
from sedd.terminal import warn
from sedd.training import checkpoint
from sedd.training.progress import progress_on_stderr

if TYPE_CHECKING:
    from sedd.evaluation.quality import SampleSet

PICTURES, RECORDS = (".png",), (".json", ".jsonl")
Record = dict[str, Any]


@root.command()
@sampling_options
def quality(
    inputs: Annotated[list[Path] | None, built_in_names()] = None,
    *,
    judge: str | None = None,
    count: int = 64,
    length: int | None = None,
    sweep: list[str] | None = None,
    molecules: bool = False,
    known: Path | None = None,
    mauve: Path | None = None,
    first_token: str | None = None,
    ids: bool = False,
    truncate: bool = False,
    draw_precision: str | None = None,
    judge_precision: str | None = None,
    judge_batch: int = 8,
    batch: int = 16,
    save: Path | None = None,
    out: list[Path] | None = None,
    as_json: bool = False,
    device: str | None = None,
    network: list[str] | None = None,
    **settings: Any,
) -> None:
    """Measure sample quality: generative perplexity under a judge model, entropy, diversity, MAUVE; valid molecules.

    Generative perplexity is given by both conventions in use: by token, exp(total nats / total tokens), and by sample,
    the mean over samples of exp(nats / tokens). It is low for degenerate text too, so these are always shown beside it:
    the entropy of a sample's token frequencies in nats, distinct 1- to 4-grams over all samples, the fraction of
    repeated 4-grams per sample, network calls (NFE) and seconds per sample, and the precision of the draws. All are
    computed in the judge's tokens, with standard errors. Of molecules, validity is valid/all, uniqueness unique/valid
    and novelty novel/unique; RDKit decides where it is installed, else the syntax of SMILES. Examples:

    - `sedd quality run --judge gpt2-large -n 256 --sweep steps=16,64,256 --out sweep.png`
    - `sedd quality run --molecules -n 1000`
    - `sedd quality samples.jsonl --judge ar-run --json > a.json`
    - `sedd quality a.json b.json`

    Args:
        inputs: Runs to sample from, or names of bundled models ({names}) or on the Hub; samples (.jsonl of sedd sample,
            .txt with one per line, a folder of .txt); or saved results (.json, .jsonl) to show beside them. By default
            the bundled model stories.
        judge: Model that scores the samples: a Hugging Face causal language model (folder, .gguf file, Hub name), or an
            autoregressive run.
        count (-n --count): Number of samples per run.
        sweep: Values of a sampling option to compare: steps=16,32,64, temperature=0.8,1, sampler=…, eta=…. Repeat it
            for a grid.
        molecules: Count valid, unique and novel molecules among samples that are SMILES; --judge is then optional.
            Implied, without --judge, for runs trained on .smi and .smiles files.
        known: Molecules that are not novel (.smi, .txt, a table); by default the run's training data.
        mauve: Human texts (.txt, .jsonl) to compute MAUVE against, in the judge's features.
        first_token: skipped: not scored, as in published tables (default of Hugging Face judges); scored: scored given
            the judge's start token (default of our runs).
        ids: Score the sampled token ids themselves; the judge must have the same tokens.
        truncate: Truncate samples to the judge's context instead of refusing them.
        draw_precision: Precision with which the samples of a file were drawn, if the file does not state it.
        judge_precision: Precision of the judge: float32, bfloat16 or, for a Hugging Face judge, float64. By default
            float32; on a GPU bfloat16 if the measured difference is below a tenth of the standard error.
        judge_batch: Samples scored at a time; affects speed and memory only.
        save: File for the generated samples (.jsonl).
        out: Plot of quality against cost and entropy (.png), or the results (.jsonl). Repeatable.
    """
    from sedd import samplers
    from sedd.evaluation.molecules import measure_molecules
    from sedd.evaluation.quality import judges, results
    from sedd.evaluation.quality import samples as sample_sets
    from sedd.evaluation.quality.metrics import MauveReference
    from sedd.loading import load_model
    from sedd.runtime.device import resolve_device

    sampling = sampling_settings(settings)
    for path in out or []:
        root.check_out(path, PICTURES + RECORDS)
    if save is not None:
        root.check_out(save, RECORDS[1:])
    paths = (
        [path if path.exists() and not checkpoint.holds_model(path) else root.find_model(path) for path in inputs]
        if inputs
        else [root.find_model(None)]
    )
    swept = sample_sets.parse_sweeps(sweep or [])
    points = sample_sets.sweep_points((sampling, length), swept)
    molecules = molecules or (judge is None and all(_is_molecule_run(path) for path in paths))
    if save is not None and (len(paths) > 1 or len(points) > 1):
        raise ValueError("save takes the samples of one run and one setting; leave out other inputs and --sweep")
    if judge is None and molecules and any(path.suffix in PICTURES for path in out or []):
        raise ValueError("the plot shows generative perplexity, which needs --judge; save the results as .jsonl")
    if known is not None and not molecules:
        raise ValueError(f"known is {known}, and there are no molecules to compare with it; add --molecules")
    stored = [results.read_results(path) for path in paths]
    if judge is None and not molecules and None in stored:
        raise ValueError(
            "samples need a judge; name a Hugging Face model or an autoregressive run with --judge, or, for molecules, "
            "add --molecules"
        )
    root.announce(", ".join(map(root.model_name, paths)), count=count, sweep=" ".join(sweep or []) or None, judge=judge)
    where = str(resolve_device(device))

    def sample_sets_of(path: Path) -> "Iterator[SampleSet]":
        """Check an input now; samples of a run are drawn when iterated over."""
        if judges.is_run_folder(path):
            loaded = load_model(path, device=where)
            runs = [samplers.SamplingRun.of(loaded, setting) for setting, _ in points]
            prompts = [samplers.blank_prompt(loaded, count, size) for _, size in points]

            def draw(run: samplers.SamplingRun, prompt: samplers.Prompt) -> "SampleSet":
                with progress_on_stderr(f"sampling {path}") as on_progress:
                    return sample_sets.generate_samples(loaded, run, prompt, batch, str(path), on_progress)

            return map(draw, runs, prompts)
        if sweep:
            raise ValueError(f"{path} is a file of samples; --sweep needs the folder of a run")
        found = sample_sets.read_samples(path)
        facts = {**found.facts, "draw_precision": found.facts.get("draw_precision") or draw_precision}
        return iter([replace(found, facts=facts)])

    work = [saved or sample_sets_of(path) for path, saved in zip(paths, stored, strict=True)]
    scorer = reference = None
    if judge is not None and None in stored:
        texts = None if mauve is None else sample_sets.read_samples(mauve)
        scorer = judges.load_judge(judge, first_token=first_token, precision=judge_precision, device=where)
        beside = [record for saved in stored for record in saved or []]
        results.check_comparable([*beside, results.judge_record(scorer)])  # before any work
        reference = None if texts is None else MauveReference(texts, scorer, judge_batch)
    known_by_source: dict[str, list[str] | None] = {}

    def evaluate(item: "SampleSet | Record") -> Record:
        if isinstance(item, dict):
            return item
        if save is not None:
            with root.writing_to(save):
                sample_sets.write_samples(item, save)
        if scorer is None:
            record = results.sampling_record(item)
        else:
            with progress_on_stderr(f"scoring {item.source}") as on_progress:
                options: Any = {"by_ids": ids, "truncate": truncate, "reference": reference, "batch": judge_batch}
                record = results.evaluate_samples(item, scorer, on_progress=on_progress, **options)
        if molecules:
            if item.source not in known_by_source:
                known_by_source[item.source] = _read_known(known, item)
            texts, others = [sample.text or "" for sample in item.samples], known_by_source[item.source]
            with progress_on_stderr("comparing with known molecules") as on_progress:
                record |= measure_molecules(texts, others, on_progress).as_record()
            record["known_molecules"] = None if others is None else len(others)
        return record

    _report([evaluate(item) for items in work for item in items], [*swept], out or [], as_json)


def _is_molecule_run(path: Path) -> bool:
    """Return whether ``path`` is the folder of a run that was trained on files of SMILES."""
    from sedd.data.readers import SMILES, file_kind

    sources = checkpoint.read_run_config(path).data.sources if (path / "config.json").is_file() else []
    return bool(sources) and all(file_kind(Path(source)) in SMILES for source in sources)


def _read_known(given: Path | None, samples: "SampleSet") -> list[str] | None:
    """Return the molecules that are not novel: those given, or the training data of the run that was sampled."""
    from sedd import data
    from sedd.training.datasets import find_sources, prepare_data

    if given is not None:
        return list(data.read_documents([given], packing="lines"))
    try:
        folder = Path(samples.facts.get("model") or samples.source)
        trained = samples.config or checkpoint.find_model(folder).config
        config = find_sources(trained, folder)
        length, fraction = config.model.seq_len, config.data.val_fraction
        blocks = data.TokenBlocks.open(prepare_data(config), length, "train", fraction)
    except ValueError as error:
        warn(f"novelty is not known, name the training data with --known: {error}")
        return None
    return blocks.decode()


IDENTIFYING = ("source", "sampler", "steps")
METRICS = (
    *("gen_ppl_by_token", "gen_ppl_by_sample", "entropy_nats", "distinct_1", "distinct_2", "distinct_3", "distinct_4"),
    *("self_repetition_4", "mauve", "validity", "uniqueness", "novelty"),
)
"""Columns of the table, as far as the records have them."""
SETTINGS = ("temperature", "top_p", "top_k", "grid", "options", "label", "guidance", "length", "seed")
"""Settings of sampling: columns of the table where they differ."""
COUNTS = ("samples", "tokens", "truncated", "known_molecules")
"""Shown below the metrics of a single record."""
COSTS = ("nfe", "seconds_per_sample", "draw_precision")


def _report(records: list[Record], swept: list[str], out: list[Path], as_json: bool) -> None:
    """Print the table or the records to stdout, write the files of ``out``, print warnings to stderr."""
    from sedd import plot
    from sedd.evaluation.quality import comparison_warnings, quality_table
    from sedd.evaluation.quality.plots import plot_quality

    extra = [name if name in records[0] else "options" for name in swept if name not in IDENTIFYING]
    for name in SETTINGS:  # a column each if they tell records apart
        values = {json.dumps(record.get(name), sort_keys=True) for record in records}
        extra += [name] if len(values) > 1 and name not in extra else []
    metrics = [name for name in METRICS if any(record.get(name) is not None for record in records)]
    columns = [*IDENTIFYING, *extra, *metrics, *COSTS]
    rows = quality_table(records, columns)
    for path in out:
        if path.suffix in PICTURES:
            with root.writing_to(path):
                plot.save_png(plot_quality(records, swept), path)
        else:
            root.write_records(records, path)
    for warning in comparison_warnings(records):
        warn(warning)
    if as_json:
        root.print_records(records)
    else:
        _print(records, columns, rows)


def _print(records: list[Record], columns: list[str], found: list[list[Any]]) -> None:
    """Print what the numbers depend on, then one record as a line per number, or several as a table."""
    if judged := next((record for record in records if "judge" in record), None):
        about = f"judge {judged['judge']} in {judged['judge_precision']}, first token {judged['first_token']}"
        root.show(f"{about}; in the judge's tokens, entropy in nats")
    if counted := next((record for record in records if "validity" in record), None):
        root.show(
            f"molecules by RDKit {counted['rdkit_version']}, in any spelling"
            if counted["validity_by"] == "RDKit"
            else "molecules by the syntax of SMILES alone, as text; with RDKit also by valence, in any spelling: "
            + install_hint("molecules")
        )
    cells = [
        [_format(value, record.get(f"stderr_{name}")) for name, value in zip(columns, row, strict=True)]
        for record, row in zip(records, found, strict=True)
    ]
    if len(cells) > 1:
        root.print_table(columns, cells)
        return
    counts = {name: records[0][name] for name in COUNTS if records[0].get(name) is not None}
    root.print_rows(dict(zip(columns, cells[0], strict=True)) | counts, 22)


def _format(value: Any, stderr: float | None) -> str:
    """Return a table cell; a standard error follows its number."""
    if not isinstance(value, float):
        return "" if value is None else str(value)
    return f"{value:.4g}" if stderr is None else f"{value:.4g} ± {stderr:.2g}"
