"""Single texts: encode them, alone or after a context, and estimate the likelihood of what follows a context."""

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch

from sedd.data.tables import TextOrIds
from sedd.likelihood import LikelihoodEstimate, estimate_likelihood
from sedd.likelihood.estimate import build_estimator
from sedd.likelihood.orders import Orders
from sedd.loading import LoadedModel
from sedd.runtime.distributed import Ranks
from sedd.tokenizer import Ids, Integers, Tokenizer


def encode(source: str, texts: Sequence[TextOrIds], tokenizer: Tokenizer) -> list[Ids]:
    """Encode the texts, or the sequences of integers, of ``source``."""
    try:
        if set(map(type, texts)) <= {str}:
            return tokenizer.encode_batch(cast("Sequence[str]", texts))
        if not isinstance(tokenizer, Integers):
            raise ValueError(f"it holds integers, and the model's tokenizer is {tokenizer.kind}")
        return list(map(tokenizer.encode_integers, texts))
    except ValueError as error:
        raise ValueError(f"the model's tokenizer cannot read {source}: {error}") from None


def pad_records(rows: Sequence[Ids], loaded: LoadedModel) -> list[Ids]:
    """Pad records to the sequence length if padding is part of what the model was trained to predict."""
    length, pad = loaded.config.model.seq_len, loaded.learned_pad
    if (longest := max(map(len, rows), default=0)) > length:
        raise ValueError(f"a record has {longest} tokens and the model was trained on {length}; shorten it")
    return list(rows) if pad is None else [np.append(row, np.full(length - len(row), pad)) for row in rows]


def encode_texts(texts: Sequence[str], loaded: LoadedModel) -> list[Ids]:
    """Encode each text as one sequence; reject one that is longer than the model's sequence length."""
    if not texts or not all(texts):
        raise ValueError("a text is empty; there is nothing to score in it")
    rows, length = encode("the text", texts, loaded.tokenizer), loaded.config.model.seq_len
    for text, row in zip(texts, rows, strict=True):
        if len(row) > length:
            raise ValueError(
                f"the text {text[:40]!r} … has {len(row)} tokens and the model was trained on {length}; shorten it, or "
                "put it into a file for sedd eval, whose protocol strict cuts it into windows"
            )
    return pad_records(rows, loaded) if loaded.config.data.packing == "lines" else rows


def require_packed_text(loaded: LoadedModel) -> None:
    """Reject a model of padded records, in which a context is followed by padding."""
    if loaded.config.data.packing == "lines" and loaded.config.data.pad == "model":
        raise ValueError("this model was trained on padded records; score whole records with sedd score")


def encode_continuation(context: str, continuation: str, loaded: LoadedModel) -> tuple[Ids, Ids]:
    """Encode context and continuation together and split the tokens where the context ends.

    A context that does not fit into the model's sequence length loses its beginning.
    """
    require_packed_text(loaded)
    if not continuation:
        raise ValueError("a continuation is empty; there is nothing to score in it")
    tokenizer, length = loaded.tokenizer, loaded.config.model.seq_len
    ids = tokenizer.encode(context + continuation)
    start = min(len(tokenizer.encode(context)), len(ids) - 1)  # BPE may merge across the boundary
    rest = ids[start:]
    if len(rest) > length:
        raise ValueError(f"a continuation has {len(rest)} tokens and the model was trained on {length}; shorten it")
    return ids[max(0, start - (length - len(rest))) : start], rest


def score_continuation(
    context: Ids,
    continuation: Ids,
    loaded: LoadedModel,
    *,
    estimator: str | None = None,
    orders: Orders | None = None,
    draws: int = 16,
    seed: int = 0,
    noise_seed: int | None = None,
    batch: int = 16,
    **options: Any,
) -> LikelihoodEstimate[float]:
    """Estimate −log p(continuation | context), or an upper bound on it, by adding noise to the continuation only.  [§8]

    The bound is on the distribution with which the model infills after a fixed context. For scores and denoisers under
    absorbing noise that is the model's conditional distribution; under uniform noise it is not. Arguments are those of
    `results.evaluate`; the rest goes to `estimate_likelihood`.
    """
    by = build_estimator(estimator, loaded.model, seed=seed, orders=orders)
    model = loaded.model.bind(context=torch.from_numpy(context).to(loaded.device))
    seed, ranks = seed if noise_seed is None else noise_seed, Ranks(0, 1, loaded.device)
    return estimate_likelihood(model, by, [continuation], draws=draws, seed=seed, batch=batch, ranks=ranks, **options)
