"""A front of three measured points, whose rewards are not linear in the preference."""

import pytest

from firm.fronts import Front, Point
from firm.serving import ServedFront

NAMES = ("helpful", "harmless")


def make_point(share: float) -> Point:
    return Point(
        name=f"p{share}",
        preference=(share, 1 - share),
        seed=0,
        rewards={"helpful": share**2, "harmless": 1 - share**2},
        errors=dict.fromkeys((*NAMES, "kl"), 0.01),
        scores={},
        kl=2 * share,
        adapter=f"front/{share}",
    )


@pytest.fixture(scope="session")
def served() -> ServedFront:
    """An export of this front; its adapters do not exist."""
    front = Front(
        objectives=NAMES,
        points=tuple(map(make_point, (0.0, 0.5, 1.0))),
        reference=(0.0, 0.0),
        calibrations={name: {"method": "none"} for name in NAMES},
        base=dict.fromkeys(NAMES, 0.25),
        strategy="FIRM",
        num_prompts=8,
        is_conditioned=True,
    )
    return ServedFront(
        base_model="org/tiny",
        base_file="",
        adapters={name: f"{name}.gguf" for name in NAMES},
        front=front,
        system_prompt="Be brief.",
        request={"temperature": 0.7},
    )
