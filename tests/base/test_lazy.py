import subprocess
import sys
from importlib import import_module

import pytest

PACKAGES = ("firm.alignment", "firm.federation", "firm.fmoo", "firm.report", "firm.run")


@pytest.mark.parametrize("name", PACKAGES)
def test_every_public_name_is_there(name):
    package = import_module(name)
    assert set(package.__all__) <= set(dir(package))
    for public in package.__all__:
        assert getattr(package, public) is not None


@pytest.mark.parametrize("name", PACKAGES)
def test_an_unknown_name_is_an_attribute_error_of_the_package(name):
    with pytest.raises(AttributeError, match=f"module '{name}' has no attribute 'nothing'"):
        _ = import_module(name).nothing


def test_importing_a_package_loads_no_torch_and_a_name_loads_its_module_alone():
    code = f"""
import sys
from importlib.util import find_spec
import {", ".join(PACKAGES)}
assert not {{"torch", "transformers", "wandb"}} & set(sys.modules)
from firm.federation import Client
assert "firm.federation.strategies" not in sys.modules
if find_spec("nvflare"):
    import firm.jobs.network_parties  # each command of a site starts a process
    assert not {{"transformers", "datasets"}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_python_interface_imports_its_libraries_when_it_is_called():
    code = """
import sys
from firm import align
assert not {"torch", "transformers", "datasets", "pydantic"} & set(sys.modules)
try:
    align("policy", rewards={"brief": len})
except ValueError as error:
    assert "rewards and prompts must be given" in str(error)
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
