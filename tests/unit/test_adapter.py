"""A network of the user's own is given what its ``forward`` takes, and its output is checked."""

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sedd.nn.adapter import AdaptedNetwork, adapt
from sedd.nn.transformer import Modern
from sedd.parameterization import CausalModel, MeanModel, ScoreModel
from sedd.process import Absorbing

STATES = 5
X = torch.tensor([[0, 4, 2], [4, 4, 1]])
SIGMA = torch.tensor([0.3, 2.0])
VALID = torch.tensor([[True, True, False], [True, True, True]])


class Base(nn.Module):
    """Embeddings of tokens plus the mean of the row, so that padding would be noticed."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(STATES, STATES)
        self.given: list[dict[str, Any]] = []

    def logits(self, x: Tensor, **given: Any) -> Tensor:
        self.given.append({"x": x, **given})
        rows: Tensor = self.table(x)
        return rows + rows.mean(1, keepdim=True)


class Timeless(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.logits(x)


class Timed(Base):
    def forward(self, x: Tensor, sigma: Tensor) -> Tensor:
        return self.logits(x, sigma=sigma) * sigma[:, None, None]


class ByPosition(Base):
    def forward(self, tokens: Tensor, t: Tensor) -> Tensor:
        return self.logits(tokens, sigma=t)


class Encoder(Base):
    """As the encoders of Hugging Face: the second argument is a mask with a default, the output has ``.logits``."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **options: Any) -> Any:
        assert attention_mask is None
        assert not options
        return SimpleNamespace(logits=self.logits(input_ids))


class Everything(Base):
    def forward(self, x: Tensor, sigma: Tensor, *, valid: Tensor | None = None, label: Tensor | None = None) -> Tensor:
        return self.logits(x, sigma=sigma, valid=valid, label=label)


class Demanding(Base):
    def forward(self, x: Tensor, label: Tensor | None) -> Tensor:
        return self.logits(x, label=label)


class Few(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.logits(x)[..., :2]


class Wrapper(nn.Module):
    """As DDP."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: Any, **options: Any) -> Any:
        return self.module(*inputs, **options)


@pytest.mark.parametrize(
    "wrap", [lambda network: network, Wrapper, lambda network: torch.compile(network, backend="eager")]
)
@pytest.mark.parametrize(
    ("kind", "depends"), [(Timeless, False), (Timed, True), (ByPosition, True), (Encoder, False), (Everything, True)]
)
def test_the_signature_decides_what_is_passed(
    kind: type[Base], depends: bool, wrap: Callable[[nn.Module], nn.Module]
) -> None:
    network = kind()
    adapted = adapt(wrap(network))
    output = adapted(X, SIGMA)
    assert output.shape == (2, 3, STATES)
    assert adapted.depends_on_sigma == depends
    assert ("sigma" in network.given[0]) == depends
    if depends:
        assert torch.equal(network.given[0]["sigma"], SIGMA)


def test_padding_and_labels_reach_the_network() -> None:
    network = Everything()
    adapt(network)(X, SIGMA, VALID, label=torch.tensor(1).expand(2))
    assert torch.equal(network.given[0]["valid"], VALID)
    assert network.given[0]["label"].tolist() == [1, 1]
    adapt(network)(X, SIGMA)
    assert network.given[1]["valid"] is network.given[1]["label"] is None


def test_a_label_without_a_default_is_passed_as_none() -> None:
    network = Demanding()
    adapted = adapt(network)
    adapted(X, SIGMA)
    assert not adapted.depends_on_sigma
    assert network.given[0]["label"] is None


def test_more_dimensions_are_one_batch() -> None:
    network = Timed()
    x, sigma = X.expand(4, 2, 3), torch.rand(4, 2)
    output = adapt(network)(x, sigma)
    assert network.given[0]["x"].shape == (8, 3)
    torch.testing.assert_close(output[3, 1], adapt(network)(x[3, 1][None], sigma[3, 1][None])[0])


def test_without_the_argument_rows_are_computed_without_their_padding() -> None:
    network = Timed().eval()
    with torch.no_grad():
        output = adapt(network)(X, SIGMA, VALID)
        torch.testing.assert_close(output[0, :2], network(X[:1, :2], SIGMA[:1])[0])
        torch.testing.assert_close(output[1], network(X[1:], SIGMA[1:])[0])
        assert not output[0, 2].any()


def test_padding_in_training_and_labels_are_rejected(refuses: Callable[..., object]) -> None:
    adapted = adapt(Timed())
    refuses(lambda: adapted(X, SIGMA, VALID), "padding", "Timed", "valid")
    refuses(lambda: adapted(X, SIGMA, label=torch.zeros(2).long()), "labels", "Timed", "label")
    with torch.no_grad():
        refuses(lambda: adapted(X, SIGMA, VALID.flip(-1)), "valid")  # padding on the left
    adapted(X, SIGMA, torch.ones_like(VALID))


def test_outputs_and_signatures_that_do_not_fit(refuses: Callable[..., object]) -> None:
    def network(forward: Callable[..., object]) -> nn.Module:
        return type("MyNet", (nn.Module,), {"forward": forward})()

    refuses(lambda: adapt(network(lambda self, x: x.float()))(X, SIGMA), "MyNet", "(2, 3)", "(2, 3, outputs)")
    refuses(lambda: adapt(network(lambda self, x: (x, x)))(X, SIGMA), "MyNet", "tuple", ".logits")
    refuses(lambda: adapt(network(lambda self, *x: x)), "MyNet", "names no arguments")
    refuses(lambda: adapt(network(lambda self, x, sigma, width: x)), "MyNet", "needs width")
    refuses(lambda: adapt(Timed), "Timed", "instance")
    refuses(lambda: adapt(lambda x: x), "torch.nn.Module")


def test_a_network_of_the_package_stays_as_it_is() -> None:
    network = Modern(states=STATES, width=8, depth=1, heads=2)
    assert adapt(network) is network
    assert isinstance(wrapped := adapt(Wrapper(network)), Wrapper)
    assert wrapped.module is network
    adapted = adapt(Timed())
    assert adapt(adapted) is adapted


def test_a_copy_has_weights_of_its_own() -> None:
    adapted = adapt(Timed())
    assert isinstance(adapted, AdaptedNetwork)
    copied = copy.deepcopy(adapted)
    with torch.no_grad():
        copied.module.table.weight.zero_()
    assert adapted(X, SIGMA).any()
    assert not copied(X, SIGMA).any()


def test_a_model_of_a_network_without_sigma_is_time_free(refuses: Callable[..., object]) -> None:
    """Then samplers reuse what the network has computed."""
    process = Absorbing(STATES - 1)
    assert not ScoreModel(adapt(Timeless()), process).depends_on_sigma
    assert ScoreModel(adapt(Timed()), process).depends_on_sigma
    network = Timed()
    model = MeanModel(adapt(network), process, time_conditioning="none")
    model.log_mean(X, SIGMA)
    assert not model.depends_on_sigma
    assert not network.given[0]["sigma"].any()


def test_the_number_of_outputs_is_checked(refuses: Callable[..., object]) -> None:
    model, x = ScoreModel(adapt(Timed()), Absorbing(STATES)), X % STATES
    refuses(lambda: model(x, SIGMA), "5 entries", "needs 6")
    refuses(lambda: model.hidden(x, SIGMA), "5 entries", "needs 6")
    causal = CausalModel(adapt(Few()), Absorbing(STATES - 1))
    refuses(lambda: causal.log_next(X[:, :2] % 4), "2 entries", "needs 4")


def test_an_encoder_of_hugging_face_is_a_network() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    encoder = transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=STATES, **sizes)).eval()
    model = MeanModel(adapt(encoder), Absorbing(STATES - 1))
    assert not model.depends_on_sigma
    expected = encoder(X).logits[..., : STATES - 1].log_softmax(-1)
    masked = X == STATES - 1
    torch.testing.assert_close(model.log_mean(X, SIGMA)[masked], expected[masked])
