"""The recipes for clusters: a script for Slurm, and a manifest that Kubernetes' schema allows."""

import shutil
import subprocess

import kubernetes_validate
import pytest
import yaml

from firm.alignment.rollout_config import VLLMServerConfig
from tests.smoke import ROOT

FOLDER = ROOT / "recipes" / "cluster"


def test_the_manifest_fits_the_schema_and_the_command_that_is_printed():
    documents = list(yaml.safe_load_all((FOLDER / "rollout_server.yaml").read_text()))
    assert [each["kind"] for each in documents] == ["Service", "StatefulSet"]
    for each in documents:
        kubernetes_validate.validate(each, "1.31", strict=True)
    pod = documents[1]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    engine = VLLMServerConfig(urls=["http://a"], shared_folder="/adapters")
    printed = engine.command("M", "bfloat16", 16, 512).split()
    variable, options = printed[0], {word for word in printed if word.startswith("--")}
    assert variable == "{name}={value}".format(**container["env"][0])
    written = {word.partition("=")[0] for word in container["args"]}
    assert written == options - {"--port"} | {"--model"}


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_the_script_for_slurm_asks_servers_on_all_nodes_but_the_first(tmp_path):
    programs = {
        "scontrol": "echo a; echo b; echo c",
        "curl": 'test -f "$LOG-${3:7:1}"',  # the server of this node was started
        "firm": "echo serve first; echo serve second",
        "srun": 'echo "$*" >> "$LOG"; touch "$LOG-$6"; test "$6" = a || exec sleep 60',
    }
    for name, body in programs.items():
        file = tmp_path / name
        file.write_text(f"#!/bin/bash\n{body}\n")
        file.chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}:/usr/bin:/bin", "LOG": str(tmp_path / "log"), "WORK": "/shared",
        "SLURM_JOB_NODELIST": "abc", "SLURM_JOB_ID": "7",
    }  # fmt: skip
    script = ["bash", FOLDER / "align.sbatch", "smoke"]
    done = subprocess.run(script, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    calls = (tmp_path / "log").read_text().splitlines()
    assert [call.split()[5] for call in calls[-1:]] == ["a"]  # it trains when all servers answer
    assert "--rollout.engine.urls [http://b:8000,http://c:8000]" in calls[-1]
    assert {call.split()[5]: call.split()[-2:] for call in calls[:-1]} == {
        "b": ["serve", "first"],
        "c": ["serve", "second"],
    }
