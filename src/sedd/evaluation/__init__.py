"""Evaluation: likelihoods of data sets under a named protocol, and the quality of samples.

A `Protocol` states how text becomes sequences; `load_corpora` and `read_corpus` build a `Corpus`; `evaluate` returns
its likelihood with everything the number depends on; `likelihood_table` puts comparable results side by side;
`score_continuation` scores a continuation given its context. Sample quality is in `evaluation.quality`.
"""

from sedd.evaluation.continuation import encode_continuation as encode_continuation
from sedd.evaluation.continuation import encode_texts as encode_texts
from sedd.evaluation.continuation import score_continuation as score_continuation
from sedd.evaluation.corpus import load_corpora as load_corpora
from sedd.evaluation.corpus import read_corpus as read_corpus
from sedd.evaluation.corpus import text_corpora as text_corpora
from sedd.evaluation.protocols import SINGLE_TEXT as SINGLE_TEXT
from sedd.evaluation.protocols import default_draws as default_draws
from sedd.evaluation.protocols import get_protocol as get_protocol
from sedd.evaluation.results import evaluate as evaluate
from sedd.evaluation.results import evaluate_difference as evaluate_difference
from sedd.evaluation.results import evaluate_own_samples as evaluate_own_samples
from sedd.evaluation.results import likelihood_table as likelihood_table
from sedd.evaluation.results import models_by_precision as models_by_precision
