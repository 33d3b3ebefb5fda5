"""CelebA: faces with 40 binary attributes, as 40 objectives or five groups of eight."""

import numpy as np
import torch

from firm.fmoo.config import DatasetConfig
from firm.fmoo.loaders.sources import Layout, Table, read_tables
from firm.fmoo.loaders.splitting import as_images, complete_splits, to_splits
from firm.fmoo.task_data import Splits, TaskData

CELEBA_ATTRIBUTES = (
    "5_o_Clock_Shadow", "Arched_Eyebrows", "Attractive", "Bags_Under_Eyes", "Bald", "Bangs",
    "Big_Lips", "Big_Nose", "Black_Hair", "Blond_Hair", "Blurry", "Brown_Hair", "Bushy_Eyebrows",
    "Chubby", "Double_Chin", "Eyeglasses", "Goatee", "Gray_Hair", "Heavy_Makeup", "High_Cheekbones",
    "Male", "Mouth_Slightly_Open", "Mustache", "Narrow_Eyes", "No_Beard", "Oval_Face", "Pale_Skin",
    "Pointy_Nose", "Receding_Hairline", "Rosy_Cheeks", "Sideburns", "Smiling", "Straight_Hair",
    "Wavy_Hair", "Wearing_Earrings", "Wearing_Hat", "Wearing_Lipstick", "Wearing_Necklace",
    "Wearing_Necktie", "Young",
)  # fmt: skip
"""Attributes in CelebA's order."""

CELEBA_GROUPS = tuple(
    tuple(names.split())
    for names in (
        "5_o_Clock_Shadow Blond_Hair Bags_Under_Eyes Eyeglasses Mustache Wavy_Hair Oval_Face "
        "Rosy_Cheeks",
        "Arched_Eyebrows Black_Hair Big_Nose Blurry Goatee Straight_Hair Pale_Skin "
        "Wearing_Earrings",
        "Attractive Brown_Hair Bushy_Eyebrows Double_Chin Mouth_Slightly_Open Receding_Hairline "
        "Wearing_Hat Young",
        "Bald Big_Lips Chubby Heavy_Makeup High_Cheekbones Male Sideburns Smiling",
        "Bangs Gray_Hair Narrow_Eyes No_Beard Pointy_Nose Wearing_Lipstick Wearing_Necklace "
        "Wearing_Necktie",
    )
)
"""The five objectives of CelebA-5 (FedCMOO, Appendix D.1)."""

CELEBA_COMPOSITE = ("Attractive", "Male", "Mouth_Slightly_Open")
"""Attributes that form CelebA's eight composite labels (Appendix D.1)."""

CELEBA = Layout(
    ("x", "y"),
    {"x": ("image",), **{name: (name,) for name in CELEBA_ATTRIBUTES}},
    "flwrlabs/celeba",
    "x",
    channels=3,
)


def celeba(cfg: DatasetConfig) -> Splits:
    """Returns CelebA with 40 objectives, one per binary attribute."""
    return _celeba(cfg, tuple((name,) for name in CELEBA_ATTRIBUTES), CELEBA_ATTRIBUTES)


def celeba5(cfg: DatasetConfig) -> Splits:
    """Returns CelebA-5: five groups of eight attributes, with the mean loss of each group."""
    names = tuple(f"group_{number}" for number in range(1, 6))
    return _celeba(cfg, CELEBA_GROUPS, names)


def _celeba(
    cfg: DatasetConfig, groups: tuple[tuple[str, ...], ...], objectives: tuple[str, ...]
) -> Splits:
    tables = read_tables(cfg.path, CELEBA, image_size=cfg.image_size)
    for table in tables.values():
        if "y" not in table:
            table["y"] = np.stack([table.pop(name) for name in CELEBA_ATTRIBUTES], axis=1)
        table["x"] = as_images(table["x"], channels=3, side=None)
        if table["y"].shape[1:] != (40,):
            raise ValueError(
                f"CelebA's y must have 40 attributes, shape [N, 40], got {table['y'].shape}."
            )
    where = {name: column for column, name in enumerate(CELEBA_ATTRIBUTES)}
    columns = np.array([[where[name] for name in group] for group in groups])  # [M, A]
    composite = [where[name] for name in CELEBA_COMPOSITE]

    def data(part: Table) -> TaskData:
        attributes = part["y"].astype(np.float32)
        targets = attributes[:, columns]  # [N, M, A]
        return TaskData(
            inputs=torch.from_numpy(part["x"]),
            targets=torch.from_numpy(targets[:, :, 0] if columns.shape[1] == 1 else targets),
            objectives=objectives,
            losses=("binary",) * len(objectives),
            groups=torch.from_numpy(attributes[:, composite].astype(np.int64) @ [4, 2, 1]),
        )

    return to_splits(complete_splits(tables, cfg, order="random"), data)
