"""Results: every fact that a number depends on beside it; and tables, of what may stand side by side."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sedd.evaluation.quality import samples as given
from sedd.evaluation.quality.judge import Judge, OnProgress, score
from sedd.evaluation.quality.mauve import Reference
from sedd.evaluation.quality.metrics import GRAMS, REPEATED, Mean, Quality, measure
from sedd.evaluation.quality.samples import Samples

SAME = ("judge_sha256", "judge_precision", "first_token", "scored")
"""What two results must share to stand in one table."""
NEEDED = ("gen_ppl_by_token", "gen_ppl_by_sample", "entropy_nats", "judge", "draw_precision", *SAME)
"""What a record must hold to be one."""
DIGITS = 6


def judged(
    samples: Samples,
    judge: Judge,
    *,
    by_ids: bool = False,
    truncate: bool = False,
    reference: Reference | None = None,
    batch: int = 8,
    on_progress: OnProgress = lambda done, total: None,
) -> dict[str, Any]:
    """What ``samples`` are worth to ``judge``, as it is stored and printed."""
    if batch < 1:
        raise ValueError(f"judge-batch is {batch}; it must be 1 or more")
    read = given.rows(samples, judge, by_ids=by_ids, truncate=truncate)
    quality = measure(score(judge, read.ids, batch, on_progress))
    return {
        "source": samples.source,
        **_numbers(quality),
        **({} if reference is None else reference.against(judge, read.ids, batch)),
        "nfe": _rounded(samples.nfe),
        "seconds_per_sample": _rounded(samples.seconds),
        **{name: samples.facts.get(name) for name in given.CARRIED},
        **facts(judge),
        "scored": read.of,
        "truncated": read.truncated,
    }


def facts(judge: Judge) -> dict[str, Any]:
    """Who judged, and how."""
    return {
        "judge": judge.name,
        "judge_sha256": judge.sha256,
        "judge_precision": judge.precision,
        "first_token": "skipped" if judge.skips_first else "scored",
    }


def _numbers(found: Quality) -> dict[str, Any]:
    named = {
        "gen_ppl_by_token": found.gen_ppl_by_token,
        "gen_ppl_by_sample": found.gen_ppl_by_sample,
        "entropy_nats": found.entropy,
        f"self_repetition_{REPEATED}": found.repetition or Mean(float("nan"), None),
    }
    numbers: dict[str, Any] = {"samples": found.samples, "tokens": found.tokens}
    for name, mean in named.items():
        numbers |= {name: _rounded(mean.value), f"stderr_{name}": _rounded(mean.stderr)}
    return numbers | {f"distinct_{n}": _rounded(share) for n, share in zip(GRAMS, found.distinct, strict=True)}


def _rounded(value: float | None) -> float | None:
    return None if value is None or value != value else float(f"{value:.{DIGITS}g}")


def stored(path: Path) -> list[dict[str, Any]] | None:
    """The records of a file that ``sedd quality`` wrote; None if it is no such file. One without entropy is none."""
    if not path.is_file() or not (records := given.records_of(path)):
        return None
    if not all(isinstance(record, dict) and "judge" in record for record in records):
        return None
    for record in records:
        if missing := [name for name in NEEDED if name not in record]:
            raise ValueError(f"{path} holds a result without {missing[0]}; make it again with sedd quality")
        if not all(isinstance(record[name], float) for name in NEEDED[:3]):
            raise ValueError(f"{path} holds a generative perplexity without an entropy; make it again")
    return records


def table(records: Sequence[dict[str, Any]], columns: Sequence[str]) -> list[list[Any]]:
    """These columns of the records, if one judge made them all in one way; never a perplexity without entropy."""
    if any(name.startswith("gen_ppl") for name in columns) and "entropy_nats" not in columns:
        raise ValueError("a generative perplexity stands in no table without entropy_nats")
    for key in (*SAME, "mauve_reference"):
        found = {str(record[key]): record for record in records if record.get(key) is not None}
        if len(found) > 1:
            shown = sorted(f"{r['judge']} ({v[:8]})" if key == "judge_sha256" else v for v, r in found.items())
            raise ValueError(
                f"these results have {key.removesuffix('_sha256')} {' and '.join(shown)}; numbers made in different "
                "ways never share a table"
            )
    return [[record.get(column) for column in columns] for record in records]


def warnings(records: Sequence[dict[str, Any]]) -> list[str]:
    """What to keep in mind when these are compared."""
    said = []
    found = sorted({str(record["draw_precision"] or "unknown") for record in records})
    if len(found) > 1:
        said.append(
            f"warning: these samples were drawn with {' and '.join(found)} precision. Draws of float32 act as a lower "
            "temperature and can lower a generative perplexity several times, and entropy with it: compare entropies"
        )
    if len({record["samples"] for record in records}) > 1:
        said.append("note: distinct-n falls with the number of samples, which differs here")
    lengths = [record["tokens"] / record["samples"] for record in records]
    if max(lengths) > 1.1 * min(lengths):
        said.append("note: entropy rises and distinct-n falls with the length of samples, which differs here")
    return said
