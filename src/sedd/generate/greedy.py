"""Greedy decoding: the most probable token, one position after another. Nothing is sampled."""

from collections.abc import Iterator

import torch
from torch import Tensor

from sedd.factory import LoadedModel
from sedd.generate.run import SamplingRun
from sedd.parameterization import CausalModel
from sedd.samplers import Prompt, SamplingModel, sigma_of_masked_fraction
from sedd.sampling_settings import SamplingSettings
from sedd.tokenizer import Ids


def decode_greedy(loaded: LoadedModel, context: Ids, length: int) -> Iterator[tuple[int, int]]:
    """Yield positions after ``context`` and their tokens, in the order in which they are filled.

    An autoregressive model fills from left to right; under absorbing noise the position with the most probable token
    comes first. Under other noise no token is final before the last step: the positions come at the end, as the default
    sampler fills them with ``top_k=1``.

    Args:
        loaded: The model.
        context: Tokens that are given.
        length: Tokens to fill after them.
    """
    given = torch.from_numpy(context).to(loaded.device)
    if isinstance(loaded.model, CausalModel):
        return _left_to_right(loaded, given, length)
    return (_most_probable_first if loaded.process.only_masks else _by_sampler)(loaded, given, length)


@torch.no_grad()
def _left_to_right(loaded: LoadedModel, x: Tensor, length: int) -> Iterator[tuple[int, int]]:
    for position in range(length):
        x = torch.nn.functional.pad(x, (0, 1))  # the model does not read the last token
        x[-1] = loaded.model.log_next(x[None])[0, -1].argmax()  # type: ignore[operator]
        yield position, int(x[-1])


@torch.no_grad()
def _most_probable_first(loaded: LoadedModel, x: Tensor, length: int) -> Iterator[tuple[int, int]]:
    process, model, start = loaded.process, SamplingModel(loaded.model), len(x)
    x = torch.cat([x, process.prior_sample(torch.zeros(length, device=x.device))])
    while len(masked := process.is_noisy(x).nonzero().squeeze(-1)):
        sigma = sigma_of_masked_fraction(torch.tensor([len(masked) / len(x)], device=x.device), loaded.schedule)
        hidden = model.hidden(x[None], sigma)[0, masked]
        probability, token = model.clean_probs_at(hidden, x[masked], sigma.expand(len(masked))).max(-1)
        position = masked[best := probability.argmax()]
        x = x.index_fill(0, position, int(token[best]))
        yield int(position) - start, int(token[best])


def _by_sampler(loaded: LoadedModel, x: Tensor, length: int) -> Iterator[tuple[int, int]]:
    prompt = Prompt(torch.nn.functional.pad(x, (0, length), value=-1)[None])
    sampling_run = SamplingRun(loaded.model, SamplingSettings(top_k=1))
    *_, last = sampling_run.states(prompt)
    yield from enumerate(last.x[0, len(x) :].tolist())
