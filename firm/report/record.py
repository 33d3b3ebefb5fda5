"""Reads run directories, finished or not."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from firm.run.directory import Row, Run
from firm.run.files import read_text
from firm.run.resuming import CONFIG_NAME, RESTORE, check_run
from firm.run.rows import as_one_training, is_of_earlier
from firm.run.sweep import Sweep

if TYPE_CHECKING:  # it imports numpy, which records need not
    from firm.report.drawing import Error

ONE_SIDED = 0.95
"""Confidence of a bound on a constrained reward."""


@dataclass(frozen=True)
class Record:
    """Content of a run directory; fields are empty until the run has written them."""

    name: str
    path: Path
    """Its directory."""
    config: str
    """Text of the resolved config."""
    settings: dict[str, Any]
    """The parsed config."""
    run: Row
    """Commit, versions, command, start and status."""
    objectives: tuple[str, ...]
    clients: tuple[str, ...]
    num_rounds: int
    """Rounds to train, by the configuration."""
    header: Row
    """The row of kind "run": calibration, sizes."""
    evaluations: dict[str, list[Row]]
    """Split -> evaluations by rising round; the last one on the test prompts is of the adapter that
    the run left."""
    trainings: dict[str, list[Row]]
    """Client -> its local trainings by rising round; rounds without it have no row."""
    rounds: list[Row]
    """One row per round, by rising round."""
    samples: list[Row]
    """Replies of the base and the aligned model, for a conditioned one at equal shares."""
    front_samples: list[Row] = field(default_factory=list)
    """Replies of a conditioned model, each at a preference."""
    chosen: dict[str, Row] = field(default_factory=dict)
    """Split -> evaluation on the validation prompts of the adapter that the run left, where that is
    an earlier round's."""
    left_out: tuple[str, ...] = ()
    """Invalid entries of the rows, one text each."""

    @property
    def seed(self) -> int | None:
        """The seed of the run; the configuration of a classic run has a list with one seed."""
        (only,) = self.settings.get("seeds") or [None]
        return self.settings.get("seed", only)

    @property
    def method(self) -> dict[str, Any]:
        """The part of the configuration in which settings differ; the algorithm of classic runs."""
        return next(iter((self.settings.get("algorithms") or {}).values()), self.settings)

    @property
    def preference(self) -> tuple[float, ...] | None:
        """The strategy's preference or fixed weights; None without either."""
        strategy = self.method.get("strategy") or {}
        shares = strategy.get("preference") or strategy.get("weights")
        return tuple(shares) if isinstance(shares, list) else None

    @property
    def learns_from_pairs(self) -> bool:
        """True if ranked pairs take the place of rewards: what is measured is their ranking."""
        return bool(self.settings.get("pairs"))

    @property
    def main_field(self) -> str:
        """Field of evaluations with the objectives: raw scores, or accuracies on pairs."""
        return "rewards" if self.learns_from_pairs else "scores"

    @cached_property
    def place_by_client(self) -> dict[str, int]:
        """Places of the clients that have trained, among all clients."""
        places = enumerate(self.clients)
        return {client: place for place, client in places if client in self.trainings}

    @property
    def is_finished(self) -> bool:
        """True if the run has ended and written its adapter."""
        return self.run.get("status") == "finished"

    @property
    def rows(self) -> list[Row]:
        """The rows that have rounds."""
        groups = [*self.evaluations.values(), *self.trainings.values(), self.rounds]
        return [row for rows in groups for row in rows]

    @property
    def last_round(self) -> int:
        """The last round that is complete, 0 before the first."""
        return self.rounds[-1]["round"] if self.rounds else 0

    @property
    def hacking_signs(self) -> list[str]:
        """Signs of reward hacking in the final model's replies to the test prompts."""
        final = final_row(self) or {}
        signs: list[str] = [*(final.get("hacking_signs") or ())]
        for split, rows in self.evaluations.items():
            if split.startswith("test at ") and rows[-1]["round"] == final.get("round"):
                at = split.removeprefix("test at ")
                signs += [f"at preference {at}, {s}" for s in rows[-1].get("hacking_signs") or ()]
        return signs

    @property
    def kept_adapter(self) -> str:
        """The round of the adapter that the run left, and why; empty until it is chosen."""
        final = final_row(self) or {}
        reason = final.get("adapter_reason")
        return f"round {final.get('adapter_round')}: {reason}" if reason else ""

    @property
    def kept_no_update(self) -> bool:
        """Whether rounds have ended, and the run left the adapter that it started from."""
        return bool(self.last_round) and (final_row(self) or {}).get("adapter_round") == 0

    @property
    def min_rewards(self) -> dict[str, float]:
        """The strategy's lower bounds of mean rewards, by objective."""
        return (self.settings.get("strategy") or {}).get("min_rewards") or {}

    @property
    def constraint_outcomes(self) -> list[str]:
        """Sentences on whether the strategy's constraints hold on the test prompts.

        A constraint holds, or is missed, if the one-sided bound of the mean reward at 95 %
        confidence is on that side of it; otherwise it is open. The bounds are those of
        ``firm.fronts.confidence`` from the values by prompt, or Student's without them.
        """
        if not self.min_rewards:
            return []
        import numpy as np

        from firm.fronts.confidence import half_width, lower_bound, upper_bound
        from firm.report.run_front import SCORES_NAME, values_by_prompt

        values = values_by_prompt(self.path / SCORES_NAME, self.objectives)
        found, row = [], final_row(self) or {}
        for name, bound in self.min_rewards.items():
            mean, se = (score(row, "rewards", name, part) for part in ("mean", "se"))
            if mean is None or se is None:
                continue
            num = score(row, "rewards", name, "num_prompts") or row.get("num_prompts") or 0
            width = half_width(se, int(num), ONE_SIDED)
            low, high = mean - width, mean + width
            known = np.array(values.get(name, ()))
            known = known[np.isfinite(known)]
            is_bounded = self.is_bounded(name)
            # a stranger's file may hold anything
            is_valid = not is_bounded or bool(((known >= 0) & (known <= 1)).all())
            if len(known) and is_valid:
                sides = (lower_bound, upper_bound)
                low, high = (side(known, ONE_SIDED, is_bounded=is_bounded) for side in sides)
            verdict = "holds" if low >= bound else "is missed" if high < bound else "is open"
            unit = "reward in [0, 1]" if is_bounded else "reward"
            found.append(
                f"{name} >= {bound:g} {verdict}: {unit} {mean:.3f} ± {se:.3f}, one-sided 95 % "
                f"bounds {low:.3f} and {high:.3f}"
            )
        return found

    def of_own_model(self, name: str) -> dict[str, list[str]]:
        """Returns the clients that score an objective by their group's own reward model, by group.

        Its scores have other units than those of the run's model.
        """
        maps, groups = self.header.get("calibration") or {}, self.settings.get("groups") or {}
        return {
            group: [self.clients[at] for at in own.get("clients") or () if at < len(self.clients)]
            for group, own in groups.items()
            if f"{group}/{name}" in maps
        }

    def is_bounded(self, name: str) -> bool:
        """Returns whether an objective's rewards are calibrated to [0, 1]."""
        own = (self.header.get("calibration") or {}).get(name) or {}
        return own.get("method", "none") != "none"

    def extra_scores(self) -> list[str]:
        """Names of the scores other than the objectives, in order of appearance."""
        rows = [row for rows in self.evaluations.values() for row in rows]
        names = dict.fromkeys(name for row in rows for name in row.get("scores", {}))
        return [name for name in names if name not in self.objectives]


def read_record(run_path: Path) -> Record:
    """Reads the files of a run directory.

    If a round has several rows for a client or split, the last one is used. Invalid values, such as
    infinite numbers or text in place of a number, are dropped.

    Raises:
        UserError: There is no run at `run_path`.
        ValueError: One of its files is malformed.
    """
    check_run(run_path)
    config = read_text(run_path / CONFIG_NAME, remedy=RESTORE)
    run = Run(run_path)
    rows, left_out = run.checked_rows()
    samples = [row for row in run.samples() if {"prompt", "completion"} <= row.keys()]
    header = next((row for row in rows if row.get("kind") == "run"), {})
    chosen = {row["split"]: row for row in rows if is_of_earlier(row)}
    rows = [row for row in rows if not is_of_earlier(row)]
    evaluations = _latest(rows, "evaluation", "split")
    trainings = [as_one_training(row) for row in _latest(rows, "client", "client")]
    # clients may join after the header was written
    clients = dict.fromkeys([*header.get("clients", []), *(row["client"] for row in trainings)])
    return Record(
        name=run_path.resolve().name,
        path=run_path,
        config=config,
        settings=run.settings() or {},
        run=run.record(),
        objectives=tuple(header.get("objectives", ())),
        clients=tuple(clients),
        num_rounds=header.get("rounds", 0),
        header=header,
        evaluations=_grouped(evaluations, "split"),
        trainings=_grouped(trainings, "client"),
        rounds=_latest(rows, "round", "kind"),
        samples=[row for row in samples if "preference" not in row],
        front_samples=[row for row in samples if "preference" in row],
        chosen=chosen,
        left_out=tuple(left_out),
    )


def study_records(sweep: Sweep) -> dict[str, list[Record]]:
    """Returns the finished runs of a study by setting, in order of their seeds."""
    by_setting: dict[str, list[Record]] = {}
    for name, point in sweep.manifest["points"].items():
        runs = by_setting.setdefault(point["setting"], [])
        if sweep.is_done(name):
            runs.append(read_record(sweep.run_path(name)))
    return by_setting


def score(row: Row, field: str, name: str, part: str) -> float | None:
    """Returns a part of a score, such as "mean", in an evaluation; None if missing."""
    return ((row.get(field) or {}).get(name) or {}).get(part)


def main_error(record: Record, row: Row, name: str) -> "Error | None":
    """Returns the error bar of an objective's main figure.

    It is one standard error of a score, and the exact 95 % interval of an accuracy on pairs. The
    base model's accuracy is 1/2 by definition.
    """
    mean, se, count = (
        score(row, record.main_field, name, part) for part in ("mean", "se", "num_prompts")
    )
    if not record.learns_from_pairs:
        return se
    count = count or row.get("num_prompts")
    return share_error(mean, int(count)) if mean is not None and count and row["round"] else None


def share_error(share: float, num: int) -> "Error":
    """Returns the error bar of a share of `num` prompts, up to the ends of its exact interval."""
    from firm.fronts.confidence import share_interval  # imports scipy, likewise

    low, high = share_interval(share, num)
    return share - low, high - share


def rewards_of(row: Row, objectives: Sequence[str]) -> list[float] | None:
    """Returns the mean calibrated rewards of an evaluation; None if one is missing."""
    means = [score(row, "rewards", name, "mean") for name in objectives]
    known = [mean for mean in means if mean is not None]
    return known if len(known) == len(means) else None


def final_row(record: Record, split: str = "test") -> Row | None:
    """Returns the evaluation of the model that the run left; None if there is none yet."""
    if split in record.chosen:
        return record.chosen[split]
    rows = record.evaluations.get(split, [])
    # a run without rounds ends with the adapter that it starts from
    trained = [row for row in rows if row["round"] > 0 or record.num_rounds == 0]
    return trained[-1] if trained else None


def is_base(row: Row) -> bool:
    """Returns whether an evaluation is of the base model, and not of an adapter to start from."""
    return row.get("round") == 0 and "change" not in row


def _latest(rows: list[Row], kind: str, key: str) -> list[Row]:
    """Returns the rows of one kind by round, the last one of each round and value of `key`.

    A run without rounds has two evaluations of round 0: one of the base model, and one of the
    adapter from which the run starts; only the latter has the field "change".
    """
    own = [row for row in rows if row.get("kind") == kind]
    # a run that was stopped and continued logs a round again
    latest = {(row["round"], row[key], "change" in row): row for row in own}
    return sorted(latest.values(), key=lambda row: row["round"])


def _grouped(rows: list[Row], key: str) -> dict[str, list[Row]]:
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row[key], []).append(row)
    return groups
