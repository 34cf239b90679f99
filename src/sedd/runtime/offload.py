"""A network on a device that has no float64, with everything else on the CPU."""

from typing import Any

from torch import Tensor, float64, nn


class OffloadedNetwork(nn.Module):
    """A network in inference on a device without float64, such as Apple's ``mps``.

    Tokens and noise levels are moved to the device and outputs back: draws and bounds are in float64 on the CPU.
    """

    def __init__(self, network: nn.Module, device: str) -> None:
        super().__init__()
        self.module: Any = network.to(device)
        self.device, self.depends_on_sigma = device, getattr(network, "depends_on_sigma", True)

    @property
    def head(self) -> "OffloadedNetwork":
        return OffloadedNetwork(self.module.head, self.device)

    def hidden(self, *arguments: Any, **options: Any) -> Tensor:
        return self._call(self.module.hidden, arguments, options)

    def forward(self, *arguments: Any, **options: Any) -> Tensor:
        return self._call(self.module, arguments, options)

    def _call(self, function: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Tensor:
        def move(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            return (value.float() if value.dtype == float64 else value).to(self.device)

        output = function(*map(move, arguments), **{name: move(value) for name, value in options.items()})
        logits: Tensor = getattr(output, "logits", output)
        return logits.cpu()
