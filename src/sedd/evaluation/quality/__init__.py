"""Generative quality: what samples are worth to a judge, a language model with a name.  [§10]

`samples.read` and `samples.draw` give `Samples`, `judges.load` a `Judge`, `measure` the `Quality` of what the judge
said; `judged` does all of it and makes the record, and `table` puts records side by side if they may stand there. A
generative perplexity is found in `Quality` and nowhere else, and no `Quality` is without an entropy: repeating oneself
is cheap.
"""

from sedd.evaluation.quality.judge import Judge, Scored, score
from sedd.evaluation.quality.metrics import Mean, Quality, measure
from sedd.evaluation.quality.results import judged, table, warnings
from sedd.evaluation.quality.samples import Sample, Samples

__all__ = [
    "Judge",
    "Mean",
    "Quality",
    "Sample",
    "Samples",
    "Scored",
    "judged",
    "measure",
    "score",
    "table",
    "warnings",
]
