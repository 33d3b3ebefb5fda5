"""A site decides: what it carries out, how often, and what its record says."""

import json
from dataclasses import replace

import pytest
import torch

from firm.base.inside import LinkFound
from firm.federation import LocalEngine
from firm.federation.options.accounting import gaussian_epsilon
from firm.federation.options.privacy import PrivacyConfig
from firm.federation.schedule import ScheduleConfig
from firm.federation.schema import Invalid
from firm.federation.serialization import pack, unpack
from firm.federation.strategy_configs import FedCmooConfig, FirmConfig, FsmgdaConfig
from firm.federation.training import LocalTraining
from firm.network.agreement import Agreement, Ledger, Refused
from firm.network.site import Site
from firm.network.site_policy import Budget, SitePolicy

PRIVACY = PrivacyConfig(clip_norm=0.1, noise_multiplier=1.0, at="client")
OBJECTIVES = ("left", "right")
NAMES = ["a", "b"]


def _agreement(cfg, num_rounds=3):
    return Agreement(cfg, objectives=OBJECTIVES, num_rounds=num_rounds, clients=NAMES)


def _content(start, cfg, **changes):
    fields = {**cfg.local_training(OBJECTIVES), **changes}
    request = LocalTraining(
        round=1, objectives=OBJECTIVES, adapter=start.adapter, accepted={}, **fields
    )
    return unpack(pack(request.to_network(*NAMES)))


def test_the_agreed_request_is_carried_out_with_the_sites_own_values(start):
    cfg = FirmConfig(privacy=replace(PRIVACY, noise_seed=5), num_local_steps=2)
    content = _content(start, cfg)
    assert content["options"]["privacy"]["noise_seed"] is None  # it stays where it is
    request = _agreement(cfg).request("local_training", content)
    assert request.options == {"privacy": cfg.privacy}
    assert request.num_local_steps == 2
    assert torch.equal(request.adapter["first"], start.adapter["first"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "own", [{"preferences": {"a": (0.3, 0.7), "b": (0.6, 0.4)}}, {"ranks": {"a": 1, "b": 2}}]
)
def test_a_request_has_the_settings_of_the_clients_that_it_asks_alone(start, own):
    cfg = FirmConfig(**own)
    agreement = Agreement(cfg, objectives=OBJECTIVES, num_rounds=3, clients=("a", "b"))
    request = LocalTraining(
        round=1,
        objectives=OBJECTIVES,
        adapter=start.adapter,
        accepted={},
        **cfg.local_training(OBJECTIVES),
    )
    for clients in (("a",), ("b",), ("a", "b")):
        content = unpack(pack(request.to_network(*clients)))
        assert agreement.request("local_training", content, clients).round == 1
        if len(clients) == 1:
            with pytest.raises(Refused):
                agreement.request("local_training", content, ("a", "b"))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"options": {}}, "options must be "),
        (
            {"privacy": {"noise_multiplier": 0.0}},
            "options.privacy.noise_multiplier must",
        ),
        ({"privacy": {"clip_norm": 1e6}}, "options.privacy.clip_norm must be 0.1"),
        (
            {"privacy": {"noise_seed": 3}},
            "options.privacy.noise_seed must be None",
        ),
        ({"privacy": {"statistics": "exact"}}, "options.privacy.statistics must be 'none'"),
        ({"share_gram": True}, "share_gram must be False, as agreed, got True"),
        ({"share_losses": True}, "share_losses must be False"),
        ({"solve_per": "batch"}, "solve_per must be 'minibatch'"),
        ({"factors": [1.0, 0.0]}, "factors must be None"),
        ({"skipped_batches": 1}, "skipped_batches must be 0"),
        ({"num_local_steps": 2}, "num_local_steps must be 1, as agreed, got 2"),
        ({"num_local_epochs": 2}, "num_local_epochs must be None, as agreed, got 2"),
        ({"proximal": 0.1}, "proximal must be 0"),
        ({"weighting": "fixed"}, "weighting must be 'firm'"),
        ({"weighting_options": {"beta": 9.0}}, "weighting_options must be "),
        ({"options_by_client": {"a": {"beta": 9.0}}}, "options_by_client must be {}"),
        ({"round": 4}, "round 4 is beyond the agreed 3 rounds"),
        ({"objectives": ["right", "left"]}, "objectives must be left, right"),
    ],
)
def test_a_request_for_anything_else_is_refused(start, change, reason):
    cfg = FirmConfig(privacy=PRIVACY)
    content = _content(start, cfg)
    if "privacy" in change:
        own = content["options"]["privacy"]
        change = {"options": {"privacy": {**own, **change["privacy"]}}}
    with pytest.raises(Refused, match=f"^{reason.split('{')[0]}"):
        _agreement(cfg).request("local_training", {**content, **change})


def test_a_schedule_binds_the_server_in_every_round(start):
    cfg = FirmConfig(schedule=ScheduleConfig(rounds=[1, 3], shares=[[1.0, 1.0], [1.0, 0.0]]))
    for number, share in ((1, 0.5), (2, 0.75), (3, 1.0)):
        content = {**_content(start, cfg.at_round(number, OBJECTIVES)), "round": number}
        request = _agreement(cfg).request("local_training", content)
        assert list(request.weighting_options["preference"]) == [share, 1 - share]
        with pytest.raises(Refused, match=r"weighting_options.preference must be"):
            _agreement(cfg).request("local_training", {**content, "round": number % 3 + 1})


def test_a_server_may_lower_the_learning_rates_but_not_raise_them(start):
    cfg = FirmConfig()
    content = _content(start, cfg)
    assert _agreement(cfg).request("local_training", {**content, "rate": 0.25}).rate == 0.25
    for rate in (0.0, 1.5, -1.0, float("nan"), "1"):
        with pytest.raises(Invalid, match="rate"):
            _agreement(cfg).request("local_training", {**content, "rate": rate})


def test_a_field_that_nobody_knows_and_an_adapter_that_is_not_finite_are_refused(start):
    cfg = FirmConfig()
    content = _content(start, cfg)
    with pytest.raises(Invalid, match="the message has the unknown field 'command'"):
        _agreement(cfg).request("local_training", {**content, "command": "ls"})
    adapter = {"first": torch.tensor([torch.nan, 0.0]), "second": torch.zeros(1)}
    with pytest.raises(Invalid, match=r"adapter\.first is not finite"):
        _agreement(cfg).request("local_training", {**content, "adapter": adapter})


def test_only_the_strategys_own_tasks_are_agreed(start):
    cfg = FirmConfig()
    with pytest.raises(Refused, match="'share_jacobian' is not part of the agreed run"):
        _agreement(cfg).request("share_jacobian", _content(start, cfg))
    assert _agreement(FsmgdaConfig()).tasks == ("objective_training",)
    two_way = FedCmooConfig()
    assert set(_agreement(two_way).tasks) == {"local_training", "share_jacobian", "correct_gram"}


def test_what_the_algorithm_has_the_server_decide_is_the_servers(start):
    cfg = FedCmooConfig(compressor="none", communication="one_way")
    fields = {"num_local_steps": 1, "weighting": "fixed"}
    options = {"weights": [0.3, 0.7]}
    request = LocalTraining(
        round=1, objectives=OBJECTIVES, adapter=start.adapter, weighting_options=options, **fields
    )
    agreed = _agreement(cfg).request("local_training", unpack(pack(request)))
    assert agreed.weighting_options == options
    content = unpack(pack(replace(request, share_losses=True)))
    with pytest.raises(Refused, match="share_losses must be False"):
        _agreement(cfg).request("local_training", content)


# --- the ledger -----------------------------------------------------------------------------------


def _site(new_client, cfg, policy, ledger=None, num_rounds=3):
    agreement = _agreement(cfg, num_rounds)
    site = Site(
        lambda setup: LocalEngine([new_client(name) for name in NAMES]),
        NAMES,
        fingerprint={},
        agreement=agreement,
        policy=policy,
        ledger=Ledger(agreement, policy.budget, ledger) if ledger else None,
    )
    meeting = {"do": "meet", "number": 0, "fingerprint": {}, "setup": {}}
    assert "problem" not in unpack(site.answer(pack(meeting)))
    return site


def _ask(site, start, cfg, clients=("a",), **changes):
    message = {"do": "map", "number": 1, "task": "local_training", "clients": list(clients)}
    request = _content(start, cfg, **changes)
    return unpack(site.answer(pack({**message, "request": request})))


def test_repeating_a_round_spends_and_ends_at_the_sites_own_budget(new_client, start, tmp_path):
    cfg, path = FirmConfig(privacy=PRIVACY), tmp_path / "ledger.jsonl"
    site = _site(new_client, cfg, SitePolicy(), path, num_rounds=2)
    answers = [_ask(site, start, cfg) for _ in range(6)]
    assert ["replies" in answer for answer in answers] == [True] * 4 + [False] * 2
    assert answers[-1]["problem"].startswith("the budget of ε ")
    assert answers[-1]["problem"].endswith("of a is spent")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["kind"] for row in rows] == ["answer"] * 4 + ["refusal"] * 2
    assert rows[3]["epsilon"] == cfg.spent_epsilon(4)
    sent = [answer["replies"][0]["content"]["adapter"]["first"] for answer in answers[:2]]
    assert not torch.equal(*sent)  # each has noise of its own


def test_the_record_outlives_the_sites_process(new_client, start, tmp_path):
    cfg, path = FirmConfig(privacy=PRIVACY), tmp_path / "ledger.jsonl"
    policy = SitePolicy(budget=Budget(max_epsilon=cfg.spent_epsilon(1) * 1.001))
    assert "replies" in _ask(_site(new_client, cfg, policy, path), start, cfg)
    with path.open("a") as file:
        file.write('{"kind": "ans')  # killed while it wrote
    again = _site(new_client, cfg, policy, path)
    assert "of a is spent" in _ask(again, start, cfg)["problem"]
    assert "replies" in _ask(again, start, cfg, clients=["b"])  # each client has its own


def test_answers_keep_the_noise_that_they_were_given_with(tmp_path):
    path = tmp_path / "ledger.jsonl"

    def ledger(noise):
        privacy = noise and PrivacyConfig(clip_norm=0.5, noise_multiplier=noise, at="client")
        return Ledger(_agreement(FirmConfig(privacy=privacy)), Budget(max_epsilon=30.0), path)

    ledger(2.0).answered(1, "a", "local_training")
    little = ledger(2.0).epsilon("a")
    assert ledger(8.0).epsilon("a") == little
    assert ledger(8.0).epsilon("a", more=1) > little > ledger(8.0).epsilon("b", more=1)
    ledger(8.0).answered(2, "a", "local_training")
    assert (
        ledger(2.0).epsilon("a") == ledger(8.0).epsilon("a") == gaussian_epsilon({1: 1, 4: 1}, 1e-5)
    )
    ledger(None).answered(3, "a", "local_training")
    with pytest.raises(Refused, match="budget of ε 30 of a is spent"):
        ledger(8.0).check(["a"], "local_training")
    ledger(8.0).check(["b"], "local_training")


def test_a_number_of_answers_can_be_the_budget_without_privacy(new_client, start):
    cfg = FirmConfig()
    site = _site(new_client, cfg, SitePolicy(budget=Budget(max_answers=2, max_epsilon=1.0)))
    answers = [_ask(site, start, cfg) for _ in range(3)]
    assert answers[2]["problem"] == "the budget of 2 answers of a to local_training is spent"
    assert site.ledger.answers["a", "local_training"] == 2
    assert site.ledger.num_refusals == 1


def test_refusals_are_recorded_with_their_reason(new_client, start, tmp_path):
    cfg, path = FirmConfig(privacy=PRIVACY), tmp_path / "ledger.jsonl"
    site = _site(new_client, cfg, SitePolicy(), path)
    told = _ask(site, start, cfg, share_gram=True)
    assert told["problem"] == "share_gram must be False, as agreed, got True"
    (row,) = [json.loads(line) for line in path.read_text().splitlines()]
    assert (row["kind"], row["reason"]) == ("refusal", told["problem"])


def test_no_answer_leaves_that_was_not_recorded(new_client, start, tmp_path):
    cfg = FirmConfig(privacy=PRIVACY)
    site = _site(new_client, cfg, SitePolicy(), tmp_path / "absent" / "ledger.jsonl")
    told = _ask(site, start, cfg)
    assert "replies" not in told
    assert told["problem"] == "FileNotFoundError 2 (No such file or directory)"


@pytest.mark.parametrize("values", [{"max_answers": 0}, {"max_epsilon": 0.0}])
def test_a_budget_of_nothing_is_refused(values):
    with pytest.raises(ValueError, match="must be"):
        Budget(**values)


def test_a_damaged_record_is_named_and_a_torn_last_line_is_not(tmp_path):
    path = tmp_path / "ledger.jsonl"
    path.write_text('{"kind": "answer", "client": "a", "task": "local_training"}\n{"kind": "an')
    agreement = _agreement(FirmConfig(privacy=PRIVACY))
    ledger = Ledger(agreement, Budget(), path)
    assert ledger.answers["a", "local_training"] == 1
    ledger.answered(2, "a", "local_training")  # the torn line is not continued
    assert Ledger(agreement, Budget(), path).answers["a", "local_training"] == 2
    for line in ("[]", "{}", "oops", '{"kind": "answer"}', "\x00"):
        path.write_text(f'{{"kind": "refusal", "reason": "no"}}\n{line}\n')
        with pytest.raises(ValueError, match=r"ledger\.jsonl, line 2 is damaged"):
            Ledger(agreement, Budget(), path)


def test_the_record_is_not_written_through_a_link(tmp_path):
    (tmp_path / "outside").write_text("")
    (tmp_path / "ledger.jsonl").symlink_to(tmp_path / "outside")
    ledger = Ledger(_agreement(FirmConfig(privacy=PRIVACY)), Budget(), tmp_path / "ledger.jsonl")
    with pytest.raises(LinkFound, match=r"ledger\.jsonl is a link"):
        ledger.note_sum({"client": "a"})
    assert (tmp_path / "outside").read_text() == ""


def test_refusals_without_end_do_not_fill_the_disk(tmp_path, monkeypatch):
    monkeypatch.setattr("firm.network.agreement.MAX_REFUSALS", 3)
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(_agreement(FirmConfig()), Budget(), path)
    for _ in range(5):
        ledger.refused("no")
    assert ledger.num_refusals == 5
    assert len(path.read_text().splitlines()) == 3
