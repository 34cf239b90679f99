"""Sample-quality results: metrics with everything they depend on, and tables of results that can be compared."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sedd.evaluation.quality.judge import Judge, count_tokens, score_in_low_precision
from sedd.evaluation.quality.metrics import MauveReference, compute_metrics
from sedd.evaluation.quality.samples import SAMPLING_FIELDS, SampleSet, encode_for_judge, read_json_records
from sedd.likelihood.estimate import OnProgress
from sedd.schema import check_count

JUDGE_FIELDS = ("judge_sha256", "judge_precision", "first_token", "scored")
"""Fields that results must share to be compared in one table."""
REQUIRED_FIELDS = ("gen_ppl_by_token", "gen_ppl_by_sample", "entropy_nats", "judge", "draw_precision", *JUDGE_FIELDS)


def evaluate_samples(
    samples: SampleSet,
    judge: Judge,
    *,
    by_ids: bool = False,
    truncate: bool = False,
    reference: MauveReference | None = None,
    batch: int = 8,
    on_progress: OnProgress = lambda done, total: None,
) -> dict[str, Any]:
    """Compute the metrics of ``samples`` under ``judge``; return the record that is printed and stored.

    ``by_ids`` and ``truncate`` are as for `encode_for_judge`; ``batch`` is the number of samples per forward pass.
    """
    check_count("judge-batch", batch)
    rows, facts = encode_for_judge(samples, judge, by_ids=by_ids, truncate=truncate)
    nats, check = score_in_low_precision(judge, rows, batch, on_progress)
    metrics = compute_metrics(rows, nats, count_tokens(judge, rows))
    record = sampling_record(samples)
    record |= {name: _round(value) if isinstance(value, float) else value for name, value in metrics.items()}
    record |= {} if reference is None else reference.compare(judge, rows, batch)
    record |= judge_record(judge) | {"judge_precision_difference": None}
    if check is not None and judge.low_precision is not None:
        record["judge_precision_difference"] = {
            "nats_per_token": _round(check.difference),
            "stderr": _round(check.stderr),
            "samples": check.compared,
        }
        if check.is_negligible:
            record["judge_precision"] = judge.low_precision.precision
    return record | facts


def sampling_record(samples: SampleSet) -> dict[str, Any]:
    """Return the fields that state how samples were drawn, and at what cost; they need no judge."""
    return {
        "source": samples.source,
        "samples": len(samples.samples),
        "samples_sha256": samples.sha256,
        "nfe": _round(samples.nfe),
        "seconds_per_sample": _round(samples.seconds),
        **{name: samples.facts.get(name) for name in SAMPLING_FIELDS},
    }


def judge_record(judge: Judge) -> dict[str, Any]:
    """Return the fields that identify a judge in a result."""
    return {
        "judge": judge.name,
        "judge_sha256": judge.sha256,
        "judge_precision": judge.precision,
        "first_token": "skipped" if judge.skips_first_token else "scored",
    }


def _round(value: float | None) -> float | None:
    return None if value is None or value != value else float(f"{value:.6g}")


def read_results(path: Path) -> list[dict[str, Any]] | None:
    """Read the results in a file written by ``sedd quality``; None if it is not such a file."""
    if not path.is_file() or not (records := read_json_records(path)):
        return None
    if not all(isinstance(record, dict) and {"judge", "validity"} & record.keys() for record in records):
        return None
    for record in (record for record in records if "judge" in record):
        if missing := [name for name in REQUIRED_FIELDS if name not in record]:
            raise ValueError(f"{path} holds a result without {missing[0]}; make it again with sedd quality")
        if not all(isinstance(record[name], float) for name in REQUIRED_FIELDS[:3]):
            raise ValueError(f"{path} holds a generative perplexity without an entropy; make it again")
    return records


def check_comparable(records: Sequence[dict[str, Any]]) -> None:
    """Reject records that differ in one of `JUDGE_FIELDS`, in MAUVE's reference or in what decides validity."""
    for field in (*JUDGE_FIELDS, "mauve_reference", "validity_by"):
        found = {}
        for record in (record for record in records if record.get(field) is not None):
            is_chosen = field == "judge_precision" and record.get("judge_precision_difference") is not None
            value = "float32" if is_chosen else str(record[field])  # bfloat16 was chosen since it makes no difference
            found[value] = f"{record['judge']} ({value[:8]})" if field == "judge_sha256" else value
        if len(found) > 1:
            name, values = field.removesuffix("_sha256"), " and ".join(sorted(found.values()))
            raise ValueError(f"results with {name} {values} cannot share a table")


def quality_table(records: Sequence[dict[str, Any]], columns: Sequence[str]) -> list[list[Any]]:
    """Return these columns of comparable records; a generative perplexity needs the entropy next to it."""
    if any(name.startswith("gen_ppl") for name in columns) and "entropy_nats" not in columns:
        raise ValueError("a table with a generative perplexity must contain entropy_nats too")
    check_comparable(records)
    return [[record.get(column) for column in columns] for record in records]


def comparison_warnings(records: Sequence[dict[str, Any]]) -> list[str]:
    """Return warnings about differences, and shared random numbers, that affect a comparison of these records."""
    messages = []
    precisions = sorted({str(record["draw_precision"] or "unknown") for record in records})
    if len(precisions) > 1:
        messages.append(
            f"warning: these samples were drawn with {' and '.join(precisions)} precision. Categorical draws in "
            "float32 act like a lower temperature and can reduce the generative perplexity several times, and the "
            "entropy with it: compare entropies"
        )
    judged = [record for record in records if "tokens" in record]
    if len({record["samples"] for record in judged}) > 1:
        messages.append("note: distinct-n falls with the number of samples, which differs here")
    lengths = [record["tokens"] / record["samples"] for record in judged]
    if lengths and max(lengths) > 1.1 * min(lengths):
        messages.append("note: entropy rises and distinct-n falls with the length of samples, which differs here")
    messages += [
        f"warning: the samples of rows {' and '.join(map(str, rows))} are equal, so these rows are one measurement: "
        "their settings made no difference with these random numbers"
        for rows in _rows_by(records, "seed", "samples_sha256")
    ]
    if _rows_by(records, "model_sha256", "seed"):
        messages.append(
            "note: results of one model and seed share their random numbers: their errors are not independent; for "
            "independent errors give each its own seed"
        )
    return messages


def _rows_by(records: Sequence[dict[str, Any]], *names: str) -> list[list[int]]:
    """Return the numbers, from 1, of records that agree in these fields, where there are several."""
    groups: dict[tuple[Any, ...], list[int]] = {}
    for number, record in enumerate(records, 1):
        if None not in (key := tuple(record.get(name) for name in names)):
            groups.setdefault(key, []).append(number)
    return [rows for rows in groups.values() if len(rows) > 1]
