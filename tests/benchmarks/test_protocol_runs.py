"""The parts of the protocol measure the models that its claims compare."""

import csv
import json
import shutil
from dataclasses import replace
from itertools import product

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks import adapter_runs, findings, judges
from benchmarks.judges import grade, rarity, style
from benchmarks.protocol_runs import (
    MINIATURE,
    PARTS,
    SETTINGS,
    SHRUNK,
    SMOLLM2,
    Lab,
    lab_of,
    miniature_in,
)
from firm.fronts import Front, Point
from firm.jobs.alignment_config import AlignmentConfig
from firm.run.config import compose, to_dict
from firm.run.differences import differences

MAPS = {name: {"method": "sigmoid", "mean": 0.0, "scale": 2.0} for name in ("helpful", "harmless")}
SEEDS = {
    "baselines": (*findings.TEN, *findings.SIXTY),
    "weights": findings.FIVE,
    "weightings": findings.WEIGHTING_SEEDS,
    "equal_replies": findings.REPLY_SEEDS,
    "half_kl": findings.HALF_KL_SEEDS,
    "real_front": findings.REAL_SEEDS,
    "real_baselines": findings.REAL_SEEDS,
    "real_constraint": findings.REAL_SEEDS,
    **dict.fromkeys((part for part in PARTS if part.startswith("unseen_")), findings.UNSEEN_SEEDS),
}


class PaperLab(Lab):
    """Keeps the keys of each run in place of training it, and makes figures up."""

    def __init__(self, seed, runs, world):
        super().__init__(seed, runs, world)
        self.trained = {}

    def train(self, name, overrides):
        self.trained[name] = dict(overrides)
        folder = self.folder / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.yaml").write_text("{}")
        (folder / "run.json").write_text("{}")
        row = {"kind": "run", "objectives": list(MAPS), "calibration": MAPS}
        last = {"kind": "round", "round": 1, "seconds": 2.0, "bytes_up": 3, "bytes_down": 4}
        (folder / "metrics.jsonl").write_text(f"{json.dumps(row)}\n{json.dumps(last)}\n")
        return folder

    def mean(self, name, folders, shares):
        assert sum(shares) == pytest.approx(1.0)
        return self.folder / name

    def shrunk(self, name, folder):
        return self.folder / name

    def folded(self, name, preference):
        assert sum(preference) == pytest.approx(1.0)
        return self.folder / name

    def measured(self, adapters, *, rewards=None, splits=("validation", "test")):
        random = np.random.default_rng(self.seed)
        names = self.world.calibrations or ("helpful", "harmless")
        keys = [f"reward {name}" for name in (*names, *(rewards or ()))]
        keys += [f"error {name}" for name in names]
        keys += ["true_helpful", "true_harmless", "parse", "KL", *self.world.judges]
        return {
            name: {split: {key: float(random.random()) for key in keys} for split in splits}
            for name in ("base", *adapters)
        }


def pair_runs(out):
    """Writes the files of a study and a sweep of pairs, with random figures."""
    random = np.random.default_rng(0)
    settings = "FIRM", findings.FIXED, findings.POOLED
    figures = [f"{kind}{name}" for kind in ("accuracy ", "margin ") for name in MAPS]
    rows = [
        {"setting": setting, "seed": seed, "figure": figure, "aligned": random.random()}
        for setting, seed, figure in product(settings, findings.PAIR_SEEDS, (*figures, "bytes up"))
    ]
    with (out / "pairs_study.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    for method in (findings.FOLDS, findings.SEPARATE):
        points = tuple(
            Point(
                name=f"{share} {seed}",
                preference=(share, 1 - share),
                seed=seed,
                rewards={name: float(random.random()) for name in MAPS},
                errors=dict.fromkeys(MAPS, 0.1),
                scores={},
                kl=0.0,
                adapter="adapter",
            )
            for share, seed in product(findings.FIRST, findings.PAIR_SEEDS)
        )
        base = dict.fromkeys(MAPS, 0.5)
        front = Front(tuple(MAPS), points, (0.0, 0.0), MAPS, base, method, num_prompts=8)
        front.save(out / f"pairs_front_{method}.front.json")


def trl_runs(out):
    """Writes the files of runs beside TRL, with random rewards."""
    random = np.random.default_rng(1)
    for seed in findings.TRL_SEEDS:
        places = [("base", 0.0), *((f"{m} {kl}", kl) for m in findings.METHODS for kl in (2, 5))]
        models = {
            name: {
                "test": {"KL": kl, "reward warm": random.random(), "reward plain": random.random()},
                **({"cost": {"seconds": 9.0, "memory": 3e9}} if kl == 5 else {}),
            }
            for name, kl in places
        }
        (out / f"real_trl_{seed}.json").write_text(json.dumps(models))


def smoothed_runs(out):
    """Writes the files of fronts with and without smoothing, with random rewards."""
    random = np.random.default_rng(2)
    keys = [f"reward {name}" for name in MAPS] + ["true_helpful", "true_harmless", "KL"]
    methods = ("separate", "separate smoothed", "conditioned", "conditioned smoothed")
    for seed in findings.SMOOTHED_SEEDS:
        models = {
            f"{method} {share:g}": {
                split: {key: random.random() for key in keys} for split in ("validation", "test")
            }
            for method, share in product(methods, findings.FIRST)
        }
        (out / f"smoothed_{seed}.json").write_text(json.dumps(models))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """The files of all parts, of all seeds, and the runs of one seed."""
    out, runs = (tmp_path_factory.mktemp(name) for name in ("data", "runs"))
    trained = {MINIATURE.base: {}, SMOLLM2.base: {}}
    for part, measure in PARTS.items():
        for seed in SEEDS.get(part, findings.TEN):
            world = lab_of(part, seed, runs).world
            lab = PaperLab(seed, runs, world)
            (out / f"{part}_{seed}.json").write_text(json.dumps(measure(lab)))
            trained[world.base] |= lab.trained
    for number in findings.WORLDS:
        for seed in findings.WORLD_SEEDS:
            lab = PaperLab(seed, runs / f"world_{number}", MINIATURE)
            name = f"front_world_{number}_{seed}.json"
            (out / name).write_text(json.dumps(PARTS["front"](lab)))
    pair_runs(out)
    trl_runs(out)
    smoothed_runs(out)
    for part, (jobs_of, split) in adapter_runs.PARTS.items():
        for seed in (1, 2, 3, 4, 5):
            jobs = [name for adapter in adapter_runs.CHOSEN for name in jobs_of(adapter, seed)]
            figures = PaperLab(seed, runs, MINIATURE).measured(jobs, splits=[split])
            (out / f"{part}_{seed}.json").write_text(json.dumps(figures))
    return out, trained


def test_every_claim_and_table_finds_its_models(data):
    out, _ = data
    for claims_of in findings.FAMILIES:
        family = claims_of(out)
        assert all(claim.is_complete for claim in family)
        assert not any(verdict.startswith("open:") for verdict in findings.verdicts(family))
    for table in (findings.front_table, findings.number_table, findings.kl_table,
                  findings.kl_number_table, findings.power_table, findings.rates_table,
                  findings.uploads_table, findings.privacy_tables, findings.baseline_table,
                  findings.weights_table, findings.weightings_table,
                  findings.replies_used_table, findings.smoothed_table, findings.half_kl_table,
                  findings.trl_claims, findings.trl_table,
                  findings.real_table, findings.unseen_table, findings.constraint_table,
                  findings.worlds_table, findings.pairs_table, findings.pair_front_table,
                  findings.findings):  # fmt: skip
        assert "–" not in table(out)


def test_the_picture_of_equal_replies_has_its_claims_intervals(data, tmp_path):
    findings.draw_equal_replies(tmp_path / "picture", data[0])
    rows = list(csv.DictReader((tmp_path / "picture.csv").read_text().splitlines()))
    assert [int(row["multiple"]) for row in rows] == [1, 2, 3, 5]
    for row, claim in zip(rows, reversed(findings.family_k(data[0])), strict=True):
        assert f" {row['multiple']} times" in claim.text
        assert float(row["difference"]) == pytest.approx(np.mean(claim.differences), rel=1e-3)
        assert float(row["low"]) < float(row["difference"]) < float(row["high"])


def test_claims_of_pairs_are_their_files_figures(data, tmp_path):
    frame = pd.read_csv(data[0] / "pairs_study.csv")
    frame = frame[frame.figure.str.startswith("accuracy ")]
    means = frame.groupby(["setting", "seed"]).aligned.mean()
    weights, federated, front = findings.family_g(data[0])
    assert weights.differences == pytest.approx(list(means["FIRM"] - means["fixed weights"]))
    fixed, pooled = means["fixed weights"], means["pooled, fixed weights"]
    assert federated.differences == pytest.approx(list(fixed - pooled))

    fronts = {}
    for method in ("one_conditioned_run", "separate_runs"):
        path = data[0] / f"pairs_front_{method}.front.json"
        fronts[method] = [
            np.mean([np.dot(p.preference, list(p.rewards.values())) for p in Front.load(path).points
                     if p.seed == seed]) for seed in (400, 401, 402)]  # fmt: skip
    assert front.differences == pytest.approx(np.subtract(*fronts.values()))

    shutil.copy(data[0] / "pairs_study.csv", tmp_path)
    _, _, begun_by_none = findings.family_g(tmp_path)
    assert findings.verdicts(findings.family_g(tmp_path))[2] == "open: 0 of 3 seeds"
    assert begun_by_none.differences == ()
    assert "G2" in findings.findings(tmp_path)
    assert "G3" not in findings.findings(tmp_path)


def test_accuracies_of_a_front_of_pairs_are_its_files(data, tmp_path):
    front = Front.load(data[0] / "pairs_front_separate_runs.front.json")
    own = [p.rewards["harmless"] for p in front.points if p.preference[0] == 0.7]
    row = findings.pair_front_table(data[0]).splitlines()[3]
    assert row.startswith("| (0.7, 0.3) | 3 |")
    assert row.endswith(f"| {np.mean(own):.3f} ± {np.std(own, ddof=1) / 3**0.5:.3f} |")
    part = replace(front, points=front.points[:-1])  # a model of the last seed is not there
    for method in ("one_conditioned_run", "separate_runs"):
        part.save(tmp_path / f"pairs_front_{method}.front.json")
    assert findings.pair_points(tmp_path, "separate_runs").keys() == {400, 401}


def test_a_claim_that_another_tests_with_more_seeds_leaves_the_table(data, tmp_path):
    whole = findings.findings(data[0])
    assert "| F2: " in whole
    assert "| A4: " not in whole
    for path in data[0].glob("baselines_*"):
        if path.name != "baselines_169.json":
            shutil.copy(path, tmp_path)
    part = findings.findings(tmp_path)
    assert "| F2: " not in part  # which lacks a seed, so that nothing tests A4 again
    assert "| A4: " in part


def test_a_world_counts_once_with_the_mean_of_its_seeds(data, tmp_path):
    for path in data[0].glob("front_world_*"):
        if path.name != "front_world_2_601.json":
            shutil.copy(path, tmp_path)
    for claim, whole in zip(findings.family_h(tmp_path), findings.family_h(data[0]), strict=True):
        assert claim.differences == whole.differences[:1] + whole.differences[2:]
        assert not claim.is_complete
    (_, side), *_ = findings.FRONTS
    by_seed = findings.in_worlds(side, tmp_path)[1]
    assert len(by_seed) == 2
    assert findings.family_h(tmp_path)[0].differences[0] == pytest.approx(sum(by_seed) / 2)


def test_another_world_has_its_own_models_and_prompts_and_the_same_settings(tmp_path):
    other, own = (
        compose(AlignmentConfig, [world.base], list(world.common.items()))
        for world in (miniature_in(tmp_path / "world_1"), MINIATURE)
    )
    assert lab_of("front", 600, tmp_path, tmp_path / "world_1").folder.parent.name == "world_1"
    changed = {line.split(" was ")[0] for line in differences(to_dict(own), to_dict(other))}
    assert changed == {
        "policy.path", "rewards.helpful.path", "rewards.harmless.path",
        "data.train.source", "data.validation.source", "data.test.source",
    }  # fmt: skip
    for value in (other.policy.path, other.rewards["helpful"].path, other.data.test.source):
        assert value.startswith(str(tmp_path / "world_1"))


def test_the_base_model_counts_once_per_seed(data):
    rows = [row.split(" | ") for row in findings.real_table(data[0]).splitlines()[2:]]
    assert {seeds for _, seeds, *_ in rows} == {str(len(findings.REAL_SEEDS))}


def test_every_run_of_the_protocol_has_a_valid_configuration(data):
    _, trained = data
    assert len(trained[MINIATURE.base]) > 30
    assert len(trained[SMOLLM2.base]) == 12
    for world, replies in ((MINIATURE, 64), (SMOLLM2, 64)):
        for name, overrides in trained[world.base].items():
            keys = {**world.common, **overrides}
            cfg = compose(AlignmentConfig, [world.base], list(keys.items()))
            assert cfg.num_clients * cfg.estimator.batch_size == replies, name


def test_sides_of_a_comparison_differ_in_their_strategy_alone(data):
    trained = data[1][MINIATURE.base]
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


def test_judges_rank_plain_below_learned_texts():
    plain = "Dogs run. They eat food and sleep in the sun."
    learned = "Epistemological considerations necessitate perspicacious deliberation throughout."
    for judge in (grade, rarity):
        low, high, none = judge([plain, learned, "1, 2!"])
        assert low < high
        assert none == 0.0


def test_the_style_is_the_difference_of_two_losses(monkeypatch):
    path = "firm/miniature/checkpoints/policy"
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.chat_template = "{{ messages[0].content }}\n"
    monkeypatch.setattr(judges, "_model", lambda: (model.eval(), tokenizer))
    losses = []
    for request in judges.REQUESTS:
        chat = [{"role": "user", "content": f"{request}\n\nhow are you?"}]
        asked = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        reply = tokenizer("fine , thanks", add_special_tokens=False)["input_ids"]
        labels = [-100] * len(asked) + reply
        losses.append(model(torch.tensor([asked + reply]), labels=torch.tensor([labels])).loss)
    found, empty = style(["fine , thanks", ""], prompts=["how are you?"] * 2)
    assert found == pytest.approx((losses[1] - losses[0]).item(), abs=1e-5)
    assert found
    assert np.isnan(empty)


def test_the_grade_is_that_of_the_formula():
    # 8 letters and one sentence in 2 words: 400 letters and 50 sentences per 100 words
    assert grade(["Dogs bark."]) == [pytest.approx(0.0588 * 400 - 0.296 * 50 - 15.8)]
