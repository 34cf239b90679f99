"""Muon (Jordan et al., 2024): momentum made nearly orthogonal, for all matrices of one shape in one batched call.

References: Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks"; the scale of the updates is
that of Liu et al. 2025, "Muon is Scalable for LLM Training", arXiv 2502.16982; the normalization of rows is that of
Li et al. 2025, "NorMuon: Making Muon more efficient and scalable", arXiv 2510.05491.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from sedd.ops.momentum import apply_updates, nesterov_momentum

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients a, b, c of a·s + b·s³ + c·s⁵, five iterations of which map [0.002, 1] into [0.68, 1.21]."""


def orthogonalize(matrices: Tensor, iterations: int = 5) -> Tensor:
    """Return matrices (k, m, n) with the same singular vectors and singular values in [0.68, 1.21].

    Singular values below 0.002 of the Frobenius norm stay smaller than that.

    Newton–Schulz iteration: X ← a·X + b·(XXᵀ)X + c·(XXᵀ)²X.
    """
    a, b, c = _COEFFICIENTS
    x = matrices
    is_tall = x.shape[-2] > x.shape[-1]
    x = x.mT if is_tall else x
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp_min(1e-7)  # the largest singular value is now at most 1
    for _ in range(iterations):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


class Muon(torch.optim.Optimizer):
    """Muon with Nesterov momentum, normalized rows and decoupled weight decay, for matrices only.

    Updates have the root mean square of AdamW's, 0.2, so that one learning rate serves both. Like torch's fused
    optimizers, it reads ``found_inf`` on the device: if that is 1 a step changes nothing, and the host does not wait.

    Args:
        matrices: The matrices, or groups of them with options of their own.
        weight_decay: Weights are multiplied by 1 − lr·weight_decay in each step.
        beta2: Decay of the average of squares by which rows are normalized, see `row_factors`; None: they are not.
        parts: Into how many equal parts the rows of a matrix are divided that are orthogonalized apart: 3 for stacked
            queries, keys and values, which are matrices of their own.
    """

    def __init__(
        self,
        matrices: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
        beta2: float | None = 0.95,
        parts: int = 1,
    ) -> None:
        defaults = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "beta2": beta2, "parts": parts}
        super().__init__(matrices, defaults)
        self.found_inf: Tensor | None = None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update the matrices that have a gradient."""
        if closure is not None:
            raise ValueError("Muon takes no closure")
        for group in self.param_groups:
            by_shape: defaultdict[tuple[object, ...], list[Tensor]] = defaultdict(list)
            for matrix in group["params"]:
                if matrix.grad is not None:
                    self._initialise_state(matrix, group)
                    by_shape[matrix.shape, matrix.device, _is_sharded(matrix)].append(matrix)
            for matrices in by_shape.values():
                self._update(matrices, group)

    def _initialise_state(self, matrix: Tensor, group: dict[str, Any]) -> None:
        state = self.state[matrix]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(matrix)
        if "row_squares" not in state and group["beta2"] is not None:
            state["row_squares"] = torch.zeros(len(matrix), dtype=matrix.dtype, device=matrix.device)

    def _update(self, matrices: list[Tensor], group: dict[str, Any]) -> None:
        """Update matrices of one shape."""
        buffers = [self.state[matrix]["momentum_buffer"] for matrix in matrices]
        local, gradients, averages = (
            [_local(a) for a in tensors] for tensors in (matrices, _gradients(matrices), buffers)
        )
        found_inf = self.found_inf if self.found_inf is not None else torch.zeros((), device=local[0].device)
        # the spread of the singular values leaves room for bfloat16, for which many CPUs have no instructions
        dtype = torch.bfloat16 if local[0].is_cuda else torch.float32
        updates = nesterov_momentum(gradients, averages, group["momentum"], found_inf, dtype)
        updates = self._orthogonalize(updates, matrices, group, found_inf)
        rows, columns = matrices[0].shape
        rate = 0.2 * math.sqrt(max(rows // group["parts"], columns)) * group["lr"]
        apply_updates(local, updates, rate, group["lr"] * group["weight_decay"], found_inf)

    def _orthogonalize(
        self, stacked: Tensor, matrices: list[Tensor], group: dict[str, Any], found_inf: Tensor
    ) -> Tensor:
        """Return the updates of matrices; of those that are sharded (FSDP) every process computes the whole."""
        if not _is_sharded(matrices[0]):
            return self._orthogonalize_whole(stacked, matrices, group, found_inf)
        from torch.distributed.tensor import DTensor, distribute_tensor

        mesh, placements = matrices[0].device_mesh, matrices[0].placements  # type: ignore[attr-defined]
        whole = [
            DTensor.from_local(a, mesh, placements, shape=m.shape, stride=m.stride()).full_tensor()
            for a, m in zip(stacked, matrices, strict=True)
        ]
        updates = self._orthogonalize_whole(torch.stack(whole), matrices, group, found_inf)
        return torch.stack([_local(distribute_tensor(u, mesh, placements, src_data_rank=None)) for u in updates])

    def _orthogonalize_whole(
        self, stacked: Tensor, matrices: list[Tensor], group: dict[str, Any], found_inf: Tensor
    ) -> Tensor:
        """Return orthogonalized matrices with normalized rows, contiguous."""
        k, rows, columns = stacked.shape
        divided = stacked.reshape(k * group["parts"], rows // group["parts"], columns)
        updates = orthogonalize(divided).reshape(k, rows, columns).contiguous()
        if (beta2 := group["beta2"]) is None:
            return updates
        squares = torch.linalg.vector_norm(updates, dim=-1, dtype=torch.float32).square() / columns
        averages = [self.state[matrix]["row_squares"] for matrix in matrices]
        before = torch.stack(averages)
        average = torch.where(found_inf.bool(), before, before.lerp(squares.to(before.dtype), 1 - beta2))
        torch._foreach_copy_(averages, list(average.unbind()))
        return updates * row_factors(squares, average)[..., None].to(updates.dtype)


def row_factors(squares: Float[Tensor, "k m"], averages: Float[Tensor, "k m"]) -> Float[Tensor, "k m"]:
    """Return factors that divide the rows of matrices by their root mean square over time, and keep the norm of each.

    Orthogonalized updates have rows of different size where a matrix is tall; so some neurons would learn faster.

    Args:
        squares: Mean square of every row of k matrices.
        averages: Moving averages of these, of any scale.
    """
    inverse = averages.clamp_min(1e-30).rsqrt()
    ratio = squares.sum(-1, keepdim=True) / (squares * inverse.square()).sum(-1, keepdim=True).clamp_min(1e-30)
    return inverse * ratio.sqrt()


def _gradients(matrices: list[Tensor]) -> list[Tensor]:
    return [matrix.grad for matrix in matrices if matrix.grad is not None]


def _is_sharded(a: Tensor) -> bool:
    return hasattr(a, "to_local")  # a DTensor, whose module takes a second to import


def _local(a: Tensor) -> Tensor:
    """Return the tensor, or this process's part of a sharded one."""
    return a.to_local() if _is_sharded(a) else a  # type: ignore[attr-defined]
