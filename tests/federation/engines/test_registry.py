"""Engines are chosen by name, and those of other packages join by a decorator."""

import pytest

from firm.federation import LocalEngine
from firm.federation.engine_registry import ENGINES, engine

pytestmark = pytest.mark.usefixtures("new_plugins")


def test_an_engine_of_another_package_is_found_by_its_name():
    @engine("counting")
    class CountingEngine(LocalEngine):
        num_calls = 0

        def map(self, request, clients):
            type(self).num_calls += 1
            return super().map(request, clients)

    assert ENGINES["counting"] is CountingEngine
    assert ENGINES["local"] is LocalEngine


def test_a_name_that_is_taken_or_that_nobody_has_is_refused():
    class Other(LocalEngine):
        pass

    with pytest.raises(ValueError, match="an engine 'local' is already registered"):
        engine("local")(Other)
    with pytest.raises(ValueError, match="engine must be one of local, stacked, got 'remote'"):
        ENGINES["remote"]


def test_a_redefinition_replaces_the_engine_that_it_repeats():
    for _ in range(2):  # a notebook's cell that runs twice

        @engine("counting")
        class CountingEngine(LocalEngine):
            pass

        assert ENGINES["counting"] is CountingEngine
