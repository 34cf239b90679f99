"""Build the estimator of a loaded model's likelihood."""

import functools
from collections.abc import Sequence

import torch

from sedd import likelihood
from sedd import parameterization as parameterizations
from sedd.likelihood import BoundTerms, Estimator
from sedd.likelihood.orders import Orders, check_mixture, check_orders
from sedd.loading import LoadedModel


def build_estimator(
    name: str | None,
    loaded: LoadedModel,
    terms: Sequence[str],
    t_min: float = 0.0,
    seed: int = 0,
    orders: Orders | None = None,
) -> Estimator:
    """Build the estimator of a model's likelihood.

    Args:
        name: bound, any-order, forward, backward or random, as far as they fit the model; None: the first that fits.
        loaded: The model.
        terms: The terms of the variational bound to include: all, or the diffusion term alone as in published
            tables.  [§8]
        t_min: The time at which the integral of the diffusion term begins, where it stands alone.
        seed: Decides the order named ``random``.
        orders: The number of orders of the mixture that a time-free denoiser of masks is, or ``all``; None: another
            estimator.
    """
    if orders is not None:
        return _mixture_estimator(name, loaded, orders)
    estimators = _estimators(loaded, set(terms) == set(BoundTerms._fields), t_min, seed)
    if name is not None and name not in estimators:
        what = f"{loaded.config.model.parameterization} under {loaded.config.noise.process} noise"
        raise ValueError(f"estimator, for {what}, is {name!r}; choose one of {', '.join(estimators)}")
    return estimators[name or next(iter(estimators))]


def _mixture_estimator(name: str | None, loaded: LoadedModel, orders: Orders) -> Estimator:
    """Return the estimator of a mixture over orders."""
    check_orders(orders, name)
    check_mixture(loaded.config)
    if orders == "all":
        return likelihood.AllOrdersEstimator(loaded.process)
    return likelihood.ImportanceWeightedEstimator(loaded.process, int(orders))


def _estimators(loaded: LoadedModel, all_terms: bool, t_min: float, seed: int) -> dict[str, Estimator]:
    """Return the estimators that fit a model by their names, the default first."""
    process, default = loaded.process, likelihood.default_estimator(loaded.model)
    if default.is_exact:
        return {"forward": default}
    bound = default if all_terms else likelihood.DiffusionTermEstimator(process, loaded.schedule, t_min)
    if not (isinstance(loaded.model, parameterizations.MeanModel) and process.only_masks):
        return {"bound": bound}
    in_order = functools.partial(likelihood.FixedOrderEstimator, process)
    return {
        "bound": bound,
        "any-order": likelihood.AnyOrderEstimator(process),
        "forward": in_order(torch.arange),
        "backward": in_order(lambda length: torch.arange(length).flip(0)),
        "random": in_order(lambda length: torch.randperm(length, generator=torch.Generator().manual_seed(seed))),
    }
