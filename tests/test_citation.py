"""CITATION.cff says what the package says of itself, and names the paper."""

import re
import sys
import tomllib

import pytest
import yaml

import firm
from firm.federation.strategies import STRATEGIES
from tests.smoke import ROOT


@pytest.fixture(scope="module")
def citation():
    return yaml.safe_load((ROOT / "CITATION.cff").read_text())


@pytest.fixture(scope="module")
def project():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_citation_has_what_its_format_requires(citation):
    assert citation["cff-version"] == "1.2.0"
    assert {"message", "title", "authors"} <= citation.keys()
    for reference in citation["references"]:
        assert {"type", "title", "authors"} <= reference.keys()
        assert all(
            {"family-names", "given-names"} == author.keys() for author in reference["authors"]
        )


def test_title_version_licence_and_keywords_are_the_packages(citation, project):
    subject = (firm.__doc__ or "").splitlines()[0].rstrip(".")
    assert citation["title"] == f"FIRM: {subject}"
    assert str(citation["version"]) == firm.__version__ == project["version"]
    assert citation["license"] == project["license"]
    assert citation["keywords"] == project["keywords"]


def test_the_paper_is_the_one_that_the_algorithm_names(citation, project):
    (paper,) = citation["references"]
    algorithm = sys.modules[STRATEGIES["firm"].__module__].__doc__
    named = re.search(r'Algorithm 1 of "([^"]+)" \((\w+) et al\.\)', algorithm or "")
    assert named
    assert paper["title"].startswith(named[1])
    assert paper["authors"][0]["family-names"] == named[2]
    assert paper["url"] == project["urls"]["Paper"]
    number = paper["url"].rpartition("/")[2]
    assert [each["value"] for each in paper["identifiers"]] == [f"arXiv:{number}"]
