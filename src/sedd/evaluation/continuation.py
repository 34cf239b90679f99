"""How likely a continuation is, given what stands before it."""

import torch

from sedd import factory
from sedd.diffusion.parameterization import Given
from sedd.factory import LoadedModel
from sedd.likelihood import Estimate, Terms, estimate
from sedd.runtime.distributed import Ranks
from sedd.tokenizer import Ids


def running(loaded: LoadedModel) -> None:
    """Refuse a model of padded records: what follows a context there is a record's rest and its padding."""
    if loaded.config.data.packing == "lines" and loaded.config.data.pad == "model":
        raise ValueError(
            "this model was trained on padded records, and a continuation is running text; score whole records, as "
            "sedd score does, or train on packed text"
        )


def split(context: str, continuation: str, loaded: LoadedModel) -> tuple[Ids, Ids]:
    """The tokens of both, cut where those of the context end; a long context loses its beginning."""
    running(loaded)
    if not continuation:
        raise ValueError("a continuation is empty; there is nothing to score in it")
    tokenizer, length = loaded.tokenizer, loaded.config.model.seq_len
    ids = tokenizer.encode(context + continuation)
    start = min(len(tokenizer.encode(context)), len(ids) - 1)  # BPE may have joined the two
    rest = ids[start:]
    if len(rest) > length:
        raise ValueError(
            f"the continuation {continuation[:40]!r} … has {len(rest)} tokens and the model was trained on {length}; "
            "it cannot be scored in one piece"
        )
    return ids[max(0, start - (length - len(rest))) : start], rest


def after(
    context: Ids,
    continuation: Ids,
    loaded: LoadedModel,
    *,
    estimator: str | None = None,
    draws: int = 16,
    seed: int = 0,
    batch: int = 16,
) -> Estimate:
    """−log p(continuation | context), or the bound on it: noise takes the continuation alone.  [§8]

    The bound is on what the model fills in behind a fixed context. For scores and denoisers of masks that is their
    conditional law; under uniform noise it is not (see `parameterization.Given`).
    """
    length = loaded.config.model.seq_len
    if len(context) + len(continuation) > length:
        raise ValueError(
            f"the continuation has {len(continuation)} tokens and its context {len(context)}; the model was trained on "
            f"{length} in all: shorten one of them"
        )
    by = factory.estimator(estimator, loaded, Terms._fields, seed=seed)
    model = Given(loaded.model, torch.from_numpy(context).to(loaded.device))
    here = Ranks(0, 1, loaded.device)
    return estimate(model, by, [continuation], draws=draws, seed=seed, batch=batch, ranks=here)
