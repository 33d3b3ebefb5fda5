"""Pareto fronts of models: measures and the record of a front. Loads no models.

Models are trained for several preferences and seeds; a model's rewards in M objectives are a point
[M], and more is better. `dominance` and `hypervolume` evaluate points, `front` is the record that
is saved and compared, `correlation` assesses its reliability, `collapse` detects
collapsed models, `nearest` finds the models for a target preference, `reach` the preference for a
target point on a conditioned model's front, and `smoothing` smooths training curves. The FIRM paper
plots such points; these measures are not in the paper.
"""

from typing import TYPE_CHECKING

from firm.base.lazy import lazy
from firm.fronts.hypervolume import (  # as its module, which a later import would bind
    bootstrap_hypervolume,
    hypervolume,
)
from firm.fronts.nearest import expected_rewards, nearest, neighbours  # likewise

if TYPE_CHECKING:
    from firm.base.preferences import grid, preference_folder
    from firm.fronts.collapse import collapse_reason
    from firm.fronts.correlation import (
        Violation,
        correlation_interval,
        monotone_violations,
        preference_correlations,
    )
    from firm.fronts.dominance import dominators, non_dominated
    from firm.fronts.front import (
        Front,
        Point,
        by_preference,
        check_comparable,
        mean_front,
        seed_hypervolumes,
    )
    from firm.fronts.reach import reaching, widest_gap
    from firm.fronts.smoothing import exponential_average, total_variation

__all__ = [
    "Front",
    "Point",
    "Violation",
    "bootstrap_hypervolume",
    "by_preference",
    "check_comparable",
    "collapse_reason",
    "correlation_interval",
    "dominators",
    "expected_rewards",
    "exponential_average",
    "grid",
    "hypervolume",
    "mean_front",
    "monotone_violations",
    "nearest",
    "neighbours",
    "non_dominated",
    "preference_correlations",
    "preference_folder",
    "reaching",
    "seed_hypervolumes",
    "total_variation",
    "widest_gap",
]

__getattr__, __dir__ = lazy(__name__)
