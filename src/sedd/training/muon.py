"""Muon (Jordan et al., 2024): momentum made nearly orthogonal, for all matrices of one shape in one batched call.

References: Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks"; the scale of the updates is
that of Liu et al. 2025, "Muon is Scalable for LLM Training", arXiv 2502.16982; the normalization of rows is that of
Li et al. 2025, "NorMuon: Making Muon more efficient and scalable", arXiv 2510.05491.
"""

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from sedd.ops.momentum import apply_updates, nesterov_momentum

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients a, b, c of a·s + b·s³ + c·s⁵, five iterations of which map [0.002, 1] into [0.68, 1.21]."""


def orthogonalize(matrices: Tensor, iterations: int = 5) -> Tensor:
    """Return matrices (k, m, n) with the same singular vectors and singular values in [0.68, 1.21].

    Newton–Schulz iteration: X ← a·X + b·(XXᵀ)X + c·(XXᵀ)²X. Singular values below 0.002 of the norm stay smaller.
    """
    a, b, c = _COEFFICIENTS
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if is_tall else matrices
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp_min(1e-7)  # the largest singular value is now at most 1
    for _ in range(iterations):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


def row_factors(squares: Float[Tensor, "k m"], averages: Float[Tensor, "k m"]) -> Float[Tensor, "k m"]:
    """Return factors that divide the rows of k matrices by their root mean square over time, and keep each norm.

    Orthogonalized updates of tall matrices have rows of different size, so some neurons would learn faster. Only the
    ratios of ``averages``, the moving averages of the mean ``squares`` of rows, matter.
    """
    inverse = averages.clamp_min(1e-30).rsqrt()
    ratio = squares.sum(-1, keepdim=True) / (squares * inverse.square()).sum(-1, keepdim=True).clamp_min(1e-30)
    return inverse * ratio.sqrt()


class Muon(torch.optim.Optimizer):
    """Muon with Nesterov momentum, normalized rows and decoupled weight decay, for matrices only.

    Updates have the root mean square of AdamW's, 0.2, so that one learning rate serves both. Like torch's fused
    optimizers, it reads ``found_inf`` on the device: if that is 1 a step changes nothing, and the host does not wait.

    Args:
        beta2: Decay of the average of squares that normalizes rows, see `row_factors`; None: rows are not normalized.
        parts: Into how many equal parts the rows of a matrix are divided, to be orthogonalized separately: 3 for
            stacked queries, keys and values.
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
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the matrices that have a gradient; torch passes the closure None."""
        for group in self.param_groups:
            by_shape: defaultdict[tuple[object, ...], list[Tensor]] = defaultdict(list)
            for matrix in group["params"]:
                if matrix.grad is not None:
                    by_shape[matrix.shape, matrix.device, _is_sharded(matrix)].append(matrix)
            for matrices in by_shape.values():
                self._update(matrices, group)

    def _update(self, matrices: list[Tensor], group: dict[str, Any]) -> None:
        """Update matrices of one shape."""
        for matrix in matrices:
            state = self.state[matrix]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(matrix)
            if "row_squares" not in state and group["beta2"] is not None:
                state["row_squares"] = torch.zeros(len(matrix), dtype=matrix.dtype, device=matrix.device)
        local = [_local(matrix) for matrix in matrices]
        gradients = [_local(matrix.grad) for matrix in matrices if matrix.grad is not None]
        averages = [_local(self.state[matrix]["momentum_buffer"]) for matrix in matrices]
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
        """Return orthogonalized updates with normalized rows; with FSDP each process computes all rows."""
        if is_sharded := _is_sharded(matrices[0]):
            from torch.distributed.tensor import DTensor, distribute_tensor

            mesh, placements = matrices[0].device_mesh, matrices[0].placements  # type: ignore[attr-defined]
            whole = [
                DTensor.from_local(a, mesh, placements, shape=m.shape, stride=m.stride()).full_tensor()
                for a, m in zip(stacked, matrices, strict=True)
            ]
            stacked = torch.stack(whole)
        k, rows, columns = stacked.shape
        divided = stacked.reshape(k * group["parts"], rows // group["parts"], columns)
        updates = orthogonalize(divided).reshape(k, rows, columns).contiguous()
        if (beta2 := group["beta2"]) is not None:
            squares = torch.linalg.vector_norm(updates, dim=-1, dtype=torch.float32).square() / columns
            averages = [self.state[matrix]["row_squares"] for matrix in matrices]
            before = torch.stack(averages)
            average = torch.where(found_inf.bool(), before, before.lerp(squares.to(before.dtype), 1 - beta2))
            torch._foreach_copy_(averages, list(average.unbind()))
            updates = updates * row_factors(squares, average)[..., None].to(updates.dtype)
        if is_sharded:
            updates = torch.stack([_local(distribute_tensor(u, mesh, placements, src_data_rank=None)) for u in updates])
        return updates


def _is_sharded(a: Tensor) -> bool:
    return hasattr(a, "to_local")  # a DTensor, whose module takes a second to import


def _local(a: Tensor) -> Tensor:
    """Return the tensor, or this process's part of a sharded one."""
    return a.to_local() if _is_sharded(a) else a  # type: ignore[attr-defined]
