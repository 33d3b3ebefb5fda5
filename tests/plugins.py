"""What tests register, and how it is forgotten."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module

from firm.base.registry import Registry
from firm.cli.main import COMMANDS, load


def registries() -> list[Registry]:
    """Returns every registry of the package, which plugins add to."""
    for command in COMMANDS.values():
        load(command.config, "configs")
    for name in ("firm.alignment.client", "firm.fmoo.client", "reward_models.registry"):
        import_module(name)  # import the other modules with registries
    packages = ("firm", "reward_models")
    modules = [each for name, each in sys.modules.items() if name.partition(".")[0] in packages]
    found = [each for module in modules for each in vars(module).values()]
    return list({id(each): each for each in found if isinstance(each, Registry)}.values())


@contextmanager
def plugins_forgotten() -> Iterator[None]:
    """Forgets what was registered meanwhile, and the files of plugins that were imported."""
    before = [(registry, dict(registry)) for registry in registries()]
    imported = set(sys.modules)
    try:
        yield
    finally:
        for registry, entries in before:
            registry.clear()
            registry.update(entries)
        for name in sys.modules.keys() - imported:
            if name.startswith("firm_plugin_"):
                del sys.modules[name]
