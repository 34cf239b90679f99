"""A network on a device without float64 gives what it gives on the CPU, and is never sent a float64."""

from typing import Any

import pytest
import torch

from sedd import loading, samplers
from sedd.loading import LoadedModel, prepare_for_inference
from sedd.nn.transformer import Modern
from sedd.registry import PARAMETERIZATIONS
from sedd.runtime.offload import OffloadedNetwork
from sedd.samplers import empty
from sedd.training.config import PROCESSES, SCHEDULES

KINDS = [("absorbing", "score"), ("absorbing", "mean"), ("uniform", "score"), ("absorbing", "causal")]


@pytest.mark.parametrize(("process", "parameterization"), KINDS)
def test_an_offloaded_network_samples_and_scores_the_same(process: str, parameterization: str) -> None:
    noise, schedule = PROCESSES.build(process, 5), SCHEDULES.build("log-linear")
    causal = parameterization == "causal"
    network = Modern(
        states=6 if causal else noise.num_states,
        width=16,
        depth=1,
        heads=2,
        cond_dim=8,
        causal=causal,
        time_conditioning=not causal,
    )
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.normal_(0, 0.5, generator=generator)
    network = network.eval().requires_grad_(False)
    sent: list[torch.dtype] = []

    def record(module: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        values = (*arguments, *options.values())
        sent.extend(value.dtype for value in values if isinstance(value, torch.Tensor) and value.is_floating_point())

    handles = [part.register_forward_pre_hook(record, with_kwargs=True) for part in network.modules()]
    offloaded = OffloadedNetwork(network, "cpu")
    found = []
    for candidate in (network, offloaded):
        model = PARAMETERIZATIONS.build(parameterization, candidate, noise, schedule)
        run = samplers.SamplingRun(model, samplers.SamplingSettings(steps=4, seed=3))
        texts = [row.ids for row in run.sample(empty(6, 7))]
        hidden = model.hidden(torch.tensor([[0, 4, 2]]), torch.tensor([0.7], dtype=torch.float64))
        found.append((texts, model.logits(hidden[0])))
    assert found[0][0] == found[1][0]
    assert torch.equal(found[0][1], found[1][1])
    assert sent
    assert torch.float64 not in sent
    for handle in handles:
        handle.remove()


def test_only_the_network_is_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a type of device without float64; here the meta device stands in for it."""
    monkeypatch.setattr(loading, "WITHOUT_FLOAT64", ("meta",))
    network = Modern(states=6, width=16, depth=1, heads=2, cond_dim=8)
    prepared = prepare_for_inference(network, "meta", "float32")
    assert isinstance(prepared, OffloadedNetwork)
    assert {p.device.type for p in prepared.parameters()} == {"meta"}
    assert prepared.head.module.weight.device.type == "meta"
    loaded = object.__new__(LoadedModel)
    vars(loaded).update(network=prepared)
    assert loaded.device == torch.device("cpu")
    assert isinstance(prepare_for_inference(network.to_empty(device="cpu"), "cpu", "float32"), type(network))
