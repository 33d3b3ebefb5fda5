"""The parts of the protocol measure the models that its claims compare."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks import findings
from benchmarks.protocol_runs import COMMON, PARTS, SETTINGS, SHRUNK, Lab
from firm.jobs.alignment_config import AlignmentConfig
from firm.run.config import compose

MAPS = {name: {"method": "sigmoid", "mean": 0.0, "scale": 2.0} for name in ("helpful", "harmless")}


class PaperLab(Lab):
    """Keeps the keys of each run in place of training it, and makes figures up."""

    def __init__(self, seed, runs):
        super().__init__(seed, runs)
        self.trained = {}

    def train(self, name, overrides):
        self.trained[name] = dict(overrides)
        folder = self.folder / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.yaml").write_text("{}")
        (folder / "run.json").write_text("{}")
        row = {"kind": "run", "objectives": list(MAPS), "calibration": MAPS}
        (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
        return folder

    def mean(self, name, folders, shares):
        assert sum(shares) == pytest.approx(1.0)
        return self.folder / name

    def shrunk(self, name, folder):
        return self.folder / name

    def measured(self, adapters, *, rewards=None, splits=("validation", "test")):
        random = np.random.default_rng(self.seed)
        keys = ["reward helpful", "reward harmless", *(f"reward {name}" for name in rewards or ())]
        keys += ["true_helpful", "true_harmless", "KL"]
        return {
            name: {split: {key: float(random.random()) for key in keys} for split in splits}
            for name in ("base", *adapters)
        }


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """The files of all parts, of all seeds, and the runs of one seed."""
    out, runs = (tmp_path_factory.mktemp(name) for name in ("data", "runs"))
    trained = {}
    for part, measure in PARTS.items():
        for seed in findings.FIVE if part == "weights" else findings.TEN:
            lab = PaperLab(seed, runs)
            (out / f"{part}_{seed}.json").write_text(json.dumps(measure(lab)))
            trained |= lab.trained
    return out, trained


def test_every_claim_and_table_finds_its_models(data):
    out, _ = data
    for family in (findings.family_a(out), findings.family_b(out)):
        assert all(claim.is_complete for claim in family)
        assert not any(verdict.startswith("open:") for verdict in findings.verdicts(family))
    for table in (findings.front_table, findings.number_table, findings.kl_table,
                  findings.baseline_table, findings.weights_table, findings.findings):  # fmt: skip
        assert "–" not in table(out)


def test_every_run_of_the_protocol_has_a_valid_configuration(data):
    _, trained = data
    assert len(trained) > 30
    for name, overrides in trained.items():
        keys = {**COMMON, **overrides}
        cfg = compose(AlignmentConfig, ["configs/miniature.yaml"], list(keys.items()))
        assert cfg.num_clients * cfg.estimator.batch_size == 64, name


def test_sides_of_a_comparison_differ_in_their_strategy_alone(data):
    _, trained = data
    for setting in SETTINGS:
        folder = setting.replace(" ", "_")
        firm, fixed = (trained[f"{folder}-{side}"] for side in ("firm", "fixed"))
        assert firm.pop("strategy.name") == "firm"
        assert firm == fixed
    assert trained["unlike_scales-fixed"]["evaluation.calibrations"]["helpful"]["scale"] == 20.0


def test_a_shrunk_adapter_adds_a_smaller_product(tmp_path):
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")
    a, b = torch.randn(2, 3), torch.randn(4, 2)
    name = "layer.lora_{}.weight".format
    save_file({name("A"): a, name("B"): b}, folder / "adapter_model.safetensors")
    made = load_file(Lab(1, tmp_path).shrunk("small", folder) / "adapter_model.safetensors")
    torch.testing.assert_close(made[name("B")] @ made[name("A")], SHRUNK * b @ a)
