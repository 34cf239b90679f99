"""On a GPU: likelihoods have the same noise as on a CPU, and bfloat16 is used where the difference is negligible."""

from pathlib import Path

import numpy as np
import pytest
import torch

from sedd.evaluation import SINGLE_TEXT, evaluate, models_by_precision
from sedd.evaluation.corpus import Corpus
from sedd.likelihood.estimate import _Draws
from sedd.likelihood.estimators import AnyOrderEstimator, BoundEstimator, Estimator
from sedd.loading import LoadedModel, prepare_for_inference
from sedd.process import Absorbing, Uniform
from sedd.runtime.distributed import Ranks
from sedd.schedule import Geometric, LogLinear
from sedd.tokenizer import build_tokenizer
from sedd.training.config import RunConfig
from sedd.training.setup import build_model, build_network, build_setup

pytestmark = pytest.mark.gpu
ROWS = [np.random.default_rng(i).integers(0, 27, 128) for i in range(64)]


@pytest.mark.parametrize(
    "estimator",
    [
        BoundEstimator(Absorbing(27), LogLinear()),
        BoundEstimator(Uniform(27), Geometric()),
        AnyOrderEstimator(Absorbing(27)),
    ],
    ids=["absorbing", "uniform", "any-order"],
)
def test_a_gpu_makes_the_noise_that_a_cpu_makes(estimator: Estimator) -> None:
    on_cpu, on_gpu = (
        estimator.inputs(_Draws(estimator, ROWS, 8, [3], 1, Ranks(0, 1, torch.device(device))).at(np.arange(512)))
        for device in ("cpu", "cuda")
    )
    for expected, found in zip(on_cpu, on_gpu, strict=True):
        if expected.dtype == torch.int64:
            assert torch.equal(found.cpu(), expected)
        torch.testing.assert_close(found.cpu(), expected, rtol=1e-12, atol=0)


def loaded(tmp_path: Path) -> LoadedModel:
    config = RunConfig.from_dict({"model": {"width": 256, "depth": 4, "heads": 4, "seq_len": 128}}).resolved()
    setup = build_setup(config, 27)
    network = build_network(config, setup)
    with torch.no_grad():
        network.head.weight.normal_(0, 0.02, generator=torch.Generator().manual_seed(0))
    network = prepare_for_inference(network, "cuda", "float32")
    model = build_model(config, network, setup, cuda_graphs=True)
    (tmp_path / "ema.safetensors").write_bytes(b"")
    tokenizer = build_tokenizer("bytes", lambda: iter(()))
    return LoadedModel(model, network, *setup, tokenizer, config, tmp_path)


def test_bfloat16_is_used_where_its_difference_is_negligible(tmp_path: Path) -> None:
    given, corpus = loaded(tmp_path), Corpus(ROWS, 1.0, 1.0, "rows", "all", "0")
    ranks = Ranks(0, 1, torch.device("cuda", 0))
    chosen = evaluate(given, corpus, SINGLE_TEXT, ranks, draws=8)
    exact = evaluate(given, corpus, SINGLE_TEXT, ranks, draws=8, models=models_by_precision(given, "float32"))
    assert (exact["precision"], exact["bfloat16_difference"]) == ("float32", None)
    assert chosen["precision"] == "bfloat16"
    stated, limit = chosen["bfloat16_difference"], exact["stderr_nats_per_token"] / 10
    assert abs(stated["nats_per_token"]) + 2 * stated["stderr"] < limit
    assert abs(chosen["nats_per_token"] - exact["nats_per_token"]) < limit
