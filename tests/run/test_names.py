"""Names that people give become folders of their own, and no others."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firm.run.names import check_folder_name, check_slugs, slug


@given(st.lists(st.text(), max_size=4))
def test_names_that_pass_are_different_visible_folders_below_where_they_stand(names) -> None:
    try:
        check_slugs(names, "settings")
    except ValueError:
        return
    parts = [slug(name) for name in names]
    assert len(set(parts)) == len(parts)
    assert all(name.isprintable() for name in names)
    assert not any("/" in part or "\0" in part or part.startswith(".") for part in parts)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (
            [".."],
            "settings need names that contain letters or digits and do not start with a dot",
        ),
        (
            ["/"],
            "settings need names that contain letters or digits and do not start with a dot",
        ),
        (
            ["a\x1b[2J"],
            r"settings need names of printable characters in one line, got 'a\x1b[2J'.",
        ),
        (
            ["a", "../A"],
            "settings need names that contain letters or digits and do not start with a dot",
        ),
        (["FIRM", "firm"], "that differ as file names, got 'FIRM' and 'firm'; rename one."),
        (["β, 1", "β 1"], "that differ as file names, got 'β, 1' and 'β 1'; rename one."),
        (["β" * 76], "settings need names of at most 150 bytes, got 152 in 'β"),
    ],
)
def test_names_that_are_no_files_are_refused(names, message) -> None:
    with pytest.raises(ValueError) as refused:
        check_slugs(names, "settings")
    assert message in str(refused.value)


def test_the_names_that_people_give_pass() -> None:
    check_slugs(["FIRM, β = 0.5", "FedCMOO", "1/2 of all", "-0.5"], "settings")
    for name in ("FSMGDA, η = 0.1", "FedMGDA+", "a.b", "q-FedAvg (q = 1)"):
        assert check_folder_name(name, "a name") == name


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../a", "/a", "a/b", "a\\b", ".a", "a ", " a", "a\n", "\x1b[2J", "a\0"]
)
def test_a_name_that_leads_elsewhere_or_is_not_shown_is_no_folder(name) -> None:
    with pytest.raises(ValueError, match="an algorithm's name must be a valid folder name") as no:
        check_folder_name(name, "an algorithm's name")
    assert str(no.value).isprintable()


def test_a_long_name_is_no_folder() -> None:
    with pytest.raises(ValueError, match="at most 150 bytes"):
        check_folder_name("a" * 151, "a name")
