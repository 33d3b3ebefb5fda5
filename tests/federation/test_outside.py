import pytest
from hypothesis import given
from hypothesis import strategies as st

from firm.federation.outside import MAX_NAME, check_name, printable


@given(st.text(st.characters(), max_size=700))
def test_a_printable_text_is_one_line_of_characters_that_a_terminal_shows(text):
    shown = printable(text)
    assert shown.isprintable()
    assert len(shown) <= 500
    shown.encode("utf-8")  # no lone surrogate


@given(st.text(st.characters(blacklist_categories=("C", "Z")), max_size=100))
def test_a_plain_text_stays_as_it_is(text):
    assert printable(text) == text


def test_escapes_can_be_read():
    assert (
        printable("\x1b[2Jfine\r\nround 9\u202e\ud800") == "\\x1b[2Jfine\\r\\nround 9\\u202e\\ud800"
    )


@pytest.mark.parametrize("name", ["run", "a.b-c_9", "0", "x" * MAX_NAME])
def test_a_name_of_one_component_is_taken(name):
    assert check_name(name, "a name") == name


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "../run",
        "a/b",
        "a\\b",
        "/root",
        "-rf",
        ".hidden",
        "a\n",
        "a b",
        "ä",
        "x" * 65,
    ],
)
def test_a_name_that_leaves_its_folder_is_refused(name):
    with pytest.raises(ValueError, match="a run's name must be at most"):
        check_name(name, "a run's name")
