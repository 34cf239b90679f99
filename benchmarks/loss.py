"""Time and memory of the output layer and the loss, forward and backward: fused, and the PyTorch reference.

python benchmarks/loss.py                                       sizes of published models on a GPU, small ones on a CPU
python benchmarks/loss.py --vocab 256 --parameterization mean --json
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
from measure import (
    Machine,
    Measurement,
    build_parser,
    describe_machine,
    free_memory,
    print_measurements,
    read_setting,
    time_variant,
)
from torch import Tensor, nn

from sedd.nn.layers import Linear
from sedd.ops.block_ops import PackedTokens, gather
from sedd.ops.fused_loss import fused_loss
from sedd.registry import PARAMETERIZATIONS
from sedd.tensors import compute_dtype, upcast
from sedd.training.config import OBJECTIVES, PROCESSES, SCHEDULES

LOSS_FLOPS = "6 · positions in the loss · width · vocabulary"


@dataclass(frozen=True)
class LossSetting:
    """Sizes of the output layer and of the loss."""

    CPU: ClassVar[dict[str, Any]] = {"rows": 1024, "width": 128, "vocab_size": 4096, "precision": "float32"}
    process: str = "absorbing"
    parameterization: str = "score"
    rows: int = 65_536
    masked: float = 0.5
    width: int = 768
    vocab_size: int = 50_257
    precision: str = "bfloat16"
    device: str = "cuda"
    repeats: int = 15

    def __post_init__(self) -> None:
        if not 0 < self.masked < 1:
            raise ValueError(f"masked is {self.masked}; it is a fraction and must lie between 0 and 1")
        if self.precision == "float8":
            raise ValueError(
                "precision is 'float8', which applies to transformer blocks only; choose float32 or bfloat16"
            )


@final
class _Head(nn.Module):
    """A network that consists of the output layer over random hidden states."""

    def __init__(self, setting: LossSetting, states: int, generator: torch.Generator) -> None:
        super().__init__()
        self.head = Linear(setting.width, states)
        self.head.reset_parameters(generator)
        self.states = nn.Parameter(torch.randn(1, setting.rows, setting.width, generator=generator))
        self.is_bfloat16 = setting.precision == "bfloat16"

    def forward(
        self,
        x: Tensor,
        sigma: Tensor,
        valid: Tensor | None = None,
        *,
        packed: PackedTokens | None = None,
        return_hidden: bool = False,
    ) -> Tensor:
        with torch.autocast(self.states.device.type, torch.bfloat16, enabled=self.is_bfloat16):
            hidden = self.states if packed is None else gather(self.states, packed)
            hidden = hidden.to(compute_dtype(self.head.weight))
            return hidden if return_hidden else upcast(self.head(hidden))


def measure_loss(setting: LossSetting, machine: Machine) -> Iterator[Measurement]:
    """Measure output layer and loss with all gradients: fused, and the PyTorch reference."""
    generator = torch.Generator().manual_seed(0)
    process, schedule = (
        PROCESSES.build(setting.process, setting.vocab_size),
        SCHEDULES.build("log-linear"),
    )
    objective = OBJECTIVES.build("score-entropy")
    t = schedule.t(-torch.log1p(-torch.tensor([setting.masked])))
    x_0 = torch.randint(setting.vocab_size, (1, setting.rows), generator=generator)
    x_t = process.corrupt(x_0, schedule.sigma(t), generator)
    count = int(process.is_noisy(x_t).sum())
    head = _Head(setting, process.num_states, generator).to(setting.device)
    model = PARAMETERIZATIONS.build(setting.parameterization, head, process, schedule)
    x_0, x_t, t = (a.to(setting.device) for a in (x_0, x_t, t))
    weight, leaves = torch.ones_like(t), list(head.parameters())

    def fused() -> Tensor:
        loss = fused_loss(objective, model, x_t, x_0, t, weight, count=count)
        if loss is None:
            raise ValueError(
                f"score entropy of parameterization {setting.parameterization} under {setting.process} noise has no "
                "fused loss; choose parameterization score"
            )
        return loss.total

    variants: dict[str, Callable[[], object]] = {
        "fused": lambda: torch.autograd.grad(fused(), leaves),
        "plain": lambda: torch.autograd.grad(objective.loss(model, x_t, x_0, t).sum(), leaves),
    }
    flops = 6.0 * count * setting.width * setting.vocab_size
    for variant, work in variants.items():
        free_memory(setting.device)
        yield time_variant(variant, work, machine, setting.repeats, setting.rows, flops)


def main() -> None:
    """Measure and print."""
    parser = build_parser(__doc__, LossSetting)
    args = parser.parse_args()
    setting = read_setting(parser, args, LossSetting)
    machine = describe_machine(setting.device, setting.precision)
    print_measurements(setting.__dict__, machine, LOSS_FLOPS, measure_loss(setting, machine), args.json)


if __name__ == "__main__":
    main()
