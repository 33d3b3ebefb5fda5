"""Engines are chosen by name, and those of other packages join by a decorator."""

import pytest

from firm.federation import LocalEngine
from firm.federation.engines import ENGINES, check_engine, engine

pytestmark = pytest.mark.usefixtures("new_plugins")


def test_an_engine_of_another_package_is_found_by_its_name():
    @engine("counting")
    class CountingEngine(LocalEngine):
        num_calls = 0

        def map(self, request, clients):
            type(self).num_calls += 1
            return super().map(request, clients)

    check_engine("counting")
    assert ENGINES["counting"] is CountingEngine
    assert ENGINES["local"] is LocalEngine


def test_a_name_that_is_taken_or_that_nobody_has_is_refused():
    with pytest.raises(ValueError, match="there is an engine 'local' already"):
        engine("local")(LocalEngine)
    with pytest.raises(ValueError, match="engine must be one of local, stacked, got 'remote'"):
        check_engine("remote")
