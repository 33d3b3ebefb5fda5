"""Makes the runs of docs/protocol.md, and keeps their figures per seed as small JSON files.

    python benchmarks/protocol_runs.py front --seeds 100 101 102 103 104 105 106 107 108 109
    python benchmarks/protocol_runs.py weights --seeds 100 101 102 103 104
    python benchmarks/protocol_runs.py front --world runs/world_1 --seeds 600 601

Parts: front (A1, A2), weights (family B), baselines (A3, A4), equal_kl, nine, warm, weightings
(family J), equal_replies (K) and half_kl (O), of the miniature world; real_front (C1 to C3),
real_baselines (C4 to C7) and real_constraint (D1), of SmolLM2; unseen_front, unseen_baselines,
unseen_constraint and unseen_style (family M), of SmolLM2 on questions that chose nothing. Each seed
of a part is one file below --out, written when all its models are measured, and skipped when it is
there; its runs below --runs continue from their last checkpoints. All runs share one process, whose
start would take a fifth of the miniature's time.

A file has the base model's and every model's mean rewards in [0, 1] with their standard errors over
the prompts, further scores and KL, by split. All models of a seed reply to the same prompts with
the same random stream.
"""

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from benchmarks.judges import grade, rarity, style
from benchmarks.measure import quiet
from firm.alignment import Calibration, Evaluation, RewardFn, evaluate, load_prompts
from firm.alignment.adapter_files import read_adapter
from firm.alignment.evaluation import summaries
from firm.base.inside import replace_text
from firm.federation import RandomStream
from firm.federation.aggregation import weighted_mean
from firm.fronts import Front, Point, preference_folder
from firm.fronts.reach import mean_preference
from firm.fronts.requirements import Requirement, best_meeting
from firm.jobs.alignment import align
from firm.jobs.alignment_config import AlignmentConfig
from firm.jobs.configs import SpeakersConfig
from firm.jobs.speakers import Speakers
from firm.report import read_record
from firm.run import compose
from firm.run.shipped import with_shipped_paths

RUNS: dict[str, Any] = {
    "num_clients": 4,
    "engine": "stacked",
    "estimator.name": "critic_free",
    # as these runs were made, before the guard
    "estimator.max_approx_kl": None,
    "guard.kl_growth": None,
    "guard.max_kl": None,
    "strategy.name": "fedavg",
    "evaluation.num_validation_prompts": 0,
    "evaluation.num_test_prompts": 2,  # models are measured by `measured`, on many more
    "evaluation.num_samples": 1,
    "evaluation.num_shown_samples": 0,
    "evaluation.front_every": None,
    "checkpoints.keep_last": 1,
    "checkpoints.keep_best": False,
}


@dataclass(frozen=True)
class World:
    """A base model with its objectives, and the size of the runs on it."""

    base: Path
    common: dict[str, Any]
    """Keys of all runs."""
    num_prompts: dict[str, int]
    """Prompts on which models are measured, by split."""
    num_samples: int = 1
    """Replies to each prompt."""
    calibrations: dict[str, Calibration] = field(default_factory=dict)
    """Maps to [0, 1] that were measured before; those of other objectives are run's own."""
    judges: dict[str, RewardFn] = field(default_factory=dict)
    """Quantities that no run is trained on."""
    ratio: str = "cispo"
    """Importance ratio of runs without a critic, as most were made before `auto`."""


COMMON = {
    **RUNS,
    "rounds": 16,
    "estimator.batch_size": 16,
    "estimator.minibatch_size": 8,
}
MINIATURE = World(Path("configs/miniature.yaml"), COMMON, {"validation": 200, "test": 300})
PINNED = ("estimator.max_approx_kl", "guard.kl_growth", "guard.max_kl")
GUARDED = replace(
    MINIATURE,
    common={k: v for k, v in COMMON.items() if k not in PINNED},
    ratio="auto",
)
"""The miniature with the defaults of the guard and of the importance ratio."""


def miniature_in(folder: Path) -> World:
    """Returns the miniature with the models and prompts of a folder of `recipes.miniature`."""
    models = {f"rewards.{name}.path": str(folder / name) for name in ("helpful", "harmless")}
    prompts = {
        f"data.{split}.source": str(folder / f"prompts_{split}.jsonl")
        for split in ("train", "validation", "test")
    }
    own = {"policy.path": str(folder / "policy"), **models, **prompts}
    return replace(MINIATURE, common={**COMMON, **own})


SMOLLM2 = World(
    Path("configs/smollm2_front.yaml"),
    {
        **RUNS,
        "num_threads": 1,
        "policy.conditioning.kind": "none",
        "policy.dtype": "bfloat16",
    },
    {"validation": 20, "test": 50},
    num_samples=2,
    calibrations={  # measured on 64 replies of the base model
        "plain": Calibration("sigmoid", mean=55.1, scale=20.7),
        "rich": Calibration("sigmoid", mean=0.797, scale=0.424),
    },
    judges={"grade": grade, "rarity": rarity},
)
UNSEEN = replace(
    SMOLLM2,
    common={k: v for k, v in SMOLLM2.common.items() if k not in PINNED}
    | {"data.test.source": "firm/questions/unseen.jsonl", "policy.dtype": "float32"},
    num_prompts={"validation": 20, "test": 200},
    num_samples=1,
    judges={},
    ratio="auto",
)
"""SmolLM2 with today's defaults, on questions by which no setting was chosen."""
REAL, SHORT = (0.1, 0.5, 0.9), 4
"""Preferences for plain on SmolLM2, and the rounds of three runs with the replies of one."""
BOUND = 0.58
"""Minimum reward of plain under the constraint."""
FIRST, FURTHER = (0.5, 0.1, 0.9, 0.3, 0.7), (0.2, 0.8, 0.4, 0.6)
"""Preferences for helpful, in the order in which separate runs are counted."""
SHRUNK = 0.8
"""Factor of B in the models that are measured for rewards at equal KL."""
CALIBRATION_SEED = 100
MULTIPLES = (1, 2, 3, 5)
"""Replies of conditioned runs in family K, in those of one separate run."""
HALF_KL = 0.03
"""KL coefficient of family O, half that of configs/miniature.yaml."""
OTHER = {"path": "firm/miniature/checkpoints/helpful_other", "format": "plain", "batch_size": 64}
HELPFUL = {**OTHER, "path": "firm/miniature/checkpoints/helpful", "append_eos": True}
BREVITY = {"name": "brevity"}
SETTINGS: dict[str, dict[str, Any]] = {
    "unlike scales": {"estimator.advantage_scale": "shared"},  # and a wider map, see `_weights`
    "late objective": {"rounds": 8},
    "unlike clients": {
        "rewards.helpful_other": OTHER,
        "groups": {
            "others": {"clients": [0, 1], "objectives": ["helpful", "helpful_other"]},
            "cautious": {"clients": [2, 3], "objectives": ["helpful", "harmless"]},
        },
    },
    "four objectives": {"rewards.helpful_other": OTHER, "rewards.brevity": BREVITY},
    "eight objectives": {
        "rewards.helpful_other": OTHER,
        "rewards.brevity": BREVITY,
        **{f"rewards.helpful_{copy}": HELPFUL for copy in (2, 3)},
        **{f"rewards.helpful_other_{copy}": OTHER for copy in (2, 3)},
    },
    "adversarial scaling": {
        "estimator.advantage_scale": "shared",
        "groups": {
            "attacker": {
                "clients": [3],
                "attack": {"kind": "reward_scaling", "scale": 10.0, "objective": "helpful"},
            }
        },
    },
}
WEIGHTINGS: dict[str, dict[str, Any]] = {
    "FIRM": {"strategy.name": "firm"},
    "fixed weights": {},
    "GDPO": {"estimator.aggregation": "normalize_then_sum"},
    **{
        name: {"strategy.name": "firm", "strategy.solver": f"torchjd/{method}"}
        for name, method in (("UPGrad", "upgrad"), ("NashMTL", "nash_mtl"), ("CAGrad", "cagrad"))
    },
    "FAMO": {"strategy.name": "famo"},
}
"""Keys of the ways to weigh objectives, by method."""
WEIGHTED = ("eight objectives", "adversarial scaling")
"""Settings in which they are compared."""
Adapters = dict[str, Path]
"""Folders of adapters, by the name of the model in the file of a seed."""


class Lab:
    """Trains and measures the models of one seed."""

    def __init__(self, seed: int, runs: Path, world: World = MINIATURE) -> None:
        self.seed, self.folder, self._runs = seed, runs / f"seed_{seed}", runs
        self.world = world

    def train(self, name: str, overrides: Mapping[str, Any]) -> Path:
        """Returns the folder of a finished run, after training what is left of it."""
        folder = self.folder / name
        state = folder / "run.json"
        if state.exists() and json.loads(state.read_text())["status"] == "finished":
            return folder
        keys = {
            **self.world.common,
            "seed": self.seed,
            "out": str(folder),
            "resume": "auto",
            **overrides,
        }
        if keys["estimator.name"] == "critic_free":
            keys.setdefault("estimator.ratio", self.world.ratio)
        keys.setdefault("evaluation.calibration_seed", CALIBRATION_SEED)
        objectives = compose(AlignmentConfig, [self.world.base], list(keys.items())).rewards
        known = {k: vars(own) for k, own in self._calibrations().items() if k in objectives}
        keys.setdefault("evaluation.calibrations", known)
        if known.keys() == objectives.keys():  # then these replies fit nothing
            keys["evaluation.num_calibration_prompts"] = 2
        align(compose(AlignmentConfig, [self.world.base], list(keys.items())))
        return folder

    def separate(self, share: float, **overrides: Any) -> Path:
        """Returns the adapter of the run with fixed weights (share, 1 - share)."""
        weights = {"strategy.weights": [share, round(1 - share, 3)]}
        return self.train(f"separate_{100 * share:.0f}", {**weights, **overrides}) / "adapter"

    def conditioned(
        self,
        shares: Sequence[float] = (*FIRST, *FURTHER),
        name: str = "conditioned",
        **overrides: Any,
    ) -> Adapters:
        """Returns the folds of a conditioned run, by share of the first objective."""
        shares = sorted(shares)
        preferences = [[share, round(1 - share, 3)] for share in shares]
        keys = {"policy.conditioning.kind": "preference", "evaluation.preferences": preferences}
        run = self.train(name, {**keys, **overrides})
        return {
            f"{s:g}": run / "front" / preference_folder(p)
            for s, p in zip(shares, preferences, strict=True)
        }

    def mean(self, name: str, folders: Sequence[Path], shares: Sequence[float]) -> Path:
        """Returns the folder of a weighted mean of adapters."""
        adapters = [load_file(folder / "adapter_model.safetensors") for folder in folders]
        return self.write(name, folders[0], weighted_mean(adapters, shares))

    def folded(self, name: str, preference: Sequence[float]) -> Path:
        """Returns the folder of the conditioned run's adapter at a preference."""
        whole = self.folder / "conditioned" / "adapter"
        return self.write(name, whole, read_adapter(whole, preference))

    def shrunk(self, name: str, folder: Path) -> Path:
        """Returns the folder of an adapter whose B is scaled by `SHRUNK`."""
        adapter = load_file(folder / "adapter_model.safetensors")
        scaled = {k: v * SHRUNK if "lora_B" in k else v for k, v in adapter.items()}
        return self.write(name, folder, scaled)

    def write(self, name: str, like: Path, adapter: Mapping[str, torch.Tensor]) -> Path:
        """Returns the folder of an adapter with the settings of another."""
        folder = self.folder / "made" / name
        folder.mkdir(parents=True, exist_ok=True)
        save_file(dict(adapter), folder / "adapter_model.safetensors", metadata={"format": "pt"})
        settings = (like / "adapter_config.json").read_text(encoding="utf-8")
        (folder / "adapter_config.json").write_text(settings, encoding="utf-8")
        return folder

    def measured(
        self,
        adapters: Adapters,
        *,
        rewards: Mapping[str, Any] | None = None,
        splits: Sequence[str] = ("validation", "test"),
        has_base: bool = True,
    ) -> dict[str, Any]:
        """Returns the figures of the base model, unless it is left out, and of each adapter."""
        extra = [(f"rewards.{name}", own) for name, own in (rewards or {}).items()]
        world = self.world
        cfg = with_shipped_paths(
            compose(AlignmentConfig, [world.base], [*world.common.items(), *extra])
        )
        fns = {**cfg.rewards, **cfg.evaluation.metrics}
        speaker_cfg = SpeakersConfig(
            policy=cfg.policy, rewards=fns, rollout=cfg.rollout, seed=self.seed, num_threads=1
        )
        speakers = Speakers(speaker_cfg, list(adapters.values()), fns)
        maps = {name: self._calibrations()[name] for name in cfg.rewards}
        models = {"base": None} if has_base else {}
        models |= {name: index for index, name in enumerate(adapters)}
        figures: dict[str, Any] = {name: {} for name in models}
        for split in splits:
            prompts = load_prompts(
                getattr(cfg.data, split), speakers.tokenizer, prompt_format=cfg.policy.prompt
            )[: world.num_prompts[split]]
            for name, index in models.items():
                with speakers.speaking(index) as sample:
                    own = evaluate(
                        sample,
                        prompts,
                        {key: speakers.reward_fns[key] for key in cfg.rewards},
                        calibrations=maps,
                        stream=RandomStream(self.seed, "evaluation", split),
                        extra_fns={
                            **{k: speakers.reward_fns[k] for k in cfg.evaluation.metrics},
                            **world.judges,
                        },
                        num_samples=world.num_samples,
                        batch_size=max(world.num_prompts.values()),
                    )
                figures[name][split] = _figures(own)
        return figures

    def _calibrations(self) -> dict[str, Calibration]:
        """Returns the maps to [0, 1] that runs have measured; `CALIBRATION_SEED` fixes them."""
        maps = dict(self.world.calibrations)
        for rows in sorted(self._runs.glob("seed_*/*/metrics.jsonl")):
            if rows.parent.name.startswith("unlike_scales"):
                continue
            header = json.loads(rows.read_text(encoding="utf-8").partition("\n")[0] or "{}")
            for name, own in header.get("calibration", {}).items():
                maps.setdefault(name, Calibration(**own))
        return maps


def _figures(own: Evaluation) -> dict[str, float]:
    values = {f"reward {name}": row for name, row in own.rewards.items()}
    values |= {name: row for name, row in own.scores.items() if name not in own.rewards}
    values["KL"] = own.kl
    means = {name: row.nanmean().item() for name, row in values.items()}
    rewards = summaries(own.rewards, own.prompt_of_row)
    errors = {f"error {name}": row["se"] for name, row in rewards.items()}
    return {name: round(value, 6) for name, value in (means | errors).items()}


def front(lab: Lab) -> dict[str, Any]:
    """Measures A1 and A2: a conditioned run, five separate runs, soups of two and three."""
    folds = lab.conditioned()
    separate = {f"{share:g}": lab.separate(share) for share in FIRST}
    models = {f"conditioned {share:g}": folds[f"{share:g}"] for share in FIRST}
    models |= {f"separate {share}": folder for share, folder in separate.items()}
    ends = [separate["0.9"], separate["0.1"]]
    for share in (0.3, 0.5, 0.7):
        along = (share - 0.1) / 0.8
        models[f"soup2 {share:g}"] = lab.mean(f"soup2_{share}", ends, [along, 1 - along])
    for share, end in ((0.3, "0.1"), (0.7, "0.9")):
        pair = [separate[end], separate["0.5"]]
        models[f"soup3 {share:g}"] = lab.mean(f"soup3_{share}", pair, [0.5, 0.5])
    return lab.measured(models)


def weights(lab: Lab) -> dict[str, Any]:
    """Measures family B: FIRM and fixed equal weights in each setting."""
    methods = {"fixed": {}, "FIRM": {"strategy.name": "firm"}}
    return _by_setting(lab, SETTINGS, methods)


def weightings(lab: Lab) -> dict[str, Any]:
    """Measures family J: each way to weigh objectives in two of the settings."""
    return _by_setting(lab, WEIGHTED, WEIGHTINGS)


def _by_setting(
    lab: Lab, settings: Iterable[str], methods: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """Returns the figures of methods, given by their keys, in each setting."""
    found = {}
    for setting in settings:
        overrides = SETTINGS[setting]
        keys = {**overrides, **_weights(lab, setting)}
        models = {}
        for method, own in methods.items():
            both = {**keys, **own}
            if "estimator.aggregation" in own:  # which normalises each objective by itself
                both.pop("estimator.advantage_scale", None)
            folder = f"{setting}-{method.lower()}".replace(" ", "_")
            models[f"{setting}: {method}"] = lab.train(folder, both) / "adapter"
        used = {k.removeprefix("rewards."): v for k, v in overrides.items() if "rewards." in k}
        distinct = {k: v for k, v in used.items() if not k.endswith(("_2", "_3"))}
        figures = lab.measured(models, rewards=distinct, splits=["test"])
        found |= {f"{setting}: base": figures.pop("base"), **figures}
    return found


def _weights(lab: Lab, setting: str) -> dict[str, Any]:
    """Returns the keys of a setting that depend on other runs."""
    if setting == "late objective":
        early = lab.train("helpful_alone", {"rounds": 8, "strategy.weights": [1.0, 0.0]})
        return {"start": {str(early / "adapter"): 1.0}}
    if setting == "unlike scales":
        run = lab.train("separate_50", {"strategy.weights": [0.5, 0.5]})
        maps = {k: dict(own) for k, own in read_record(run).header["calibration"].items()}
        maps["helpful"]["scale"] *= 10
        return {"evaluation.calibrations": maps}
    return {}


def baselines(lab: Lab) -> dict[str, Any]:
    """Measures A3 and A4: PPO and FIRM beside fixed equal weights without a critic."""
    equal = {"strategy.weights": [0.5, 0.5]}
    models = {
        "fixed": lab.separate(0.5),
        "PPO": lab.train("ppo", {"estimator.name": "ppo", **equal}) / "adapter",
        "FIRM": lab.train("firm", {"strategy.name": "firm"}) / "adapter",
    }
    return lab.measured(models, splits=["test"])


def equal_kl(lab: Lab) -> dict[str, Any]:
    """Measures models with a smaller B, for rewards at equal KL."""
    folds, models = lab.conditioned(), {}
    for share in (0.1, 0.5, 0.9):
        for method, folder in (
            ("conditioned", folds[f"{share:g}"]),
            ("separate", lab.separate(share)),
        ):
            models[f"{method} {share:g}"] = lab.shrunk(f"{method}_{share}_shrunk", folder)
    return lab.measured(models, splits=["test"])


def nine(lab: Lab) -> dict[str, Any]:
    """Measures the other four preferences: folds, separate runs and soups of five runs."""
    folds = lab.conditioned()
    models = {f"conditioned {share:g}": folds[f"{share:g}"] for share in FURTHER}
    models |= {f"separate {share:g}": lab.separate(share) for share in FURTHER}
    for share in FURTHER:
        pair = [lab.separate(round(share + step, 1)) for step in (-0.1, 0.1)]
        models[f"soup5 {share:g}"] = lab.mean(f"soup5_{share}", pair, [0.5, 0.5])
    return lab.measured(models)


def warm(lab: Lab) -> dict[str, Any]:
    """Measures a sweep that starts from the run at equal shares: four rounds each."""
    start = {"start": {str(lab.separate(0.5)): 1.0}, "rounds": 4}
    models = {}
    for share in (*FIRST[1:], *FURTHER):
        keys = {**start, "strategy.weights": [share, round(1 - share, 3)]}
        models[f"warm {share:g}"] = lab.train(f"warm_{100 * share:.0f}", keys) / "adapter"
    return lab.measured(models)


def equal_replies(lab: Lab) -> dict[str, Any]:
    """Measures family K: separate runs, and conditioned runs of up to as many replies together."""
    names = [lab.separate(share).parent.name for share in FIRST]
    models = {f"separate {s:g}": lab.separate(s) for s in FIRST}
    for multiple in MULTIPLES:
        run = f"conditioned_{multiple}"
        folds = lab.conditioned(FIRST, run, rounds=multiple * COMMON["rounds"])
        models |= {f"conditioned {multiple} {share}": fold for share, fold in folds.items()}
        names.append(run)
    return {**lab.measured(models), "cost": {name: _cost(lab.folder / name) for name in names}}


def half_kl(lab: Lab) -> dict[str, Any]:
    """Measures family O: separate and conditioned runs, with the KL coefficient and with half."""
    models = {f"separate {share:g}": lab.separate(share) for share in FIRST}
    models |= {f"conditioned {s}": fold for s, fold in lab.conditioned(FIRST).items()}
    half = {"estimator.kl.coefficient": HALF_KL}
    for share in FIRST:
        keys = {**half, "strategy.weights": [share, round(1 - share, 3)]}
        models[f"separate half {share:g}"] = lab.train(f"half_{100 * share:.0f}", keys) / "adapter"
    folds = lab.conditioned(FIRST, "conditioned_half", **half)
    models |= {f"conditioned half {share}": fold for share, fold in folds.items()}
    return lab.measured(models)


def _cost(run: Path) -> dict[str, float]:
    """Returns the seconds of a run's rounds and the bytes that its clients sent and received."""
    rows = read_record(run).rounds
    size = sum(row["bytes_up"] + row["bytes_down"] for row in rows)
    return {"seconds": round(sum(row["seconds"] for row in rows), 1), "bytes": size}


def real_front(lab: Lab) -> dict[str, Any]:
    """Measures C1 to C3: a conditioned run, separate runs of equal and of a third of its rounds."""
    folds = lab.conditioned(REAL)
    models = {f"conditioned {share:g}": folds[f"{share:g}"] for share in REAL}
    separate = {share: lab.separate(share) for share in REAL}
    models |= {f"separate {share:g}": folder for share, folder in separate.items()}
    for share in REAL:
        weights = {"strategy.weights": [share, round(1 - share, 3)], "rounds": SHORT}
        models[f"short {share:g}"] = lab.train(f"short_{100 * share:.0f}", weights) / "adapter"
    models["soup2 0.5"] = lab.mean("soup2_0.5", [separate[0.9], separate[0.1]], [0.5, 0.5])
    return lab.measured(models)


def real_baselines(lab: Lab) -> dict[str, Any]:
    """Measures C4 to C7: fixed weights, PPO, FIRM with whole and small uploads, and FedCMOO-A."""
    equal = {"strategy.weights": [0.5, 0.5]}
    firm = {"strategy.name": "firm"}
    server = {
        "strategy.name": "fedcmoo",
        "strategy.communication": "one_way",
        "strategy.compressor": "none",
        "strategy.solver": "exact",
    }
    models = {
        "fixed": lab.separate(0.5),
        "PPO": lab.train("ppo", {"estimator.name": "ppo", **equal}) / "adapter",
        "FIRM": lab.train("firm", firm) / "adapter",
        "2 bits": lab.train("two_bits", {**firm, "strategy.upload.bits": 2}) / "adapter",
        "FedCMOO-A": lab.train("fedcmoo", server) / "adapter",
    }
    return lab.measured(models, splits=["test"])


def real_constraint(lab: Lab) -> dict[str, Any]:
    """Measures D1: a run under a constraint, and what pick makes of the conditioned run."""
    folds = lab.conditioned(REAL)
    keys = {
        "strategy.name": "constrained",
        "strategy.min_rewards": {"plain": BOUND},
        "strategy.multiplier_learning_rate": 10.0,
    }
    models = {f"conditioned {share:g}": folds[f"{share:g}"] for share in REAL}
    models["constrained"] = lab.train("constrained", keys) / "adapter"
    figures = lab.measured(models)
    preference = _picked([figures[f"conditioned {share:g}"]["validation"] for share in REAL])
    picked = lab.measured({"picked": lab.folded("picked", preference)}, splits=["test"])
    return {**figures, "picked": picked["picked"]}


def unseen_style(lab: Lab) -> dict[str, Any]:
    """Measures M9: both ends of the conditioned run by a language model's judgement of style."""
    lab.world = replace(lab.world, judges={"style": style})
    folds = lab.conditioned(REAL)
    ends = {f"conditioned {share:g}": folds[f"{share:g}"] for share in (REAL[0], REAL[-1])}
    return lab.measured(ends, splits=["test"])


def _picked(rows: Sequence[Mapping[str, float]]) -> list[float]:
    """Returns the preference that pick mixes for the bound, from validation rewards at `REAL`."""
    names = ("plain", "rich")
    points = [
        Point(
            name=f"{share:g}",
            preference=(share, round(1 - share, 3)),
            seed=0,
            rewards={name: row[f"reward {name}"] for name in names},
            errors={name: row[f"error {name}"] for name in names},
            scores={},
            kl=row["KL"],
            adapter=f"{share:g}",
        )
        for share, row in zip(REAL, rows, strict=True)
    ]
    measured = Front(
        objectives=names,
        points=tuple(points),
        reference=(0.0, 0.0),
        calibrations={name: {} for name in names},
        base=dict.fromkeys(names, 0.0),
        strategy="conditioned",
        num_prompts=SMOLLM2.num_prompts["validation"],
        is_conditioned=True,
    )
    requirement = Requirement("plain", is_minimum=True, bound=BOUND)
    parts, _ = best_meeting(measured, [requirement], (0.0, 1.0), confidence=0.95, is_mixed=True)
    return mean_preference(parts)


PARTS = {
    part.__name__: part
    for part in (
        front, weights, weightings, baselines, equal_kl, nine, warm, equal_replies, half_kl,
        real_front, real_baselines, real_constraint, unseen_style,
    )
}  # fmt: skip
"""Functions that measure the models of a part.

Those that begin with real_ are on SmolLM2, and those that begin with unseen_ on unseen questions.
"""
PARTS |= {f"unseen_{own}": PARTS[f"real_{own}"] for own in ("front", "baselines", "constraint")}
ON_GUARDED = ("equal_replies", "half_kl")
"""Parts whose runs have today's defaults."""


def lab_of(part: str, seed: int, runs: Path, folder: Path | None = None) -> Lab:
    """Returns the lab of a part's world, or of the one in a folder."""
    if folder is not None:
        return Lab(seed, runs / folder.name, miniature_in(folder))
    if part.startswith(("real_", "unseen_")):
        return Lab(seed, runs, SMOLLM2 if part.startswith("real_") else UNSEEN)
    return Lab(seed, runs, GUARDED if part in ON_GUARDED else MINIATURE)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--seeds", type=int, nargs="+", required=True)
    parser.add_argument("--runs", type=Path, default=Path("runs/protocol"))
    parser.add_argument("--world", type=Path, help="folder of another world of the miniature")
    parser.add_argument("--out", type=Path, default=Path("docs/results/data/protocol"))
    options = parser.parse_args(arguments)
    quiet()
    options.out.mkdir(parents=True, exist_ok=True)
    name = "_".join([options.part] + ([options.world.name] if options.world else []))
    for seed in options.seeds:
        path = options.out / f"{name}_{seed}.json"
        if not path.exists():
            lab = lab_of(options.part, seed, options.runs, options.world)
            figures = PARTS[options.part](lab)
            replace_text(path, json.dumps(figures, indent=1) + "\n")
        print(path, flush=True)


if __name__ == "__main__":
    main()
