r"""The zero-shot table in miniature: a model per noise and an autoregressive one, at equal cost on the text at hand.

python experiments/zero_shot.py TEXT… --corpora FOLDER --tokenizer tokenizer.json --out OUT --limit-seconds 560
python experiments/zero_shot.py --table OUT/zero-shot.json
python experiments/zero_shot.py words.txt more.txt --corpora FOLDER --tokenizer bpe:300 --out OUT --seconds 3 \
    --datasets lambada --set model.width=32 --set train.batch_size=2        on a CPU

TEXT are files to train on; WikiText is detokenized as it is for the evaluation, and cut into articles. Every row is
`sedd train` for ``--seconds`` by the wall clock, with the same network; a run that the limit of seconds stops goes on
when this is started again. Then `sedd eval --suite zero-shot --protocol sedd`, as in the published tables, and the
strict bound of the test split of each. FOLDER holds the files of LAMBADA, WikiText, PTB and LM1B. Perplexities per
token can be compared with published ones only with the tokens of GPT-2.
"""

import argparse
import json
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from study_runs import Results, TimeLimit, parse_config, report_skipped, run_command, set_options

from sedd.data import read_documents
from sedd.evaluation.protocols import DATASETS, get_protocol

COMMON = {"train.save_every": 0, "train.keep_checkpoints": 1, "data.val_fraction": 0.02}
ROWS: dict[str, dict[str, object]] = {
    "absorbing": {},
    "uniform": {
        "objective": "score-entropy",
        "noise.process": "uniform",
        "train.time_sampling": "low-noise",
        "train.loss_weighting": 0,
    },
    "autoregressive": {"objective": "autoregressive", "train.loss_weighting": 0},
}
"""The difference of each row from the recipe english, whose length is that of the protocol sedd."""
STOPPED = 143
"""The exit code of a run that a signal stopped."""
GPT2_TOKENIZER = "26079dfe1e9ce35cbd4e448d360748b2ff8d2843ed5bce7eacb219246b99ece5"
"""The fingerprint of GPT-2's tokenizer."""
PUBLISHED = Path(__file__).with_name("published.json")


def prepare_text(sources: Sequence[Path], path: Path) -> Path:
    """Write the documents to train on, once."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps({"text": text}) for source in sources for text in read_texts(source)]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


LONGEST = 100_000
"""Characters of a document: longer ones, but for articles of WikiText, are cut: a tokenizer takes a text per thread."""


def read_texts(source: Path) -> Iterator[str]:
    """Yield the documents of a file; those of WikiText are its articles, detokenized."""
    for document in read_documents([source], packing="packed"):
        if not source.name.startswith("wikitext"):
            yield from cut(document)
            continue
        for article in re.split(r"(?m)^(?= = [^=]+ = $)", document):
            if article.strip():
                yield "\n".join(row.strip("\n") for row in DATASETS["wikitext2"].split_rows(article))


def cut(document: str) -> Iterator[str]:
    """Yield pieces of at most `LONGEST` characters, cut at spaces."""
    start = 0
    while len(document) - start > LONGEST:
        space = document.rfind(" ", start + 1, start + LONGEST)
        end = space if space > 0 else start + LONGEST
        yield document[start:end]
        start = end
    yield document[start:]


class Study:
    """The models of the table, and their results."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.limit = args, TimeLimit(args.limit_seconds)
        self.results = Results(args.out / "zero-shot.json")
        self.text = prepare_text(args.text, args.out / "train.jsonl")
        sources = [source.name for source in args.text]
        tokens = Path(args.tokenizer).name
        size = self.text.stat().st_size
        self.results.describe(seconds=args.seconds, sources=sources, characters=size, tokenizer=tokens)

    def measure(self, row: str) -> bool:
        """Train a row, or go on with it, and evaluate it; return whether it is done."""
        folder = self.args.out / row
        config = {**COMMON, "train.precision": self.args.precision, "data.tokenizer": self.args.tokenizer, **ROWS[row]}
        words = ["train", self.text, "--recipe", "english", *set_options(config | parse_config(self.args.set))]
        words += ["--minutes", self.args.seconds / 60, "--out", folder]
        words += ["--resume"] if (folder / "checkpoints").is_dir() else []
        trained = run_command(*words, stop_after=self.limit.left)
        if trained.code == STOPPED:
            return False
        if trained.code:
            self.results.store(row, {"failed": f"sedd train ended with code {trained.code}"})
            return True
        tokens = self.args.tokenizer
        command = trained.command.replace(tokens, Path(tokens).name)  # without the folder of a file
        record: dict[str, Any] = {"command": command, "training": trained.record}
        record["evaluation"] = {name: self.evaluate(folder, name) for name in self.args.protocols.split(",")}
        if empty := [name for name, records in record["evaluation"].items() if not records]:
            record["failed"] = f"sedd eval under protocol {' and '.join(empty)}"
        self.results.store(row, record)
        if not self.args.keep and not empty:
            shutil.rmtree(folder, ignore_errors=True)
        return True

    def evaluate(self, folder: Path, protocol: str) -> list[dict[str, Any]]:
        """Return the records of all data sets under a protocol; strict has no suite, so its files are named."""
        names = self.args.datasets.split(",")
        draws = ["--draws", self.args.draws]
        if protocol != "strict":
            words = [word for name in names for word in ("--dataset", name)]
            suite = ["--suite", "zero-shot", "--protocol", protocol]
            return run_command("eval", folder, self.args.corpora, *suite, *words, *draws).records
        records = []
        for name in names:
            source = find_test_file(self.args.corpora, name)
            printed = run_command("eval", folder, source, "--protocol", "strict", *draws)
            records += [record | {"dataset": name} for record in printed.records]
        return records


def find_test_file(folder: Path, dataset: str) -> Path:
    """Return the file of the test split of a data set."""
    prefixes = DATASETS[dataset].files["test"]
    found = sorted(path for path in folder.iterdir() if path.name.startswith(prefixes))
    if not found:
        raise SystemExit(f"{folder} holds no {DATASETS[dataset].title}: no file begins with {' or '.join(prefixes)}")
    return found[0]


# Tables ----------------------------------------------------------------------------------------------------


def table_lines(record: Mapping[str, Any]) -> list[str]:
    """Return one table per protocol as Markdown, with published rows where these can be compared."""
    rows = {name: row for name, row in record["rows"].items() if "failed" not in row}
    lines = [f"- {name}: failed, {row['failed']}." for name, row in record["rows"].items() if "failed" in row]
    protocols = list(dict.fromkeys(protocol for row in rows.values() for protocol in row["evaluation"]))
    for protocol in protocols:
        found = {name: {r["dataset"]: r for r in row["evaluation"][protocol]} for name, row in rows.items()}
        columns = list(dict.fromkeys(dataset for records in found.values() for dataset in records))
        titles = [DATASETS[name].title for name in columns]
        lines += [
            f"Protocol `{protocol}`, bits per character ± standard error and, in brackets, perplexity per token:",
            "",
        ]
        lines += [f"| | {' | '.join(titles)} |", "|---|" + "---|" * len(columns)]
        for name, records in found.items():
            cells = (describe(records.get(column)) for column in columns)
            tokens = f"{rows[name]['training']['tokens'] / 1e6:.3g}M tokens"
            lines.append(f"| ours, {name}, {record['seconds']:g} s, {tokens} | {' | '.join(cells)} |")
        lines += [*published_rows(protocol, columns), ""]
        lines.append(f"- {tokens_note(rows.values())}")
        lines += [*(f"- {note}" for note in contamination(record, protocol, columns)), ""]
    return [*lines, *other_protocols(protocols)]


def speed_note(record: Mapping[str, Any]) -> str:
    """State why rows of equal seconds saw different numbers of tokens."""
    seen = {name: row["training"]["tokens"] for name, row in record["rows"].items() if "failed" not in row}
    if "autoregressive" not in seen or "absorbing" not in seen:
        return ""
    counts = {name: f"{tokens / 1e6:.3g}M" for name, tokens in seen.items()}
    return (
        f"Equal seconds are not equal tokens: `autoregressive` saw {counts['autoregressive']} tokens and `absorbing` "
        f"{counts['absorbing']}, because its loss was not fused with the head when it was measured. It is now; "
        "until it is measured again, its row understates what autoregression reaches in that time."
    )


def tokens_note(rows: Iterable[Mapping[str, Any]]) -> str:
    """State whether perplexities per token can be compared with published ones."""
    used = {result["tokenizer_sha256"] for row in rows for results in row["evaluation"].values() for result in results}
    if used == {GPT2_TOKENIZER}:
        return "Tokens are those of GPT-2. Published models are larger, and were trained on OpenWebText and far longer."
    return "Our tokens are not those of GPT-2: published perplexities are for scale only."


def other_protocols(ours: Sequence[str]) -> list[str]:
    """Return published tables under protocols that our models were not scored by."""
    lines = []
    for table in json.loads(PUBLISHED.read_text(encoding="utf-8")).values():
        if "protocol" in table and table["protocol"] not in ours:
            titles = [DATASETS[name].title for name in table["columns"]]
            lines += [f"Published under protocol `{table['protocol']}`, which no row above can be compared with:", ""]
            lines += [f"| | {' | '.join(titles)} |", "|---|" + "---|" * len(titles)]
            lines += [*published_rows(table["protocol"], table["columns"]), ""]
    return lines


def describe(result: Mapping[str, Any] | None) -> str:
    """Return the bits with their standard error, and the perplexity; a bound, of all terms, has a sign."""
    if result is None:
        return ""
    sign = "" if result["is_exact"] or None in result["terms"].values() else "≤ "
    per_nat = result["bits_per_char"] / result["nats_per_token"]
    error = "" if result["is_exact"] else f" ± {(result['stderr_nats_per_token'] or 0) * per_nat:.3f}"
    return f"{sign}{result['bits_per_char']:.3f}{error} ({result['ppl_bound']:.4g})"


def published_rows(protocol: str, columns: Sequence[str]) -> list[str]:
    """Return the published perplexities under a protocol."""
    published = json.loads(PUBLISHED.read_text(encoding="utf-8"))
    tables = [value for value in published.values() if value.get("protocol") == protocol]
    lines = []
    for table in tables:
        for name, row in table["rows"].items():
            values = dict(zip(table["columns"], row["values"], strict=True))
            cells = (f"({values[column]:g})" if column in values else "" for column in columns)
            lines.append(f"| {name} ({row['source']}) | {' | '.join(cells)} |")
    return lines


def contamination(record: Mapping[str, Any], protocol: str, columns: Sequence[str]) -> list[str]:
    """Name the data sets whose scored split was trained on."""
    splits = {name: "test" if protocol == "strict" else get_protocol(protocol).split_for(name) for name in columns}
    return [
        f"{DATASETS[name].title}: the {split} split, which the protocol scores, is part of our training text."
        for name, split in splits.items()
        if any(DATASETS[name].split_of(Path(source)) == split for source in record["sources"])
    ]


def main() -> None:
    """Train and evaluate the rows that are missing, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, nargs="+", help="texts to train on; with --table, the file of results")
    parser.add_argument("--corpora", type=Path, help="folder of the files of the benchmarks")
    parser.add_argument("--out", type=Path, help="folder of the runs and of zero-shot.json")
    parser.add_argument("--only", default=",".join(ROWS), help="rows, with commas between them")
    parser.add_argument("--datasets", default=",".join(DATASETS), help="benchmarks, with commas between them")
    parser.add_argument("--protocols", default="strict,sedd", help="protocols, with commas between them")
    parser.add_argument("--tokenizer", default="gpt2", help="gpt2, the path of its tokenizer.json, or bpe:SIZE")
    parser.add_argument("--seconds", type=float, default=540, help="seconds of training of every model")
    parser.add_argument("--draws", type=int, default=2, help="draws per sequence of the evaluation, an even number")
    parser.add_argument("--precision", default="bfloat16", help="precision of training: float8 on an H100 or newer")
    parser.add_argument("--limit-seconds", type=float, help="stop training after this; start again to go on")
    parser.add_argument("--set", action="append", default=[], help="configuration of all rows, after that of each")
    parser.add_argument("--keep", action="store_true", help="keep the folders of the runs that are done")
    parser.add_argument("--table", action="store_true", help="print the tables of earlier results")
    args = parser.parse_args()
    rows = args.only.split(",")
    for name, given, known in (("only", rows, ROWS), ("datasets", args.datasets.split(","), DATASETS)):
        if unknown := [value for value in given if value not in known]:
            parser.error(f"{name} has {', '.join(unknown)}; choose from {', '.join(known)}")
    if args.table:
        record = json.loads(args.text[0].read_text(encoding="utf-8"))
    elif args.out is None or args.corpora is None:
        parser.error("--out and --corpora are needed")
    else:
        study = Study(args)
        missing = [row for row in rows if row not in study.results]
        skipped = [row for row in missing if not study.limit.allows(0) or not study.measure(row)]
        report_skipped(skipped)
        record = study.results.record
    if record.get("rows"):
        print("\n".join(table_lines(record)))


if __name__ == "__main__":
    main()
