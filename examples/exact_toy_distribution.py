"""Learn a known distribution over short sentences by score entropy, and compare the model with it exactly.

There are few enough sequences to enumerate: the entropy that no model can beat, the bound of the model during training,
and the probability with which a sampler generates each sentence.
"""

import sys
from itertools import pairwise

import torch
from rich.console import Console
from rich.progress import track

from sedd import draws, exact
from sedd.objectives import DenoisingScoreEntropy
from sedd.parameterization import MeanModel
from sedd.process import Absorbing
from sedd.samplers import Tweedie
from sedd.schedule import LogLinear

WORDS = ["I", "You", "love", "hate", "AI", "NLP"]
SENTENCES = {
    "I love AI": 0.30, "I love NLP": 0.20, "I hate AI": 0.04, "I hate NLP": 0.06,
    "You love AI": 0.05, "You love NLP": 0.05, "You hate AI": 0.20, "You hate NLP": 0.10,
}  # fmt: skip
STEPS, BATCH, SAMPLER_STEPS = 400, 256, 64


def ids(sentence: str) -> torch.Tensor:
    """Return the token ids of a sentence."""
    return torch.tensor([WORDS.index(word) for word in sentence.split()])


def sentence_distribution() -> exact.Distribution:
    """Return the probabilities above as a distribution over all sequences of three words."""
    p = torch.zeros((len(WORDS),) * 3, dtype=torch.float64)
    for sentence, probability in SENTENCES.items():
        p[tuple(ids(sentence))] = probability
    return exact.Distribution(p)


def main() -> None:
    """Train, compute the bound, and enumerate the distribution of the sampler."""
    p_data, process, schedule = sentence_distribution(), Absorbing(len(WORDS)), LogLinear()
    generator = torch.Generator().manual_seed(0)
    model = MeanModel(exact.Table(process.num_states, p_data.length), process, schedule)
    objective = DenoisingScoreEntropy()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

    print(f"entropy of the sentences          {p_data.entropy():.4f} nats, below which no bound can be")
    for step in track(range(STEPS + 1), "training", console=Console(file=sys.stderr), transient=True):
        if step % 100 == 0:
            with torch.no_grad():
                bound = exact.bound(model, p_data, process, schedule, nodes=12)
            print(f"bound of the model, step {step:4d}     {bound.total:.4f} nats")
        x_0 = p_data.draw(BATCH, generator)
        loss = objective(model, x_0, generator=generator).sum(-1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    # the distribution of the samples, step by step from all masks, by enumeration
    model.requires_grad_(False)
    x = exact.all_sequences(process.num_states, p_data.length)
    p = torch.zeros(len(x), dtype=torch.float64)
    p[-1] = 1
    times = torch.linspace(1, 0, SAMPLER_STEPS + 1, dtype=torch.float64)
    for t, s in pairwise(times):
        p = exact.propagate(p, exact.transition_table(Tweedie(), model, x, t.expand(len(x)), s.expand(len(x))))
    generated = p[exact.index_of(torch.stack([ids(sentence) for sentence in SENTENCES]), process.num_states)]
    print("\nsentence        in the data   from the model")
    for sentence, probability in zip(SENTENCES, generated.tolist(), strict=True):
        print(f"{sentence:14s}  {SENTENCES[sentence]:11.3f}   {probability:14.3f}")
    print(f"{'other':14s}  {0:11.3f}   {1 - generated.sum():14.3f}")
    samples = x[draws.sample(p.expand(5, -1), generator)]
    print("\nfive samples: " + " · ".join(" ".join(WORDS[i] for i in row) for row in samples.tolist()))


if __name__ == "__main__":
    main()
