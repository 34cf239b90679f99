"""Evaluation: likelihoods of data sets under a named protocol, and the quality of samples.

A `Protocol` states how text becomes sequences; `load_corpora` and `read_corpus` build a `Corpus`; `evaluate` returns
its likelihood with everything the number depends on; `likelihood_table` puts comparable results side by side;
`score_continuation` scores a continuation given its context. Sample quality is in `evaluation.quality`.
"""

from sedd.evaluation.continuation import encode_continuation, encode_texts, require_packed_text, score_continuation
from sedd.evaluation.corpus import Corpus, load_corpora, read_corpus, text_corpora, validation_corpus
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
    evaluate,
    evaluate_difference,
    evaluate_own_samples,
    likelihood_table,
    models_by_precision,
)

__all__ = [
    "DATASETS",
    "PROTOCOLS",
    "SINGLE_TEXT",
    "Corpus",
    "Protocol",
    "default_draws",
    "encode_continuation",
    "encode_texts",
    "evaluate",
    "evaluate_difference",
    "evaluate_own_samples",
    "get_protocol",
    "likelihood_table",
    "load_corpora",
    "models_by_precision",
    "read_corpus",
    "require_packed_text",
    "score_continuation",
    "suite_datasets",
    "text_corpora",
    "validation_corpus",
]
