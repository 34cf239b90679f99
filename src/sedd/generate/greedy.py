"""The text that a model finds likeliest, as far as one token after another can find it. Nothing is sampled."""

from collections.abc import Iterator

import torch
from torch import Tensor

from sedd.diffusion.parameterization import CausalModel
from sedd.diffusion.process import Absorbing
from sedd.factory import LoadedModel
from sedd.generate.run import SamplingRun
from sedd.generate.settings import SamplingSettings
from sedd.sampling import Asked, Prompt, noise_of
from sedd.tokenizer import Ids


def greedy(loaded: LoadedModel, context: Ids, length: int) -> Iterator[tuple[int, int]]:
    """Places behind ``context`` and their tokens, in the order in which they are filled.

    From left to right by an autoregressive model; the surest place first under absorbing noise. Under uniform noise no
    token is final before the last step: the places come at the end, as the default sampler fills them with likeliest
    tokens alone.
    """
    given = torch.from_numpy(context).to(loaded.device)
    if isinstance(loaded.model, CausalModel):
        return _in_turn(loaded, given, length)
    return (_surest if isinstance(loaded.process, Absorbing) else _at_last)(loaded, given, length)


@torch.no_grad()
def _in_turn(loaded: LoadedModel, x: Tensor, length: int) -> Iterator[tuple[int, int]]:
    for place in range(length):
        x = torch.nn.functional.pad(x, (0, 1))  # what stands at the last place is not read
        x[-1] = loaded.model.log_next(x[None])[0, -1].argmax()  # type: ignore[operator]
        yield place, int(x[-1])


@torch.no_grad()
def _surest(loaded: LoadedModel, x: Tensor, length: int) -> Iterator[tuple[int, int]]:
    process, asked, start = loaded.process, Asked(loaded.model), len(x)  # type: ignore[arg-type]
    x = torch.cat([x, process.limit(torch.zeros(length, device=x.device))])
    while len(masked := process.unknown(x).nonzero().squeeze(-1)):
        sigma = noise_of(torch.tensor([len(masked) / len(x)], device=x.device), loaded.schedule)
        hidden = asked.hidden(x[None], sigma)[0, masked]
        sure, token = asked.clean(hidden, x[masked], sigma.expand(len(masked)), process).max(-1)
        at = masked[best := sure.argmax()]
        x = x.index_fill(0, at, int(token[best]))
        yield int(at) - start, int(token[best])


def _at_last(loaded: LoadedModel, x: Tensor, length: int) -> Iterator[tuple[int, int]]:
    prompt = Prompt(torch.nn.functional.pad(x, (0, length), value=-1)[None])
    job = SamplingRun(loaded.model, loaded.process, loaded.schedule, SamplingSettings(top_k=1))
    *_, last = job.states(prompt)
    yield from enumerate(last.x[0, len(x) :].tolist())
