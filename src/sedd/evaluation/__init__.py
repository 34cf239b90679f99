"""Evaluation: likelihoods of data sets under a named protocol, and the quality of samples.

A `Protocol` states how text becomes sequences; `read_corpus`, `validation_corpus` and `text_corpora` build a `Corpus`;
`evaluate` returns its likelihood with everything the number depends on; `likelihood_table` puts comparable results side
by side; `score_continuation` scores a continuation given its context. Sample quality is in `evaluation.quality`.
"""

from sedd.evaluation.continuation import encode_continuation, require_packed_text, score_continuation
from sedd.evaluation.corpus import Corpus, encode_texts, read_corpus, text_corpora, validation_corpus
from sedd.evaluation.own_samples import evaluate_own_samples
from sedd.evaluation.protocols import (
    DATASETS,
    PROTOCOLS,
    SINGLE_TEXT,
    Protocol,
    default_draws,
    get_protocol,
    suite_datasets,
)
from sedd.evaluation.results import (
    ModelsByPrecision,
    evaluate,
    evaluate_difference,
    likelihood_table,
    models_by_precision,
)

__all__ = [
    "DATASETS",
    "PROTOCOLS",
    "SINGLE_TEXT",
    "Corpus",
    "ModelsByPrecision",
    "Protocol",
    "default_draws",
    "encode_continuation",
    "encode_texts",
    "evaluate",
    "evaluate_difference",
    "evaluate_own_samples",
    "get_protocol",
    "likelihood_table",
    "models_by_precision",
    "read_corpus",
    "require_packed_text",
    "score_continuation",
    "suite_datasets",
    "text_corpora",
    "validation_corpus",
]
