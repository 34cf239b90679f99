"""Sample quality: generative perplexity, entropy, diversity and MAUVE of samples under a judge.  [§10]

A judge is a causal language model that scores samples. `samples.read_samples` and `samples.generate_samples` return a
`SampleSet`, `judges.load_judge` returns a `Judge`, and `evaluate_samples` returns the record of all metrics;
`quality_table` puts comparable records side by side.
"""

from sedd.evaluation.quality.judge import Judge
from sedd.evaluation.quality.results import comparison_warnings, evaluate_samples, quality_table
from sedd.evaluation.quality.samples import Sample, SampleSet

__all__ = ["Judge", "Sample", "SampleSet", "comparison_warnings", "evaluate_samples", "quality_table"]
