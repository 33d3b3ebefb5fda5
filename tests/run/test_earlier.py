from dataclasses import dataclass, field

import pytest
import yaml

from firm.alignment import EstimatorConfig, PPOConfig
from firm.run import Run, to_dict
from firm.run.config import compose
from firm.run.earlier import translated_settings


@dataclass(frozen=True)
class Config:
    """A run."""

    seed: int = 0
    """Seed."""
    estimator: EstimatorConfig = field(default_factory=PPOConfig)
    """A local step."""


@pytest.fixture
def config() -> Config:
    return Config(3, PPOConfig(batch_size=32, clip_range=0.1))


@pytest.fixture
def earlier(config) -> dict:
    """What an earlier version wrote of the same run."""
    settings = to_dict(config)
    section = settings.pop("estimator")
    del section["name"]
    return {"ppo": section, **settings}


def test_the_section_of_ppo_is_the_estimator_of_that_name(config, earlier):
    assert translated_settings(earlier) == to_dict(config)
    assert translated_settings({"ppo": None}) == {"estimator": {"name": "ppo"}}
    for untouched in ({"seed": 3}, None, [1]):
        assert translated_settings(untouched) == untouched


def test_a_run_of_an_earlier_version_is_read_and_resumed(config, earlier, tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(earlier))
    assert compose(Config, [file], []) == config
    run = Run.create(tmp_path / "run", earlier)
    run.close()
    Run.resume(run.path, to_dict(config)).close()
