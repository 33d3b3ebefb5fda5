"""Weights of the objectives by TorchJD, each method from the Gram matrix alone.

TorchJD (arXiv:2406.16232) has one class per paper. Methods that need the Jacobian's columns
(GradDrop, ConFIG, ExcessMTL, TrimmedMean) or positive losses (FAMO) are not among these. The names
are read without torch.
"""

import hashlib
import threading
import warnings
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from firm.base.extras import install_command
from firm.base.registry import choice_in_words, did_you_mean

if TYPE_CHECKING:
    import numpy as np
    import torch

PREFIX = "torchjd/"
"""Prefix of the methods' names as a solver."""
MEMORY = "solver"
"""Entry of a memory that holds the states of methods."""
Option = float | str


@dataclass(frozen=True)
class Method:
    """A weighting of TorchJD."""

    weighting: str
    """Class in ``torchjd.aggregation``."""
    options: Mapping[str, Option] = field(default_factory=dict)
    """Defaults of its options, of its own type; those that TorchJD requires are the papers'."""
    takes_preference: bool = False
    """Whether it has a preference vector."""
    reads_lengths: bool = False
    """Whether its direction depends on the common scale of the gradients."""
    needs: tuple[str, ...] = ()
    """Packages that it needs beside torchjd."""


_PROJECTOR = ("qpsolvers", "quadprog")
METHODS: dict[str, Method] = {
    "aligned_mtl": Method("AlignedMTLWeighting", {"scale_mode": "min"}, takes_preference=True),
    "cagrad": Method("CAGradWeighting", {"c": 0.5, "norm_eps": 1e-4}, needs=("cvxpy", "clarabel")),
    "cr_mogm": Method("CRMOGMWeighting", {"weighting": "upgrad", "alpha": 0.9}),
    "dualproj": Method("DualProjWeighting", takes_preference=True, needs=_PROJECTOR),
    "fairgrad": Method("FairGradWeighting", {"alpha": 1.0, "max_iters": 100}, reads_lengths=True),
    "gradvac": Method("GradVacWeighting", {"beta": 0.5, "eps": 1e-8}),
    "imtl_g": Method("IMTLGWeighting"),
    "krum": Method("KrumWeighting", {"n_byzantine": 0, "n_selected": 1}),
    "mean": Method("MeanWeighting"),
    "mgda": Method("MGDAWeighting", {"epsilon": 0.001, "max_iters": 100}),
    "modo": Method("MoDoWeighting", {"gamma": 0.1, "rho": 0.1}, reads_lengths=True),
    "nash_mtl": Method(
        "NashMTL",
        {"max_norm": 1.0, "update_weights_every": 1, "optim_niter": 20},
        reads_lengths=True,
        needs=("cvxpy", "ecos"),
    ),
    "pcd": Method("PCDWeighting", {"tau": 0.02, "beta": 0.999, "eps": 1e-8}, reads_lengths=True),
    "pcgrad": Method("PCGradWeighting"),
    "random": Method("RandomWeighting"),
    "sdmgrad": Method(
        "SDMGradWeighting",
        {"lr": 10.0, "momentum": 0.5, "n_iter": 20, "lambda_": 0.3},
        takes_preference=True,
    ),
    "sum": Method("SumWeighting"),
    "upgrad": Method("UPGradWeighting", takes_preference=True, needs=_PROJECTOR),
}
"""Methods by name. MoDo and SDMGrad get the Gram matrix of one batch, where their papers have the
products of two."""
NAMES = tuple(PREFIX + name for name in METHODS)
"""Names of the methods as solvers."""

_LOCK = threading.Lock()  # of the weightings below, which have a state


def torchjd_weights(
    gram: "torch.Tensor | np.ndarray",
    method: str,
    *,
    options: Mapping[str, Option] | None = None,
    preference: Sequence[float] | None = None,
    served: Sequence[int] | None = None,
    memory: MutableMapping[str, Any] | None = None,
) -> "torch.Tensor":
    """Returns TorchJD's weights, which give the same direction as its aggregator of the Jacobian.

    They are not scaled: their sum differs from 1 for most methods, and aligned_mtl and imtl_g also
    have negative ones. TorchJD treats short gradients as zero; therefore the Gram matrix is divided
    by the mean of its diagonal first, unless the method's direction depends on lengths. Without
    gradients, weights are uniform.

    Methods that draw random numbers (pcgrad, gradvac, random) draw them from a generator whose seed
    is a digest of the Gram matrix, so that equal matrices and states give equal weights.

    Args:
        gram: Gram matrix, shape [M, M].
        method: Name among ``METHODS``.
        options: Options of the method that differ from its defaults.
        preference: Preference, shape [M], non-negative; for methods that take one. Scaled to sum 1
            over the served objectives; if all of these have zero shares, so are their weights.
        served: Indices of the objectives to weight; the others have weight 0. All by default.
        memory: Receives the state of a stateful method under ``MEMORY``, and has it from the last
            call; without it, every call is a first one.

    Returns:
        Weights in float64 on the CPU, shape [M].

    Raises:
        ValueError: The method or an option is unknown, or a package is missing.
        RuntimeError: TorchJD returns weights that are not finite.
    """
    import torch

    from firm.solvers.checks import as_gram
    from firm.solvers.settings import check_shares

    options = dict(options or {})
    check_method(method, options, has_preference=preference is not None)
    rows = list(range(len(gram)) if served is None else served)
    if not rows:
        raise ValueError("served must name an objective, got none.")
    if preference is not None:
        check_shares(preference, len(gram), name="preference")
    matrix = torch.from_numpy(as_gram(gram))[rows][:, rows]
    weights = torch.zeros(len(gram), dtype=torch.float64)
    if not matrix.any():
        weights[rows] = 1 / len(rows)
        return weights
    own = None
    if preference is not None:
        shares = [float(preference[j]) for j in rows]
        if not any(shares):
            return weights
        own = tuple(share / sum(shares) for share in shares)
    if len(rows) == 1 and method == "nash_mtl":  # cvxpy multiplies no scalars
        weights[rows] = 1.0
        return weights
    if not METHODS[_method_of(method, options)].reads_lengths:
        matrix = matrix / matrix.diagonal().mean()
    arguments = (method, tuple(sorted(options.items())), own, len(rows))
    states = dict((memory or {}).get(MEMORY, {}))
    key = f"{method} {','.join(map(str, rows))}"
    with _LOCK, torch.no_grad(), torch.random.fork_rng(devices=[]):
        weighting = _weighting(*arguments)
        _restore(weighting, states.get(key), matrix)
        torch.manual_seed(seed_of(matrix))
        solved = weighting(matrix)
        state = _copy(weighting.state_dict())
    if not solved.isfinite().all():
        raise RuntimeError(
            f"{PREFIX}{method} returns the weights {solved.tolist()} for the Gram matrix "
            f"{matrix.tolist()}; choose another solver."
        )
    weights[rows] = solved
    if memory is not None and state:  # replaced and not changed, since checkpoints refer to it
        memory[MEMORY] = {**states, key: state}
    return weights


def check_method(
    method: str, options: Mapping[str, Option], *, has_preference: bool = False
) -> None:
    """Checks a method and its options without torch.

    Raises:
        ValueError: The method or an option is unknown, an option is of the wrong type, the method
            takes no preference, or a package is missing.
    """
    if method not in METHODS:
        names = choice_in_words(sorted(METHODS))
        raise ValueError(f"method must be {names}, got {method!r}{did_you_mean(method, METHODS)}")
    known = METHODS[method].options
    for name, value in options.items():
        if name not in known:
            names = ", ".join(known) or "none"
            raise ValueError(
                f"{PREFIX}{method} has the options {names}, got {name!r}{did_you_mean(name, known)}"
            )
        if isinstance(value, str) != isinstance(known[name], str):
            kind = "a name" if isinstance(known[name], str) else "a number"
            raise ValueError(f"{PREFIX}{method}: {name} must be {kind}, got {value!r}.")
    inner = _method_of(method, options)
    if inner != method:
        if inner not in METHODS or inner == "nash_mtl":
            names = ", ".join(name for name in METHODS if name not in (method, "nash_mtl"))
            raise ValueError(f"{PREFIX}{method}: weighting must be one of {names}, got {inner!r}.")
        check_method(inner, {})
    if has_preference and not METHODS[method].takes_preference:
        names = ", ".join(name for name, own in METHODS.items() if own.takes_preference)
        raise ValueError(
            f"{PREFIX}{method} takes no preference; leave it out, or choose one of {names}."
        )
    if any(find_spec(name) is None for name in ("torchjd", *METHODS[method].needs)):
        raise ValueError(
            f"{PREFIX}{method} needs packages that are not all installed: "
            f"{install_command('torchjd')}."
        )


def seed_of(gram: "torch.Tensor") -> int:
    """Returns the seed of the random numbers for a Gram matrix in float64, [M, M]."""
    return int.from_bytes(hashlib.sha256(gram.numpy().tobytes()).digest()[:7], "big")


def _method_of(method: str, options: Mapping[str, Option]) -> str:
    """Returns the method that a smoothed one wraps, and others themselves."""
    return str({**METHODS[method].options, **options}.get("weighting", method))


@lru_cache(maxsize=256)  # NashMTL's takes milliseconds to build
def _weighting(
    method: str,
    options: tuple[tuple[str, Option], ...],
    preference: tuple[float, ...] | None,
    num_objectives: int,
) -> Any:
    """Returns TorchJD's object; its state is that of the last call."""
    import torch
    import torchjd.aggregation as jd  # pyright: ignore[reportMissingImports]

    own = METHODS[method]
    given = {name: type(own.options[name])(value) for name, value in options}
    arguments: dict[str, Any] = {**own.options, **given}
    if preference is not None:
        arguments["pref_vector"] = torch.tensor(preference, dtype=torch.float64)
    if "weighting" in arguments:
        arguments["weighting"] = _weighting.__wrapped__(
            arguments["weighting"], (), None, num_objectives
        )
    if method == "nash_mtl":
        return _OnRoot(jd.NashMTL(num_objectives, **arguments).weighting)
    return getattr(jd, own.weighting)(**arguments)


class _OnRoot:
    """Applies a weighting of Jacobians to a root of the Gram matrix, R with RRᵀ = G."""

    def __init__(self, weighting: Any) -> None:
        self.weighting = weighting

    def __call__(self, gram: "torch.Tensor") -> "torch.Tensor":
        import torch

        values, vectors = torch.linalg.eigh(gram)
        with warnings.catch_warnings():  # CVXPY's, about the speed of its parameters
            warnings.simplefilter("ignore", UserWarning)
            return self.weighting(vectors * values.clamp(min=0).sqrt())

    def reset(self) -> None:
        self.weighting.reset()

    def state_dict(self) -> dict[str, Any]:
        import torch

        return {"alpha": torch.from_numpy(self.weighting.prvs_alpha), "step": self.weighting.step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.weighting.prvs_alpha = state["alpha"].numpy()
        self.weighting.step = state["step"]


def _restore(weighting: Any, state: Mapping[str, Any] | None, gram: "torch.Tensor") -> None:
    """Sets a weighting's state; None is that before the first call."""
    if hasattr(weighting, "reset"):
        weighting.reset()
    if state is not None:
        weighting(gram)  # creates what holds the state
        weighting.load_state_dict(_copy(state))


def _copy(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a weighting's state with copies of its tensors, which TorchJD changes in place."""
    return {name: v.clone() if hasattr(v, "clone") else v for name, v in state.items()}
