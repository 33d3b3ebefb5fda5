"""What tests register, and how it is forgotten."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

REGISTRIES = {
    "firm.alignment.adapters": "ADAPTERS",
    "firm.alignment.adapters.conditioned": "PREFERENCE_SAMPLERS",
    "firm.alignment.estimators": "ESTIMATORS",
    "firm.alignment.rollout_engines": "ROLLOUT_ENGINES",
    "firm.federation.engines": "ENGINES",
    "firm.federation.strategies": "STRATEGIES",
    "firm.fmoo.data": "DATASETS",
    "firm.fmoo.models": "MODELS",
    "firm.fmoo.task_data": "LOSSES",
    "firm.quantities": "QUANTITIES",
    "reward_models": "REWARD_MODELS",
}
"""Module -> its registry, which plugins add to."""


@contextmanager
def plugins_forgotten() -> Iterator[None]:
    """Forgets what was registered meanwhile, and the files of plugins that were imported."""
    modules = {file: sys.modules[file] for file in REGISTRIES if file in sys.modules}
    registries = [getattr(modules[file], REGISTRIES[file]) for file in modules]
    before, imported = [dict(registry) for registry in registries], set(sys.modules)
    try:
        yield
    finally:
        for registry, entries in zip(registries, before, strict=True):
            registry.clear()
            registry.update(entries)
        for name in sys.modules.keys() - imported:
            if name.startswith("firm_plugin_"):
                del sys.modules[name]
