"""Learn a law of short sentences by score entropy, and check what was learned against the law itself.

The sentences are few enough to know everything: the entropy no model can beat, the bound of the model while it
trains, and the probability with which a sampler, following the learned ratios, says each sentence.
"""

import sys
from itertools import pairwise

import torch
from rich.console import Console
from rich.progress import track

from sedd import exact
from sedd.diffusion import categorical
from sedd.diffusion.objective import DenoisingScoreEntropy
from sedd.diffusion.parameterization import MeanModel
from sedd.diffusion.process import Absorbing
from sedd.diffusion.schedule import LogLinear, stratified
from sedd.sampling import Tweedie

WORDS = ["I", "You", "love", "hate", "AI", "NLP"]
SENTENCES = {
    "I love AI": 0.30, "I love NLP": 0.20, "I hate AI": 0.04, "I hate NLP": 0.06,
    "You love AI": 0.05, "You love NLP": 0.05, "You hate AI": 0.20, "You hate NLP": 0.10,
}  # fmt: skip
STEPS, BATCH, SAMPLER_STEPS = 400, 256, 64


def ids(sentence: str) -> torch.Tensor:
    """The tokens of a sentence."""
    return torch.tensor([WORDS.index(word) for word in sentence.split()])


def sentence_law() -> exact.Distribution:
    """The probabilities above, as a tensor over all sequences of three words."""
    p = torch.zeros((len(WORDS),) * 3, dtype=torch.float64)
    for sentence, probability in SENTENCES.items():
        p[tuple(ids(sentence))] = probability
    return exact.Distribution(p)


def main() -> None:
    """Train, bound, sample."""
    law, process, schedule = sentence_law(), Absorbing(len(WORDS)), LogLinear()
    generator = torch.Generator().manual_seed(0)
    model = MeanModel(exact.Table(process.num_states, law.length), process)
    objective = DenoisingScoreEntropy(process, schedule)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

    print(f"entropy of the sentences          {law.entropy():.4f} nats: no bound is below it")
    for step in track(range(STEPS + 1), "training", console=Console(file=sys.stderr), transient=True):
        if step % 100 == 0:
            with torch.no_grad():
                bound = exact.bound(model, law, process, schedule, nodes=12)
            print(f"bound of the model, step {step:4d}     {bound.total:.4f} nats")
        x_0 = law.draw(BATCH, generator)
        loss = objective(model, x_0, stratified(BATCH, generator), generator).sum(-1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    # the law of what a sampler says, step by step from all masks, without drawing anything
    sampler = Tweedie(model.requires_grad_(False), process, schedule)
    x = exact.every(process.num_states, law.length)
    p = torch.zeros(len(x), dtype=torch.float64)
    p[-1] = 1
    times = torch.linspace(1, 0, SAMPLER_STEPS + 1, dtype=torch.float64)
    for t, s in pairwise(times):
        p = exact.propagate(p, exact.transition_table(sampler, x, t.expand(len(x)), s.expand(len(x))))
    said = p[exact.index_of(torch.stack([ids(sentence) for sentence in SENTENCES]), process.num_states)]
    print("\nsentence        in the data   from the model")
    for sentence, probability in zip(SENTENCES, said.tolist(), strict=True):
        print(f"{sentence:14s}  {SENTENCES[sentence]:11.3f}   {probability:14.3f}")
    print(f"{'anything else':14s}  {0:11.3f}   {1 - said.sum():14.3f}")
    drawn = x[categorical.draw(p.expand(5, -1), generator)]
    print("\nfive draws: " + " · ".join(" ".join(WORDS[i] for i in row) for row in drawn.tolist()))


if __name__ == "__main__":
    main()
