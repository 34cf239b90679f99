"""MAUVE: how well samples cover the distribution of human texts, in a judge's features. The only user of mauve-text.

Reference: Pillutla et al. 2021, "MAUVE: Measuring the Gap Between Neural Text and Human Text using Divergence
Frontiers", arXiv 2102.01454.
"""

from typing import Any, final

from sedd.evaluation.quality.judge import Judge, extract_features
from sedd.evaluation.quality.samples import SampleSet, encode_for_judge
from sedd.extras import install_hint
from sedd.tokenizer import Ids

RECOMMENDED_TEXTS = 100
"""With fewer texts on either side MAUVE is unreliable."""


def _import_mauve() -> Any:
    try:
        import mauve
    except ImportError:
        raise ValueError(f"MAUVE needs the package mauve-text; install it: {install_hint('mauve')}") from None
    return mauve


@final
class MauveReference:
    """Features of the texts that samples are compared with; texts longer than its context are truncated."""

    def __init__(self, texts: SampleSet, judge: Judge, batch: int = 8) -> None:
        _import_mauve()  # a missing package is reported before the work
        if len(texts.samples) < 2:
            raise ValueError(
                f"{texts.source} holds one text; MAUVE compares distributions and needs {RECOMMENDED_TEXTS} or more"
            )
        self.source = texts.source
        self.features = extract_features(judge, encode_for_judge(texts, judge, truncate=True).ids, batch)

    def compare(self, judge: Judge, rows: list[Ids], batch: int) -> dict[str, Any]:
        """Return MAUVE, between 0 and 1, with mauve-text's default settings; nothing is downloaded."""
        if len(rows) < 2:
            raise ValueError(f"there is one sample; MAUVE compares distributions and needs {RECOMMENDED_TEXTS} or more")
        features = extract_features(judge, rows, batch)
        found = _import_mauve().compute_mauve(p_features=features, q_features=self.features, verbose=False)
        return {
            "mauve": round(float(found.mauve), 6),
            "mauve_reference": self.source,
            "mauve_texts": len(self.features),
            "mauve_buckets": int(found.num_buckets),
        }
