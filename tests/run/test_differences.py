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


def test_the_order_of_objectives_counts_and_that_of_other_keys_does_not():
    stored = {"rewards": {"a": {"path": "p"}, "b": {"path": "q"}}, "seed": 1}
    assert (
        differences(stored, {"seed": 1, "rewards": {"a": {"path": "p"}, "b": {"path": "q"}}}) == []
    )
    given = {"rewards": {"b": {"path": "q"}, "a": {"path": "p"}}, "seed": 1}
    assert differences(stored, given) == ["the order of rewards was a, b, is b, a"]
    assert differences(stored, {**given, "rewards": None})  # named by their keys
    for malformed in (None, [], {"rewards": 3}, {"rewards": [1]}):
        assert differences(malformed, given)
