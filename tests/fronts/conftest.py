import pytest

from firm.fronts import Front, Point


@pytest.fixture(scope="session")
def build_point():
    """Builds a point from its rewards, one per objective."""

    def build(rewards, *, preference=None, seed=0, name=None, objectives=None, **fields):
        objectives = objectives or ("a", "b", "c")[: len(rewards)]
        values = {
            "name": name or f"{preference}, seed {seed}, {rewards}",
            "preference": preference,
            "seed": seed,
            "rewards": dict(zip(objectives, rewards, strict=True)),
            "errors": dict.fromkeys(objectives, 0.01),
            "scores": {"parse": 1.0},
            "kl": 2.5,
            "adapter": "adapters/x",
        }
        return Point(**values | fields)

    return build


@pytest.fixture(scope="session")
def build_front():
    """Builds a front of points, with every other field as plain as it can be."""

    def build(points, *, num_objectives=2, **fields):
        objectives = ("a", "b", "c")[:num_objectives]
        calibration = {"method": "sigmoid", "mean": 0.25, "scale": 2.0, "num_samples": 64}
        values = {
            "objectives": objectives,
            "points": tuple(points),
            "reference": (0.0,) * num_objectives,
            "calibrations": {name: dict(calibration) for name in objectives},
            "base": dict.fromkeys(objectives, 0.5),
            "strategy": "firm",
            "num_prompts": 100,
        }
        return Front(**values | fields)

    return build


@pytest.fixture(scope="session")
def grid_front(build_point, build_front):
    """Two seeds of five preferences of two objectives; every reward is 0.2 + 0.5 of its share."""
    shares = (0.0, 0.25, 0.5, 0.75, 1.0)
    return build_front(
        build_point((0.2 + 0.5 * s, 0.7 - 0.5 * s), preference=(s, 1 - s), seed=seed)
        for seed in (0, 1)
        for s in shares
    )
