"""Preferences, targets and requirements become scales that sum to 1, or are refused in words."""

import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from firm.fronts.confidence import half_width
from firm.serving import ServedFront
from firm.serving.chat_templates import HH_TEMPLATE, check_exported, plain_template
from firm.serving.front import _preference
from firm.serving.peft_scales import _slot


@pytest.mark.parametrize(
    "preference",
    ["helpful=0.7", "harmless=0.3,helpful=0.7", {"helpful": 0.7}, {"harmless": 0.3}, [0.7, 0.3]],
)
def test_a_preference_is_read_in_every_form(served, preference):
    assert served.scales(preference) == pytest.approx({"helpful": 0.7, "harmless": 0.3})


def test_scales_are_equal_by_default_and_may_be_zero(served):
    assert served.scales() == {"helpful": 0.5, "harmless": 0.5}
    assert served.scales("helpful=0") == {"helpful": 0.0, "harmless": 1.0}
    assert served.scales({"harmless": 1}) == {"helpful": 0.0, "harmless": 1.0}


def test_a_target_is_reached_by_another_preference(served):
    # both gain half at a reward of 0.5, between those of 0.25 at equal shares and 1
    share = 0.5 + 0.5 * (0.5 - 0.25) / (1 - 0.25)
    for target in ("helpful=1,harmless=1", [2, 2]):
        scales = served.scales(target=target)
        assert list(scales.values()) == pytest.approx([share, 1 - share])


def test_requirements_are_met_by_lower_bounds(served):
    first, second = served.scales(require="helpful>=0.4", confidence=0.95).values()
    # of three models at once; what is left goes to harmless
    bound = 0.4 + half_width(0.01, 8, 1 - 0.05 / 3)
    assert first == pytest.approx(0.5 + 0.5 * (bound - 0.25) / 0.75, abs=1e-6)
    assert first + second == pytest.approx(1)
    with pytest.raises(ValueError, match=r"no mixture meets helpful >= 2 .* misses by 1\.026"):
        served.scales(require="helpful>=2")


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"preference": "helpful=0.7,harmless=0.7"}, "sum to 1, got 'helpful=0.7,harmless=0.7'"),
        ({"preference": "helpful=1.2"}, "sum to 1, got 'helpful=1.2'"),
        ({"preference": [0.5, 0.6]}, "must have shares that sum to 1"),
        ({"preference": {"helpful": -0.5, "harmless": 1.5}}, "must be a non-negative number"),
        ({"preference": {"helpful": True}}, "must be a non-negative number, got 'True'"),
        ({"preference": {"helpful": None}}, "must be a non-negative number, got 'None'"),
        ({"preference": [1]}, "a list of 2 shares (helpful, harmless), got [1]"),
        ({"preference": 0.7}, "got 0.7"),
        ({"preference": "helpfull=0.7"}, "unknown objective 'helpfull'"),
        ({"preference": ""}, "preference must be name=share pairs"),
        ({"target": "helpful=1"}, "target has no share for harmless"),
        ({"target": [0, 0]}, "target must have a share above 0"),
        ({"require": ["kl<=3"]}, "require must be a text"),
        ({"require": "truth>=0.5"}, "require has the unknown 'truth'"),
        ({"target": [1, 1], "require": "kl<=3"}, "pass one of preference, target and require"),
    ],
)
def test_what_cannot_be_served_is_refused(served, request_, message):
    with pytest.raises(ValueError) as refusal:
        served.scales(**request_)
    assert message in str(refusal.value)


def test_the_record_is_a_file(served, tmp_path):
    served.save(tmp_path)
    assert ServedFront.load(tmp_path) == served
    with pytest.raises(ValueError, match="pass a folder that `firm export` wrote"):
        ServedFront.load(tmp_path / "none")
    content = json.loads((tmp_path / "front.json").read_text())
    (tmp_path / "front.json").write_text(json.dumps({**content, "adapters": {"helpful": "a"}}))
    with pytest.raises(ValueError, match="adapters must be those of the objectives helpful, harm"):
        ServedFront.load(tmp_path)


@pytest.mark.parametrize("place", ["/etc/passwd", "../other", "a\\b"])
def test_paths_out_of_the_folder_are_refused(served, place):
    for changes in ({"base_file": place}, {"adapters": dict.fromkeys(served.adapters, place)}):
        with pytest.raises(ValueError, match="must be inside"):
            replace(served, **changes)


@given(st.text() | st.sampled_from(["", "{{ x }}", "{% y %}", '"', "\\", "-}}", "\ud800"]))
def test_templates_of_exports_are_accepted(text):
    check_exported("")
    check_exported(HH_TEMPLATE)
    for template in ("{prompt}", f"{text}{{prompt}}{text}", f"{{prompt}}{text}{{prompt}}"):
        check_exported(plain_template(template))
    assert "Réponds à" in plain_template("Réponds à {prompt}")
    check_exported(
        plain_template("Réponds à {prompt}").replace("é", "\\u00e9").replace("à", "\\u00e0")
    )


def test_shares_with_six_digits_are_a_preference_of_any_number_of_objectives():
    for count in (3, 6, 7, 9):
        names = [f"o{j}" for j in range(count)]
        shares = _preference([round(1 / count, 6)] * count, names)
        assert shares == pytest.approx([1 / count] * count)


def test_adapters_of_all_objectives_have_names_that_torch_takes():
    torch.nn.ModuleDict({_slot(name): torch.nn.Identity() for name in ("qwen2.5", "keys", "a")})


@pytest.mark.parametrize(
    "template",
    [
        "{{ 'a' * 3000000000 }}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        f"{HH_TEMPLATE} ",
        plain_template("{prompt}") * 2,
        plain_template("a{prompt}b").replace('"b"', "'b' * 10"),
        plain_template("a{prompt}b").replace('"b"', '["b"]'),
        "{{- 1 -}}",
    ],
)
def test_other_templates_are_refused_before_an_engine_renders_them(served, tmp_path, template):
    with pytest.raises(ValueError, match="chat_template must be empty or as `firm export` writes"):
        replace(served, chat_template=template)
    served.save(tmp_path)
    record = json.loads((tmp_path / "front.json").read_text())
    (tmp_path / "front.json").write_text(json.dumps({**record, "chat_template": template}))
    with pytest.raises(ValueError, match=r"front\.json is not a valid servedfront: chat_template"):
        ServedFront.load(tmp_path)
