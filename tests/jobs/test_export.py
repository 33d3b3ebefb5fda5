"""An exported front replies as the folded adapter does, in PEFT and in llama.cpp."""

import json
import shlex
import shutil
import socket
import sys
from contextlib import closing
from dataclasses import replace
from http.client import HTTPConnection
from pathlib import Path
from threading import Thread
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from firm.alignment.adapter_files import load_adapters, read_adapter
from firm.alignment.adapters.conditioned import fold
from firm.alignment.policy import without_needless_warnings
from firm.alignment.policy_config import PolicyConfig
from firm.alignment.prompts import hh_text
from firm.base.extras import install_command
from firm.cli.main import COMMANDS, main
from firm.fronts import Front
from firm.fronts.certificate import Certificate
from firm.jobs.configs import PickConfig
from firm.jobs.export import export
from firm.jobs.pick import pick
from firm.jobs.serve import endpoint
from firm.run import UserError
from firm.serving import ServedFront, load_served, set_scales_
from firm.serving.endpoint import Endpoint
from firm.serving.llama import LlamaEngine
from firm.serving.openvino import OpenVINOEngine
from firm.serving.targets import target
from tests import smoke

POINTS = ([1.0, 0.0], [0.0, 1.0], [0.5, 0.5], [0.3, 0.7])
QUESTIONS = ("Where is my ladder?", "How do I mend the mug?", "Help me!")
ROUNDING = {"rtol": 5e-6, "atol": 1e-5}
"""Differences of log-probabilities in float32, which reach -30 here."""
LLAMA_TOLERANCE = 0.05
"""The same in llama.cpp, which keeps keys and values as float16."""


def exported(run, out, *arguments):
    given = ["--run", str(run), "--out", str(out), *map(str, arguments)]
    return export(COMMANDS["export"].parse(given))


@pytest.fixture(scope="module")
def peft_folder(strong, tmp_path_factory):
    return exported(strong, tmp_path_factory.mktemp("export") / "peft").folder


@pytest.fixture(scope="module")
def gguf_folder(strong, tmp_path_factory):
    return exported(strong, tmp_path_factory.mktemp("export") / "gguf", "--to", "gguf").folder


def _folded(run, preference):
    policy = PolicyConfig(path=str(smoke.POLICY))
    return load_adapters(policy, [run / "adapter"], preference=preference)


def _prompt(run, question):
    """Returns the tokens of a question, as in training."""
    text = hh_text([{"role": "user", "content": question}])
    return AutoTokenizer.from_pretrained(run / "adapter")(text, return_tensors="pt").input_ids


@torch.no_grad()
def _log_probabilities(model, ids):
    return model(ids).logits.log_softmax(-1)


def _reply(model, ids):
    with torch.no_grad():
        return model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.size(1) :].tolist()


def test_scaled_adapters_of_peft_are_the_folded_model(strong, peft_folder, gguf_folder):
    model, served = load_served(peft_folder)
    replies = set()
    for preference in POINTS:
        folded = _folded(strong, preference)
        set_scales_(model, served.scales(preference))
        for question in QUESTIONS:
            ids = _prompt(strong, question)
            expected = _log_probabilities(folded, ids)
            torch.testing.assert_close(_log_probabilities(model, ids), expected, **ROUNDING)
            assert _reply(model, ids) == _reply(folded, ids)
            replies.add(tuple(_reply(model, ids)))
    assert len(replies) > len(QUESTIONS)  # the preference matters
    with pytest.raises(ValueError, match=r"there is no PEFT folder .*: export with --to peft"):
        load_served(gguf_folder)


def test_adapters_that_peft_concatenates_are_the_folded_model(strong, peft_folder):
    base = AutoModelForCausalLM.from_pretrained(smoke.POLICY, dtype=torch.float32)
    scales = ServedFront.load(peft_folder).scales([0.3, 0.7])
    with without_needless_warnings():
        model = PeftModel.from_pretrained(base, peft_folder / "brevity", adapter_name="brevity")
        model.load_adapter(peft_folder / "positivity", adapter_name="positivity")
    model.add_weighted_adapter(list(scales), list(scales.values()), "mixed", combination_type="cat")
    model.set_adapter("mixed")
    ids = _prompt(strong, QUESTIONS[0])
    expected = _log_probabilities(_folded(strong, [0.3, 0.7]), ids)
    torch.testing.assert_close(_log_probabilities(model.eval(), ids), expected, **ROUNDING)


def test_llama_cpp_replies_as_the_folded_model_at_every_preference(strong, gguf_folder):
    engine = LlamaEngine(gguf_folder, num_slots=1, context=256, num_threads=1)
    for question in QUESTIONS:
        messages = [{"role": "user", "content": question}]
        body = {**engine.served.request, "messages": messages, "temperature": 0}
        body |= {"max_tokens": 12, "logprobs": True, "top_logprobs": 20}
        for preference in POINTS:  # one slot, whose cache must not outlive a change of scales
            ids, folded = _prompt(strong, question), _folded(strong, preference)
            reply = engine.reply(body, engine.served.scales(preference))
            assert reply["usage"]["prompt_tokens"] == ids.size(1)
            expected = _log_probabilities(folded, ids)[0, -1]
            tokens = reply["choices"][0]["logprobs"]["content"]
            for entry in tokens[0]["top_logprobs"]:
                difference = abs(entry["logprob"] - expected[entry["id"]].item())
                assert difference < LLAMA_TOLERANCE, (question, preference, entry)
            greedy = _reply(folded, ids)
            said = [entry["id"] for entry in tokens]
            assert said == greedy[: len(said)]


def test_the_adapters_at_points_are_folded_for_vllm_and_picked_from_their_front(strong, tmp_path):
    done = exported(strong, tmp_path / "vllm", "--to", "vllm")
    front = Front.load(done.folder / "front.json")
    whole = load_file(strong / "adapter/adapter_model.safetensors")
    whole |= load_file(strong / "adapter/conditioned.safetensors")
    for point in front.points:
        adapter = load_file(done.folder / point.adapter / "adapter_model.safetensors")
        for name, values in fold(whole, point.preference or ()).items():
            torch.testing.assert_close(adapter[name], values)
        settings = json.loads((done.folder / point.adapter / "adapter_config.json").read_text())
        assert settings["modules_to_save"] is None
        assert settings["bias"] == "none"
    cfg = PickConfig(front=done.folder / "front.json", target="brevity=1,positivity=0")
    assert pick(cfg).adapter == done.folder / "100_0"


def test_scaled_adapters_of_openvino_are_the_folded_adapter(strong, tmp_path, capsys):
    given = ["--run", str(strong), "--to", "openvino", "--out", str(tmp_path / "all")]
    COMMANDS["export"].run(given)
    words = shlex.split(capsys.readouterr().out.splitlines()[-1])
    assert words[:4] == ["convert", "optimum-cli", "export", "openvino"]
    assert words[-1] == str(tmp_path / "all/base")
    served = ServedFront.load(tmp_path / "all")
    parts = {name: load_file(tmp_path / "all" / file) for name, file in served.adapters.items()}
    one = exported(strong, tmp_path / "one", "--to", "openvino", "--preference", "positivity=0.7")
    single = load_file(one.folder / "adapter.safetensors")
    settings = json.loads((strong / "adapter/adapter_config.json").read_text())
    scale = settings["lora_alpha"] / settings["r"]
    assert scale != 1
    folded = read_adapter(strong / "adapter", [0.3, 0.7])
    for name in folded:
        if "lora_B" in name:
            other = name.replace("lora_B", "lora_A")
            update = scale * folded[name] @ folded[other]
            scales = served.scales([0.3, 0.7])
            terms = [s * parts[key][name] @ parts[key][other] for key, s in scales.items()]
            torch.testing.assert_close(sum(terms), update)
            torch.testing.assert_close(single[name] @ single[other], update)


def test_without_openvino_or_its_base_model_the_remedy_is_named(strong, tmp_path, monkeypatch):
    folder = exported(strong, tmp_path / "openvino", "--to", "openvino").folder
    monkeypatch.setitem(sys.modules, "openvino_genai", None)
    with pytest.raises(ModuleNotFoundError, match="pip install openvino-genai"):
        OpenVINOEngine(folder)
    monkeypatch.setitem(sys.modules, "openvino_genai", ModuleType("openvino_genai"))
    with pytest.raises(ValueError, match="run the command that `firm export` printed"):
        OpenVINOEngine(folder)


@pytest.mark.parametrize("to", ["peft", "vllm"])
def test_one_trade_off_is_an_ordinary_adapter(strong, tmp_path, to, capsys):
    given = ["--run", str(strong), "--to", to, "--out", str(tmp_path / "one")]
    folder = COMMANDS["export"].parse([*given, "--preference", "[0.3, 0.7]"])
    done = export(folder)
    assert done.preferences == {"": pytest.approx([0.3, 0.7])}
    assert not (done.folder / "front.json").exists()
    assert "brevity 0.300, positivity 0.700" in (done.folder / "README.md").read_text()
    base = AutoModelForCausalLM.from_pretrained(smoke.POLICY, dtype=torch.float32)
    with without_needless_warnings():
        model = PeftModel.from_pretrained(base, done.folder).eval()
    ids = _prompt(strong, QUESTIONS[0])
    expected = _log_probabilities(_folded(strong, [0.3, 0.7]), ids)
    torch.testing.assert_close(_log_probabilities(model, ids), expected, rtol=0, atol=1e-6)


def test_targets_and_requirements_are_exported_as_pick_finds_them(strong, tmp_path):
    share = 0.5 + 0.25 * (0.4 - 0.25) / (0.5625 - 0.25)  # as in tests/jobs/test_front.py
    options = ("--to", "gguf", "--has_base", "false")
    done = exported(strong, tmp_path / "a", *options, "--target", "brevity=0.4,positivity=0.6")
    assert done.preferences == {"adapter.gguf": pytest.approx([share, 1 - share])}
    assert [file.name for file in done.folder.iterdir()] == ["adapter.gguf"]
    assert any(asked.startswith("stop ['") for asked in done.asked)  # no front.json says it
    done = exported(strong, tmp_path / "b", *options, "--require", "brevity>=0.3")
    [[first, _]] = done.preferences.values()
    assert 0.5 < first < 0.75


def test_the_printed_command_serves_the_export(strong, tmp_path, capsys):
    given = ["--run", str(strong), "--to", "gguf", "--out", str(tmp_path / "gguf")]
    COMMANDS["export"].run(given)
    lines = capsys.readouterr().out.splitlines()
    assert (
        f"adapter   {tmp_path}/gguf/brevity.lora.gguf, at brevity 1.000, positivity 0.000" in lines
    )
    assert not any("requests bring" in line for line in lines)  # `firm serve` does
    program, command, *arguments = shlex.split(lines[-1].removeprefix("serve"))
    assert (program, command) == ("firm", "serve")
    assert COMMANDS["serve"].parse(arguments).export == tmp_path / "gguf"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--preference", "[0.3, 0.8]"), "preference must have shares that sum to 1"),
        (("--preference", "brevty=1"), "unknown objective 'brevty'"),
        (("--preference", "[1]"), "a list of 2 shares (brevity, positivity)"),
        (("--target", "happy=1"), "target has the unknown objective 'happy'"),
        (("--require", "brevity>=2"), "no mixture meets brevity >= 2"),
        (("--target", "brevity=1", "--require", "kl<=2"), "pass one of preference, target and re"),
        (("--to", "onnx"), "to must be one of gguf, openvino, peft, vllm, got 'onnx'"),
    ],
)
def test_what_cannot_be_exported_is_refused(strong, tmp_path, arguments, message):
    with pytest.raises((UserError, ValueError)) as refusal:
        exported(strong, tmp_path / "out", *arguments)
    assert message in str(refusal.value)
    assert not (tmp_path / "out").exists()


def test_a_conditioned_run_without_a_front_and_a_folder_that_exists_are_refused(strong, tmp_path):
    bare = Path(shutil.copytree(strong, tmp_path / "bare"))
    (bare / "front.json").unlink()
    with pytest.raises(UserError, match=r"has no front\.json: export needs"):
        exported(bare, tmp_path / "out")
    with pytest.raises(UserError, match="exists; choose another --out"):
        exported(strong, tmp_path)


@pytest.mark.parametrize("to", ["peft", "gguf", "vllm"])
def test_an_ordinary_run_has_one_adapter(strong, tmp_path, to):
    ordinary = Path(shutil.copytree(strong, tmp_path / "ordinary"))
    (ordinary / "adapter/conditioned.safetensors").unlink()
    (ordinary / "front.json").unlink()
    done = exported(ordinary, tmp_path / "one", "--to", to)
    folded = exported(strong, tmp_path / "folded", "--to", to, "--preference", "[0.5, 0.5]")
    (place,) = done.preferences
    assert done.preferences == {place: None}
    weights = "adapter.gguf" if to == "gguf" else "adapter_model.safetensors"
    assert (done.folder / weights).read_bytes() == (folded.folder / weights).read_bytes()
    ours, theirs = ({file.name for file in each.folder.iterdir()} for each in (done, folded))
    assert ours == theirs  # the card and the tokenizer, or the base model, too
    if to != "gguf":
        card = (ordinary / "adapter/README.md").read_text()
        assert (done.folder / "README.md").read_text() == card


def test_the_commands_serve_an_ordinary_run_with_programs_of_the_engines(run, tmp_path, capsys):
    for to, program in (("gguf", "llama-server"), ("vllm", "vllm serve")):
        COMMANDS["export"].run(["--run", str(run), "--to", to, "--out", str(tmp_path / to)])
        lines = capsys.readouterr().out.splitlines()
        assert lines[-1].startswith(f"serve     {program}")
        assert "requests bring prompts in HH-RLHF's form, as completions, and stop" in lines[-2]
        has_sampling = "and temperature 1, top_k 0, top_p 1, min_p 0" in lines[-2]
        assert has_sampling == (to == "gguf")  # vLLM's command has the file
        paths = [word for word in shlex.split(lines[-1]) if str(tmp_path) in word]
        assert paths
        assert all(Path(word.rpartition("=")[2]).exists() for word in paths)


def test_an_ordinary_run_is_not_asked_for_a_preference(run, tmp_path):
    with pytest.raises(UserError, match="has one trade-off, not one for each preference"):
        exported(run, tmp_path / "out", "--preference", "[0.5, 0.5]")
    options = ["--run", str(run), "--port", str(free_port())]
    with (
        pytest.raises(UserError, match="serve needs a finished run with"),
        endpoint(COMMANDS["serve"].parse(options)),
    ):
        pass
    assert not (tmp_path / "out").exists()


def test_a_run_is_served_with_openai_s_requests(strong):
    options = ["--run", str(strong), "--name", "tiny", "--port", str(free_port())]
    options += ["--num_slots", "1", "--context", "256", "--num_threads", "1"]
    with endpoint(COMMANDS["serve"].parse(options)) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            replies = {share: _chat(server, f"tiny@brevity={share}") for share in (0.0, 0.3, 1.0)}
            streamed = _chat(server, "tiny@brevity=0.3", stream=True)
        finally:
            server.shutdown()
            thread.join()
    for share, reply in replies.items():
        ids = _prompt(strong, QUESTIONS[0])
        expected = _reply(_folded(strong, [share, 1 - share]), ids)
        tokenizer = AutoTokenizer.from_pretrained(strong / "adapter")
        said = json.loads(reply)["choices"][0]["message"]["content"]
        text = tokenizer.decode(expected, skip_special_tokens=True).partition("\n\nHuman:")[0]
        assert said.strip() == text.strip()
    chunks = [json.loads(line[6:]) for line in streamed.split("\n\n")[:-2]]
    parts = [chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks]
    assert "".join(parts) == json.loads(replies[0.3])["choices"][0]["message"]["content"]


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as place:
        return place.getsockname()[1]


def _chat(server, model, **options):
    messages = [{"role": "user", "content": QUESTIONS[0]}]
    body = {"model": model, "messages": messages, "temperature": 0, "max_tokens": 12, **options}
    with closing(HTTPConnection(*server.server_address[:2], timeout=60)) as connection:
        connection.request(
            "POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"}
        )
        return connection.getresponse().read().decode()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--host", "0.0.0.0"), "which needs a key: pass --api_key_file"),
        (("--api_key_file", "{tmp}/empty"), "must hold a key without spaces"),
        (("--base", "{tmp}/none.gguf"), "there is no GGUF file"),
    ],
)
def test_what_cannot_be_served_is_refused(gguf_folder, tmp_path, arguments, message):
    (tmp_path / "empty").write_text("\n")
    given = [text.format(tmp=tmp_path) for text in arguments]
    options = ["--export", str(gguf_folder), "--port", str(free_port())]
    with (
        pytest.raises(UserError) as refusal,
        endpoint(COMMANDS["serve"].parse([*options, *given])),
    ):
        pass
    assert message in str(refusal.value)


def test_without_llama_cpp_the_command_says_what_to_install(gguf_folder, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "xllamacpp", None)
    with pytest.raises(SystemExit):
        main(["serve", "--export", str(gguf_folder), "--port", str(free_port())])
    line = capsys.readouterr().err
    assert "firm serve needs the package xllamacpp, which is not installed" in line
    assert install_command("serve") in line


def test_a_base_model_that_llama_cpp_does_not_know_is_not_loaded(gguf_folder, tmp_path):
    folder = shutil.copytree(gguf_folder, tmp_path / "gguf")
    (folder / "base.gguf").write_bytes(b"GGUF")
    with pytest.raises(ValueError, match=r"llama\.cpp cannot load"):
        LlamaEngine(folder)
    (folder / "base.gguf").unlink()
    with pytest.raises(ValueError, match="there is no GGUF file"):
        LlamaEngine(folder)


@pytest.fixture(scope="module")
def end(strong):
    """A token that the policy says early, and that is no end of its own."""
    ids = _prompt(strong, QUESTIONS[0])
    said = _reply(_folded(strong, [0.5, 0.5]), ids)
    tokenizer = AutoTokenizer.from_pretrained(strong / "adapter")
    assert said.index(said[3]) == 3
    return said[3], tokenizer.convert_ids_to_tokens(said[3]), said[:4]


def with_ends(run, out, end, *arguments):
    return exported(run, out, "--rollout.end_tokens", json.dumps([end[1]]), *arguments).folder


def ends_in(folder):
    return json.loads((folder / "generation_config.json").read_text())["eos_token_id"]


def test_exports_end_replies_where_training_ended_them(strong, tmp_path, end, capsys):
    eos = AutoTokenizer.from_pretrained(strong / "adapter").eos_token_id
    peft = with_ends(strong, tmp_path / "peft", end)
    assert ends_in(peft / "brevity") == [eos, end[0]]
    assert ServedFront.load(peft).end_ids == (eos, end[0])
    model, served = load_served(peft)
    set_scales_(model, served.scales([0.5, 0.5]))
    with pytest.raises(ValueError, match="there is no adapter for 'Brevity'"):
        set_scales_(model, {"Brevity": 1.0})
    assert _reply(model, _prompt(strong, QUESTIONS[0])) == end[2]

    gguf = with_ends(strong, tmp_path / "gguf", end, "--to", "gguf")
    engine = LlamaEngine(gguf, num_slots=1, context=256, num_threads=1)
    messages = [{"role": "user", "content": QUESTIONS[0]}]
    body = {**engine.served.request, "messages": messages, "temperature": 0, "max_tokens": 12}
    choice = engine.reply(body, engine.served.scales([0.5, 0.5]))["choices"][0]
    assert choice["finish_reason"] == "stop"
    tokenizer = AutoTokenizer.from_pretrained(strong / "adapter")
    assert choice["message"]["content"] == tokenizer.decode(end[2])

    given = ["--rollout.end_tokens", json.dumps([end[1]]), "--out", str(tmp_path / "vllm")]
    COMMANDS["export"].run(["--run", str(strong), "--to", "vllm", *given])
    words = shlex.split(capsys.readouterr().out.splitlines()[-1])
    assert words[words.index("--generation-config") + 1] == str(tmp_path / "vllm")
    assert ends_in(tmp_path / "vllm") == ends_in(tmp_path / "vllm/100_0") == [eos, end[0]]
    settings = json.loads((tmp_path / "vllm/generation_config.json").read_text())
    assert "max_new_tokens" not in settings  # which would be a limit of all requests


def test_openvino_ends_replies_where_training_ended_them(strong, tmp_path, end, monkeypatch):
    asked = []

    class Pipeline:
        def __init__(self, *_, **__):
            pass

        def get_tokenizer(self):
            return self

        def set_chat_template(self, _):
            pass

        def generate(self, prompt, **options):
            asked.append(options)

    genai = ModuleType("openvino_genai")
    genai.Adapter = genai.AdapterConfig = lambda *arguments: arguments
    genai.LLMPipeline = Pipeline
    monkeypatch.setitem(sys.modules, "openvino_genai", genai)
    folder = with_ends(strong, tmp_path / "openvino", end, "--to", "openvino")
    (folder / "base").mkdir()
    (folder / "base/openvino_model.xml").touch()
    engine = OpenVINOEngine(folder)
    engine.generate("Hi", engine.served.scales())
    engine.generate("Hi", engine.served.scales(), stop_token_ids={1})
    assert asked[0]["stop_token_ids"] == set(engine.served.end_ids) >= {end[0]}
    assert asked[1]["stop_token_ids"] == {1}


def test_a_run_s_adapter_has_its_settings_of_generation(strong):
    settings = json.loads((strong / "adapter/generation_config.json").read_text())
    assert settings["eos_token_id"] == [AutoTokenizer.from_pretrained(smoke.POLICY).eos_token_id]
    assert (settings["top_k"], settings["top_p"], settings["do_sample"]) == (0, 1.0, True)


def test_certificates_are_exported_and_served(strong, tmp_path, capsys, monkeypatch):
    run = Path(shutil.copytree(strong, tmp_path / "run"))
    requirements = "brevity>=0.3"
    chosen = pick(PickConfig(front=run, require=requirements)).adapter
    own = Certificate.load(chosen)
    assert own is not None
    assert own.passes
    folder = exported(run, tmp_path / "all", "--to", "gguf", "--has_base", "false").folder
    assert ServedFront.load(folder).certificates == (own,)
    monkeypatch.setattr(Endpoint, "serve_forever", lambda _: None)
    COMMANDS["serve"].run([str(run), "--port", str(free_port()), "--name", "tiny"])
    assert "certificate  tiny@brevity=" in capsys.readouterr().out
    COMMANDS["export"].run(
        ["--run", str(run), "--out", str(tmp_path / "one"), "--require", requirements]
    )
    assert "certificate  pass: brevity >= 0.3 (bound 0.300)" in capsys.readouterr().out
    found = Certificate.load(tmp_path / "one")
    assert found is not None
    assert found.passes
    assert found.is_interpolated
    folder = exported(run, tmp_path / "other", "--target", "brevity=1,positivity=1").folder
    assert Certificate.load(folder) is None


def test_a_model_that_does_not_pass_is_neither_exported_nor_served(strong, tmp_path):
    run = Path(shutil.copytree(strong, tmp_path / "run"))
    front = Front.load(run / "front.json")
    good, bad = ({"brevity": (0.9,) * 50, "positivity": (b,) * 50} for b in (0.9, 0.1))
    names = [point.name for point in front.points]
    known = {
        "test_values": dict.fromkeys(names, bad),
        "validation_values": dict.fromkeys(names, good),
    }
    replace(front, **known).save(run / "front.json")
    with pytest.raises(UserError, match=r"not pass its certificate .fail: positivity >= 0.5"):
        exported(run, tmp_path / "out", "--require", "positivity>=0.5")
    assert not (tmp_path / "out").exists()
    chosen = pick(PickConfig(front=run, require="positivity>=0.5"))
    assert chosen.certificate is not None
    assert chosen.certificate.verdict == "fail"
    assert Certificate.load(chosen.adapter) == chosen.certificate


def test_a_base_model_that_is_a_gguf_file_is_copied_as_it_is(tmp_path):
    base, draft = tmp_path / "model.gguf", tmp_path / "draft"
    base.write_bytes(b"GGUF of a base")
    draft.mkdir()
    source: Any = SimpleNamespace(policy=PolicyConfig(path=str(base)))
    name = target("gguf").write_rest(draft, source, has_base=True)
    assert (draft / name).read_bytes() == base.read_bytes()
