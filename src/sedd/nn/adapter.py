"""Call any network as the models do: ``adapt(network)(x, sigma, valid, label=label)``.

The signature of ``forward`` decides what a network is given. Its first argument is the tokens. ``sigma`` is the
argument of that name, or a second argument without a default; ``valid`` and ``label`` are the arguments of those names.
"""

import inspect
from typing import final

import torch
from torch import Tensor, nn

from sedd.nn.transformer import Labels, Transformer, Valid
from sedd.tensors import PerSequence, PerState, Tokens


def adapt(network: object) -> nn.Module:
    """Wrap a module called as ``network(x, sigma)`` or ``network(x)``; return a `Transformer` as it is.

    The network may be wrapped already, by DDP for example.
    """
    if not isinstance(network, nn.Module):
        hint = "call it to make an instance" if inspect.isclass(network) else "wrap it in one"
        raise ValueError(f"network is {network!r}; it must be a torch.nn.Module: {hint}")
    return network if isinstance(_unwrapped(network), Transformer | AdaptedNetwork) else AdaptedNetwork(network)


@final
class AdaptedNetwork(nn.Module):
    """A network that is given what its ``forward`` takes and whose output is checked.

    The network always reads tokens (b, L) and a noise level (b,). It returns the logits (b, L, outputs), or an object
    that has them as ``.logits``, as the encoders of Hugging Face do.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        inner = _unwrapped(module)
        self.name, self._is_required = type(inner).__name__, _arguments(inner)
        if not self._is_required:
            raise ValueError(f"forward of {self.name} names no arguments; write forward(self, x, sigma)")
        _, *rest = self._is_required
        second = [name for name in rest[:1] if self._is_required[name] and name not in ("valid", "label")]
        self._sigma = next((name for name in ("sigma", *second) if name in rest), None)
        self.depends_on_sigma = self._sigma is not None
        if others := [name for name in rest if self._is_required[name] and name not in (self._sigma, "valid", "label")]:
            needed = f"forward of {self.name} needs {', '.join(others)}; sedd passes x, sigma, valid and label alone"
            raise ValueError(f"{needed}: give every other argument a default")

    def require(self, name: str) -> None:
        """Raise ValueError if ``forward`` has no argument of this name: ``valid`` for padding, ``label`` for labels."""
        if name not in self._is_required:
            given = {"valid": "padding to leave out", "label": "labels"}[name]
            missing = f"the data has {given}, and forward of {self.name} has no argument {name}"
            raise ValueError(f"{missing}; add it, as in forward(self, x, sigma, {name}=None), or choose data without")

    def forward(self, x: Tokens, sigma: PerSequence, valid: Valid = None, *, label: Labels = None) -> PerState:
        """Return the logits of every position.

        Without the argument ``valid``, sequences of each length are computed by themselves; training rejects padding.
        """
        if label is not None:
            self.require("label")
        rows = x.reshape(-1, x.shape[-1])
        sigma = sigma.expand(x.shape[:-1]).reshape(-1)
        valid = None if valid is None else valid.expand(x.shape).reshape(rows.shape)
        label = None if label is None else label.expand(x.shape[:-1]).reshape(-1)
        if valid is None or "valid" in self._is_required or valid.all():
            logits = self._call(rows, sigma, valid, label)
        else:
            logits = self._call_by_length(rows, sigma, valid, label)
        return logits.reshape(*x.shape, -1)

    def _call(self, x: Tensor, sigma: Tensor, valid: Tensor | None, label: Tensor | None) -> Tensor:
        given = {"valid": valid, "label": label, self._sigma: sigma}
        passed = {  # None only where forward has no default
            name: given[name]
            for name, is_required in self._is_required.items()
            if name in given and (is_required or given[name] is not None)
        }
        try:
            output = self.module(x, **passed)
        except IndexError as error:
            raised = f"{self.name} raised {error!r} on token ids up to {int(x.max())}"
            raise ValueError(f"{raised}; its embedding needs a row for every state, the mask included") from error
        logits = getattr(output, "logits", output)
        if not isinstance(logits, Tensor) or logits.ndim != 3 or logits.shape[:2] != x.shape:
            returned = f"shape {tuple(logits.shape)}" if isinstance(logits, Tensor) else f"a {type(output).__name__}"
            wanted = f"logits of shape ({x.shape[0]}, {x.shape[1]}, outputs), or an object that has them as .logits"
            raise ValueError(f"{self.name} returned {returned}; return {wanted}")
        return logits

    def _call_by_length(self, x: Tensor, sigma: Tensor, valid: Tensor, label: Tensor | None) -> Tensor:
        """Call the network on the sequences of each length without their padding; the output is 0 at padding."""
        lengths = valid.sum(-1)
        is_padded_right = (valid == (torch.arange(x.shape[1], device=x.device) < lengths[:, None])).all()
        if not is_padded_right or (self.module.training and torch.is_grad_enabled()):
            self.require("valid")
        logits: Tensor | None = None
        for length in lengths[lengths > 0].unique().tolist():
            at = (lengths == length).nonzero().squeeze(-1)
            part = self._call(x[at, :length], sigma[at], None, None if label is None else label[at])
            logits = part.new_zeros(*x.shape, part.shape[-1]) if logits is None else logits
            logits[at, :length] = part
        if logits is None:
            raise ValueError("every sequence is padding alone; a network needs at least one token")
        return logits


def _arguments(network: nn.Module) -> dict[str, bool]:
    """Return the named arguments of a network's ``forward``, and whether each is required."""
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(network.forward).parameters
    return {name: p.default is p.empty for name, p in parameters.items() if p.kind not in variadic}


def _unwrapped(network: nn.Module) -> nn.Module:
    """Return the network inside wrappers, whose ``forward`` passes everything on: DDP, `torch.compile`, ours."""
    while not _arguments(network):
        inner = network._modules.get("_orig_mod") or network._modules.get("module")
        if inner is None:
            break
        network = inner
    return network
