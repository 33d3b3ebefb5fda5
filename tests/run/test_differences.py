"""What differs between a stored configuration and a given one."""

from firm.run.differences import differences

STORED = {"seed": 1, "ppo": {"rate": 0.5}, "names": ["a", "b"]}


def test_differences_name_key_path_and_both_values():
    given = {"seed": 1, "ppo": {"rate": 0.25}, "names": ["a", "c"]}
    assert differences(STORED, given) == ["ppo.rate was 0.5, is 0.25", "names.1 was 'b', is 'c'"]
    assert differences(STORED, given, ignore=["ppo", "names"]) == []


def test_a_key_that_was_added_later_is_no_difference_while_it_is_null():
    later = {**STORED, "limit": None}
    assert differences(STORED, later) == []
    assert differences(STORED, {**STORED, "limit": 3}) == ["limit was absent, is 3"]
    assert differences(later, STORED) == ["limit was None, is absent"]
