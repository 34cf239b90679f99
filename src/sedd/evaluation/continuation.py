"""The likelihood of a continuation given its context."""

import torch

from sedd.likelihood import LikelihoodEstimate, build_estimator, estimate_likelihood
from sedd.likelihood.estimate import OnProgress
from sedd.likelihood.orders import Orders
from sedd.loading import LoadedModel
from sedd.runtime.distributed import Ranks
from sedd.tokenizer import Ids


def require_packed_text(loaded: LoadedModel) -> None:
    """Raise an error for a model of padded records, in which a context is followed by padding."""
    if loaded.config.data.packing == "lines" and loaded.config.data.pad == "model":
        raise ValueError(
            "this model was trained on padded records, and a continuation is running text; score whole records, as "
            "sedd score does, or train on packed text"
        )


def encode_continuation(context: str, continuation: str, loaded: LoadedModel) -> tuple[Ids, Ids]:
    """Encode context and continuation together and split the tokens where those of the context end.

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
        raise ValueError(
            f"the continuation {continuation[:40]!r} … has {len(rest)} tokens and the model was trained on {length}; "
            "it cannot be scored in one piece"
        )
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
    on_progress: OnProgress | None = None,
) -> LikelihoodEstimate[float]:
    """Estimate −log p(continuation | context), or an upper bound on it, by adding noise to the continuation only.  [§8]

    The bound is on the distribution with which the model infills after a fixed context. For scores and denoisers under
    absorbing noise that is the model's conditional distribution; under uniform noise it is not. ``orders``, ``seed``
    and ``noise_seed`` are as for `results.evaluate`.

    Args:
        estimator: Its name; None: the first that fits the model.
        orders: The number of orders of a mixture.
        seed: Decides times and noise, and the order named ``random``.
        batch: How many draws are evaluated at once.
    """
    length = loaded.config.model.seq_len
    if len(context) + len(continuation) > length:
        raise ValueError(
            f"the continuation has {len(continuation)} tokens and its context {len(context)}; the model was trained on "
            f"{length} in all: shorten one of them"
        )
    by = build_estimator(estimator, loaded.model, seed=seed, orders=orders)
    model = loaded.model.bind(context=torch.from_numpy(context).to(loaded.device))
    ranks = Ranks(0, 1, loaded.device)
    seed = seed if noise_seed is None else noise_seed
    return estimate_likelihood(
        model, by, [continuation], draws=draws, seed=seed, batch=batch, ranks=ranks, on_progress=on_progress
    )
