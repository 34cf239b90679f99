"""``sedd eval`` and ``sedd score``: likelihood and perplexity by named protocols; ``sedd lm-eval``."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from sedd.cli import root
from sedd.cli.root import count_of
from sedd.extras import install_hint
from sedd.files import read_text
from sedd.models import built_in_folder
from sedd.terminal import visible, warn
from sedd.training.progress import progress_on_stderr

if TYPE_CHECKING:
    from sedd.evaluation.protocols import Protocol
    from sedd.loading import LoadedModel
    from sedd.runtime.distributed import Ranks

Record = dict[str, Any]


@contextmanager
def _open_model(
    model: Path,
    protocol: "Protocol",
    what: str,
    *,
    estimator: str | None = None,
    orders: str | None = None,
    draws: int | None = None,
    batch: int | None = None,
    precision: str | None = None,
    device: str | None = None,
    network: list[str] | None = None,
    seed: int = 0,
    label: str | None = None,
) -> Iterator[tuple["LoadedModel", "Ranks", Callable[..., Record]]]:
    """Load a model and announce what is evaluated; yield the model, the processes, and the evaluation.

    It is `evaluation.evaluate` or `evaluation.evaluate_own_samples`, with these options.

    Args:
        estimator: bound (the negative ELBO, default); for denoisers under absorbing noise also any-order (a bound with
            less variance) and forward, backward, random (the exact likelihood of generation in that order).
        orders: For time-free denoisers under absorbing noise, whose distribution is a mixture over orders: a number K
            for the importance-weighted bound of K random orders, tighter the more there are, with K network calls per
            token and draw; all for the exact likelihood of sequences of at most 16 tokens.
        draws: Monte Carlo draws per sequence, an even number, by default 8 (score: 128), with --orders 2 (score: 8);
            more draws give a smaller standard error.
        batch: Sequences evaluated at a time on each process, by default as many as suit the device; affects speed and
            memory only.
        precision: Precision of matrix products: float32 or bfloat16. By default float32; on a GPU bfloat16 if the
            measured difference is below a tenth of the standard error.
        seed: Random seed of times and noise.
        label: Label to condition on; without it, the likelihood is unconditional.
    """
    from sedd import evaluation
    from sedd.evaluation.protocols import OWN_SAMPLES
    from sedd.likelihood.orders import check_orders
    from sedd.likelihood.variance_reduction import check_draws
    from sedd.loading import load_model
    from sedd.runtime import distributed

    check_draws(draws)
    number = int(orders) if orders is not None and orders.isdecimal() else orders
    if number is not None:
        check_orders(number, estimator)
    with distributed.process_group(device) as ranks:
        loaded = load_model(model, device=str(ranks.device)).with_label(label)
        root.announce(what, model, estimator=estimator, orders=orders, draws=draws, seed=seed)
        options: Record = {"orders": number, "batch": batch, "seed": seed}
        if protocol is OWN_SAMPLES:
            yield loaded, ranks, partial(evaluation.evaluate_own_samples, loaded, ranks, **options)
        else:
            options |= {"models": evaluation.models_by_precision(loaded, precision)}
            options |= {"protocol": protocol, "ranks": ranks, "estimator": estimator, "draws": draws}
            yield loaded, ranks, partial(evaluation.evaluate, loaded, **options)


likelihood_options = root.keywords(_open_model)


@root.command("eval")
@root.takes(likelihood_options)
def evaluate_dataset(
    model: root.FirstModel = None,
    data: str | None = None,
    *,
    protocol: str | None = None,
    suite: str | None = None,
    dataset: list[str] | None = None,
    samples: int | None = None,
    column: str | None = None,
    encoding: str | None = None,
    as_json: bool = False,
    out: Path | None = None,
    **options: Any,
) -> None:
    """Evaluate the likelihood of a dataset: the variational bound, its terms and its standard error.

    Up to rounding, the result does not depend on the number of processes. Examples:

    - `sedd eval run test.txt`
    - `sedd eval run text8.xz --protocol text8p --json`
    - `sedd eval run corpora --suite zero-shot --protocol sedd`
    - `sedd eval run --samples 64 --orders 16`
    - `torchrun --nproc-per-node 8 -m sedd eval run test.txt`

    Args:
        data: File, folder or prepared dataset; by default the validation split of the run's own data, which may be
            named, if it was moved, with --protocol held-out.
        suite: zero-shot: all benchmarks of the protocol; DATA is then the folder of their files.
        dataset: Benchmark: lambada, ptb, wikitext2, wikitext103 or lm1b. By default recognized by the file's name; with
            --suite, only these, repeatable.
        samples: Generate this many samples and evaluate them in place of DATA. With --orders K their likelihood is
            bounded from both sides; its mean is the entropy of the model.
        out: File for the results, one JSON record per line.
    """
    from sedd import evaluation
    from sedd.evaluation.protocols import OWN_SAMPLES

    if out is not None:
        root.check_out(out)
    folder, source = _split_data(model, data, suite is not None or samples is not None)
    if samples is not None:
        for name, value in {**options, "DATA": source, "protocol": protocol, "suite": suite}.items():
            if value is not None and name in ("DATA", "protocol", "suite", "draws", "precision"):
                raise ValueError(f"{name} is {value}, and --samples generates the data and scores it; leave one out")
        chosen, what = OWN_SAMPLES, f"{count_of(samples, 'sample')} of its own"
    else:
        chosen = evaluation.get_protocol(protocol or ("strict" if source else "held-out"))
        what = f"{suite or ''} {source or 'validation split'}, protocol {chosen.name}".lstrip()
    records = []
    with _open_model(folder, chosen, what, **options) as (loaded, ranks, evaluate):
        if samples is not None:
            with progress_on_stderr("evaluating samples", shown=ranks.is_main) as on_progress:
                records.append(evaluate(samples=samples, on_progress=on_progress))
        else:
            published, size = chosen.published_vocab_size, loaded.tokenizer.vocab_size
            if published not in (None, size) and ranks.is_main:
                warn(
                    f"published numbers of protocol {chosen.name} count tokens of a vocabulary of {published:,}; this "
                    f"model has {size:,}: compare bits_per_char only"
                )
            reading: Record = {"suite": suite, "datasets": dataset or (), "column": column}
            for corpus in evaluation.load_corpora(loaded, source, chosen, encoding=encoding or "utf-8", **reading):
                with progress_on_stderr(corpus.dataset or "evaluating", shown=ranks.is_main) as on_progress:
                    records.append(evaluate(corpus, on_progress=on_progress))
    if not ranks.is_main:
        return
    if out is not None:
        root.write_records(records, out)
    if as_json:
        root.print_records(records)
    elif suite is not None:
        print(f"protocol {chosen.name}")
        root.print_table(TABLE_COLUMNS, evaluation.likelihood_table(records, TABLE_COLUMNS))
    else:
        _describe(records[0])


def _split_data(model: str | None, data: str | None, has_other: bool) -> tuple[Path, str | None]:
    """Return the folder of the model, and the data: a single argument may be either."""
    if data is not None:
        return root.find_model(model), data
    folder, given = root.split_model(model, (), "data", lambda text: os.path.exists(text) or text.startswith("hf:"))
    if not given and not has_other and folder.parent == built_in_folder():
        raise ValueError(f"the data of {folder.name} is not bundled; name a text, as in: sedd eval {folder.name} FILE")
    return folder, given[0] if given else None


RECORD_FIELDS = (
    *("bits_per_token", "bits_per_char", "bits_per_byte", "ppl_bound", "stderr_population_nats_per_token"),
    *("tokens", "sequences", "draws", "orders", "network_calls", "seed", "precision", "protocol", "split", "data"),
)
TABLE_COLUMNS = ("dataset", "split", "tokens", "ppl_bound", "nats_per_token", "stderr_nats_per_token", "bits_per_char")


def _interval(record: Record) -> str:
    """Return the value in words: exact, between two bounds, or at most one."""
    nats, lower = f"{record['nats_per_token']:.5f}", record["lower_nats_per_token"]
    if record["is_exact"]:
        return f"exactly {nats}"
    nats = f"{nats} ± {record['stderr_nats_per_token']:.5f}"
    if lower is not None:
        return f"between {lower:.5f} ± {record['stderr_lower_nats_per_token']:.5f} and {nats}"
    return f"at most {nats}" if None not in record["terms"].values() else f"as published, {nats}"


def _describe(record: Record) -> None:
    """Print a record for people: the bound first, then the other numbers and the terms."""
    print(f"{_interval(record)} nats per token")
    rows = {name: record[name] for name in RECORD_FIELDS if record[name] is not None}  # not all tokens are text
    if difference := record["bfloat16_difference"]:
        about = f"{difference['nats_per_token']:.6f} ± {difference['stderr']:.6f} nats per token"
        rows["bfloat16 − float32"] = f"{about}, on {difference['draws']} draws"
    rows |= {name: "not counted" if value is None else value for name, value in record["terms"].items()}
    root.print_rows(rows, 34)


@root.command("score")
@root.takes(likelihood_options)
def score_texts(
    model: root.FirstModel = None,
    texts: list[str] | None = None,
    *,
    file: Path | None = None,
    shared_noise: bool = False,
    as_json: bool = False,
    **options: Any,
) -> None:
    """Evaluate the likelihood of each text separately, and print one line per text.

    A text may not be longer than the model's sequence length. Its result depends on the seed and the text, not on the
    other texts; the errors of different texts are independent. Example:

    - `sedd score run "the cat sat on the mat" "mat the on sat cat the"`

    Args:
        texts: Texts; - reads them from stdin, one per line.
        file: File of texts, one per line.
        shared_noise: Use the same times and noise for all texts: better for differences between texts of one length,
            worse for sums over texts.
    """
    folder, given = root.split_model(model, texts or (), "a text", lambda text: not _is_path(text))
    lines = [line for text in given for line in (sys.stdin.read().splitlines() if text == "-" else [text])]
    lines += read_text(file).splitlines() if file else []
    if not lines:
        raise ValueError("no text was given; give one or more, or --file FILE, or - to read them from stdin")
    from sedd import evaluation
    from sedd.draws import derive_seed

    what, seed = count_of(len(lines), "text"), options["seed"]
    with _open_model(folder, evaluation.SINGLE_TEXT, what, **options) as (loaded, ranks, evaluate):
        for text, corpus in zip(lines, evaluation.text_corpora(lines, loaded), strict=True):
            record = evaluate(corpus, noise_seed=seed if shared_noise else derive_seed(seed, text))
            if ranks.is_main:
                _print_score({"text": text, **record, "shared_noise": shared_noise}, as_json)


def _is_path(text: str) -> bool:
    """Whether a text was probably meant as a path: it exists as one, or is written as one."""
    return text != "-" and (text.startswith(("./", "../", "/", "~/")) or os.path.exists(text))


def _print_score(record: Record, as_json: bool) -> None:
    if as_json:
        root.print_records([record])
        return
    error = "exact" if record["is_exact"] else f"± {record['stderr_nats_per_token']:.5f}"
    nats, bits = record["nats_per_token"], record["bits_per_char"]
    size = f"{record['tokens']} tokens" + ("" if bits is None else f", {bits:.3f} bits/char")
    print(f"{nats:9.5f} {error} nats per token, {size}: {visible(record['text'])}", flush=True)


@root.command("lm-eval", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def run_lm_eval(context: typer.Context) -> None:
    """Run EleutherAI's Language Model Evaluation Harness (lm_eval) with the model type `sedd` registered.

    All arguments are passed on to lm_eval's own command line. Log-probabilities of diffusion models are lower bounds.
    Needs the extra `lm-eval`. Examples:

    - `sedd lm-eval --model sedd --model_args pretrained=run,draws=16 --tasks lambada_openai`
    - `sedd lm-eval ls tasks`
    """
    try:
        from lm_eval.__main__ import cli_evaluate
    except ImportError:
        raise ValueError(f"lm_eval is not installed; install it: {install_hint('lm-eval')}") from None
    from sedd.evaluation import lm_eval as registered  # noqa: F401  importing it registers the model type

    sys.argv = ["lm_eval", *context.args]
    cli_evaluate()
