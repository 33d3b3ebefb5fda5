import json
import re
import shutil
import stat
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

pytest.importorskip("nvflare", reason="the extra `network` is not installed")

from cryptography import x509
from nvflare.fuel.sec.authz import AuthzContext, Person, parse_policy_config
from nvflare.security.security import COMMAND_CATEGORIES

from firm.network import jobs, kits

SITES = ["hospital", "bank"]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The kits of a small federation."""
    folder = tmp_path_factory.mktemp("federation")
    return kits.provision(
        folder, name="small", host="firm.example.org", port=8123, sites=SITES, valid_days=30
    )


def _certificate(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(path.read_bytes())


def test_every_party_has_a_kit_of_its_own(made):
    assert made.keys() == {"server", "admin", *SITES}
    assert {path.name for path in made["server"].parent.iterdir()} == {*made, "authority"}


def test_keys_are_for_their_owner_alone(made):
    for kit in made.values():
        assert stat.S_IMODE(kit.stat().st_mode) == 0o700
        (key,) = (kit / "startup").glob("*.key")
        assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert stat.S_IMODE((made["server"].parent / "authority").stat().st_mode) == 0o700


@pytest.mark.slow
def test_keys_are_for_their_owner_alone_while_they_are_made(tmp_path, monkeypatch):
    modes, move = [], shutil.move

    def watched(source, target):
        modes.append(stat.S_IMODE((tmp_path / "kits/.draft").stat().st_mode))
        return move(source, target)

    monkeypatch.setattr(kits.shutil, "move", watched)
    kits.provision(tmp_path / "kits", name="small", host="localhost", port=8123, sites=["bank"])
    assert set(modes) == {0o700}


def test_certificates_name_their_party_and_end(made):
    (server,) = (made["server"] / "startup").glob("server.crt")
    names = _certificate(server).extensions.get_extension_for_class(x509.SubjectAlternativeName)
    assert "firm.example.org" in names.value.get_values_for_type(x509.DNSName)
    root = _certificate(made["bank"] / "startup/rootCA.pem")
    left = root.not_valid_after_utc - datetime.now(UTC)
    assert timedelta(days=29) < left < timedelta(days=31)


def test_the_authoritys_key_is_in_no_kit(made):
    authority = (made["server"].parent / "authority/cert.json").read_text()
    key = json.loads(authority)["root_pri_key"]
    for kit in made.values():
        for path in kit.rglob("*"):
            assert path.is_dir() or key.encode() not in path.read_bytes()


@pytest.mark.parametrize("party", ["server", "admin", "hospital"])
def test_every_kit_knows_the_way_to_the_server(made, party):
    assert kits.server_address(made[party]) == ("firm.example.org", 8123)


@pytest.mark.parametrize("party", ["server", "admin", "hospital"])
def test_a_kit_that_would_speak_in_plain_text_is_refused(made, party, tmp_path):
    (tmp_path / "startup").mkdir()
    for path in (made[party] / "startup").glob("fed_*.json"):
        text = path.read_text().replace('"mtls"', '"clear"')
        (tmp_path / "startup" / path.name).write_text(text)
    with pytest.raises(ValueError, match=r"connection_security in .* must be 'mtls'.*got 'clear'"):
        kits.server_address(tmp_path)


@pytest.mark.parametrize("name", ["a#b", "why?", "a\tb", "a\nb"])
def test_a_folder_that_flare_takes_for_another_address_is_refused(tmp_path, name):
    with pytest.raises(ValueError, match=r"path of a site's kit must not contain .*, since FLARE"):
        kits.prepare_site(tmp_path / name, site="bank")


def test_a_folder_that_is_no_kit_is_told(tmp_path):
    with pytest.raises(ValueError, match="is not a kit of a server"):
        kits.server_address(tmp_path)


def test_one_class_may_run_at_each_party_and_a_gate_stands_before_it(made):
    kits.prepare_server(
        made["server"],
        controller="firm.jobs.network.AlignmentController",
        arguments={"name": jobs.NAME},
    )
    kits.prepare_site(made["hospital"], site="hospital")
    for party, allowed, gate in (
        ("server", "firm.jobs.network.AlignmentController", "firm.network.gate.ServerGate"),
        ("hospital", "firm.network.executor.SiteExecutor", "firm.network.gate.SiteGate"),
    ):
        resources = json.loads((made[party] / "local/resources.json").read_text())
        assert resources["class_allow_list"] == [allowed]
        assert resources["class_list_enforcement_mode"] == "enforce"
        assert resources["app_validator"]["path"] == "firm.network.gate.AppGate"
        paths = [component["path"] for component in resources["components"]]
        assert gate in paths
        by_id = {component["id"]: component for component in resources["components"]}
        if party == "server":  # where FLARE would give a run up after ten tries
            patience = by_id["job_scheduler"]["args"]
            assert 100 < patience["max_schedule_count"] < 1024  # 2 to its power is a float
        assert not [path for path in paths if path.endswith("JobLauncher")]


def test_an_administrator_may_do_what_a_run_needs(made):
    kits.prepare_server(
        made["server"], controller="firm.jobs.network.AlignmentController", arguments={}
    )
    kits.prepare_site(made["hospital"], site="hospital")
    for party, allowed in (("server", kits.SERVER_RIGHTS), ("hospital", kits.SITE_RIGHTS)):
        content = json.loads((made[party] / "local/authorization.json").read_text())
        assert content["permissions"].keys() == {"project_admin"}
        policy, _ = parse_policy_config(content, COMMAND_CATEGORIES)
        assert policy is not None
        admin = Person(kits.ADMIN, "firm", "project_admin")
        rights = {*COMMAND_CATEGORIES, *COMMAND_CATEGORIES.values(), *allowed, "byoc", "clone_job"}
        granted = {
            right for right in rights if policy.evaluate("firm", AuthzContext(right, admin))[0]
        }
        assert granted == set(allowed)


def test_a_kit_that_was_handed_on_is_for_its_owner_alone_again(made):
    for party in ("server", "bank"):
        made[party].chmod(0o755)
    kits.prepare_server(
        made["server"], controller="firm.jobs.network.AlignmentController", arguments={}
    )
    kits.prepare_site(made["bank"], site="bank")
    for party in ("server", "bank"):
        assert stat.S_IMODE(made[party].stat().st_mode) == 0o700


def test_a_sites_logs_stay_at_the_site(made):
    kits.prepare_site(made["bank"], site="bank")
    resources = json.loads((made["bank"] / "local/resources.json").read_text())
    assert resources["allow_log_streaming"] is False
    assert not re.search("log_streamer", json.dumps(resources["components"]))


def test_the_meeting_place_of_a_site_is_for_its_owner_alone(made):
    profile = json.loads(kits.prepare_site(made["bank"], site="bank").read_text())
    place = Path(profile["rendezvous_dir"])
    assert place.is_absolute()
    assert stat.S_IMODE(place.stat().st_mode) == 0o700
    listener = json.loads((made["bank"] / "local/comm_config.json").read_text())
    assert listener["client_api_attach"]["resources"]["root_dir"] == str(place)


def test_the_engine_of_sites_needs_no_flare():
    program = (
        "import sys, firm.run.states, firm.federation.engines; print('nvflare' in sys.modules)"
    )
    printed = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert printed.stdout.strip() == "False"
