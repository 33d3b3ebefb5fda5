import pytest
from hypothesis import given
from hypothesis import strategies as st

from firm.base.sanitize import MAX_NAME, check_name, legible, legible_data, printable


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


@pytest.mark.parametrize(
    "text",
    [
        "two\nlines\tand a tab",
        "\u3000\u4f60\u597d",
        "\u0645\u06cc\u200c\u062e",
        "\U0001f468\u200d\U0001f469",
        "a\u00a0b",
    ],
    ids=["lines", "Chinese", "Persian", "emoji", "no break"],
)
def test_prose_in_any_language_is_legible_as_it_is(text):
    assert legible(text) == text


def test_the_texts_of_plain_data_become_legible_and_the_rest_stays():
    data = {"a\x1b": [1.5, None, ("\u202e", True)], "b": {"c": "d"}}
    assert legible_data(data) == {"a\\x1b": [1.5, None, ["\\u202e", True]], "b": {"c": "d"}}
