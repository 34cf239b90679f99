"""A box of models for tests, in place of the package's own: models with random weights, and their cards."""

from pathlib import Path

import torch

from sedd import hub
from sedd.tokenizer import Bytes
from sedd.training import checkpoint
from sedd.training.config import ModelConfig, RunConfig
from sedd.training.setup import build_network, build_setup

SEQ_LEN = 144  # the template of the demo has 134 bytes with its gap


def write_model(folder: Path, seed: int = 0) -> Path:
    """Write a model folder of a time-free denoiser of bytes, small enough to load at once."""
    model = ModelConfig(width=32, depth=1, heads=2, seq_len=SEQ_LEN)
    run = RunConfig(model=model, objective="lambda-dce", seed=seed).resolved()
    network = build_network(run, build_setup(run, vocab_size=256))
    generator = torch.Generator().manual_seed(seed)
    weights = {
        name: value + 0.1 * torch.randn(value.shape, generator=generator)
        for name, value in network.state_dict().items()
    }
    state = {"step": 7, "tokens": 700, "seconds": 1.0, "skipped": 0, "best": None, "best_step": None}
    records = {"config": {**run.as_dict(), "vocab_size": 256}, "state": state}
    return checkpoint.save(folder.parent, folder.name, {"ema": weights}, records, Bytes().files())


RESULT = {
    "data": "/tmp/tales.txt",
    "protocol": "strict",
    "nats_per_token": 1.5,
    "stderr_nats_per_token": 0.25,
    "bits_per_char": 2.5,
}
COST = {
    "dtype": "int8",
    "data": "tales.txt",
    "nats_per_token": 0.00012,
    "stderr_nats_per_token": 0.00003,
    "bits_per_char": 0.0002,
}
FACTS = hub.CardFacts(
    summary="Short tales.",
    data="Tales that a grammar generated.",
    licence="MIT",
    command="sedd train tales.txt --out run\n# with more below",
    limits="It repeats itself.",
    template="Once {8} end.",
    results=[RESULT],
    weights_cost=COST,
    samples=["Once there was\na fox.", "Tom had a ball."],
)


def write_box(box: Path, *names: str) -> Path:
    """Write models with these names into the folder ``box``, each with other weights, and a card in int8."""
    for seed, name in enumerate(names):
        source = write_model(box.parent / f"{name}-source", seed)
        hub.write_card(hub.save_pretrained(source, box / name, dtype="int8"), name, FACTS)
    return box
